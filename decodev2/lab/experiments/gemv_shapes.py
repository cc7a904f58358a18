"""One-column products over the thirteen shapes of the lab log: ours and the peers, cold weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ... import native, panels, toggles
from ...errors import DecodeError
from ...linear import cuda_product
from ...nf4 import LEVELS, Packed
from ...synth import random_matrix
from .. import bench, card
from ..plate import Measured, Missing

TITLE = "One column: thirteen shapes, cold weights, against the read rate and the peers"
QUESTION = "How near does the GEMV come to the rate at which this card can read its weights?"
PREDICTION = (
    "A launch costs about 5 us plus its bytes at the read rate, so wide matrices reach more than "
    "two thirds of it and small ones are bound by the launch. 4-bit peers are bound by decoding: "
    "bitsandbytes near 1,000 GB/s, torch int4 near 1,750 GB/s on the widest."
)
PARAMS = {
    "shapes": ([], "names of shapes, separated by commas; all thirteen if left out"),
    "kernels": ([], "kernels to time, separated by commas; all if left out"),
    "cold_mb": (600, "megabytes of weights in rotation, several times the L2"),
    "runs": (9, "timed replays of each graph"),
    "seed": (0, "seed of weights and inputs"),
}
DEPENDS = ("nf4_gemv.cu", "nf4_gemm.cu", "nf4.cuh", "launch.h")
DEVICE = "cuda"
SHAPES = {
    "q_proj": (2048, 2048), "k_proj": (256, 2048), "v_proj": (256, 2048), "o_proj": (2048, 2048),
    "gate_proj": (11008, 2048), "up_proj": (11008, 2048), "down_proj": (2048, 11008),
    "lm_head_rep": (16384, 2048), "lm_head": (151936, 2048), "32b_q": (5120, 5120),
    "32b_k": (1024, 5120), "32b_gate": (27648, 5120), "32b_down": (5120, 27648),
}  # fmt: skip
ERROR_LIMIT = 1e-3  # relative to the size of the terms
COLUMNS = [
    {"name": "shape", "unit": ""},
    {"name": "rows", "unit": "1"},
    {"name": "cols", "unit": "1"},
    {"name": "kernel", "unit": ""},
    {"name": "us", "unit": "us"},
    {"name": "us_best", "unit": "us"},
    {"name": "us_worst", "unit": "us"},
    {"name": "runs", "unit": "runs"},
    {"name": "floor_us", "unit": "us"},
    {"name": "gb_s", "unit": "GB/s"},
    {"name": "share", "unit": "%"},
    {"name": "error_before", "unit": "1"},
    {"name": "error_after", "unit": "1"},
]


@dataclass(frozen=True)
class Case:
    """One matrix on the card in several cold copies, and what is needed to check a product."""

    packed: Packed
    copies: list[panels.PanelLinear]
    rng: np.random.Generator

    def fresh_x(self) -> torch.Tensor:
        cols = self.packed.shape[1]
        return torch.from_numpy(self.rng.standard_normal((1, cols)).astype(np.float32)).cuda()


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape and kernel; a kernel of ours is timed between two checks on fresh input."""
    if not torch.cuda.is_available():
        raise DecodeError("gemv_shapes needs a CUDA device")
    names = _chosen(params["shapes"], SHAPES, "shape")
    kernels = _chosen(params["kernels"], _KERNELS, "kernel")
    native.build_cuda()
    read_rate = card.measure_read_rate(1, "cuda")
    rows = []
    for index, name in enumerate(names):
        progress(index, len(names), name)
        m, k = SHAPES[name]
        rng = np.random.default_rng((params["seed"], m, k))
        packed = random_matrix(m, k, rng)
        first = panels.from_packed(packed, "cuda")
        count = max(2, min(64, -(-params["cold_mb"] * 10**6 // first.nbytes)))
        copies = [first] + [
            panels.PanelLinear(first.panels.roll(i, 0).contiguous(), m, k) for i in range(1, count)
        ]
        case = Case(packed, copies, rng)
        for kernel in kernels:
            made = _KERNELS[kernel](case, max(count, 24), params["runs"])
            rows.append({"shape": name, "rows": m, "cols": k, "kernel": kernel} | made)
        del case, copies, first
        torch.cuda.empty_cache()
    progress(len(names), len(names), "done")
    read_rate = card.faster_read_rate(read_rate, card.measure_read_rate(1, "cuda"))
    for row in rows:
        _add_rates(row, read_rate["gb_s"])
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows),
        card=card.card("cuda", read_rate=read_rate),
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
    ax.annotate("read rate of the card", (ceiling, -0.9), (-6, 0), textcoords="offset points",
                ha="right", va="center", fontsize=11.5)  # fmt: skip
    for row in plate.rows:
        if row["kernel"] == kernels[0] and row["us"] is not None:
            ax.annotate(
                f"{row['us']:.1f} us", (ceiling * 1.12, shapes.index(row["shape"])),
                va="center", fontsize=11.5, annotation_clip=False,
            )  # fmt: skip
    sizes = {row["shape"]: f"{row['rows']:,} x {row['cols']:,}" for row in plate.rows}
    ax.set_yticks(range(len(shapes)), [f"{name}  {sizes[name]}" for name in shapes])
    ax.set_ylim(len(shapes) - 0.4, -1.4)
    ax.set_xscale("log")
    ax.set_xticks(
        [50, 100, 200, 500, 1000, 2000, 4000],
        ["50", "100", "200", "500", "1,000", "2,000", "4,000"],
    )
    ax.set_xlim(35, ceiling * 2)
    ax.minorticks_off()
    ax.set_xlabel(f"bytes of NF4 weights over time [GB/s]; at the right, time of {kernels[0]}")
    ax.legend(loc="lower left", frameon=True, fontsize=11.5)


def _chosen(given: list[str], known: dict, what: str) -> list[str]:
    for name in given:
        if name not in known:
            raise DecodeError(f"{what} {name!r} is unknown; there are {', '.join(known)}")
    return given or list(known)


# ---- ours ----


def _ours(case: Case, launches: int, runs: int, **switches) -> dict:
    m, _ = case.packed.shape
    y = torch.empty(1, m, device="cuda")
    tiles, groups = case.copies[0].tiles, case.packed.scales.shape[1]
    need = native.cuda("nf4_gemm").workspace_bytes(tiles, groups, 1)
    scratch = torch.empty(need, dtype=torch.uint8, device="cuda")

    def check() -> float:
        x = case.fresh_x()
        y.fill_(torch.nan)
        cuda_product(x, case.copies[0], y, scratch)
        return _error(case.packed, x, y)

    with toggles.using(**switches):
        before = check()
        x = case.fresh_x()
        copies = case.copies
        times = bench.graph_times(
            lambda i: cuda_product(x, copies[i % len(copies)], y, scratch), launches, runs
        )
        after = check()
    if not max(before, after) < ERROR_LIMIT:
        raise DecodeError(f"product of {case.packed.shape} is off by {max(before, after):.2e}")
    return _times(times) | {"error_before": before, "error_after": after}


def _error(packed: Packed, x: torch.Tensor, y: torch.Tensor) -> float:
    """|y - W x| over the size of the terms, in float64 by the codec's definition."""
    levels = torch.from_numpy(LEVELS.copy()).cuda().double()
    x64 = x[0].double()
    difference = size = 0.0
    for start in range(0, packed.shape[0], 8192):
        codes = torch.from_numpy(packed.codes[start : start + 8192]).cuda()
        scales = torch.from_numpy(packed.scales[start : start + 8192]).cuda().double()
        nibbles = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1).long()
        w = levels[nibbles].view(*scales.shape, 64) * scales[:, :, None]
        terms = w.flatten(1)[:, : len(x64)] * x64
        difference += float((terms.sum(1) - y[0, start : start + 8192].double()).square().sum())
        size += float(terms.square().sum())
    return (difference / size) ** 0.5


# ---- peers: timed, not checked ----


def _bitsandbytes(case: Case, launches: int, runs: int) -> dict:
    if importlib.util.find_spec("bitsandbytes") is None:
        return _absent("bitsandbytes is not installed")
    import bitsandbytes.functional as bnb

    m, k = case.packed.shape
    weights = []
    for _ in range(len(case.copies)):
        w = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * 0.02
        weights.append(bnb.quantize_4bit(w, blocksize=64, quant_type="nf4"))
        del w
    x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)

    def run(i: int) -> None:
        codes, state = weights[i % len(weights)]
        bnb.gemv_4bit(x, codes.t(), state=state)

    return _peer(run, launches, runs)


