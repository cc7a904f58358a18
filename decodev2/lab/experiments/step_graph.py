"""A step of a four-layer toy: tensor cores or GEMV, launched by Python or as one CUDA graph."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch

from ... import graph, oracle, plan, runner, state, step, synth, toggles
from ...errors import DecodeError
from ...load import load_weights
from .. import bench, cases
from ..plate import Measured
from .limits import log_ticks

TITLE = "Four layers, four ways: tensor cores or GEMV, eager or one graph"
QUESTION = "What does launching from Python cost, and do tensor cores at one column buy anything?"
PREDICTION = (
    "4 layers of 5 ops, embedding, head and choice are 23 ops: 23 kernels by GEMV, 39 by MMA, "
    "which needs two launches for each of 16 products. In a graph about 3 us each: 0.07 ms by "
    "GEMV, 0.12 ms by MMA. Python needs about 8 us per op: 0.2 ms, whatever the kernel. So the "
    "graph wins two to three times where the old card won 17 to 19 times, and MMA loses in the "
    "graph only."
)
LINEARS = ("mma", "gemv")
HOWS = ("eager", "graph")
PARAMS = {
    "linear": ([], "mma, gemv or both, separated by commas; both if left out"),
    "how": ([], "eager, graph or both, separated by commas; both if left out"),
    "runs": (15, "timed runs of 16 steps"),
    "seed": (2, "seed of the weights"),
}
TOGGLES = {"linear": ("linear", LINEARS), "how": ("how", HOWS)}
DEPENDS = ("*.cu", "*.cuh", "*.h")
DEVICE = "cuda"
PROMPTS = ([3, 1, 4, 1], [5, 9, 2, 6])  # checked before timing, and after
NEW_IDS = 8
STEPS = 16  # of a run: positions 4 to 19 of 32
NEAR_TIE = 0.02  # margin of the oracle's logits below which another id may be chosen
OLD_MS = {  # RTX 3080
    ("mma", "eager"): 13.8, ("mma", "graph"): 0.817, ("gemv", "eager"): 13.0,
    ("gemv", "graph"): 0.698,
}  # fmt: skip
COLUMNS = [
    {"name": "linear", "unit": ""},
    {"name": "how", "unit": ""},
    *cases.MS_COLUMNS,
    {"name": "floor_ms", "unit": "ms"},
    {"name": "share", "unit": "%"},
    {"name": "ids_before", "unit": ""},
    {"name": "ids_after", "unit": ""},
    {"name": "old_ms", "unit": "ms"},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per backend and way; ids of both prompts must be the oracle's."""
    linears = cases.chosen([str(x) for x in params["linear"]], LINEARS, "linear")
    hows = cases.chosen([str(x) for x in params["how"]], HOWS, "how")
    read_rate = cases.begin("step_graph")
    spec = plan.MEDIUM_LLAMA
    model = synth.build(spec, params["seed"])
    weights = load_weights(model, DEVICE)
    live = state.allocate_state(spec, DEVICE)
    rows, noise = [], 0.0
    total = len(linears) * len(hows)
    for linear in linears:
        for how in hows:
            progress(len(rows), total, f"{linear}, {how}")
            with toggles.using(linear=linear):
                if how == "graph":
                    take = graph.capture(live, weights).replay
                else:
                    take = functools.partial(step.greedy_decode, live, weights)
                name = f"{linear}, {how}"
                before = _ids(model, live, weights, take, PROMPTS[0], name)
                times = _times(live, take, params["runs"])
                noise = max(noise, bench.noise_band(times, _times(live, take, params["runs"])))
                after = _ids(model, live, weights, take, PROMPTS[1], name)
            rows.append(
                {
                    "linear": linear, "how": how, "ids_before": before, "ids_after": after,
                    "old_ms": OLD_MS[linear, how],
                }
                | cases.ms_row(times)
            )  # fmt: skip
    progress(total, total, "done")
    made = cases.end(read_rate)
    for row in rows:
        row["floor_ms"] = weights.bytes_per_token / made["read_rate"]["gb_s"] * 1e-6
        row["share"] = 100 * row["floor_ms"] / row["ms"]
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=made,
        notes=[
            cases.noise_note(noise, "every way"),
            f"Host time of {STEPS} steps between two synchronisations, over {STEPS}; the prompt is "
            "not in it.",
            f"{weights.bytes_per_token / 1e6:.2f} MB of packed weights per step: they stay in the "
            "L2, so the share of the read rate says nothing but how small this model is.",
            "old_ms: the same shape on an RTX 3080, from the lab log.",
        ],
        figure={"kind": "own"},
    )


