"""One greedy step from 0.5 to 32 billion weights, as a graph and as one kernel, over its bytes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import numpy as np
import torch

from ... import graph, load, native, persistent, plan, state, synth, toggles
from ...errors import DecodeError
from .. import bench, card, cases
from ..figure import number
from ..plate import Measured, Missing
from .attention import kv_bytes
from .limits import log_ticks
from .persistent_step import difference, fill

TITLE = "Roofline of a step: 0.5 to 32 billion weights"
QUESTION = "How near does a step come to the time of reading its bytes, and what stops a small one?"
PREDICTION = (
    "A step is its layers times what their starts and hand-offs cost, and its bytes at a rate that "
    "the kernels reach. By graph 20 us a layer (five kernels) and 3,600 GB/s describe the recorded "
    "steps of 3B to 32B; then 0.5B and 1.5B should take 0.55 and 0.79 ms. As one kernel, a guess: "
    "6 us a layer and 4,300 GB/s, which is 0.21, 0.36, 0.60, 1.04, 2.02 and 4.34 ms from 0.5B to "
    "32B. The floors at 4,660 GB/s are 0.06, 0.18, 0.35, 0.81, 1.60 and 3.65 ms. So the share of "
    "the floor grows with the size, from a tenth to six tenths by graph and from a quarter to over "
    "eight tenths as one kernel."
)
SHAPES = (
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b",
)  # fmt: skip
GRAPH, PERSISTENT = "graph", "persistent"
WAYS = (GRAPH, PERSISTENT)
PARAMS = {
    "shapes": (list(SHAPES), "named shapes, separated by commas"),
    "ways": ([], "graph, persistent or both, separated by commas; both if left out"),
    "max_seq": (2048, "capacity of the KV cache"),
    "position": (100, "tokens before the one that is timed"),
    "runs": (11, "timed steps"),
    "seed": (0, "seed of the weights, keys and values"),
}
TOGGLES = {"shape": ("shapes", SHAPES), "way": ("ways", WAYS)}
DEPENDS = ("*.cu", "*.cuh", "*.h")
DEVICE = "cuda"
# tg128 of llama-bench on an NVIDIA H200, recorded once; not measured again by this experiment.
LLAMA_CPP_TOK_S = {
    "qwen2.5-0.5b": 913.0, "qwen2.5-1.5b": 584.0, "qwen2.5-3b": 400.5, "qwen2.5-7b": 280.9,
    "qwen2.5-14b": 152.1, "qwen2.5-32b": 79.1,
}  # fmt: skip
LLAMA_CPP_SOURCE = (
    "llama_cpp_tok_s: tg128 of llama-bench (llama.cpp 0.5.0-dev built for sm_90, flash attention, "
    "all layers on the card, random weights of the shape in the Q4_K_M mix), recorded once on an "
    "NVIDIA H200; its weights are a little larger than ours."
)
COLUMNS = [
    {"name": "shape", "unit": ""},
    {"name": "way", "unit": ""},
    {"name": "layers", "unit": "1"},
    {"name": "packed_mb", "unit": "MB"},
    {"name": "kv_mb", "unit": "MB"},
    *cases.MS_COLUMNS,
    {"name": "tok_s", "unit": "tok/s"},
    {"name": "floor_ms", "unit": "ms"},
    {"name": "share", "unit": "%"},
    {"name": "difference", "unit": "1"},
    {"name": "llama_cpp_tok_s", "unit": "tok/s"},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape and way; one shape at a time is on the card. The graph's logits are checked
    against a step by other kernels, the persistent step's against the graph's."""
    ways = cases.chosen(params["ways"], WAYS, "way")
    specs = [
        plan.with_max_seq(plan.named_spec(name), params["max_seq"])
        for name in params["shapes"] or SHAPES
    ]
    if not 0 <= params["position"] < params["max_seq"]:
        raise DecodeError(
            f"position {params['position']} is outside the cache of {params['max_seq']} slots"
        )
    if not torch.cuda.is_available():
        raise DecodeError("step_roofline needs a CUDA device")
    native.build_cuda()
    read_rate = card.measure_read_rate(1, DEVICE)
    rows, noise = [], 0.0
    for index, spec in enumerate(specs):
        progress(index, len(specs), spec.name)
        with toggles.using(linear="gemv"):
            made, band = _rows(spec, ways, params)
        rows += made
        noise = max(noise, band)
        gc.collect()
        torch.cuda.empty_cache()
    progress(len(specs), len(specs), "done")
    read_rate = card.faster_read_rate(read_rate, card.measure_read_rate(1, DEVICE))
    for row in rows:
        row["floor_ms"] = (row["packed_mb"] + row["kv_mb"]) / read_rate["gb_s"]
        reason = row["ms"] if isinstance(row["ms"], Missing) else None
        row["tok_s"] = reason or 1e3 / row["ms"]
        row["share"] = reason or 100 * row["floor_ms"] / row["ms"]
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=card.card(DEVICE, read_rate=read_rate),
        notes=[
            cases.noise_note(noise, "the first way of each shape"),
            "floor_ms: packed weights and live keys and values at the read rate.",
            LLAMA_CPP_SOURCE,
        ],
        figure={"kind": "own"},
    )


