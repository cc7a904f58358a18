"""The floors of the card: reading at every size of matrix, copying, and one node of a graph."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from ... import native
from ...errors import DecodeError
from .. import bench, cases
from ..figure import number
from ..plate import Measured, Missing

TITLE = "The floors: reading by size, and a node that does nothing"
QUESTION = (
    "How fast can this card read a matrix of a given size, and what is one kernel's own cost?"
)
PREDICTION = (
    "One kernel reads in about 3 us plus its bytes at the full rate: on a card of 4,600 GB/s 3 + "
    "357 = 360 us for 1,640 MB (99 % of the rate), 3 + 8.9 = 11.9 us for 41 MB (75 %), 3 + 0.4 = "
    "3.4 us for 2 MB (13 %). A node of a graph that does nothing costs about 1 us, with "
    "programmatic launch about 0.7 us: 182 nodes of a step are then 0.18 and 0.13 ms."
)
SIZES_MB = (1640, 165, 41, 24, 12, 6, 4, 2)
NODES = {  # name: (a CTA per multiprocessor, programmatic launch)
    "node, 1 CTA": (False, False),
    "node, 1 CTA, programmatic": (False, True),
    "node, all multiprocessors": (True, False),
    "node, all multiprocessors, programmatic": (True, True),
}
COPIES = 4  # between two events
WHAT = (*(f"read {mb} MB" for mb in SIZES_MB), "copy 1640 MB", *NODES)
PARAMS = {
    "what": ([], "floors to measure, separated by commas; all if left out"),
    "runs": (9, "timed replays of each graph"),
    "seed": (0, "seed of the contents"),
}
TOGGLES = {"what": ("what", WHAT)}
DEPENDS = ("read_rate.cu", "step.cu", "choose.cuh", "nf4.cuh", "device.cuh", "ptx.cuh", "launch.h")
DEVICE = "cuda"
CHAIN = 256  # nodes of a chain; each needs the one before
HIDDEN = 64  # of a node's norm: one warp, one load
MOST_LAUNCHES = 128
ERROR_LIMIT = 1e-5
COLUMNS = [
    {"name": "what", "unit": ""},
    {"name": "kind", "unit": ""},
    {"name": "mb", "unit": "MB"},
    *cases.US_COLUMNS,
    {"name": "floor_us", "unit": "us"},
    {"name": "gb_s", "unit": "GB/s"},
    {"name": "share", "unit": "%"},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per floor. What a read saw and what a node computed is checked before and after."""
    wanted = cases.chosen([str(w) for w in params["what"]], WHAT, "floor")
    read_rate = cases.begin("limits")
    torch.manual_seed(params["seed"])
    pool = None
    if any(w not in NODES for w in wanted):  # as large as the largest read: many times any L2
        pool = torch.empty(max(SIZES_MB) * 250_000, dtype=torch.int32, device=DEVICE).random_()
    rows, noise = [], 0.0
    for index, what in enumerate(wanted):
        progress(index, len(wanted), what)
        if what in NODES:
            row, times = _node(*NODES[what], params["runs"])
            again = _node(*NODES[what], params["runs"])[1]
        elif what.startswith("copy"):
            row, times = _copy(pool, params["runs"])
            again = _copy(pool, params["runs"])[1]
        else:
            mb = int(what.split()[1])
            row, times = _read(pool, mb, params["runs"])
            again = _read(pool, mb, params["runs"])[1]
        noise = max(noise, bench.noise_band(times, again))
        rows.append({"what": what} | row | cases.times_row(times))
    del pool
    torch.cuda.empty_cache()
    progress(len(wanted), len(wanted), "done")
    made = cases.end(read_rate)
    for row in rows:
        if row["kind"] == "node":
            nothing = Missing("a node that does nothing moves no bytes")
            row |= {"floor_us": nothing, "gb_s": nothing, "share": nothing}
        else:
            cases.add_rates(row, row["mb"] * 1e6, made["read_rate"]["gb_s"])
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=made,
        notes=[
            cases.noise_note(noise, "every floor"),
            "Reads walk over 1,640 MB, so that no buffer is in a cache; copies count bytes read "
            "and bytes written.",
            f"A node is the RMSNorm of rows of {HIDDEN}, in place, {CHAIN} in one graph.",
        ],
        figure={"kind": "own"},
    )


# ---- reading and copying ----


