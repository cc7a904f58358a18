"""Handing a vector from all CTAs to all CTAs: by ends of kernels, barriers, and flags in data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ... import native
from ...errors import DecodeError
from .. import bench, cases
from ..plate import Measured, Missing

TITLE = "Hand-offs: one vector from all CTAs to all CTAs"
QUESTION = "What does it cost until every CTA has read what all of them have just written?"
PREDICTION = (
    "An earlier draft of such hand-offs took 1,525 cycles for 8 KB of words that carry their own "
    "flag, 0.87 us at 1.75 GHz; these should do the same. About half of that, 700 cycles, is "
    "reading from the L2 and a CTA's own barrier, which nothing can beat; the store must reach the "
    "L2 first. A barrier that is an add and a poll (0.90 us in that draft) is followed by the "
    "reading: 1.3 us; the grid's own (0.97 us) 1.4 us. A kernel's end costs 1.54 us as a plain "
    "node, 1.00 us with programmatic launch, and the reading: 1.9 and 1.4 us. Two looks in flight "
    "instead of one find a word a quarter of a round trip sooner, 100 cycles. 4 KB are no faster "
    "than 8: it is latency."
)
NODE, EARLY_NODE = "graph node", "programmatic node"
BARRIER, COUNTER = "grid barrier", "counter"
ONE_LOOK, TWO_LOOKS = "flag in data", "flag in data and two looks"
READING = "reading alone"
WAYS = {  # HandoffWay of csrc/launch.h, or whether a node starts early
    NODE: False,
    EARLY_NODE: True,
    BARRIER: 1,
    COUNTER: 2,
    ONE_LOOK: 3,
    TWO_LOOKS: 4,
    READING: 0,
}
SIZES_KB = (8, 4)
PARAMS = {
    "ways": ([], "ways to hand over, separated by commas; all if left out"),
    "kb": ([], "sizes of the vector, 8 or 4 KB; both if left out"),
    "rounds": (512, "hand-offs in a row"),
    "runs": (11, "timed launches, or replays of nodes"),
    "seed": (0, "seed of the first vectors"),
}
TOGGLES = {"way": ("ways", tuple(WAYS)), "kb": ("kb", SIZES_KB)}
DEPENDS = (
    "handoff.cu", "persistent.cuh", "persistent.h", "attn.cuh", "device.cuh", "nf4.cuh", "ptx.cuh",
    "launch.h",
)  # fmt: skip
DEVICE = "cuda"
FACTOR = 1664525  # as csrc/handoff.cu
PATIENCE_CYCLES = 10_000_000  # about six milliseconds before a hand-off counts as lost
COLUMNS = [
    {"name": "way", "unit": ""},
    {"name": "kb", "unit": "KB"},
    {"name": "rounds", "unit": "1"},
    {"name": "cycles", "unit": "cycles"},
    {"name": "cycles_least", "unit": "cycles"},
    {"name": "cycles_most", "unit": "cycles"},
    *cases.US_COLUMNS,
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per way and size. The last vector, and the sum of all that was read, are checked
    after every launch."""
    ways = cases.chosen(params["ways"], WAYS, "way")
    sizes = [int(kb) for kb in cases.chosen(params["kb"], map(str, SIZES_KB), "size")]
    if params["rounds"] < 16:
        raise DecodeError(f"rounds is {params['rounds']}, needs at least 16")
    read_rate = cases.begin("handoff")
    rng = np.random.default_rng(params["seed"])
    rows, noise = [], 0.0
    for kb in sizes:
        for way in ways:
            progress(len(rows), len(sizes) * len(ways), f"{way}, {kb} KB")
            made = Rounds(way, kb, params["rounds"])
            cycles, seconds = _timed(made, rng, params["runs"])
            _, again = _timed(made, rng, params["runs"])
            noise = max(noise, bench.noise_band(seconds, again))
            rows.append(
                {"way": way, "kb": kb, "rounds": params["rounds"]}
                | cycles
                | cases.times_row(seconds)
            )
    progress(len(rows), len(rows), "done")
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=cases.end(read_rate),
        notes=[
            cases.noise_note(noise, "every way"),
            "A round: every CTA reads the whole vector into its shared memory, meets at its own "
            "barrier, and writes its own words of the next vector, each made from another place of "
            "the one it read. us is a launch over its rounds, cycles the mean over the CTAs of the "
            f"rounds after the first {native.cuda('handoff').warm_up}, with the least and the most "
            "of a CTA.",
            f"{READING}: the same, but nothing is waited for and the first vector is read in every "
            "round.",
        ],
        figure={"kind": "own"},
    )


