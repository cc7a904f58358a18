"""Where a step's time goes: every op timed alone over all layers, against the captured graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ... import graph, ops, plan, state, step, synth, toggles
from ...load import ModelWeights, load_weights
from ...state import DecodeState
from .. import bench, cases
from ..plate import Measured, Missing
from .attention import kv_bytes

TITLE = "Step mix: each op alone, times its layers, against the whole graph"
QUESTION = (
    "Which op takes the time, how far is each from its bytes, and does the graph beat the sum?"
)
PREDICTION = (
    "Per layer, at 4,600 GB/s: qkv 2.8 MB, 0.6 us; attention at 2,000 2.0 MB, 0.4 us; o 2.2 MB, "
    "0.5 us; gate and up 24 MB, 5.2 us; down 12 MB, 2.6 us; head 165 MB, 36 us once. With 3 us a "
    "launch that is 3.6, 3.4, 3.5, 8.2 and 5.6 us, 36 layers and the head 0.91 ms: gate and up 32 "
    "%, down 22 %, head 4 %. The old card had SwiGLU 26 %, down 16 %, attention 18 %, head 5 %, "
    "and a graph (4.80 ms) that beat its own sum."
)
POSITIONS = (100, 2000)
SUM, GRAPH = "sum of the ops", "whole graph"
PER_LAYER = ("qkv", "attention", "project o", "swiglu", "project down")
OPS = ("embed", *PER_LAYER, "head", "choose")
CHOICES = (*OPS, SUM, GRAPH)
PARAMS = {
    "shape": ("qwen2.5-3b", "a named shape, see decodev2/plan.py"),
    "op": ([], "ops to time, separated by commas; all, their sum and the graph if left out"),
    "position": ([], "positions of the step, separated by commas; all if left out"),
    "runs": (11, "timed replays of each graph"),
    "seed": (0, "seed of weights, keys and values"),
}
TOGGLES = {"op": ("op", CHOICES), "position": ("position", POSITIONS)}
DEPENDS = ("*.cu", "*.cuh", "*.h")
DEVICE = "cuda"
MAX_SEQ = 2048
HEADS_IN_A_GRAPH = 8  # one head is larger than the L2 already
OLD_PARTS = {"swiglu": 26, "attention": 18, "project down": 16, "head": 5}  # % on the RTX 3080
COLUMNS = [
    {"name": "position", "unit": "tokens"},
    {"name": "op", "unit": ""},
    *cases.US_COLUMNS,
    {"name": "times", "unit": "1"},
    {"name": "total_us", "unit": "us"},
    {"name": "part", "unit": "%"},
    {"name": "mb", "unit": "MB"},
    {"name": "floor_us", "unit": "us"},
    {"name": "gb_s", "unit": "GB/s"},
    {"name": "share", "unit": "%"},
    {"name": "error_before", "unit": "1"},
    {"name": "error_after", "unit": "1"},
]


@dataclass(frozen=True)
class Part:
    """One op: `run(i)` launches it for layer i; `times` a step, `n_bytes` to read each."""

    run: Callable[[int], None]
    times: int
    launches: int
    n_bytes: float


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """Rows of each op, their sum and the graph, per position. The whole step is checked against
    other kernels before and after."""
    wanted = cases.chosen([str(x) for x in params["op"]], CHOICES, "op")
    positions = [
        int(x)
        for x in cases.chosen([str(x) for x in params["position"]], map(str, POSITIONS), "position")
    ]
    timed = list(OPS) if SUM in wanted else [op for op in OPS if op in wanted]
    read_rate = cases.begin("step_mix")
    total, done = len(positions) * (len(timed) + 1), 0
    progress(0, total, "weights")
    spec = plan.with_max_seq(plan.named_spec(params["shape"]), MAX_SEQ)
    torch.manual_seed(params["seed"])
    weights = load_weights(synth.random_packed(spec, params["seed"]), DEVICE)
    live = state.allocate_state(spec, DEVICE, 1)
    live.kv.k.normal_()
    live.kv.v.normal_()
    rows, noise = [], 0.0
    with toggles.using(linear="gemv"):
        captured = graph.capture(live, weights)
        for position in positions:
            progress(done, total, f"whole graph at {position}")
            before = cases.step_error(live, weights, captured.replay, position, 11)
            whole = cases.step_times(live, captured.replay, position, params["runs"])
            again = cases.step_times(live, captured.replay, position, params["runs"])
            noise = max(noise, bench.noise_band(whole, again))
            parts, here = parts_of(live, weights, position), []
            for op in timed:
                done += 1
                progress(done, total, f"{op} at {position}")
                live.position.fill_(position)
                live.token.fill_(1)
                step.forward_decode(live, weights)  # every buffer holds what the step leaves there
                part = parts[op]
                times = bench.graph_times(part.run, part.launches, params["runs"])
                here.append(_op_row(position, op, part, times))
            after = cases.step_error(live, weights, captured.replay, position, 12)
            done += 1
            rows += _with_whole(here, wanted, position, whole, weights, spec, (before, after))
    made = cases.end(read_rate)
    for row in rows:
        cases.add_rates(row, row["mb"] * 1e6, made["read_rate"]["gb_s"])
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=made,
        notes=[
            cases.noise_note(noise, "the whole graph"),
            f"{weights.bytes_per_token / 1e6:,.1f} MB of packed weights per step. An op is timed "
            "in a graph over all layers, so its weights are cold, and its own kernels follow each "
            "other: what it waits for in a step, another op, is not there.",
            "total_us is us times how often a step runs it; part is its share of the sum.",
        ],
        figure={"kind": "own"},
    )


def parts_of(live: DecodeState, weights: ModelWeights, position: int) -> dict[str, Part]:
    """Every op of a step at `position`."""
    c, layers, spec = live.decode, weights.layers, weights.spec
    n = len(layers)

    def layered(run: Callable[[int], None], n_bytes: float) -> Part:
        return Part(lambda i: run(i % n), n, n, n_bytes)

    first = layers[0]
    return {
        "embed": Part(lambda i: ops.embed(c, weights), 1, n, cases.weight_bytes(1, spec.hidden)),
        "qkv": layered(lambda i: ops.qkv(c, live, layers[i]), _nbytes(first.qkv)),
        "attention": layered(
            lambda i: ops.attention(c, live, i, in_step=True), kv_bytes(spec, position + 1)
        ),
        "project o": layered(lambda i: ops.project(c.attn, layers[i].o, c, live), first.o.nbytes),
        "swiglu": layered(lambda i: ops.swiglu(c, live, layers[i]), _nbytes(first.gate_up)),
        "project down": layered(
            lambda i: ops.project(c.act, layers[i].down, c, live), first.down.nbytes
        ),
        "head": Part(
            lambda i: ops.head(c, live, weights), 1, HEADS_IN_A_GRAPH, weights.lm_head.nbytes
        ),
        "choose": Part(
            lambda i: ops.choose(live, commit=False), 1, n,
            sum(t.nbytes for t in live.candidates),
        ),
    }  # fmt: skip


def _nbytes(w) -> int:
    """Packed bytes of a matrix, or of the matrices of a fused op that are kept apart."""
    return sum(part.nbytes for part in w) if isinstance(w, tuple) else w.nbytes


# ---- rows ----


def _op_row(position: int, op: str, part: Part, times: list[float]) -> dict:
    row = cases.times_row(times)
    return {"position": position, "op": op} | row | {
        "times": part.times, "total_us": row["us"] * part.times, "mb": part.n_bytes / 1e6,
        "error_before": Missing("checked in the whole graph"),
        "error_after": Missing("checked in the whole graph"),
    }  # fmt: skip


def _with_whole(here, wanted, position, whole, weights, spec, errors) -> list[dict]:
    """The asked-for rows of one position: ops, their sum, the graph."""
    step_bytes = weights.bytes_per_token + spec.n_layers * kv_bytes(spec, position + 1)
    total = sum(r["total_us"] for r in here)
    complete = len(here) == len(OPS)
    for row in here:
        alone = Missing("the other ops were not timed")
        row["part"] = 100 * row["total_us"] / total if complete else alone
    rows = [r for r in here if r["op"] in wanted]
    once = {"position": position, "times": 1, "mb": step_bytes / 1e6}
    if SUM in wanted:
        made = Missing("a sum of medians")
        rows.append(
            once | {
                "op": SUM, "us": total, "us_best": made, "us_worst": made, "runs": here[0]["runs"],
                "total_us": total, "part": 100.0, "error_before": made, "error_after": made,
            }
        )  # fmt: skip
    if GRAPH in wanted:
        times = cases.times_row(whole)
        part = 100 * times["us"] / total if complete else Missing("the ops were not timed")
        before, after = errors
        rows.append(
            once | {"op": GRAPH, "total_us": times["us"], "part": part} | times
            | {"error_before": before, "error_after": after}
        )  # fmt: skip
    return rows


# ---- what it says ----


def _verdict(rows: list[dict], noise: float) -> str:
    words = []
    for position in dict.fromkeys(r["position"] for r in rows):
        us = {r["op"]: r["total_us"] for r in rows if r["position"] == position}
        if {SUM, *OPS} <= us.keys():
            parts = sorted(((us[op] / us[SUM], op) for op in OPS), reverse=True)[:4]
            words.append(
                f"at {position:,}: "
                + ", ".join(f"{op} {100 * part:.0f} %" for part, op in parts)
                + f" of {us[SUM] / 1e3:.3f} ms"
            )
        else:
            words += [f"{op} at {position:,}: {t:.1f} us a step" for op, t in us.items()]
        if {SUM, GRAPH} <= us.keys():
            ratio = us[GRAPH] / us[SUM]
            change = bench.compare(us[SUM], us[GRAPH], noise)
            known = {"faster": "beats", "slower": "does not beat", "no change": "equals"}[change]
            words.append(
                f"the graph's {us[GRAPH] / 1e3:.3f} ms {known} that sum ({ratio:.2f}x), "
                f"{'as' if change == 'faster' else 'not as'} on the old card"
            )
    first = {r["op"]: r["total_us"] for r in rows if r["position"] == rows[0]["position"]}
    if {SUM, *OPS} <= first.keys():
        largest = sorted(OPS, key=first.get)[-2:][::-1]
        ok = largest == ["swiglu", "project down"]
        words.append(f"{cases.held(ok).lower()} (swiglu, then down)")
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card and in every run."""
    us = {(r["position"], r["op"]): r["total_us"] for r in plate.rows}
    found = []
    for position in dict.fromkeys(p for p, _ in us):
        here = {op: us[position, op] for op in OPS if (position, op) in us}
        if len(here) == len(OPS):
            text = f"at {position:,} gate and up take the largest part"
            found.append((text, max(here, key=here.get) == "swiglu"))
    first, last = ((p, "attention") for p in POSITIONS)
    if first in us and last in us:
        text = f"attention costs more at {POSITIONS[1]:,} than at {POSITIONS[0]:,}"
        found.append((text, us[last] > us[first]))
    errors = [r[n] for r in plate.rows for n in ("error_before", "error_after") if r[n] is not None]
    if errors:
        found.append(
            ("the graph's logits agree with other kernels'", max(errors) < cases.STEP_LIMIT)
        )
    return found