def _read(pool: torch.Tensor, mb: int, runs: int) -> tuple[dict, list[float]]:
    """One kernel per buffer of `mb` megabytes, back to back over the pool."""
    words = mb * 250_000
    parts = [pool[i * words : (i + 1) * words] for i in range(len(pool) // words)][:MOST_LAUNCHES]
    checksum = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    read_all = native.cuda("read_rate").read_all

    def check() -> None:
        part = parts[-1]
        part[: min(words, 1 << 20)].random_()
        checksum.zero_()
        read_all(part, checksum)
        found, expected = int(checksum), exclusive_or(part)
        if found != expected:
            raise DecodeError(f"read {mb} MB: checksum is {found}, needs {expected}")

    check()
    times = bench.graph_times(
        lambda i: read_all(parts[i % len(parts)], checksum), max(4, len(parts)), runs
    )
    check()
    return {"kind": "read", "mb": mb}, times


def exclusive_or(words: torch.Tensor) -> int:
    """Exclusive or of all int32 elements, by folding halves."""
    total = 0
    while len(words) > 1:
        half = len(words) // 2
        if len(words) % 2:
            total ^= int(words[-1])
        words = words[:half] ^ words[half : 2 * half]
    return total ^ int(words[0])


def _copy(pool: torch.Tensor, runs: int) -> tuple[dict, list[float]]:
    """torch's copy of one half of the pool to the other."""
    first, second = pool.chunk(2)

    def check() -> None:
        second[: 1 << 20].random_()
        first.copy_(second)
        if not torch.equal(first, second):
            raise DecodeError("copy 1640 MB: the halves differ afterwards")

    check()
    # not captured: in a graph the copy is a memory node, which moved two thirds as much
    times = bench.event_times(lambda: [first.copy_(second) for _ in range(COPIES)], runs)
    times = [t / COPIES for t in times]
    check()
    return {"kind": "copy", "mb": max(SIZES_MB)}, times


# ---- a node ----


def _node(everywhere: bool, pdl: bool, runs: int) -> tuple[dict, list[float]]:
    """A chain of norms in place: node i + 1 reads what node i wrote."""
    count = torch.cuda.get_device_properties(0).multi_processor_count if everywhere else 1
    x = torch.empty(count, HIDDEN, device=DEVICE)
    weight = torch.ones(HIDDEN, device=DEVICE)
    rms = native.cuda("step").rms
    eps = 1e-6

    def check() -> None:
        x.normal_()
        expected = x.cpu().numpy().astype(np.float64)
        for _ in range(8):
            rms(x, weight, eps, x, pdl)
            expected /= np.sqrt((expected**2).mean(1, keepdims=True) + eps)
        error = float(np.abs(x.cpu().numpy() - expected).max())
        if not error < ERROR_LIMIT:
            raise DecodeError(f"a chain of norms is off by {error:.1e}, needs {ERROR_LIMIT:.0e}")

    check()
    times = bench.graph_times(lambda i: rms(x, weight, eps, x, pdl), CHAIN, runs)
    check()
    return {"kind": "node", "mb": Missing("a node that does nothing moves no bytes")}, times


# ---- what it says ----


def fit(rows: list[dict]) -> tuple[float, float] | None:
    """(fixed cost [us], rate [GB/s]) of us = fixed + bytes / rate over the reads, each size of the
    same weight; None with fewer than three sizes."""
    reads = [r for r in rows if r["kind"] == "read"]
    if len(reads) < 3:
        return None
    mb, us = (np.array([float(r[name]) for r in reads]) for name in ("mb", "us"))
    terms = np.stack([np.ones_like(mb), mb], axis=1) / us[:, None]  # relative errors count
    (fixed, per_mb), *_ = np.linalg.lstsq(terms, np.ones_like(us), rcond=None)
    return float(fixed), float(1e3 / per_mb)


def _verdict(rows: list[dict], noise: float) -> str:
    by_name = {r["what"]: r for r in rows}
    words = []
    reads = sorted((r for r in rows if r["kind"] == "read"), key=lambda r: r["mb"])
    if reads:
        small, large = reads[0], reads[-1]
        words.append(
            f"{large['mb']:,} MB are read at {large['gb_s']:,.0f} GB/s"
            + (f", {small['mb']} MB at {small['gb_s']:,.0f}" if small is not large else "")
        )
    found = fit(rows)
    if found:
        fixed, rate = found
        near = abs(fixed - 3) <= 1
        words.append(
            f"all sizes fit {fixed:.1f} us plus bytes at {rate:,.0f} GB/s "
            f"({'as' if near else 'not as'} predicted: 2 to 4 us)"
        )
    for place in ("1 CTA", "all multiprocessors"):
        plain = by_name.get(f"node, {place}")
        early = by_name.get(f"node, {place}, programmatic")
        if plain and early:
            change = bench.compare(plain["us"], early["us"], noise)
            words.append(
                f"a node on {place} costs {plain['us']:.2f} us, with programmatic launch "
                f"{early['us']:.2f} us ({change})"
            )
    if not words:
        words = [f"{r['what']}: {r['us']:.2f} us" for r in rows]
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}. The old card's log has no such floor to compare with."


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card and in every run."""
    us = {r["what"]: r["us"] for r in plate.rows}
    rate = {r["what"]: r["gb_s"] for r in plate.rows}
    found = []
    sizes = [f"read {mb} MB" for mb in (1640, 41, 2)]
    if all(name in rate for name in sizes):
        large, middle, small = (rate[name] for name in sizes)
        found.append(("a larger read is faster per byte: 1640, 41, 2 MB", large > middle > small))
    for place in ("1 CTA", "all multiprocessors"):
        names = f"node, {place}", f"node, {place}, programmatic"
        if all(name in us for name in names):
            found.append(
                (
                    f"programmatic launch makes a node on {place} cheaper",
                    us[names[1]] < us[names[0]],
                )
            )
    if "copy 1640 MB" in rate and "read 1640 MB" in rate:
        found.append(
            ("copying is not faster than reading", rate["copy 1640 MB"] <= rate["read 1640 MB"])
        )
    return found


def draw(plate, fig) -> None:
    """Left: rate over size with the fitted line. Right: bars of the nodes."""
    reads = sorted((r for r in plate.rows if r["kind"] == "read"), key=lambda r: r["mb"])
    nodes = [r for r in plate.rows if r["kind"] == "node"]
    if reads and nodes:
        left, right = fig.subplots(1, 2, width_ratios=(3, 2))
        _draw_reads(left, plate, reads)
        _draw_nodes(right, nodes)
    elif nodes:
        _draw_nodes(fig.subplots(), nodes)
    else:
        _draw_reads(fig.subplots(), plate, reads or plate.rows)


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten that lie between `low` and `high`."""
    first = math.floor(math.log10(low))
    all_ticks = (m * 10.0**e for e in range(first, first + 12) for m in (1, 2, 5))
    return [t for t in all_ticks if low <= t <= high]


def _draw_reads(ax, plate, reads: list[dict]) -> None:
    ceiling = plate.card["read_rate"]["gb_s"]
    sizes = np.array([r["mb"] for r in reads], float)
    found = fit(plate.rows)
    if found:
        grid = np.geomspace(sizes.min() * 0.8, sizes.max() * 1.25, 100)
        curve = grid / (found[0] + grid * 1e3 / found[1]) * 1e3
        ax.plot(grid, curve, color="#888888", linewidth=1.5, linestyle="--", zorder=1)
    ax.plot(sizes, [r["gb_s"] for r in reads], "o", color="#0072B2", markersize=9)
    for r in reads:
        place = {"xytext": (9, -5), "ha": "left", "va": "top"}  # the curve rises to the right
        if r is reads[-1]:
            place = {"xytext": (0, 13), "ha": "center", "va": "bottom"}
        ax.annotate(
            f"{number(r['us'])} us", (r["mb"], r["gb_s"]), textcoords="offset points",
            fontsize=11.5, **place,
        )  # fmt: skip
    ax.axhline(ceiling, color="#222222", linewidth=1.5)
    ax.annotate(
        f"read rate {ceiling:,.0f} GB/s", (0, ceiling), (4, 5), xycoords=("axes fraction", "data"),
        textcoords="offset points", fontsize=11.5,
    )  # fmt: skip
    for r in plate.rows:
        if r["kind"] == "copy":
            ax.plot(r["mb"], r["gb_s"], "D", color="#E69F00", markersize=9)
            ax.annotate(
                f"copy {r['gb_s']:,.0f}", (r["mb"], r["gb_s"]), (0, -11),
                textcoords="offset points", ha="center", va="top", fontsize=11.5,
            )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    low = min(r["gb_s"] for r in reads) / 1.5
    ticks = [m * 10.0**e for e in range(7) for m in (1, 2, 3, 4, 6)]
    ticks = [t for t in ticks if low <= t <= 0.95 * ceiling]
    ax.set_yticks(ticks, [f"{t:,g}" for t in ticks])
    ticks = [t for t in SIZES_MB if t != 6]
    ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlim(1.5, 4000)
    ax.set_ylim(low, ceiling * 1.5)
    ax.grid(True, axis="both")
    ax.set_xlabel(
        f"bytes of one read [MB], its time beside it; dashed: {found[0]:.1f} us + bytes at "
        f"{found[1]:,.0f} GB/s" if found else "bytes of one read [MB], its time beside it",
        fontsize=11.5,
    )  # fmt: skip
    ax.set_ylabel("GB/s", fontsize=12)


def _draw_nodes(ax, nodes: list[dict]) -> None:
    longest = max(r["us"] for r in nodes)
    for y, r in enumerate(nodes):
        early = "programmatic" in r["what"]
        ax.barh(y, r["us"], 0.62, color="#009E73" if early else "#0072B2")
        ax.annotate(
            f"{r['us']:.2f}", (r["us"], y), (5, 0), textcoords="offset points", va="center",
            fontsize=11.5,
        )  # fmt: skip
    names = [
        r["what"].removeprefix("node, ").replace(", ", ",\n").replace("all multi", "all\nmulti")
        for r in nodes
    ]
    ax.set_yticks(range(len(nodes)), names, fontsize=11.5)
    ax.set_ylim(len(nodes) - 0.4, -0.6)
    ax.set_xlim(0, 1.25 * longest)
    ax.set_xlabel("one node of a graph that does nothing [us]", fontsize=11.5)
