"""One-column products over the thirteen shapes of the lab log: ours and the peers, cold weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ... import native, toggles
from ...linear import cuda_product
from .. import bench, cases, peer_products
from ..cases import SHAPES
from ..plate import Measured, Missing

TITLE = "One column: thirteen shapes against the read rate and the peers"
QUESTION = "How near does the GEMV come to the rate at which this card can read its weights?"
PREDICTION = (
    "A launch costs about 5 us plus its bytes at the read rate, so wide matrices reach more than "
    "two thirds of it and small ones are bound by the launch. 4-bit peers are bound by decoding: "
    "bitsandbytes near 1,000 GB/s, torch int4 near 1,750 GB/s on the widest."
)
PARAMS = {
    "shapes": ([], "names of shapes, separated by commas; all thirteen if left out"),
    "kernels": ([], "kernels to time, separated by commas; all if left out"),
    **cases.COMMON_PARAMS,
}
DEPENDS = (
    "nf4_gemv.cu", "gemv.cuh", "nf4_gemm.cu", "nf4_gemm.cuh", "columns.cuh", "nf4.cuh", "ptx.cuh",
    "device.cuh", "launch.h",
)  # fmt: skip
DEVICE = "cuda"
OURS = "gemv"
OLD_GAIN = "1.8x (v_proj) to 8.6x (32b_down)"  # of the lab log's isolated table
COLUMNS = [
    {"name": "shape", "unit": ""},
    {"name": "rows", "unit": "1"},
    {"name": "cols", "unit": "1"},
    {"name": "kernel", "unit": ""},
    *cases.TIME_COLUMNS,
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape and kernel, timed between two checks on fresh input."""
    names = cases.chosen(params["shapes"], SHAPES, "shape")
    kernels = cases.chosen(params["kernels"], KERNELS, "kernel")
    read_rate = cases.begin("gemv_shapes")
    rng = cases.inputs(params["seed"])
    rows, noise = [], 0.0
    for index, name in enumerate(names):
        progress(index, len(names), name)
        m, k = SHAPES[name]
        case = Case(name, cases.random_weights((m, k), params["seed"]), params, rng)
        samples = {}
        for kernel in kernels:
            made, samples[kernel] = KERNELS[kernel](case)
            rows.append({"shape": name, "rows": m, "cols": k, "kernel": kernel} | made)
        if first := samples.get(OURS):
            _, again = KERNELS[OURS](case)
            noise = max(noise, bench.noise_band(first, again))
        del case
        torch.cuda.empty_cache()
    progress(len(names), len(names), "done")
    card = cases.end(read_rate)
    for row in rows:
        _add_rates(row, card["read_rate"]["gb_s"])
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=card,
        notes=[cases.noise_note(noise, f"{OURS} on each shape")] if OURS in kernels else [],
        figure={"kind": "own"},
    )


def draw(plate, fig) -> None:
    """Dots: one line per shape, one colour per kernel, GB/s on a log axis; times of the first."""
    ax = fig.subplots()
    shapes = list(dict.fromkeys(row["shape"] for row in plate.rows))
    kernels = list(dict.fromkeys(row["kernel"] for row in plate.rows))
    markers = "osD^vP"
    for index, kernel in enumerate(kernels):
        rows = [r for r in plate.rows if r["kernel"] == kernel and r["gb_s"] is not None]
        ax.plot(
            [r["gb_s"] for r in rows], [shapes.index(r["shape"]) for r in rows],
            markers[index % len(markers)], markersize=9, label=kernel, zorder=3 - 0.1 * index,
        )  # fmt: skip
    ceiling = plate.card["read_rate"]["gb_s"]
    ax.axvline(ceiling, color="#222222", linewidth=1.5)
    ax.annotate("read rate of the card", (ceiling, -0.85), (-6, 0), textcoords="offset points",
                ha="right", va="center", fontsize=11.5)  # fmt: skip
    for row in plate.rows:
        if row["kernel"] == kernels[0] and row["us"] is not None:
            ax.annotate(
                f"{row['us']:.1f} us", (ceiling * 1.12, shapes.index(row["shape"])),
                va="center", fontsize=11.5, annotation_clip=False,
            )  # fmt: skip
    sizes = {row["shape"]: f"{row['rows']:,} x {row['cols']:,}" for row in plate.rows}
    ax.set_yticks(range(len(shapes)), [f"{name}  {sizes[name]}" for name in shapes])
    ax.set_ylim(len(shapes) - 0.4, -3)
    ax.set_xscale("log")
    ticks = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 4000)
    low = min([35, *(0.85 * r["gb_s"] for r in plate.rows if r["gb_s"] is not None)])
    ticks = [t for t in ticks if low <= t < ceiling]
    ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel(f"bytes of NF4 weights over time [GB/s]; at the right, time of {kernels[0]}")
    ax.legend(loc="upper left", ncols=3, frameon=False, fontsize=11.5)


# ---- ours ----


