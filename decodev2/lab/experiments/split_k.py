"""Who shares the K of a row, and whether x is copied into shared memory first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import ladder
from ...errors import DecodeError
from .. import cases
from ..plate import Measured

TITLE = "Four warps on a row, and a copy of x: split K and staging"
QUESTION = "What do four warps per row buy over one, and what does staging all of x cost?"
PREDICTION = (
    "A multiprocessor of an H200 keeps 24 KB in flight to read at full rate (4,600 GB/s x 0.7 us / "
    "132). One warp a row with 2,048 rows is 16 warps of 128 B there: 2 KB, 8 % of the rate, so "
    "about 30 us for down. Four warps a row are four times the loads in flight: about a quarter "
    "of the time on down, qkv and o, little on gate, whose 11,008 rows fill the card anyway. "
    "Staging x on down costs 44 KB per CTA to read 6 KB of weights: 5 CTAs fit where 16 would, and "
    "90 MB of copies go through the L2; slower. At 2,048 columns it is 8 KB and changes little."
)
PARAMS = {
    "split_k": ([], "on, off: four warps a row or one; both if left out"),
    "stage_x": ([], "on, off: x in shared memory first (needs split_k on); both if left out"),
    "shapes": ([], "names of shapes, separated by commas; all if left out"),
    **cases.COMMON_PARAMS,
}
DEPENDS = ("ladder_gemv.cu", "nf4.cuh", "ptx.cuh", "launch.h")
DEVICE = "cuda"
SHAPES = {
    "qkv_proj": cases.STACKED["qkv_proj"],
    "o_proj": cases.SHAPES["o_proj"],
    "down_proj": cases.SHAPES["down_proj"],
    "gate_proj": cases.SHAPES["gate_proj"],
}
SWITCH = ("on", "off")
TOGGLES = {
    "split_k": ("split_k", SWITCH),
    "stage_x": ("stage_x", SWITCH),
    "shape": ("shapes", tuple(SHAPES)),
}
WAYS = {  # split_k, stage_x
    ("off", "off"): "one warp a row",
    ("on", "off"): "four warps a row",
    ("on", "on"): "four warps a row, x staged",
}
ONE, FOUR, STAGED = WAYS
COLUMNS = [
    {"name": "shape", "unit": ""},
    {"name": "rows", "unit": "1"},
    {"name": "cols", "unit": "1"},
    {"name": "split_k", "unit": ""},
    {"name": "stage_x", "unit": ""},
    {"name": "x_kb", "unit": "KB"},
    *cases.TIME_COLUMNS,
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape and way: levels in shared memory, one row per x, as in the log."""
    ways = _ways(params)
    shapes = cases.chosen(params["shapes"], SHAPES, "shape")
    read_rate = cases.begin("split_k")
    rng = cases.inputs(params["seed"])
    rows, noise = [], 0.0
    for index, shape in enumerate(shapes):
        m, k = SHAPES[shape]
        packed = cases.random_weights((m, k), params["seed"])
        w = cases.row_major(packed, cases.copies_for(packed.nbytes, params["cold_mb"]))

        def work_of(way, at=index, shape=shape, w=w):
            progress(at, len(shapes), f"{shape}, {WAYS[way]}")
            return _work(shape, way, w)

        timed, band = cases.series(ways, work_of, rng, params["runs"])
        noise = max(noise, band)
        rows += [
            {"shape": shape, "rows": m, "cols": k, "split_k": way[0], "stage_x": way[1],
             "x_kb": 4 * k / 1024 if way == STAGED else 0.0}
            | timed[way].row
            for way in ways
        ]  # fmt: skip
        del w, work_of
        torch.cuda.empty_cache()
    progress(len(shapes), len(shapes), "done")
    notes = [
        cases.noise_note(noise, f"{WAYS[ways[0]]} on each shape"),
        "x_kb is the copy of x that every CTA makes (1 KB = 1024 bytes). With x staged and at "
        "least 4,096 columns a lane loads 16 bytes of codes at once, else 4.",
    ]
    return cases.finish(read_rate, COLUMNS, rows, lambda: _verdict(rows, noise), notes)


def _ways(params: dict) -> list[tuple[str, str]]:
    split = cases.chosen(params["split_k"], SWITCH, "split_k")
    stage = cases.chosen(params["stage_x"], SWITCH, "stage_x")
    found = [way for way in WAYS if way[0] in split and way[1] in stage]
    if not found:
        raise DecodeError("stage_x on with split_k off has no kernel; needs split_k on")
    return found