def draw(plate, fig) -> None:
    """Bars: microseconds of a step per op, a tick at its bytes; the sum and the graph below. In the
    room beside the ops, which are short: the roofline."""
    ax = fig.subplots()
    names = [op for op in CHOICES if any(r["op"] == op for r in plate.rows)]
    positions = list(dict.fromkeys(r["position"] for r in plate.rows))
    shades = dict(zip(positions, ("#56B4E9", "#0072B2"), strict=False))
    longest = max(r["total_us"] for r in plate.rows)
    height = 0.8 / len(positions)
    for r in plate.rows:
        y = (
            names.index(r["op"])
            + (positions.index(r["position"]) - (len(positions) - 1) / 2) * height
        )
        ax.barh(y, r["total_us"], height * 0.92, color=shades[r["position"]])
        floor = r["floor_us"] * r["times"]
        ax.plot(
            [floor, floor], [y - height * 0.44, y + height * 0.44], color="#222222", linewidth=2
        )
        text = f"{r['total_us']:,.0f} us" if r["total_us"] >= 10 else f"{r['total_us']:.1f} us"
        if r["part"] is not None and r["op"] not in (SUM,):
            text += (
                ", under 1 %"
                if r["part"] < 1
                else f", {r['part']:.0f} %" + " of the sum" * (r["op"] == GRAPH)
            )
        text += f", floor {r['share']:.0f} %" if r["share"] >= 1 else ""
        ax.annotate(text, (max(r["total_us"], floor), y), (6, 0), textcoords="offset points",
                    va="center", fontsize=11)  # fmt: skip
    labels = [
        f"{op}  x {next(r['times'] for r in plate.rows if r['op'] == op)}"
        if op in PER_LAYER
        else op
        for op in names
    ]
    ax.set_yticks(range(len(names)), labels)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, 1.32 * longest)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel(
        "time of one step [us], its part of the sum; tick: its bytes at the read rate (floor, in % "
        "of the time)", fontsize=12,
    )  # fmt: skip
    handles = [ax.barh(0, 0, color=shades[p]) for p in positions]
    ax.legend(
        handles, [f"position {p:,}" for p in positions], loc="upper left", fontsize=12,
        bbox_to_anchor=(0.17, 1.0), ncols=2, frameon=False,
    )  # fmt: skip
    if {SUM, GRAPH, *OPS} <= set(names):
        _roofline(ax.inset_axes((0.61, 0.33, 0.39, 0.6)), plate, shades)