class Case:
    """One matrix in cold copies, for kernels of ours and, as a shape and a count, for peers."""

    def __init__(self, name: str, packed, params: dict, rng: np.random.Generator):
        self.name, self.rng, self.runs = name, rng, params["runs"]
        self.rows, self.cols = packed.shape
        self.count = cases.copies_for(packed.nbytes, params["cold_mb"])
        self.copies = cases.panel_matrix(packed, self.count)
        self.exact = cases.row_major(packed, 1)[0]

    @property
    def launches(self) -> int:
        return self.count * -(-cases.LAUNCHES // self.count)


def _ours(case: Case, **switches) -> tuple[dict, list[float]]:
    w = case.copies
    with toggles.using(**switches):
        need = native.cuda("nf4_gemm").workspace_bytes(w[0].tiles, -(-case.cols // 64), 1)
        scratch = torch.empty(need, dtype=torch.uint8, device=cases.DEVICE)
        shared = cases.shared(w[0].tiles)
        work = cases.Work(
            name=f"{case.name}, {switches}",
            cols=case.cols,
            outputs=case.rows,
            copies=case.count,
            run=lambda i, x, y: cuda_product(x, w[i], y, scratch, shared=shared),
            expected=lambda x: cases.exact(case.exact, x),
        )
        timed = cases.checked_times(work, case.rng, case.runs)
    return timed.row, timed.seconds


# ---- peers: on weights of their own ----


def _peer(case: Case, library: str) -> tuple[dict, list[float]]:
    if reason := peer_products.why_not(library, [(case.rows, case.cols)]):
        return _absent(reason), []
    make = peer_products.LIBRARIES[library]
    made = [make(case.rows, case.cols, seed) for seed in range(case.count)]
    before = peer_products.check(made[0], peer_products.column(case.cols))
    x = peer_products.column(case.cols)
    seconds = bench.graph_times(lambda i: made[i % case.count].run(x), case.launches, case.runs)
    after = peer_products.check(made[0], peer_products.column(case.cols))
    return cases.times_row(seconds) | {"error_before": before, "error_after": after}, seconds


def _absent(reason: str) -> dict:
    names = ("us", "us_best", "us_worst", "error_before", "error_after")
    return {name: Missing(reason) for name in names} | {"runs": 0}


KERNELS = {
    OURS: lambda c: _ours(c, linear="gemv", pdl=True),
    "gemv, plain launch": lambda c: _ours(c, linear="gemv", pdl=False),
    "gemv, direct loads": lambda c: _ours(c, linear="gemv", gemv="direct", pdl=True),
    "mma": lambda c: _ours(c, linear="mma", pdl=True),
    "bitsandbytes NF4": lambda c: _peer(c, "bitsandbytes NF4"),
    "torch int4": lambda c: _peer(c, "torch int4"),
}
TOGGLES = {"shape": ("shapes", tuple(SHAPES)), "kernel": ("kernels", tuple(KERNELS))}


# ---- rows ----


def _add_rates(row: dict, read_rate: float) -> None:
    """Bytes are NF4's for every kernel."""
    n_bytes = cases.weight_bytes(row["rows"], row["cols"])
    if isinstance(row["us"], Missing):
        row["floor_us"] = n_bytes / read_rate * 1e-3
        row["gb_s"] = row["share"] = row["us"]
    else:
        cases.add_rates(row, n_bytes, read_rate)


def _times(rows: list[dict]) -> dict[tuple[str, str], float]:
    return {(r["shape"], r["kernel"]): r["us"] for r in rows if isinstance(r["us"], int | float)}


def _ratios(rows: list[dict], peer: str, only_over: int = 0) -> dict[str, float]:
    """Peer's time over ours by shape, where both were timed and a side is over `only_over`."""
    times = _times(rows)
    return {
        r["shape"]: times[r["shape"], peer] / times[r["shape"], OURS]
        for r in rows
        if r["kernel"] == peer
        and (r["shape"], peer) in times
        and (r["shape"], OURS) in times
        and max(r["rows"], r["cols"]) > only_over
    }


WIDE = 10_000


def _verdict(rows: list[dict], noise: float) -> str:
    lines = []
    for peer, over in (("bitsandbytes NF4", 0), ("torch int4", WIDE), ("mma", 0)):
        if ratios := _ratios(rows, peer, over):
            where = f" where a side is over {over:,}" if over else ""
            lines.append(f"{cases.ratio_text(ratios)} as fast as {peer}{where}")
    ours = [r for r in rows if r["kernel"] == OURS]
    if not ours:
        return f"{OURS} was not timed; {len(rows)} rows of other kernels."
    best = max(ours, key=lambda r: r["gb_s"])
    lines.append(f"best {best['gb_s']:.0f} GB/s, {best['share']:.0f} % of the read rate")
    reached = [r for r in ours if r["rows"] > WIDE and r["rows"] * r["cols"] > 10**8]
    words = f"{cases.held(all(r['share'] > 200 / 3 for r in reached))}: the" if reached else "The"
    old = ""
    if ratios := _ratios(rows, "mma"):
        same = min(ratios.values()) > 1 + noise
        old = f" Old card, {OLD_GAIN} as fast as mma: {'faster' if same else 'not faster'} here."
    return f"{words} GEMV is {'; '.join(lines)}.{old} Noise {100 * noise:.1f} %."


def claims(plate) -> list[tuple[str, bool]]:
    """What must not change between runs."""
    rows = plate.rows
    ours = [r for r in rows if r["kernel"] == OURS]
    peers = [r for r in rows if r["kernel"] in peer_products.LIBRARIES]  # they round to bfloat16
    agree = cases.accurate([r for r in rows if r not in peers])
    agree &= cases.accurate(peers, peer_products.ERROR_LIMIT)
    found = [("every checked product agrees with float64", agree)]
    for peer, over in (("mma", 0), ("bitsandbytes NF4", 0), ("torch int4", WIDE)):
        if ratios := _ratios(rows, peer, over):
            where = "on every shape" if not over else f"where a side is over {over:,}"
            found.append((f"the GEMV is faster than {peer} {where}", min(ratios.values()) > 1))
    if {"lm_head", "k_proj"} <= {r["shape"] for r in ours}:
        share = {r["shape"]: r["share"] for r in ours}
        found.append(("lm_head reaches more than half of the read rate", share["lm_head"] > 50))
        found.append(("k_proj is bound by its launch: under a tenth", share["k_proj"] < 10))
    return found