def _torch_int4(case: Case, launches: int, runs: int) -> dict:
    m, k = case.packed.shape
    weights = []
    for _ in range(len(case.copies)):
        codes = torch.randint(0, 256, (m, k // 2), dtype=torch.uint8, device="cuda")
        packed = torch._convert_weight_to_int4pack(codes, 8)
        scales = torch.rand(k // 64, m, 2, device="cuda", dtype=torch.bfloat16) * 0.01
        weights.append((packed, scales))
    x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)

    def run(i: int) -> None:
        packed, scales = weights[i % len(weights)]
        torch._weight_int4pack_mm(x, packed, 64, scales)

    return _peer(run, launches, runs)


def _peer(run, launches: int, runs: int) -> dict:
    reason = "a peer's own weights; timed only"
    made = _times(bench.graph_times(run, launches, runs))
    return made | {"error_before": Missing(reason), "error_after": Missing(reason)}


def _absent(reason: str) -> dict:
    names = ("us", "us_best", "us_worst", "error_before", "error_after")
    return {name: Missing(reason) for name in names} | {"runs": 0}


_KERNELS = {
    "gemv": lambda c, n, r: _ours(c, n, r, linear="gemv", pdl=True),
    "gemv, plain launch": lambda c, n, r: _ours(c, n, r, linear="gemv", pdl=False),
    "gemv, direct loads": lambda c, n, r: _ours(c, n, r, linear="gemv", gemv="direct", pdl=True),
    "mma": lambda c, n, r: _ours(c, n, r, linear="mma", pdl=True),
    "bitsandbytes NF4": _bitsandbytes,
    "torch int4": _torch_int4,
}


# ---- rows ----


def _times(seconds: list[float]) -> dict:
    s = bench.stats([t * 1e6 for t in seconds])
    return {"us": s.median, "us_best": s.best, "us_worst": s.worst, "runs": s.runs}


def _add_rates(row: dict, read_rate: float) -> None:
    """Bytes are NF4's for every kernel: rows * cols * 17 / 32."""
    n_bytes = row["rows"] * row["cols"] * 17 / 32
    row["floor_us"] = n_bytes / read_rate * 1e-3
    if isinstance(row["us"], Missing):
        row["gb_s"] = row["share"] = row["us"]
        return
    row["gb_s"] = n_bytes / row["us"] * 1e-3
    row["share"] = 100 * row["gb_s"] / read_rate


def _verdict(rows: list[dict]) -> str:
    times = {(r["shape"], r["kernel"]): r["us"] for r in rows if not isinstance(r["us"], Missing)}
    lines = []
    for peer, only in (("bitsandbytes NF4", None), ("torch int4", 10_000)):
        ratios = {
            r["shape"]: times[r["shape"], peer] / times[r["shape"], "gemv"]
            for r in rows
            if r["kernel"] == peer
            and (r["shape"], peer) in times
            and (r["shape"], "gemv") in times
            and (only is None or max(r["rows"], r["cols"]) > only)
        }
        if ratios:
            low, high = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
            lines.append(
                f"{ratios[low]:.2f}x ({low}) to {ratios[high]:.2f}x ({high}) as fast as {peer}"
                + (f" where a side is over {only:,}" if only else "")
            )
    best = max(
        (r for r in rows if r["kernel"] == "gemv" and not isinstance(r["gb_s"], Missing)),
        key=lambda r: r["gb_s"],
        default=None,
    )
    if best:
        lines.append(f"best {best['gb_s']:.0f} GB/s, {best['share']:.0f} % of the read rate")
    return f"The GEMV is {'; '.join(lines)}." if lines else "Nothing was timed."
