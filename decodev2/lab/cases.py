"""The protocol of the one-column experiments: cold copies, a float64 reference, checked times.

A kernel is timed only after it agreed with the reference on fresh input, twice with the same bits,
and it is checked again on other input afterwards. Between the checks a CUDA graph walks over copies
of the weights that together are several times the L2: a decode step finds no weight in a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .. import ladder, native, panels, step, toggles
from ..errors import DecodeError
from ..ladder import RowMajor
from ..linear import PLAIN, cuda_product, shared_tiles
from ..load import ModelWeights
from ..nf4 import LEVELS, Packed
from ..panels import PanelLinear
from ..plan import GROUP
from ..state import DecodeState
from ..synth import random_matrix
from . import bench, card
from .plate import Measured

DEVICE = "cuda"
SHAPES = {  # the thirteen of the lab log: rows, columns
    "q_proj": (2048, 2048), "k_proj": (256, 2048), "v_proj": (256, 2048), "o_proj": (2048, 2048),
    "gate_proj": (11008, 2048), "up_proj": (11008, 2048), "down_proj": (2048, 11008),
    "lm_head_rep": (16384, 2048), "lm_head": (151936, 2048), "32b_q": (5120, 5120),
    "32b_k": (1024, 5120), "32b_gate": (27648, 5120), "32b_down": (5120, 27648),
}  # fmt: skip
STACKED = {"qkv_proj": (2560, 2048), "gate_up": (22016, 2048)}  # q, k, v; gate, up: row on row
ERROR_LIMIT = 1e-3  # relative to the size of the terms, for half levels or half x
EXACT_LIMIT = 1e-5  # the same for float32 throughout
STEP_LIMIT = 5e-2  # relative difference of logits by other kernels, after many layers
LAUNCHES = 48  # in a graph at least: what a replay itself costs is spread over them
BLOCK_WEIGHTS = 1 << 24  # of the reference at a time: 128 MB in float64

TIME_COLUMNS = [
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
MS_COLUMNS = [
    {"name": "ms", "unit": "ms"},
    {"name": "ms_best", "unit": "ms"},
    {"name": "ms_worst", "unit": "ms"},
    {"name": "runs", "unit": "runs"},
]
US_COLUMNS = [
    {"name": "us", "unit": "us"},
    {"name": "us_best", "unit": "us"},
    {"name": "us_worst", "unit": "us"},
    {"name": "runs", "unit": "runs"},
]
# What a product by the GEMV is made of, for DEPENDS.
GEMV_SOURCES = ("nf4_gemv.cu", "gemv.cuh", "device.cuh", "nf4.cuh", "ptx.cuh", "launch.h")
COMMON_PARAMS = {
    "cold_mb": (400, "megabytes of weights in rotation, several times the L2"),
    "runs": (9, "timed replays of each graph"),
    "seed": (0, "seed of weights and inputs"),
}


def chosen(given: Iterable[object], known: Iterable[str], what: str) -> list[str]:
    """The given names, or all known ones if none is given. Raises DecodeError for another name."""
    known, given = list(known), list(map(str, given))
    for name in given:
        if name not in known:
            raise DecodeError(f"{what} {name!r} is unknown; there are {', '.join(known)}")
    return given or known


def begin(experiment: str) -> dict:
    """Build the kernels and measure the read rate. Raises DecodeError without a CUDA device."""
    if not torch.cuda.is_available():
        raise DecodeError(f"{experiment} needs a CUDA device")
    _build()
    return card.measure_read_rate(1, DEVICE)


def end(read_rate: dict) -> dict:
    """The card of the run, its read rate being the better one of before and after."""
    after = card.measure_read_rate(1, DEVICE)
    return card.card(DEVICE, read_rate=card.faster_read_rate(read_rate, after))


def finish(
    read_rate: dict, columns: list[dict], rows: list[dict], verdict: Callable[[], str], notes
) -> Measured:
    """What a one-column experiment returns, once every row [rows, cols, us, ...] has its floor,
    rate and share; `verdict()` is asked after that."""
    found = end(read_rate)
    for row in rows:
        n_bytes = weight_bytes(row["rows"], row["cols"])
        add_rates(row, n_bytes, found["read_rate"]["gb_s"])
    return Measured(columns, rows, verdict(), {"kind": "own"}, notes, found)


@functools.cache
def _build() -> None:
    native.build_cuda()


# ---- weights and inputs ----


def random_weights(shape: tuple[int, int], seed: int, part: int = 0) -> Packed:
    """A seeded random NF4 matrix; `part` tells matrices of one shape apart."""
    return random_matrix(*shape, np.random.default_rng((seed, *shape, part)))


def inputs(seed: int) -> np.random.Generator:
    """The source of fresh inputs of one experiment."""
    return np.random.default_rng((seed, 1))


def vector(rng: np.random.Generator, cols: int) -> torch.Tensor:
    """float32 [1, cols] on the device, standard normal."""
    return torch.from_numpy(rng.standard_normal((1, cols), dtype=np.float32)).to(DEVICE)


def copies_for(n_bytes: int, cold_mb: int) -> int:
    """How many copies of `n_bytes` exceed `cold_mb`, at least two."""
    return max(2, -(-cold_mb * 10**6 // n_bytes))


def row_major(packed: Packed, count: int) -> list[RowMajor]:
    """`count` copies in the order of the file; all but the first have their rows rolled."""
    first = ladder.from_packed(packed, DEVICE)
    return [first] + [
        RowMajor(first.codes.roll(i, 0), first.scales.roll(i, 0), *packed.shape)
        for i in range(1, count)
    ]


def panel_copies(first: PanelLinear, count: int) -> list[PanelLinear]:
    """`count` copies in the layout of the step; all but the first have their tiles rolled."""
    return [first] + [replace(first, panels=first.panels.roll(i, 0)) for i in range(1, count)]


def panel_matrix(packed: Packed, count: int) -> list[PanelLinear]:
    """`count` copies of one matrix in the layout of the step."""
    return panel_copies(panels.from_packed(packed, DEVICE), count)


def production(
    x: torch.Tensor, w: PanelLinear, y: torch.Tensor, kind: int = PLAIN, **tensors
) -> None:
    """The product that the step uses at one column, whatever `toggles` say. x [1, cols]."""
    with toggles.using(linear="gemv"):
        cuda_product(x, w, y, y, kind, shared=shared(w.tiles), **tensors)  # needs no scratch


@functools.cache
def shared(tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    return shared_tiles(tiles, DEVICE)


# ---- the reference ----


def exact(w: RowMajor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """W x in float64 by the codec's definition, and per row the root of its squared terms' sum.

    x float64 [cols]. Rounding is measured against the second: a sum that nearly cancels may be off
    by more than its own size.
    """
    levels = torch.from_numpy(LEVELS.copy()).to(x.device).double()
    products, squares = [], []
    step = max(1, BLOCK_WEIGHTS // w.cols)
    for start in range(0, w.rows, step):
        codes = w.codes[start : start + step]
        scales = w.scales[start : start + step].double()
        nibbles = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1).long()
        weights = levels[nibbles].view(*scales.shape, GROUP) * scales[:, :, None]
        terms = weights.flatten(1)[:, : w.cols] * x
        products.append(terms.sum(1))
        squares.append(terms.square().sum(1))
    return torch.cat(products), torch.cat(squares).sqrt()


def exact_swiglu(
    gate: RowMajor, up: RowMajor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate x) * (up x) in float64, and per unit the size that rounding is measured against:
    each factor's, times the other factor (silu' is at most 1.1), and the result's own."""
    (g, g_size), (u, u_size) = exact(gate, x), exact(up, x)
    silu = g * torch.sigmoid(g)
    y = silu * u
    sizes = (1.1 * g_size * u).square() + (silu * u_size).square() + y.square()
    return y, sizes.sqrt()


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of float64 x [cols]."""
    return x * torch.rsqrt(x.square().mean() + eps) * weight.double().flatten()


def relative_error(y: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> float:
    """Length of y - expected over the length of the sizes; NaN if y holds one."""
    difference = y.flatten().double() - expected
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(sizes))


# ---- verify, time, verify ----

Run = Callable[[int, torch.Tensor, torch.Tensor], None]
Expected = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Work:
    """One op on cold weights: x float32 [1, cols] -> y float32 [1, outputs].

    `run(i, x, y)` takes the i-th of `copies` copies; `expected(x float64 [cols])` is exact for the
    first copy and gives the sizes that rounding is measured against.
    """

    name: str
    cols: int
    outputs: int
    copies: int
    run: Run
    expected: Expected
    limit: float = ERROR_LIMIT


@dataclass(frozen=True)
class Timed:
    """`row` has the measured ones of TIME_COLUMNS; `seconds` are its samples."""

    row: dict
    seconds: list[float]


def checked_times(work: Work, rng: np.random.Generator, runs: int) -> Timed:
    """Verify on fresh input, time, verify on fresh input. Raises DecodeError naming the work."""
    y = torch.empty(1, work.outputs, device=DEVICE)
    before = _check(work, vector(rng, work.cols), y)
    x = vector(rng, work.cols)
    launches = work.copies * -(-LAUNCHES // work.copies)
    seconds = bench.graph_times(lambda i: work.run(i % work.copies, x, y), launches, runs)
    after = _check(work, vector(rng, work.cols), y)
    return Timed(times_row(seconds) | {"error_before": before, "error_after": after}, seconds)


def series(
    ways: Sequence, work_of: Callable[[object], Work], rng: np.random.Generator, runs: int
) -> tuple[dict, float]:
    """({way: Timed}, noise band): every way checked and timed, the first one again at the end."""
    timed: dict = {}
    for way in [*ways, ways[0]]:
        made = checked_times(work_of(way), rng, runs)
        if way in timed:
            return timed, bench.noise_band(timed[way].seconds, made.seconds)
        timed[way] = made
    raise DecodeError("a series needs at least one way")


def _check(work: Work, x: torch.Tensor, y: torch.Tensor) -> float:
    y.fill_(torch.nan)
    work.run(0, x, y)
    first = y.clone()
    found = relative_error(first, *work.expected(x[0].double()))
    if not found < work.limit:
        raise DecodeError(f"{work.name} is off by {found:.2e}, needs less than {work.limit:.0e}")
    y.fill_(torch.nan)
    work.run(0, x, y)
    if not torch.equal(y, first):
        raise DecodeError(f"{work.name}: two runs on one input differ")
    return found


def times_row(seconds: list[float]) -> dict:
    """Median, best, worst [us] and count of samples in seconds."""
    s = bench.stats([t * 1e6 for t in seconds])
    return {"us": s.median, "us_best": s.best, "us_worst": s.worst, "runs": s.runs}


def ms_row(seconds: list[float]) -> dict:
    """The MS_COLUMNS of samples in seconds."""
    s = bench.stats([t * 1e3 for t in seconds])
    return {"ms": s.median, "ms_best": s.best, "ms_worst": s.worst, "runs": s.runs}


def step_times(
    live: DecodeState, take: Callable[[], object], position: int, runs: int
) -> list[float]:
    """Seconds of `runs` greedy steps at one position, after two to warm up. Going back to the
    position is not in the time."""
    seconds = []
    for index in range(runs + 2):
        live.position.fill_(position)
        live.token.fill_(1)
        taken = bench.event_times(take, 1, 0)
        seconds += taken if index >= 2 else []
    return seconds


def step_error(
    live: DecodeState, weights: ModelWeights, take: Callable[[], object], position: int, token: int
) -> float:
    """Relative difference of the logits of one step by `take` from those of an eager step by other
    kernels: tensor cores, two launches of attention, norms apart. Raises DecodeError past
    STEP_LIMIT."""

    def logits_of(run: Callable[[], object]) -> torch.Tensor:
        live.position.fill_(position)
        live.token.fill_(token)
        live.logits.fill_(torch.nan)
        run()
        return live.logits[0].double()

    found = logits_of(take)
    with toggles.using(linear="mma", attention="two_launch", norm="alone", pdl=False):
        expected = logits_of(lambda: step.forward_decode(live, weights))
    error = float((found - expected).norm() / expected.norm())
    if not error < STEP_LIMIT:
        raise DecodeError(
            f"the step at {position} is off by {error:.2e}, needs under {STEP_LIMIT:.0e}"
        )
    return error


def add_rates(row: dict, n_bytes: float, read_rate: float) -> None:
    """floor_us, gb_s and share [%] of a row whose `us` reads `n_bytes` of weights."""
    row["floor_us"] = n_bytes / read_rate * 1e-3
    row["gb_s"] = n_bytes / row["us"] * 1e-3
    row["share"] = 100 * row["gb_s"] / read_rate


def weight_bytes(rows: int, cols: int) -> float:
    """Bytes of rows * cols weights at 4.25 bits."""
    return rows * cols * 17 / 32


# ---- words of verdicts ----


def noise_note(noise: float, what: str) -> str:
    """A note on the noise band (relative), `what` having been timed twice."""
    return f"Noise band {100 * noise:.1f} %: the larger difference of {what} timed twice."


def held(ok: bool) -> str:
    return "As predicted" if ok else "Not as predicted"


def ratio_text(ratios: dict[str, float]) -> str:
    """ "1.20x (down_proj) to 3.40x (lm_head)", or one of them if there is one."""
    low, high = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    if low == high:
        return f"{ratios[low]:.2f}x ({low})"
    return f"{ratios[low]:.2f}x ({low}) to {ratios[high]:.2f}x ({high})"


def accurate(rows: list[dict], limit: float = ERROR_LIMIT) -> bool:
    """Do all checked rows of a plate keep to the limit?"""
    errors = [r[name] for r in rows for name in ("error_before", "error_after")]
    return all(e is None or e < limit for e in errors)


# ---- figures ----


def axes_grid(fig, rows: int, cols: int) -> list:
    """`rows` x `cols` axes, row by row; those of one row share their y axis, which has no ticks."""
    axes = fig.subplots(rows, cols, sharey="row", squeeze=False).ravel().tolist()
    for ax in axes:
        ax.tick_params(axis="y", length=0)
    return axes