def _work(shape: str, way: tuple[str, str], w: list) -> cases.Work:
    m, k = SHAPES[shape]
    split_k, stage_x = (switch == "on" for switch in way)

    def run(i, x, y):
        ladder.gemv(x[0], w[i], y[0], split_k=split_k, stage_x=stage_x, nr=1)

    return cases.Work(
        name=f"{shape}, {WAYS[way]}", cols=k, outputs=m, copies=len(w), run=run,
        expected=lambda x: cases.exact(w[0], x), limit=cases.EXACT_LIMIT,
    )  # fmt: skip


def _ratios(rows: list[dict], slow: tuple[str, str], fast: tuple[str, str]) -> dict[str, float]:
    """Time of way `slow` over time of way `fast` by shape, where both are there."""
    us = {(r["shape"], (r["split_k"], r["stage_x"])): r["us"] for r in rows}
    shapes = dict.fromkeys(r["shape"] for r in rows)
    return {s: us[s, slow] / us[s, fast] for s in shapes if (s, slow) in us and (s, fast) in us}


def _verdict(rows: list[dict], noise: float) -> str:
    split, staged = _ratios(rows, ONE, FOUR), _ratios(rows, STAGED, FOUR)
    parts, ok, old = [], [], []
    if split:
        parts.append(f"four warps a row are {cases.ratio_text(split)} as fast as one")
        old.append(("four warps win", min(split.values()) > 1 + noise))
        if {"down_proj", "gate_proj"} <= set(split):
            ok.append(split["down_proj"] > 2 > split["gate_proj"])
    if staged:
        parts.append(f"with x staged the time is {cases.ratio_text(staged)}")
        if "down_proj" in staged:
            old.append(("staging slows down", staged["down_proj"] > 1 + noise))
            ok.append(staged["down_proj"] > 1 + noise)
    if not parts:
        only = ", ".join(f"{r['shape']} {r['us']:.1f} us" for r in rows)
        return f"Nothing to compare: {only}. Noise {100 * noise:.1f} %."
    words = f"{cases.held(all(ok))}: " if ok else ""
    agreed = "; ".join(f"{what}: {'the same here' if yes else 'not here'}" for what, yes in old)
    agreed = f" Old card: {agreed}." if old else ""
    return f"{words}{'; '.join(parts)}.{agreed} Noise {100 * noise:.1f} %."


def claims(plate) -> list[tuple[str, bool]]:
    """What must not change between runs."""
    found = [("every product agrees with float64 before and after", cases.accurate(plate.rows))]
    split, staged = _ratios(plate.rows, ONE, FOUR), _ratios(plate.rows, STAGED, FOUR)
    if "down_proj" in split:
        found.append(("four warps a row are faster on down_proj", split["down_proj"] > 1))
    if "down_proj" in staged:
        found.append(("staging x makes down_proj slower", staged["down_proj"] > 1))
    return found


def draw(plate, fig) -> None:
    """Bars: time per shape and way, a tick at the floor of the bytes."""
    from .. import figure

    rows = plate.rows
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    ways = [w for w in WAYS if w in {(r["split_k"], r["stage_x"]) for r in rows}]
    colours = dict(zip(WAYS, ("#E69F00", "#0072B2", "#CC79A7"), strict=True))
    ax = fig.subplots()
    longest = max(r["us_worst"] for r in rows)
    height = 0.8 / len(ways)
    for r in rows:
        way = (r["split_k"], r["stage_x"])
        y = shapes.index(r["shape"]) + (ways.index(way) - (len(ways) - 1) / 2) * height
        ax.barh(y, r["us"], 0.88 * height, color=colours[way])
        ax.plot([r["floor_us"]] * 2, [y - height / 2, y + height / 2], color=figure.DARK, lw=2)
        text = f"{figure.number(r['us'])} us  {WAYS[way]}, {r['share']:.0f}% of the read rate"
        ax.annotate(
            text, (max(r["us"], r["floor_us"]), y), (6, 0), textcoords="offset points",
            va="center", fontsize=11.5,
        )  # fmt: skip
    sizes = {r["shape"]: f"{r['shape']}\n{r['rows']:,} x {r['cols']:,}" for r in rows}
    ax.set_yticks(range(len(shapes)), [sizes[s] for s in shapes])
    ax.set_ylim(len(shapes) - 0.5, -0.5)
    ax.set_xlim(0, 1.75 * longest)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("one product on cold weights [us]      ┃ = bytes at the read rate", loc="left")