def _rows(spec, ways: list[str], params: dict) -> tuple[list[dict], float]:
    """Rows of one shape, and the noise band of its first way."""
    position, runs = params["position"], params["runs"]
    weights = load.load_weights(synth.random_packed(spec, params["seed"]), DEVICE)
    by_graph = state.allocate_state(spec, DEVICE, 1)
    fill(by_graph)
    captured = graph.capture(by_graph, weights)
    rows, noise = [], None
    for way in ways:
        row = {
            "shape": spec.name, "way": way, "layers": spec.n_layers,
            "packed_mb": weights.bytes_per_token / 1e6,
            "kv_mb": spec.n_layers * kv_bytes(spec, position + 1) / 1e6,
            "llama_cpp_tok_s": LLAMA_CPP_TOK_S.get(spec.name, Missing("was not recorded")),
        }  # fmt: skip
        live, take, one, reason = by_graph, captured.replay, None, None
        if way == PERSISTENT:
            one, take, reason = _persistent(spec, weights)
            live = one and one.state
        if reason:
            missing = Missing(f"no persistent step: {reason}")
            names = ("ms", "ms_best", "ms_worst", "difference")
            rows.append(row | dict.fromkeys(names, missing) | {"runs": 0})
            continue

        def check(token: int, way=way, take=take, live=live) -> float:
            if way == GRAPH:
                return cases.step_error(by_graph, weights, take, position, token)
            return difference(by_graph, live, captured.replay, take, position)

        before = check(11)
        seconds = cases.step_times(live, take, position, runs)
        if noise is None:
            noise = bench.noise_band(seconds, cases.step_times(live, take, position, runs))
        after = check(12)
        if one:
            persistent.check(one)
        rows.append(row | cases.ms_row(seconds) | {"difference": max(before, after)})
    return rows, noise or 0.0


def _persistent(spec, weights):
    """(persistent step, what takes it, None), or why it cannot be as the last of three."""
    if reason := persistent.why_not(spec):
        return None, None, reason
    live = state.allocate_state(spec, DEVICE, 1)
    fill(live)
    one = persistent.prepare(live, weights)
    step = functools.partial(persistent.greedy_decode, one)
    replay = graph.capture_step(live, step).replay
    return one, replay, None


# ---- what it says ----


def fit(rows: list[dict], way: str) -> tuple[float, float] | None:
    """(us a layer, GB/s) of ms = layers * cost + bytes / rate over the shapes of one way, each of
    the same weight; None with fewer than three shapes."""
    known = [r for r in rows if r["way"] == way and isinstance(r["ms"], int | float)]
    if len(known) < 3:
        return None
    layers, mb, ms = (np.array([float(r[n]) for r in known]) for n in ("layers", "packed_mb", "ms"))
    terms = np.stack([layers, mb], axis=1) / ms[:, None]  # relative errors count
    (per_layer, per_mb), *_ = np.linalg.lstsq(terms, np.ones_like(ms), rcond=None)
    return float(1e3 * per_layer), float(1 / per_mb)


def _verdict(rows: list[dict], noise: float) -> str:
    words = []
    for way in WAYS:
        known = [r for r in rows if r["way"] == way and isinstance(r["ms"], int | float)]
        if not known:
            continue
        small = min(known, key=lambda r: r["packed_mb"])
        large = max(known, key=lambda r: r["packed_mb"])
        text = (
            f"{way}: {large['ms']:.2f} ms, {large['share']:.0f} % of the floor ({large['shape']})"
        )
        if small is not large:
            text += f", {small['ms']:.2f} ms, {small['share']:.0f} % ({small['shape']})"
        if found := fit(rows, way):
            near = {GRAPH: (15 <= found[0] <= 25), PERSISTENT: (4 <= found[0] <= 8)}[way]
            text += (
                f"; {found[0]:.1f} us a layer and {found[1]:,.0f} GB/s fit all shapes "
                f"({cases.held(near).lower()}: {'20' if way == GRAPH else '6'} us)"
            )
        words.append(text)
    ms = {(r["shape"], r["way"]): r["ms"] for r in rows if isinstance(r["ms"], int | float)}
    both = [shape for shape, way in ms if way == PERSISTENT and (shape, GRAPH) in ms]
    if both:
        gains = {shape: ms[shape, GRAPH] / ms[shape, PERSISTENT] for shape in both}
        slower = [shape for shape, gain in gains.items() if gain < 1 - noise]
        words.append(
            f"one kernel is {cases.ratio_text(gains)} as fast as the graph"
            + (f", so slower on {', '.join(slower)}" if slower else "")
        )
    best = {}
    for r in rows:
        if isinstance(r["ms"], int | float) and isinstance(r["llama_cpp_tok_s"], int | float):
            gain = r["tok_s"] / r["llama_cpp_tok_s"]
            best[r["shape"]] = max(gain, best.get(r["shape"], 0.0))
    if best:
        words.append(f"the better way is {cases.ratio_text(best)} as fast as llama.cpp's record")
    text = "; ".join(words) or "no way that was asked for exists"
    return f"{text[0].upper()}{text[1:]}."


