"""One kernel for a token: its time beside the graph's, and its cycles, phase by phase."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ... import graph, load, native, persistent, plan, state, synth, toggles
from ...errors import DecodeError
from .. import bench, card, cases
from ..plate import Measured, Missing

TITLE = "One kernel for a token, and where its cycles go"
QUESTION = "What does a step take as one kernel, and how much of it is waiting for other CTAs?"
PREDICTION = (
    "A layer of the 3B shape has 18,816 panels, 143 for each of 132 CTAs. Looking up one takes 84 "
    "passes through shared memory: 12,000 cycles. Five hand-offs of a store, a look through the L2 "
    "and a barrier take about 1,500 each, attention 2,000: 21,500 cycles, 12 us at 1.75 GHz. "
    "36 layers and a head at the read rate are then 0.48 ms, less than half of the graph's 1.15; "
    "nearly half of it is waiting."
)
PARAMS = {
    "shape": ("qwen2.5-3b", "a named shape, see decodev2/plan.py"),
    "max_seq": (2048, "capacity of the KV cache"),
    "positions": (["0", "100", "2000"], "tokens before the one that is timed, separated by commas"),
    "ways": ([], "persistent step, graph, separated by commas; both if left out"),
    "runs": (15, "timed launches"),
    "seed": (0, "seed of the weights"),
}
DEPENDS = ("persistent.cu", "persistent_binding.cpp", "*.cuh", "*.h")
DEVICE = "cuda"
STEP, GRAPH = "persistent step", "graph"
TOGGLES = {"position": ("positions", ("0", "100", "2000")), "what": ("ways", (STEP, GRAPH))}
# Phase -> (first stamp, last stamp), as csrc/persistent.cu writes them: for each product when its
# turn came, when x of its first panel was there and when that warp had multiplied, and, of another
# warp, when its sums were out.
PHASES = {
    "x of qkv": (0, 1),
    "qkv": (1, 2),
    "attention": (2, 4),
    "x of o": (4, 5),
    "o": (5, 6),
    "x of gate, up": (6, 9),
    "gate, up": (9, 14),
    "x of down": (14, 17),
    "down": (17, 18),
}
INSIDE = {  # attention, of the last CTA: queries are there, the weights of its positions, its sums
    "attention: queries": (2, 20),
    "attention: scores": (20, 21),
    "attention: values": (21, 22),
    "attention: handed on": (22, 23),
}
WAITS = ("x of qkv", "x of o", "x of gate, up", "x of down")
COLUMNS = [
    {"name": "position", "unit": "tokens"},
    {"name": "what", "unit": ""},
    *cases.MS_COLUMNS,
    {"name": "tok_s", "unit": "tok/s"},
    {"name": "floor_ms", "unit": "ms"},
    {"name": "share", "unit": "%"},
    {"name": "cycles", "unit": "cycles"},
    {"name": "cycles_least", "unit": "cycles"},
    {"name": "cycles_most", "unit": "cycles"},
    {"name": "difference", "unit": "1"},
]
TIMED = ("ms", "ms_best", "ms_worst", "runs", "tok_s", "floor_ms", "share", "difference")


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """Two rows of time and a row per phase, at each position."""
    spec = plan.with_max_seq(plan.named_spec(params["shape"]), params["max_seq"])
    for text in map(str, params["positions"]):
        if not (text.isdigit() and int(text) < spec.max_seq):
            raise DecodeError(f"position {text} is no slot of a cache of {spec.max_seq}")
    positions = list(map(int, params["positions"]))
    ways = cases.chosen(params["ways"], (STEP, GRAPH), "way")
    if spec.n_layers < 4:
        raise DecodeError(f"{spec.name} has {spec.n_layers} layers, a time line needs at least 4")
    if not torch.cuda.is_available():
        raise DecodeError("persistent_step needs a CUDA device")
    native.build_cuda()
    if reason := persistent.why_not(spec):
        raise DecodeError(f"{spec.name}: no persistent step, {reason}")
    read_rate = card.measure_read_rate(1, "cuda")
    weights = load.load_weights(synth.random_packed(spec, params["seed"]), "cuda")
    floor = weights.bytes_per_token / read_rate["gb_s"] * 1e-6
    rows, noise = [], 0.0
    for index, position in enumerate(positions):
        progress(index, len(positions), f"position {position}")
        made, band = _rows(spec, weights, position, params["runs"], floor)
        rows += [
            {"position": position} | row
            for row in made
            if row["what"] in ways or (STEP in ways and row["what"] != GRAPH)
        ]
        noise = max(noise, band)
    progress(1, 1, "done")
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=verdict(rows, noise),
        card=card.card("cuda", read_rate=read_rate),
        notes=[
            "cycles: of the first warp of each CTA, mean over the layers but the outer ones; mean, "
            "least and most over the CTAs. A launch that writes its time line takes a little "
            "longer than one that is timed.",
            cases.noise_note(noise, STEP),
        ],
        figure={"kind": "own"},
    )


def _rows(spec, weights, position: int, runs: int, floor: float) -> tuple[list[dict], float]:
    by_graph, by_launch = (state.allocate_state(spec, "cuda") for _ in range(2))
    fill(by_graph, by_launch)
    one = persistent.prepare(by_launch, weights)
    with toggles.using(linear="gemv"):
        captured = graph.capture(by_graph, weights).replay
    launch = graph.capture_step(by_launch, functools.partial(persistent.greedy_decode, one)).replay
    before = difference(by_graph, by_launch, captured, launch, position)
    found = {STEP: launch, GRAPH: captured}
    lives = {STEP: by_launch, GRAPH: by_graph}
    times = {
        name: cases.step_times(lives[name], take, position, runs) for name, take in found.items()
    }
    again = cases.step_times(by_launch, launch, position, runs)
    after = difference(by_graph, by_launch, captured, launch, position)
    persistent.check(one)
    rows = []
    for name, seconds in times.items():
        row = {"what": name} | cases.ms_row(seconds)
        row |= {"tok_s": 1e3 / row["ms"], "floor_ms": floor, "share": 100 * floor / row["ms"]}
        row["difference"] = max(before, after) if name == STEP else Missing("it is the reference")
        rows.append(row | dict.fromkeys(_cycles(), Missing("timed without a time line")))
    line = persistent.timeline_of(one)
    by_launch.position.fill_(position)
    persistent.forward_decode(one, line)
    for phase, cycles in phases(line.cpu()).items():
        rows.append({"what": phase} | dict.fromkeys(TIMED, Missing("a part of the step")) | cycles)
    return rows, bench.noise_band(times[STEP], again)


def _cycles() -> tuple[str, ...]:
    return "cycles", "cycles_least", "cycles_most"


def phases(line: torch.Tensor) -> dict[str, dict]:
    """{phase: cycles, least, most} of a time line [layers + 1, stamps, CTAs], and of a layer.

    Attention is the longest of the CTAs', for the others do not attend.
    """
    layers = line[2:-2].double() if len(line) > 5 else line[:-1].double()
    out = {}
    for phase, (first, last) in PHASES.items():
        spent = (layers[:, last] - layers[:, first]).mean(0)
        mean = spent.max() if phase == "attention" else spent.mean()
        values = (mean, spent.min(), spent.max())
        out[phase] = dict(zip(_cycles(), map(float, values), strict=True))
    for part, (first, last) in INSIDE.items():
        spent = float((layers[:, last, -1] - layers[:, first, -1]).mean())
        out[part] = dict.fromkeys(_cycles(), spent)
    starts = layers[:, 0]
    layer = (starts[1:] - starts[:-1]).mean(0)
    values = (layer.mean(), layer.min(), layer.max())
    return out | {"a layer": dict(zip(_cycles(), map(float, values), strict=True))}


def fill(*lives: state.DecodeState) -> None:
    """The same keys and values in all of them: attention must have something to read."""
    for live in lives:
        chance = torch.Generator(device="cuda").manual_seed(5)
        for cache in (live.kv.k, live.kv.v):
            cache.copy_(torch.rand(cache.shape, generator=chance, device="cuda") * 4 - 2)


def difference(by_graph, by_launch, captured, launch, position: int) -> float:
    """Relative difference of the logits after one step each."""
    for live, take in ((by_graph, captured), (by_launch, launch)):
        live.position.fill_(position)
        live.token.fill_(1)
        take()
    a, b = by_graph.logits.double(), by_launch.logits.double()
    found = float((a - b).norm() / a.norm())
    if not found < 0.02:
        raise DecodeError(f"the persistent step is off by {found:.1e} at position {position}")
    return found


def claims(plate) -> list[tuple[str, bool]]:
    """What a kernel change must not change."""
    ms = {(row["position"], row["what"]): row["ms"] for row in plate.rows}
    positions = dict.fromkeys(row["position"] for row in plate.rows)
    close = all(r["difference"] < 0.02 for r in plate.rows if r["what"] == STEP)
    both = [p for p in positions if {(p, STEP), (p, GRAPH)} <= ms.keys()]
    found = [("its logits are the graph's, before and after", close)]
    if both:
        faster = all(ms[p, STEP] < ms[p, GRAPH] for p in both)
        found.append(("one kernel beats the graph, at every position", faster))
    return found


def verdict(rows: list[dict], noise: float) -> str:
    """One sentence a position, and what the first one's cycles are."""
    ms = {(row["position"], row["what"]): row["ms"] for row in rows}
    cycles = {(row["position"], row["what"]): row["cycles"] for row in rows}
    positions = list(dict.fromkeys(row["position"] for row in rows))
    if not {(p, way) for p in positions for way in (STEP, GRAPH)} <= ms.keys():
        return "; ".join(
            f"{what} at {p:,}: {t:.3f} ms" for (p, what), t in ms.items() if what in (STEP, GRAPH)
        )
    words = [
        f"at {p:,} {ms[p, STEP]:.3f} ms, {1e3 / ms[p, STEP]:,.0f} tok/s "
        f"(the graph {ms[p, GRAPH]:.3f}, {bench.compare(ms[p, STEP], ms[p, GRAPH], noise)})"
        for p in positions
    ]
    first = positions[0]
    waiting = sum(cycles[first, phase] for phase in WAITS) / cycles[first, "a layer"]
    return (
        f"{cases.held(ms[first, STEP] < 0.6)} (0.48 ms): {'; '.join(words)}. A layer takes "
        f"{cycles[first, 'a layer']:,.0f} cycles at {first:,}, {100 * waiting:.0f} % of them "
        f"waiting for x."
    )