# ---- one way ----


@dataclass
class Rounds:
    """A way to hand over, with its buffers."""

    way: str
    kb: int
    rounds: int
    patience: int = PATIENCE_CYCLES

    def __post_init__(self):
        self.words = self.kb * 256
        self.module = native.cuda("handoff")
        ints = {"dtype": torch.int32, "device": DEVICE}
        self.vectors = torch.empty(2, self.words, **ints)
        self.control = torch.empty(3 * self.module.apart, **ints)
        count = torch.cuda.get_device_properties(0).multi_processor_count
        self.cycles = torch.zeros(count, dtype=torch.int64, device=DEVICE)
        self.graph = self._captured() if self.by_nodes else None

    @property
    def by_nodes(self) -> bool:
        return isinstance(WAYS[self.way], bool)

    def start_from(self, first: np.ndarray) -> None:
        """`first` uint32 [words], lowest bits 0, into the first vector; all else as before any
        launch."""
        self.vectors.fill_(-1)
        self.vectors[0].copy_(torch.from_numpy(first.view(np.int32)))
        self.control.zero_()

    def take(self) -> None:
        """All rounds."""
        if self.graph:
            self.graph.replay()
        else:
            self.module.rounds(
                self.vectors, self.control, self.cycles, WAYS[self.way], self.rounds, self.patience
            )

    def _captured(self) -> torch.cuda.CUDAGraph:
        self.start_from(np.zeros(self.words, np.uint32))
        self._nodes()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._nodes()
        return graph

    def _nodes(self) -> None:
        for r in range(self.rounds):
            self.module.node(self.vectors, self.control, r, WAYS[self.way])

    def check(self, first: np.ndarray) -> None:
        """Raise DecodeError unless the rounds from `first` left what they must."""
        where = f"{self.way}, {self.kb} KB"
        total, _, fault = (int(v) for v in self.control[:: self.module.apart])
        if fault:
            raise DecodeError(f"{where}: the hand-off of round {fault - 1} did not come")
        last, sum_of_all = expected(first, self.rounds, fresh=self.way != READING)
        found = self.vectors[1 if self.way == READING else self.rounds & 1].cpu().numpy().view(
            np.uint32
        ) & ~np.uint32(1)
        if wrong := int((found != last).sum()):
            raise DecodeError(f"{where}: {wrong} of {self.words} words of the last vector differ")
        if not self.by_nodes and total % 2**32 != sum_of_all * len(self.cycles) % 2**32:
            raise DecodeError(f"{where}: the sum of all that was read differs")


def expected(first: np.ndarray, rounds: int, fresh: bool = True) -> tuple[np.ndarray, int]:
    """The vector after `rounds` rounds, and the sum of all that one CTA has read by then (modulo
    2^32). Without `fresh` each round reads the first vector again."""
    here = np.arange(len(first), dtype=np.uint32)
    vector, total = first, 0
    with np.errstate(over="ignore"):
        for r in range(rounds):
            read = vector if fresh else first
            total += int(read.sum(dtype=np.uint64))
            from_where = (5 * here + np.uint32(r)) % np.uint32(len(first))
            vector = (read[from_where] * np.uint32(FACTOR) + here) & ~np.uint32(1)
    return vector, total % 2**32


def _timed(made: Rounds, rng: np.random.Generator, runs: int) -> tuple[dict, list[float]]:
    """Cycles and seconds of a round; each launch starts from a fresh vector and is checked."""
    cycles, seconds = [], []
    for index in range(runs + 2):
        first = rng.integers(0, 2**31, made.words, dtype=np.uint32) * np.uint32(2)
        made.start_from(first)
        taken = bench.event_times(made.take, 1, 0)
        made.check(first)
        if index >= 2:
            seconds += [t / made.rounds for t in taken]
            cycles.append(made.cycles.cpu().numpy() / (made.rounds - made.module.warm_up))
    names = ("cycles", "cycles_least", "cycles_most")
    if made.by_nodes:
        return dict.fromkeys(names, Missing("kernels in a row have no common clock")), seconds
    by_cta = np.median(cycles, axis=0)
    values = (float(v) for v in (by_cta.mean(), by_cta.min(), by_cta.max()))
    return dict(zip(names, values, strict=True)), seconds


