"""How many rows share each x they load: 1, 2, 4 or 8, on the thirteen shapes of the lab log."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import ladder
from .. import bench, cases
from ..cases import SHAPES
from ..plate import Measured

TITLE = "Rows that share x: 1, 2, 4 or 8 on thirteen shapes"
QUESTION = "From which size on do several rows per CTA pay, and does the rule by size pick them?"
PREDICTION = (
    "An H200 holds 132 x 16 = 2,112 CTAs of four warps, so NR rows a CTA leave it idle below 2,112 "
    "x NR rows: NR 1 is best up to 2,048 rows, 1 or 2 at 5,120, 4 from 8,448 on, 8 from 16,896 on. "
    "Per 8 weights a lane makes 8 reads of levels and 8 cycles' worth of reads of x; four rows "
    "share the x: (8 + 8) / (8 + 2) = 1.6x on lm_head at most (old card: 494 / 393 us = 1.26x). NR "
    "2 on down halves the CTAs: slower (old card: 64 to 90 us). The rule of the log, 4 from 4,096 "
    "rows on, should be within 10 % of the best on most shapes."
)
PARAMS = {
    "shapes": ([], "names of shapes, separated by commas; all thirteen if left out"),
    "nr": ([], "1, 2, 4, 8: rows that share x; all if left out"),
    "tables": (["lut_shared"], "where the levels live, see decodev2/ladder.py"),
    **cases.COMMON_PARAMS,
}
DEPENDS = ("ladder_gemv.cu", *cases.GEMV_SOURCES)
DEVICE = "cuda"
NR = tuple(map(str, ladder.ROWS_SHARING_X))
TOGGLES = {
    "shape": ("shapes", tuple(SHAPES)),
    "nr": ("nr", NR),
    "table": ("tables", tuple(ladder.TABLES)),
}
NEAR = 1.10  # of the best time: what "the rule picks well" allows
OLD_GAIN = 494 / 393  # lm_head, NR 4 for 1, on the card of the lab log
COLUMNS = [
    {"name": "shape", "unit": ""},
    {"name": "rows", "unit": "1"},
    {"name": "cols", "unit": "1"},
    {"name": "table", "unit": ""},
    {"name": "nr", "unit": ""},
    {"name": "picked", "unit": ""},
    *cases.TIME_COLUMNS,
    {"name": "production_us", "unit": "us"},
    {"name": "production_error", "unit": "1"},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape, table and NR; the GEMV of the step stands beside each as a column."""
    shapes = cases.chosen(params["shapes"], SHAPES, "shape")
    counts = cases.chosen(params["nr"], NR, "nr")
    tables = cases.chosen(params["tables"], ladder.TABLES, "table")
    read_rate = cases.begin("nr_sweep")
    rng = cases.inputs(params["seed"])
    rows, noise = [], 0.0
    for index, shape in enumerate(shapes):
        progress(index, len(shapes), shape)
        m, k = SHAPES[shape]
        packed = cases.random_weights((m, k), params["seed"])
        count = cases.copies_for(packed.nbytes, params["cold_mb"])
        w, panel = cases.row_major(packed, count), cases.panel_matrix(packed, count)
        beside = cases.checked_times(_production(shape, panel, w[0]), rng, params["runs"])
        again = cases.checked_times(_production(shape, panel, w[0]), rng, params["runs"])
        noise = max(noise, bench.noise_band(beside.seconds, again.seconds))
        del panel
        for table in tables:
            for nr in counts:
                work = _work(shape, table, int(nr), w)
                timed = cases.checked_times(work, rng, params["runs"])
                rows.append(
                    {"shape": shape, "rows": m, "cols": k, "table": table, "nr": nr,
                     "picked": int(nr) == ladder.pick_nr(m)}
                    | timed.row
                    | {"production_us": beside.row["us"],
                       "production_error": beside.row["error_after"]}
                )  # fmt: skip
        del w, work
        torch.cuda.empty_cache()
    progress(len(shapes), len(shapes), "done")
    notes = [
        cases.noise_note(noise, "the production GEMV on each shape"),
        "picked marks the NR that the rule by size takes; it is the same for every table.",
    ]
    return cases.finish(read_rate, COLUMNS, rows, lambda: _verdict(rows, noise), notes)