def claims(plate) -> list[tuple[str, bool]]:
    """What must not change between runs."""
    known = [r for r in plate.rows if r["ms"] is not None]
    found = [
        ("logits agree with those of other kernels", all(r["difference"] < 0.05 for r in known))
    ]
    shares = {(r["shape"], r["way"]): r["share"] for r in known}
    first, last = SHAPES[0], SHAPES[-1]
    for way in WAYS:
        if (first, way) in shares and (last, way) in shares:
            found.append(
                (f"{way}: the largest shape is nearer to its floor than the smallest",
                 shares[last, way] > shares[first, way])
            )  # fmt: skip
    ours = {(r["shape"], r["way"]): r["tok_s"] for r in known}
    theirs = {r["shape"]: r["llama_cpp_tok_s"] for r in known if r["llama_cpp_tok_s"] is not None}
    shapes = [shape for shape in theirs if (shape, GRAPH) in ours]
    if shapes:
        found.append(
            ("the graph beats llama.cpp's recorded rate on every shape that has one",
             all(ours[s, GRAPH] > theirs[s] for s in shapes))
        )  # fmt: skip
    return found


def draw(plate, fig) -> None:
    """Time of a step over its bytes, both on log axes: the read rate as a line, our two ways, and
    llama.cpp's records."""
    ax = fig.subplots()
    rows = [r for r in plate.rows if r["ms"] is not None]
    rate = plate.card["read_rate"]["gb_s"]
    sizes = [r["packed_mb"] for r in plate.rows]
    left, right = 0.75 * min(sizes), 1.6 * max(sizes)
    grid = np.array([left, right])
    ax.plot(grid, grid / rate, color="#222222", linewidth=1.5)
    ax.annotate(
        f"bytes at {rate:,.0f} GB/s", (left, left / rate), (6, -4), textcoords="offset points",
        va="top", fontsize=11.5,
    )  # fmt: skip
    records = {r["shape"]: r for r in plate.rows if r["llama_cpp_tok_s"] is not None}.values()
    series = [
        ("llama.cpp Q4_K_M, recorded", "D", "#E69F00",
         [(r["packed_mb"], 1e3 / r["llama_cpp_tok_s"], None) for r in records], (0, 9)),
        (GRAPH, "o", "#999999",
         [(r["packed_mb"], r["ms"], r) for r in rows if r["way"] == GRAPH], (-10, 0)),
        (PERSISTENT, "s", "#0072B2",
         [(r["packed_mb"], r["ms"], r) for r in rows if r["way"] == PERSISTENT], (8, 4)),
    ]  # fmt: skip
    for name, marker, colour, points, offset in series:
        if not points:
            continue
        x, y, _ = zip(*points, strict=True)
        ax.plot(x, y, marker, color=colour, markersize=9, label=name, zorder=3)
        for mb, ms, row in points:
            if row is None:
                continue
            left_of = offset[0] < 0
            ax.annotate(
                f"{number(ms)} ms\n{row['share']:.0f} %", (mb, ms), offset,
                textcoords="offset points", ha="right" if left_of else "left",
                va="center" if left_of else "top", fontsize=10.5, color="#444444", zorder=2,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
    low = 0.6 * left / rate
    high = 1.6 * max(y for *_, points, _ in series for _, y, _ in points)
    ax.set(xscale="log", yscale="log", xlim=(left / 1.7, right * 1.5), ylim=(low, high))
    named = {r["shape"]: r["packed_mb"] for r in plate.rows}
    ax.set_xticks(
        list(named.values()), [f"{n.split('-')[-1].upper()}\n{mb:,.0f} MB" for n, mb in
                               named.items()]
    )  # fmt: skip
    ticks = log_ticks(low, high)
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel("packed weights of a step")
    ax.set_ylabel("a step [ms], and its share of the floor")
    ax.legend(loc="upper left", fontsize=12, frameon=False)
