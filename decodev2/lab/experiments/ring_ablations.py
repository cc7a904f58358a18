"""The ring GEMV against itself with parts of its loop left out, and with rings of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ... import native, toggles
from ...errors import DecodeError
from ...linear import GEMV_VARIANTS, cuda_product
from ...nf4 import LEVELS
from ...panels import BLOCK_BYTES, BLOCK_CODES, PANEL_BLOCKS, TILE_ROWS, PanelLinear
from .. import bench, cases
from ..plate import Measured, Missing
from .limits import exclusive_or

TITLE = "The ring with parts left out: what looking up, multiplying and streaming cost"
QUESTION = "Is a product bound by its look-ups, its tensor-core products, or by bringing the bytes?"
PREDICTION = (
    "A panel of 16 rows x 256 columns takes 64 passes through shared memory to look up, 16 for its "
    "words, 4 for x and 6 for scales and sums: 90 cycles at one a clock. lm_head has 75,968 "
    "panels, 576 for each of 132 multiprocessors: 51,800 cycles, 29 us at 1.78 GHz, under the 35 "
    "us of its bytes at 4,660 GB/s. So it is bound by the bytes: loads alone should save less "
    "than a tenth, and no single part more than a twentieth (an early draft of the kernel took "
    "42.3 us whole, 41.7 without the table, 41.8 without the tensor cores, 40.0 with loads only). "
    "Where a matrix is a tenth of that, filling and draining the ring counts, and no part of the "
    "loop does. A slot that is refilled when its words are in registers, not when its sums are "
    "added up, is filled half a stage's work longer: up to 3 % on lm_head. Two stages of 16 warps "
    "are too few: with 70 KB to a multiprocessor that draft was a third slower."
)
SHAPES = {
    name: (cases.SHAPES | cases.STACKED)[name]
    for name in ("lm_head", "32b_gate", "32b_down", "gate_up", "down_proj")
}
WHOLE, NO_TABLE, NO_MMA, LOADS = "whole", "no table", "no tensor cores", "loads only"
LATE = "late refill"  # the whole, but a slot is refilled once its sums are added up
PARTS = {WHOLE: 0, NO_TABLE: 1, NO_MMA: 2, LOADS: 3, LATE: 4}  # RingParts of csrc/launch.h
RINGS = {  # warps x stages: RingSize of csrc/launch.h, and the variant of the step that it is
    "8x2": (0, "ring8x2"),
    "8x4": (1, None),
    "16x2": (2, None),
    "16x3": (3, "ring16x3"),
    "16x4": (4, "ring16x4"),
}
DIRECT = "direct"  # no ring: every warp loads into registers
PARAMS = {
    "shapes": ([], "names of shapes, separated by commas; all five if left out"),
    "parts": ([], "what is left of the loop, separated by commas; all if left out"),
    "rings": ([], "warps x stages, or direct, separated by commas; left out: all with the whole "
                  "loop, the step's own with the other parts"),
    **cases.COMMON_PARAMS,
}  # fmt: skip
TOGGLES = {
    "shape": ("shapes", tuple(SHAPES)),
    "part": ("parts", tuple(PARTS)),
    "ring": ("rings", (*RINGS, DIRECT)),
}
DEPENDS = ("ring_ablations.cu", "nf4_gemv.cu", "gemv.cuh", "device.cuh", "nf4.cuh", "ptx.cuh",
           "launch.h")  # fmt: skip
DEVICE = "cuda"
COLUMNS = [
    {"name": "shape", "unit": ""},
    {"name": "rows", "unit": "1"},
    {"name": "cols", "unit": "1"},
    {"name": "ring", "unit": ""},
    {"name": "part", "unit": ""},
    {"name": "in_step", "unit": ""},
    {"name": "stage_kb", "unit": "KB"},
    {"name": "ring_kb", "unit": "KB"},
    *cases.TIME_COLUMNS,
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape, ring and part. A whole product, and one without the table, is checked
    against float64; what the others saw against the exclusive or of what they had to see."""
    names = cases.chosen(params["shapes"], SHAPES, "shape")
    parts = cases.chosen(params["parts"], PARTS, "part")
    rings = cases.chosen(params["rings"], (*RINGS, DIRECT), "ring")
    read_rate = cases.begin("ring_ablations")
    rng = cases.inputs(params["seed"])
    rows, noise = [], 0.0
    for index, name in enumerate(names):
        progress(index, len(names), name)
        case = Case(name, params, rng)
        for ring in rings:
            for part in parts:
                if params["rings"] or part == WHOLE or ring == case.chosen:
                    rows.append(case.row(ring, part))
        noise = max(noise, case.noise())
        del case
        torch.cuda.empty_cache()
    progress(len(names), len(names), "done")
    made = cases.end(read_rate)
    for row in rows:
        if isinstance(row["us"], Missing):
            row |= dict.fromkeys(("floor_us", "gb_s", "share"), row["us"])
        else:
            n_bytes = cases.weight_bytes(row["rows"], row["cols"])
            cases.add_rates(row, n_bytes, made["read_rate"]["gb_s"])
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=made,
        notes=[
            cases.noise_note(noise, "the step's own ring with the whole loop, on each shape,"),
            "Every part builds the table and stages x: what is missing is what the loop does with "
            "them. Programmatic launch, as in the step.",
            "Loads only: the exclusive or of all words of the panels, read from shared memory, is "
            "the one of the matrix. No tensor cores: the same of all pairs of levels. No table: "
            "the product with the raw words as halves agrees with float64.",
        ],
        figure={"kind": "own"},
    )