def _times(live, take: Callable[[], None], runs: int) -> list[float]:
    """Seconds per step as the host sees them."""
    seconds = []
    for index in range(runs + 2):
        state.reset(live)
        live.position.fill_(len(PROMPTS[0]))
        live.token.fill_(1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            take()
        torch.cuda.synchronize()
        if index >= 2:
            seconds.append((time.perf_counter() - start) / STEPS)
    return seconds


def _ids(model, live, weights, take, prompt: list[int], name: str) -> str:
    """The new ids after `prompt`, which are the oracle's. Raises DecodeError where they part."""
    ids = runner.generate(live, weights, prompt, NEW_IDS, step=take).ids
    logits = oracle.step_logits(model, prompt + ids[:-1])[len(prompt) - 1 :]
    parting = oracle.first_parting(logits, ids)
    if parting and not parting.margin < NEAR_TIE:
        raise DecodeError(f"{name} leaves the oracle at {parting}")
    return " ".join(map(str, ids))


# ---- what it says ----


def _verdict(rows: list[dict], noise: float) -> str:
    ms = {(r["linear"], r["how"]): r["ms"] for r in rows}
    words = []
    for linear in LINEARS[::-1]:
        name = linear.upper()
        eager, captured = ms.get((linear, "eager")), ms.get((linear, "graph"))
        if eager and captured:
            old = OLD_MS[linear, "eager"] / OLD_MS[linear, "graph"]
            words.append(
                f"by {name} a step takes {captured:.3f} ms in a graph, {eager:.3f} eager: "
                f"{eager / captured:.1f}x (old card {old:.0f}x)"
            )
        elif eager or captured:
            words.append(f"by {name} a step takes {eager or captured:.3f} ms")
    if ("gemv", "eager") in ms and ("gemv", "graph") in ms:
        ok = 2 <= ms["gemv", "eager"] / ms["gemv", "graph"] <= 3
        words.append(f"{cases.held(ok).lower()} (two to three times)")
    if ("mma", "graph") in ms and ("gemv", "graph") in ms:
        ratio = ms["mma", "graph"] / ms["gemv", "graph"]
        change = bench.compare(ms["mma", "graph"], ms["gemv", "graph"], noise)
        old = OLD_MS["mma", "graph"] / OLD_MS["gemv", "graph"]
        words.append(
            f"GEMV against MMA in the graph: {change}, {ratio:.2f}x (old card {old:.2f}x)"
            + (": unused columns buy nothing here either" if change == "faster" else "")
        )
    words.append("all ids are the oracle's")
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card and in every run."""
    ms = {(r["linear"], r["how"]): r["ms"] for r in plate.rows}
    found = []
    for linear in LINEARS:
        if (linear, "eager") in ms and (linear, "graph") in ms:
            found.append(
                (f"{linear}: a graph is faster than eager steps",
                 ms[linear, "graph"] < ms[linear, "eager"])
            )  # fmt: skip
    if ("mma", "graph") in ms and ("gemv", "graph") in ms:
        found.append(
            ("in a graph GEMV is faster than MMA", ms["gemv", "graph"] < ms["mma", "graph"])
        )
    same = all(len({r[name] for r in plate.rows}) == 1 for name in ("ids_before", "ids_after"))
    return [*found, ("all ways choose the same ids", same)]


def host_timed(row: dict, column: str) -> bool:
    """Eager steps are launched one kernel at a time by Python."""
    return row["how"] == "eager"


def draw(plate, fig) -> None:
    """Dots: ms per step of each way, the old card's beside it, joined by a line."""
    ax = fig.subplots()
    shades = {"mma": "#D55E00", "gemv": "#0072B2"}
    every = [r[name] for r in plate.rows for name in ("ms", "old_ms")]
    low, high = min(every) / 2.2, max(every) * 2.2
    for y, r in enumerate(plate.rows):
        ax.plot([r["ms"], r["old_ms"]], [y, y], color="#BBBBBB", linewidth=2, zorder=1)
        ax.plot(r["old_ms"], y, "o", color="white", markeredgecolor="#555555", markersize=12,
                markeredgewidth=2)  # fmt: skip
        ax.plot(r["ms"], y, "o", color=shades[r["linear"]], markersize=13)
        for value, text, shade in (
            (r["ms"], f"{r['ms']:.3f} ms", shades[r["linear"]]),
            (r["old_ms"], f"{r['old_ms']:g} ms on the old card", "#555555"),
        ):
            near = math.log(max(r["ms"], r["old_ms"]) / min(r["ms"], r["old_ms"])) < 1.2
            above = 14 if value == r["ms"] or not near else -26
            ax.annotate(text, (value, y), (0, above), textcoords="offset points", ha="center",
                        fontsize=12, color=shade)  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ticks = log_ticks(low, high)
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    names = {"mma": "tensor cores (MMA)", "gemv": "GEMV"}
    ax.set_yticks(
        range(len(plate.rows)), [f"{names[r['linear']]},\n{r['how']}" for r in plate.rows]
    )
    ax.set_ylim(len(plate.rows) - 0.4, -0.6)
    ax.set_xlabel("one greedy step of four layers [ms]; filled: this card, open: RTX 3080")