def draw(plate, fig) -> None:
    """Left the step against the graph, right a layer's cycles by phase, both by position."""
    positions = list(dict.fromkeys(row["position"] for row in plate.rows))
    left, right = fig.subplots(1, 2, width_ratios=(1, 1.7))
    shades = {STEP: "#0072B2", GRAPH: "#999999"}
    for y, position in enumerate(positions):
        for k, (name, shade) in enumerate(shades.items()):
            (row,) = (r for r in plate.rows if (r["position"], r["what"]) == (position, name))
            left.barh(y + 0.36 * k, row["ms"], 0.34, color=shade)
            left.annotate(
                f"{row['ms']:.3f}, {row['tok_s']:,.0f} tok/s", (row["ms"], y + 0.36 * k), (4, 0),
                textcoords="offset points", va="center", fontsize=11,
            )  # fmt: skip
    floor = next(r["floor_ms"] for r in plate.rows if r["what"] == STEP)
    left.axvline(floor, color="#222222", linewidth=1.5)
    left.set_yticks([y + 0.18 for y in range(len(positions))], [f"at {p:,}" for p in positions])
    left.set_ylim(len(positions) - 0.4, -0.9)
    left.set_xlim(0, 1.7 * max(r["ms"] for r in plate.rows if r["what"] in shades))
    left.set_xlabel("a step [ms]; line: its bytes at the read rate")
    left.legend(
        [left.barh(0, 0, color=shade) for shade in shades.values()], list(shades), fontsize=11,
        loc="upper right", ncols=2,
    )  # fmt: skip
    colors = ["#56B4E9", "#0072B2", "#CC79A7", *["#56B4E9", "#0072B2"] * 3]
    for y, position in enumerate(positions):
        at = 0.0
        for phase, color in zip(PHASES, colors, strict=True):
            (row,) = (r for r in plate.rows if (r["position"], r["what"]) == (position, phase))
            width = row["cycles"] / 1e3
            if phase == "attention":  # the others wait for it in o
                continue
            right.barh(y, width, 0.68, left=at, color=color, edgecolor="white")
            narrow = width < 1  # its label stands above it
            right.annotate(
                f"{phase} {width:.1f}" if narrow else f"{phase}  {width:.1f}",
                (at + width / 2, y - 0.36 if narrow else y), ha="center",
                va="bottom" if narrow else "center", fontsize=10, rotation=0 if narrow else 90,
                color="white" if color == "#0072B2" and not narrow else "black",
            )  # fmt: skip
            at += width
    right.set_yticks(range(len(positions)), [f"at {p:,}" for p in positions])
    right.set_ylim(len(positions) - 0.5, -0.5)
    right.set_xlabel("a layer [1,000 cycles]: light waits for x, dark multiplies and hands on")