def _roofline(ax, plate, shades: dict[int, str]) -> None:
    """Rate over the bytes of one launch: below the read rate, and on lines of one time each."""
    ceiling = plate.card["read_rate"]["gb_s"]
    rows = [r for r in plate.rows if r["op"] in (*PER_LAYER, "head")]
    sizes = [r["mb"] for r in rows]
    left, right = min(sizes) / 2, max(sizes) * 3
    low = min(r["gb_s"] for r in rows) / 2
    meets = {us: ceiling * us * 1e-3 for us in (1, 3, 10, 30, 100)}  # MB
    meets = {us: mb for us, mb in meets.items() if left < mb < right}
    for us, mb in meets.items():
        ax.plot([left, mb], [left * 1e3 / us, ceiling], color="#BBBBBB", linewidth=1.2)
        ax.annotate(f"{us} us" if us == max(meets) else f"{us}", (mb, ceiling), (0, 4),
                    textcoords="offset points", ha="center", fontsize=10.5,
                    color="#666666")  # fmt: skip
    ax.plot([left, right], [ceiling, ceiling], color="#222222", linewidth=1.5)
    ax.annotate("read rate", (left, ceiling), (4, 4), textcoords="offset points", fontsize=10.5)
    last = max(shades)
    step = next(r["gb_s"] for r in plate.rows if r["op"] == GRAPH and r["position"] == last)
    ax.plot([left, right], [step, step], color="#222222", linewidth=1.2, linestyle="--")
    ax.annotate("whole graph", (left, step), (4, 4), textcoords="offset points", fontsize=10.5)
    for r in rows:
        ax.plot(r["mb"], r["gb_s"], "o", color=shades[r["position"]], markersize=8, zorder=3)
        if r["position"] == last:
            above = r["op"] in ("project o", "swiglu")  # each near another, lower one
            ax.annotate(
                r["op"], (r["mb"], r["gb_s"]), (-7, 5) if above else (8, -4),
                textcoords="offset points", ha="right" if above else "left",
                va="bottom" if above else "top", fontsize=11,
            )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, ceiling * 2))
    for axis, limits, draw_ticks in (
        ("x", (left, right), ax.set_xticks), ("y", (low, ceiling), ax.set_yticks),
    ):  # fmt: skip
        powers = [10.0**e for e in range(-3, 7) if limits[0] <= 10.0**e <= limits[1]]
        draw_ticks(powers, [f"{p:,g}" for p in powers], fontsize=10.5)
        ax.tick_params(axis=axis, which="minor", length=0)
    ax.set_xlabel("bytes of one launch [MB]", fontsize=11)
    ax.set_ylabel("GB/s", fontsize=11, labelpad=0)