# ---- what it says ----


def _verdict(rows: list[dict], noise: float) -> str:
    us = {(r["way"], r["kb"]): r["us"] for r in rows}
    cycles = {(r["way"], r["kb"]): r["cycles"] for r in rows}
    kb = max(r["kb"] for r in rows)
    here = {way: us[way, kb] for way in WAYS if (way, kb) in us}
    parts = []
    flags = cycles.get((TWO_LOOKS, kb), cycles.get((ONE_LOOK, kb)))
    if flags is not None:
        parts.append(
            f"{cases.held(abs(flags / 1525 - 1) < 0.15)} (1,525 cycles): words that carry their "
            f"own flag take {flags:,.0f} cycles for {kb} KB"
        )
    handing = {way: t for way, t in here.items() if way != READING}
    if handing:
        order = sorted(handing, key=handing.get)
        parts.append(", ".join(f"{way} {handing[way]:.2f} us" for way in order))
    if READING in here:
        parts.append(f"reading alone takes {here[READING]:.2f} us of that")
    if {ONE_LOOK, TWO_LOOKS} <= here.keys():
        change = bench.compare(here[ONE_LOOK], here[TWO_LOOKS], noise)
        parts.append(f"two looks in flight against one: {change}")
    pairs = [way for way in handing if (way, 4) in us and (way, 8) in us]
    if pairs:
        ratio = {way: us[way, 8] / us[way, 4] for way in pairs}
        parts.append(f"8 KB over 4 KB: {cases.ratio_text(ratio)}")
    text = "; ".join(parts)
    return f"{text}. The old card's log hands over by the ends of kernels only."


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card and in every run."""
    us = {(r["way"], r["kb"]): r["us"] for r in plate.rows}
    found = []
    for faster, slower, text in (
        (TWO_LOOKS, COUNTER, "flags in the data beat a counter"),
        (TWO_LOOKS, BARRIER, "flags in the data beat the grid's barrier"),
        (TWO_LOOKS, EARLY_NODE, "flags in the data beat the end of a kernel"),
        (EARLY_NODE, NODE, "programmatic launch beats plain nodes"),
        (READING, TWO_LOOKS, "nothing beats reading alone"),
    ):
        sizes = [kb for kb in SIZES_KB if (faster, kb) in us and (slower, kb) in us]
        if sizes:
            found.append((text, all(us[faster, kb] < us[slower, kb] for kb in sizes)))
    return found


def draw(plate, fig) -> None:
    """Bars: microseconds of a hand-off by way and size; a line at reading alone."""
    ax = fig.subplots()
    ways = [way for way in WAYS if any(r["way"] == way for r in plate.rows)]
    sizes = [kb for kb in SIZES_KB if any(r["kb"] == kb for r in plate.rows)]
    shades = {8: "#0072B2", 4: "#56B4E9"}
    height = 0.8 / len(sizes)
    for r in plate.rows:
        y = ways.index(r["way"]) + (sizes.index(r["kb"]) - (len(sizes) - 1) / 2) * height
        ax.barh(y, r["us"], height * 0.92, color=shades[r["kb"]])
        text = f"{r['us']:.2f} us"
        if r["cycles"] is not None:
            text += f", {r['cycles']:,.0f} cycles"
        ax.annotate(text, (r["us"], y), (6, 0), textcoords="offset points", va="center",
                    fontsize=12)  # fmt: skip
    alone = [r["us"] for r in plate.rows if (r["way"], r["kb"]) == (READING, sizes[0])]
    if alone:
        ax.axvline(alone[0], color="#222222", linewidth=1.5, zorder=3)
    ax.set_yticks(range(len(ways)), ways)
    ax.set_ylim(len(ways) - 0.4, -0.6)
    ax.set_xlim(0, 1.3 * max(r["us"] for r in plate.rows))
    ax.set_xlabel("a hand-off between all CTAs [us]; line: reading alone")
    handles = [ax.barh(0, 0, color=shades[kb]) for kb in sizes]
    ax.legend(handles, [f"{kb} KB" for kb in sizes], loc="lower right", fontsize=12)