# ---- one matrix ----


@dataclass
class Case:
    """A matrix in cold copies and what its kernels must find."""

    name: str
    params: dict
    rng: np.random.Generator
    timed: dict = field(default_factory=dict)

    def __post_init__(self):
        self.rows, self.cols = SHAPES[self.name]
        packed = cases.random_weights((self.rows, self.cols), self.params["seed"])
        self.exact = cases.row_major(packed, 1)[0]
        count = cases.copies_for(packed.nbytes, self.params["cold_mb"])
        self.copies = cases.panel_matrix(packed, count)
        tiles = self.copies[0].tiles
        self.tame = replace(self.copies[0], panels=without_large_halves(self.copies[0].panels))
        self.shared = cases.shared(tiles)
        variant = native.cuda("nf4_gemv").chosen(self.cols)
        by_variant = {GEMV_VARIANTS[v]: ring for ring, (_, v) in RINGS.items() if v}
        self.chosen = by_variant.get(variant, DIRECT)

    def row(self, ring: str, part: str) -> dict:
        """A row of the plate; a ring that does not fit, or a part that does not exist, is
        missing."""
        row = {"shape": self.name, "rows": self.rows, "cols": self.cols, "ring": ring, "part": part}
        row["in_step"] = "yes" if ring == self.chosen else "no"
        if ring == DIRECT:
            row |= dict.fromkeys(("stage_kb", "ring_kb"), Missing("no ring"))
            if part != WHOLE:
                return row | _missing("direct loads exist with the whole loop only")
            return row | self._timed(ring, part)
        warps, stages = map(int, ring.split("x"))
        stage = warps * PANEL_BLOCKS * BLOCK_BYTES / 1024
        row |= {"stage_kb": stage, "ring_kb": stages * stage}
        need = native.cuda("ring_ablations").shared_bytes(RINGS[ring][0], self.cols)
        limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        if need > limit:
            return row | _missing(f"takes {need:,} bytes of shared memory, a CTA has {limit:,}")
        return row | self._timed(ring, part)

    def _timed(self, ring: str, part: str) -> dict:
        if part in (WHOLE, LATE, NO_TABLE):
            made = cases.checked_times(self._work(ring, part), self.rng, self.params["runs"])
            self.timed[ring, part] = made.seconds
            return made.row
        unchecked = Missing("makes no product; the exclusive or of what it saw is checked")
        self._check_seen(ring, part)
        y, seen = self._outputs()
        x = cases.vector(self.rng, self.cols)
        count = len(self.copies)
        seconds = bench.graph_times(
            lambda i: self.product(ring, part, self.copies[i % count], x, y, seen),
            count * -(-cases.LAUNCHES // count),
            self.params["runs"],
        )
        self._check_seen(ring, part)
        return cases.times_row(seconds) | dict.fromkeys(("error_before", "error_after"), unchecked)

    def noise(self) -> float:
        """Of the step's own ring with the whole loop, timed once more; 0 where it was not timed."""
        if (self.chosen, WHOLE) not in self.timed:
            return 0.0
        again = cases.checked_times(self._work(self.chosen, WHOLE), self.rng, self.params["runs"])
        return bench.noise_band(self.timed[self.chosen, WHOLE], again.seconds)

    def product(self, ring: str, part: str, w: PanelLinear, x, y, seen) -> None:
        if ring == DIRECT:
            with toggles.using(linear="gemv", gemv=DIRECT, pdl=True):
                return cuda_product(x, w, y, y)
        native.cuda("ring_ablations").product(
            x, w.panels, w.tiles, y, seen, PARTS[part], RINGS[ring][0], True, *self.shared
        )

    def _outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty(1, self.rows, device=cases.DEVICE)
        return y, torch.zeros(1, dtype=torch.int32, device=cases.DEVICE)

    def _work(self, ring: str, part: str) -> cases.Work:
        """Without the table the first copy is one whose raw words are finite as halves."""
        _, seen = self._outputs()
        first = self.tame if part == NO_TABLE else self.copies[0]

        def run(i: int, x: torch.Tensor, y: torch.Tensor) -> None:
            self.product(ring, part, self.copies[i] if i else first, x, y, seen)

        def expected(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return raw_product(first.panels, x) if part == NO_TABLE else cases.exact(self.exact, x)

        name = f"{self.name}, {ring}, {part}"
        return cases.Work(name, self.cols, self.rows, len(self.copies), run, expected)

    def _check_seen(self, ring: str, part: str) -> None:
        """On the last copy with a fresh first tile."""
        w = self.copies[-1]
        fresh = self.rng.integers(0, 256, (w.panels.shape[1],), dtype=np.uint8)
        w.panels[0].copy_(torch.from_numpy(fresh))
        y, seen = self._outputs()
        self.product(ring, part, w, cases.vector(self.rng, self.cols), y, seen)
        needed = all_words(w.panels) if part == LOADS else all_pairs(w.panels)
        if int(seen) != needed:
            raise DecodeError(
                f"{self.name}, {ring}, {part}: saw {int(seen)} in all, needs {needed}"
            )


def _missing(reason: str) -> dict:
    names = ("us", "us_best", "us_worst", "error_before", "error_after")
    return dict.fromkeys(names, Missing(reason)) | {"runs": 0}


# ---- what the parts must find ----


def all_words(panels: torch.Tensor) -> int:
    """Exclusive or of all int32 words of a panel matrix."""
    return exclusive_or(panels.flatten().view(torch.int32))


def all_pairs(panels: torch.Tensor) -> int:
    """Exclusive or over all code bytes of the pair of levels, as two halves, that each stands
    for."""
    codes, _ = _codes_and_scales(panels)
    odd = torch.bincount(codes.flatten().int(), minlength=256) & 1  # an even count leaves nothing
    halves = LEVELS.astype(np.float16).view(np.uint16).astype(np.uint32)
    byte = np.arange(256)
    pairs = halves[byte & 15] | halves[byte >> 4] << 16
    found = np.bitwise_xor.reduce(pairs[odd.cpu().numpy() == 1], initial=0)
    return int(np.uint32(found).view(np.int32))


def without_large_halves(panels: torch.Tensor) -> torch.Tensor:
    """The matrix with the highest exponent bit of every half of its codes cleared: read as halves
    they are then below 2."""
    out = panels.clone()
    codes, _ = _codes_and_scales(out)
    codes[..., 1::2] &= 0xBF
    return out


def raw_product(panels: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """W x in float64 as the product without a table makes it, x float64 [cols]; and per row the
    root of its squared terms' sum.

    A lane's word holds the codes of eight columns of a row, and goes into two tensor-core products
    as it is, twice in each: its lower half stands for the four even ones of them, its upper half
    for the odd ones.
    """
    codes, scales = _codes_and_scales(panels)
    tiles, count = codes.shape[:2]
    shape = (count, PANEL_BLOCKS, 2, 2, 2, 4, 2)  # panel, block, word, m % 2, h, t, half
    x = x.view(shape)
    x_sums, x_squares = (v.sum((3, 4)) for v in (x, x.square()))  # panel, block, word, t, half
    y = torch.empty(tiles, 2, 8, dtype=torch.float64, device=panels.device)
    sizes = torch.empty_like(y)
    step = max(1, cases.BLOCK_WEIGHTS // (TILE_ROWS * len(x.flatten())))
    for start in range(0, tiles, step):
        part = slice(start, start + step)
        # tile, panel, block, g, t, row half, word, half
        halves = codes[part].contiguous().view(torch.float16).double()
        halves = halves.view(-1, count, PANEL_BLOCKS, 8, 4, 2, 2, 2)
        scale = scales[part].double().view(-1, count, 2, 8, PANEL_BLOCKS)
        of_block = torch.einsum("zpbgtrwe,pbwte->zprgb", halves, x_sums) * scale
        squares = torch.einsum("zpbgtrwe,pbwte->zprgb", halves.square(), x_squares)
        y[part] = of_block.sum((1, 4))
        sizes[part] = (squares * scale.square()).sum((1, 4)).sqrt()
    return y.flatten(), sizes.flatten()


def _codes_and_scales(panels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of whole panels [tiles, n * panel bytes]: codes uint8 [tiles, n, codes], scales half
    [tiles, n, rows * blocks]."""
    by_panel = panels.view(len(panels), -1, PANEL_BLOCKS * BLOCK_BYTES)
    split = PANEL_BLOCKS * BLOCK_CODES
    return by_panel[..., :split], by_panel[..., split:].view(torch.float16)


# ---- what it says ----


def _times(rows: list[dict]) -> dict[tuple[str, str, str], float]:
    return {
        (r["shape"], r["ring"], r["part"]): r["us"]
        for r in rows
        if isinstance(r["us"], int | float)
    }


def saved(rows: list[dict]) -> dict[tuple[str, str], float]:
    """{(shape, part): part of the whole's time that is saved without it}, in the step's own
    ring."""
    us = {(r["shape"], r["part"]): r["us"] for r in rows
          if r["in_step"] == "yes" and isinstance(r["us"], int | float)}  # fmt: skip
    return {
        (shape, part): 1 - t / us[shape, WHOLE]
        for (shape, part), t in us.items()
        if part != WHOLE and (shape, WHOLE) in us
    }


def _verdict(rows: list[dict], noise: float) -> str:
    us, found, words = _times(rows), saved(rows), []
    head = {part: found["lm_head", part] for part in PARTS if ("lm_head", part) in found}
    if {NO_TABLE, NO_MMA, LOADS} <= set(head):
        held = head[LOADS] < 0.1 and head[NO_TABLE] < 0.05 and head[NO_MMA] < 0.05
        words.append(
            f"{cases.held(held)} for lm_head: without the table {100 * head[NO_TABLE]:.1f} % are "
            f"saved, without the tensor cores {100 * head[NO_MMA]:.1f} %, without both "
            f"{100 * head[LOADS]:.1f} %"
        )
    late = {shape: -s for (shape, part), s in found.items() if part == LATE}
    if late:
        most = max(late, key=late.get)
        words.append(
            f"a slot that is refilled only when its sums are added up costs up to "
            f"{100 * late[most]:.1f} % ({most})"
        )
    others = {shape: s for (shape, part), s in found.items() if part == LOADS}
    if len(others) > 1:
        low, high = min(others, key=others.get), max(others, key=others.get)
        words.append(
            f"loads only save {100 * others[low]:.0f} % ({low}) to {100 * others[high]:.0f} % "
            f"({high})"
        )
    for shape in dict.fromkeys(r["shape"] for r in rows):
        known = {ring: t for (s, ring, part), t in us.items() if (s, part) == (shape, WHOLE)}
        own = [r["ring"] for r in rows if r["shape"] == shape and r["in_step"] == "yes"]
        if len(known) > 1 and own and own[0] in known:
            best = min(known, key=known.get)
            change = bench.compare(known[own[0]], known[best], noise)
            if best != own[0] and change == "faster":
                words.append(f"{shape} is faster with {best} than with the step's {own[0]} "
                             f"({known[best]:.1f} against {known[own[0]]:.1f} us)")  # fmt: skip
            else:
                words.append(f"{shape} has its best ring, {own[0]} ({known[own[0]]:.1f} us)")
    if not words:
        words = [f"{' '.join(key)}: {t:.1f} us" for key, t in us.items()]
    return f"{'; '.join(words) or 'Nothing that was asked for exists'}. Noise {100 * noise:.1f} %."


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card and in every run."""
    rows = plate.rows
    found = [("every checked product agrees with float64", cases.accurate(rows))]
    by_loads = {shape: s for (shape, part), s in saved(rows).items() if part == LOADS}
    if by_loads:
        found.append(
            ("loads only are never slower than the whole, but for noise",
             min(by_loads.values()) > -0.03)
        )  # fmt: skip
    us = _times(rows)
    rings = [t for (shape, ring, part), t in us.items()
             if (shape, part) == ("lm_head", WHOLE) and ring != DIRECT]  # fmt: skip
    if rings and ("lm_head", DIRECT, WHOLE) in us:
        found.append(
            ("on lm_head the best ring beats direct loads",
             min(rings) < us["lm_head", DIRECT, WHOLE])
        )  # fmt: skip
    return found


def draw(plate, fig) -> None:
    """Left: the parts in the step's own ring; right: the whole loop by ring. Both in percent of the
    whole in the step's own ring, with microseconds beside."""
    left, right = fig.subplots(1, 2)
    shapes = list(dict.fromkeys(r["shape"] for r in plate.rows))
    own = {r["shape"]: r for r in plate.rows if r["in_step"] == "yes" and r["part"] == WHOLE}
    by_part = [r for r in plate.rows if r["in_step"] == "yes" and r["us"] is not None]
    by_ring = [r for r in plate.rows if r["part"] == WHOLE and r["us"] is not None]
    _bars(left, shapes, own, by_part, "part", tuple(PARTS),
          ("#0072B2", "#E69F00", "#009E73", "#999999", "#CC79A7"))  # fmt: skip
    _bars(right, shapes, own, by_ring, "ring", (*RINGS, DIRECT),
          ("#56B4E9", "#0072B2", "#F0E442", "#E69F00", "#D55E00", "#999999"))  # fmt: skip
    labels = [
        f"{name}\n{own[name]['ring']}" if name in own else name
        for name in shapes
    ]  # fmt: skip
    left.set_yticks(range(len(shapes)), labels)
    right.set_yticks([])
    left.set_xlabel("parts of the loop, in the step's ring [us]")
    right.set_xlabel("the whole loop, by ring [us]; tick: bytes at the read rate")


def _bars(ax, shapes, own, rows, column: str, choices, colours) -> None:
    """Groups of bars, one group a shape, each as long as its time over the group's whole."""
    present = [c for c in choices if any(r[column] == c for r in rows)]
    height = 0.86 / max(1, len(present))
    longest = 1.0
    for r in rows:
        base = own[r["shape"]]["us"] if r["shape"] in own else rows[0]["us"]
        y = shapes.index(r["shape"])
        y += (present.index(r[column]) - (len(present) - 1) / 2) * height
        length = r["us"] / base
        longest = max(longest, length)
        ax.barh(y, length, height * 0.9, color=colours[choices.index(r[column])])
        ax.annotate(f"{r['us']:.1f}", (length, y), (4, 0), textcoords="offset points",
                    va="center", fontsize=10)  # fmt: skip
        floor = r["floor_us"] / base
        ax.plot([floor, floor], [y - height / 2, y + height / 2], color="#222222", linewidth=1.5)
    ax.set_xticks([])
    ax.set_xlim(0, 1.16 * longest)
    ax.set_ylim(len(shapes) - 0.45, -1.15)
    handles = [ax.barh(0, 0, color=colours[choices.index(c)]) for c in present]
    ax.legend(handles, present, loc="upper center", ncols=min(3, len(present)), fontsize=10.5,
              frameon=False)  # fmt: skip