def _work(shape: str, table: str, nr: int, w: list) -> cases.Work:
    m, k = SHAPES[shape]
    exact = table not in ("lut_byte_permute", "lut_pair")

    def run(i, x, y):
        ladder.gemv(x[0], w[i], y[0], table=table, stage_x=table == "lut_pair", nr=nr)

    return cases.Work(
        name=f"{shape}, {table}, NR {nr}", cols=k, outputs=m, copies=len(w), run=run,
        expected=lambda x: cases.exact(w[0], x),
        limit=cases.EXACT_LIMIT if exact else cases.ERROR_LIMIT,
    )  # fmt: skip


def _production(shape: str, panel: list, exact: ladder.RowMajor) -> cases.Work:
    m, k = SHAPES[shape]
    return cases.Work(
        name=f"{shape}, production", cols=k, outputs=m, copies=len(panel),
        run=lambda i, x, y: cases.production(x, panel[i], y),
        expected=lambda x: cases.exact(exact, x),
    )  # fmt: skip


def _groups(rows: list[dict]) -> list[dict[str, dict]]:
    """Rows of one shape and table as {nr: row}."""
    groups: dict[tuple[str, str], dict[str, dict]] = {}
    for r in rows:
        groups.setdefault((r["shape"], r["table"]), {})[r["nr"]] = r
    return list(groups.values())


def _gains(rows: list[dict], over: str, nr: str) -> dict[str, float]:
    """Time at NR `over` over the time at NR `nr` by shape; the first table of each shape."""
    found: dict[str, float] = {}
    for group in _groups(rows):
        if over in group and nr in group:
            found.setdefault(group[nr]["shape"], group[over]["us"] / group[nr]["us"])
    return found


def _near(group: dict[str, dict]) -> bool:
    """Is the picked NR within NEAR of the best of its shape?"""
    picked = next(r for r in group.values() if r["picked"])
    return picked["us"] <= NEAR * min(r["us"] for r in group.values())


def _whole(rows: list[dict]) -> list[dict[str, dict]]:
    return [g for g in _groups(rows) if len(g) == len(NR)]


def _verdict(rows: list[dict], noise: float) -> str:
    whole = _whole(rows)
    four, two = _gains(rows, "1", "4").get("lm_head"), _gains(rows, "1", "2").get("down_proj")
    parts, ok, old = [], [], []
    if whole:
        near = [g for g in whole if _near(g)]
        ok.append(2 * len(near) > len(whole))
        parts.append(
            f"the rule by size is within {100 * NEAR - 100:.0f} % of the best NR on {len(near)} of "
            f"{len(whole)} shapes"
        )
        behind = [
            min(r["us"] for r in g.values()) / next(iter(g.values()))["production_us"]
            for g in whole
        ]
        parts.append(f"the best rung takes {min(behind):.2f} to {max(behind):.2f} times production")
    if four:
        ok.append(1 + noise < four <= 1.65)
        parts.append(f"NR 4 for 1 on lm_head is {four:.2f}x as fast ({OLD_GAIN:.2f}x there)")
        old.append(four > 1 + noise)
    if two:
        slower = two < 1 - noise
        ok.append(slower)
        old.append(slower)
        parts.append(f"NR 2 for 1 on down_proj is {two:.2f}x as fast (0.71x there)")
    if not parts:
        only = ", ".join(f"{r['shape']} NR {r['nr']} {r['us']:.1f} us" for r in rows)
        return f"Nothing to compare: {only}. Noise {100 * noise:.1f} %."
    agreed = ""
    if old:
        agreed = " Agrees with the old card." if all(old) else " Not what the old card showed."
    return f"{cases.held(all(ok))}: {'; '.join(parts)}.{agreed} Noise {100 * noise:.1f} %."


def claims(plate) -> list[tuple[str, bool]]:
    """What must not change between runs."""
    rows = plate.rows
    limit = cases.ERROR_LIMIT
    checked = cases.accurate(rows) and all(r["production_error"] < limit for r in rows)
    found = [("every product agrees with float64 before and after", checked)]
    gain = _gains(rows, "1", "4")
    if "lm_head" in gain:
        found.append(("four rows per x make lm_head faster", gain["lm_head"] > 1))
    if whole := _whole(rows):
        best = [min(r["us"] for r in g.values()) / g["1"]["production_us"] for g in whole]
        found.append(("production beats every rung where a side is over 10,000",
                      all(b > 1 for b, g in zip(best, whole, strict=True)
                          if max(g["1"]["rows"], g["1"]["cols"]) > 10_000)))  # fmt: skip
    return found


def draw(plate, fig) -> None:
    """Per shape a line of dots, time relative to production; the picked NR has a ring."""
    from .. import figure

    table = plate.rows[0]["table"]
    rows = [r for r in plate.rows if r["table"] == table]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    counts = [nr for nr in NR if nr in {r["nr"] for r in rows}]
    colours = dict(zip(NR, ("#0072B2", "#009E73", "#E69F00", "#CC79A7"), strict=True))
    markers = dict(zip(NR, "osD^", strict=True))
    ax = fig.subplots()
    relative = {id(r): r["us"] / r["production_us"] for r in rows}
    for nr in counts:
        own = [r for r in rows if r["nr"] == nr]
        ax.plot(
            [relative[id(r)] for r in own], [shapes.index(r["shape"]) for r in own],
            markers[nr], color=colours[nr], markersize=9, label=f"NR {nr}", zorder=3,
        )  # fmt: skip
    picked = [r for r in rows if r["picked"]]
    ax.plot(
        [relative[id(r)] for r in picked], [shapes.index(r["shape"]) for r in picked], "o",
        color="none", markeredgecolor=figure.DARK, markeredgewidth=1.8, markersize=17,
        label="picked by size", zorder=2,
    )  # fmt: skip
    ax.axvline(1, color=figure.DARK, linewidth=1.5)
    low, high = min([1, *relative.values()]), max([1, *relative.values()])
    for shape in shapes:
        own = [r for r in rows if r["shape"] == shape]
        best = min(own, key=lambda r: r["us"])
        ax.annotate(
            f"{figure.number(best['us'])} us at NR {best['nr']}; "
            f"{figure.number(best['production_us'])} us",
            (1.01, shapes.index(shape)), xycoords=("axes fraction", "data"), va="center",
            fontsize=11.5, annotation_clip=False,
        )  # fmt: skip
    ax.annotate(
        "best rung; production", (1.01, -0.9), xycoords=("axes fraction", "data"), va="center",
        fontsize=11.5, color=figure.GREY, annotation_clip=False,
    )  # fmt: skip
    sizes = {r["shape"]: f"{r['shape']}  {r['rows']:,} x {r['cols']:,}" for r in rows}
    ax.set_yticks(range(len(shapes)), [sizes[s] for s in shapes])
    ax.set_ylim(len(shapes) - 0.4, -1.4)
    _log_axis(ax, low, high)
    ax.set_xlabel(f"time over that of the production GEMV [1], levels: {table}", loc="left")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.02), ncols=5, frameon=False, fontsize=11.5,
              columnspacing=1.2, handletextpad=0.3)  # fmt: skip


def _log_axis(ax, low: float, high: float) -> None:
    ticks = [
        t
        for t in (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 50)
        if low / 1.1 <= t <= high * 1.1
    ]
    ax.set_xscale("log")
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlim(low / 1.15, high * 1.15)
