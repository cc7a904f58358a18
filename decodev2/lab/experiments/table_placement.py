"""Where the sixteen levels live: the five tables of the rungs, and the GEMV of the step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import ladder
from .. import cases
from ..plate import Measured

TITLE = "Where the sixteen levels live: constant, shared, registers, pairs"
QUESTION = "What does it cost to look up a level per weight, by the place where the levels are?"
PREDICTION = (
    "An H200 has 132 multiprocessors at 1.98 GHz. Shared memory serves 32 lanes a cycle: 132 x "
    "1.98e9 x 32 weights x 17/32 byte = 4,440 GB/s, and less with x read beside it. Constant "
    "memory serves one address a cycle, and 32 random lanes want 14 of the 16 levels: 4,440 / 14 = "
    "320 GB/s at most. A shuffle takes the path of a shared read, so no gain; byte permutes take 3 "
    "operations a weight at 64 lanes a cycle, so a little less. A table of pairs halves the reads "
    "and is the fastest rung; the GEMV of the step, pairs and bulk copies, is faster still."
)
PARAMS = {
    "tables": ([], "tables to time, separated by commas; all if left out"),
    "shapes": ([], "names of shapes, separated by commas; all if left out"),
    **cases.COMMON_PARAMS,
}
DEPENDS = ("ladder_gemv.cu", *cases.GEMV_SOURCES)
DEVICE = "cuda"
SHAPES = {
    "lm_head": cases.SHAPES["lm_head"],
    "32b_gate": cases.SHAPES["32b_gate"],
    "gate_up": cases.STACKED["gate_up"],
    "down_proj": cases.SHAPES["down_proj"],
}
PRODUCTION = "production"
TABLES = (*ladder.TABLES, PRODUCTION)
HALF_TABLES = ("lut_byte_permute", "lut_pair")  # their levels are rounded to half
TOGGLES = {"table": ("tables", TABLES), "shape": ("shapes", tuple(SHAPES))}
CONSTANT_LIMIT = 320  # GB/s, of the prediction
COLUMNS = [
    {"name": "shape", "unit": ""},
    {"name": "rows", "unit": "1"},
    {"name": "cols", "unit": "1"},
    {"name": "table", "unit": ""},
    {"name": "layout", "unit": ""},
    *cases.TIME_COLUMNS,
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape and table. All rungs split K over four warps and share x between rows by
    size; only the table differs, but for the pairs, whose CTAs stay and stage x."""
    tables = cases.chosen(params["tables"], TABLES, "table")
    shapes = cases.chosen(params["shapes"], SHAPES, "shape")
    read_rate = cases.begin("table_placement")
    rng = cases.inputs(params["seed"])
    rows, noise = [], 0.0
    for index, shape in enumerate(shapes):
        m, k = SHAPES[shape]
        packed = cases.random_weights((m, k), params["seed"])
        count = cases.copies_for(packed.nbytes, params["cold_mb"])
        row_major = cases.row_major(packed, count if set(tables) - {PRODUCTION} else 1)
        panel = cases.panel_matrix(packed, count) if PRODUCTION in tables else []

        def work_of(table, at=index, shape=shape, weights=(row_major, panel)):
            progress(at, len(shapes), f"{shape} {table}")
            return _work(shape, table, *weights)

        timed, band = cases.series(tables, work_of, rng, params["runs"])
        noise = max(noise, band)
        rows += [
            {"shape": shape, "rows": m, "cols": k, "table": table, "layout": _layout(table, m)}
            | timed[table].row
            for table in tables
        ]
        del row_major, panel, work_of
        torch.cuda.empty_cache()
    progress(len(shapes), len(shapes), "done")
    notes = [
        cases.noise_note(noise, f"{tables[0]} on each shape"),
        "The log moved the table and split K in one go; here K is split for every table.",
    ]
    return cases.finish(read_rate, COLUMNS, rows, lambda: _verdict(rows, noise), notes)


def _work(shape: str, table: str, row_major: list, panel: list) -> cases.Work:
    m, k = SHAPES[shape]
    if table == PRODUCTION:
        limit, copies = cases.ERROR_LIMIT, len(panel)

        def run(i, x, y):
            cases.production(x, panel[i], y)

    else:
        limit = cases.ERROR_LIMIT if table in HALF_TABLES else cases.EXACT_LIMIT
        copies, stage_x = len(row_major), table == "lut_pair"

        def run(i, x, y):
            ladder.gemv(x[0], row_major[i], y[0], table=table, stage_x=stage_x)

    return cases.Work(
        name=f"{shape}, {table}", cols=k, outputs=m, copies=copies, run=run,
        expected=lambda x: cases.exact(row_major[0], x), limit=limit,
    )  # fmt: skip


def _layout(table: str, rows: int) -> str:
    if table == PRODUCTION:
        return "tiles of 16 rows in panels, pairs in shared memory"
    nr = ladder.pick_nr(rows)
    text = f"rows of the file, 4 warps a row, {nr} row{'s' * (nr > 1)} per x"
    return f"{text}, x staged" if table == "lut_pair" else text


def _by(rows: list[dict], column: str) -> dict[tuple[str, str], float]:
    return {(r["shape"], r["table"]): r[column] for r in rows}


def _ratios(rows: list[dict], slow: str, fast: str) -> dict[str, float]:
    """Time of `slow` over time of `fast` by shape, where both are there."""
    us = _by(rows, "us")
    shapes = dict.fromkeys(shape for shape, _ in us)
    return {s: us[s, slow] / us[s, fast] for s in shapes if (s, slow) in us and (s, fast) in us}


def _fastest_rung(rows: list[dict]) -> dict[str, str]:
    """By shape, the fastest table of the row-major rungs."""
    best: dict[str, dict] = {}
    for r in rows:
        if r["table"] != PRODUCTION and r["us"] < best.get(r["shape"], r | {"us": 1e30})["us"]:
            best[r["shape"]] = r
    return {shape: r["table"] for shape, r in best.items()}


def _verdict(rows: list[dict], noise: float) -> str:
    constant = [r["gb_s"] for r in rows if r["table"] == "lut_constant"]
    gain = _ratios(rows, "lut_constant", "lut_shared")
    ahead = _ratios(rows, "lut_pair", PRODUCTION)
    best = _fastest_rung(rows)
    parts, ok = [], []
    if constant:
        ok.append(max(constant) <= CONSTANT_LIMIT)
        parts.append(f"constant memory reaches {max(constant):.0f} GB/s at most")
    if gain:
        parts.append(f"shared is {cases.ratio_text(gain)} as fast")
    if len({r["table"] for r in rows} - {PRODUCTION}) == len(ladder.TABLES):
        ok.append(set(best.values()) == {"lut_pair"})
        winners = dict.fromkeys(best.values())
        names = [f"{w} ({', '.join(s for s in best if best[s] == w)})" for w in winners]
        parts.append(f"the fastest rung is {', '.join(names)}")
    if ahead:
        ok.append(min(ahead.values()) > 1 + noise)
        parts.append(f"production is {cases.ratio_text(ahead)} as fast as the pairs")
    if not ok:
        only = ", ".join(f"{r['table']} on {r['shape']} {r['us']:.1f} us" for r in rows)
        return f"Nothing to compare: {only}. Noise {100 * noise:.1f} %."
    old = ""
    if gain:
        same = min(gain.values()) > 1 + noise
        old = (
            f" The old card's first jump, constant to shared, is {'here too' if same else 'gone'}."
        )
    return f"{cases.held(all(ok))}: {'; '.join(parts)}.{old} Noise {100 * noise:.1f} %."


def claims(plate) -> list[tuple[str, bool]]:
    """What must not change between runs."""
    rows = plate.rows
    found = [("every product agrees with float64 before and after", cases.accurate(rows))]
    if gain := _ratios(rows, "lut_constant", "lut_shared"):
        found.append(
            ("constant memory is the slower by more than 2x on every shape", min(gain.values()) > 2)
        )
    for table in ladder.TABLES:
        if ahead := _ratios(rows, table, PRODUCTION):
            found.append((f"production is faster than {table} everywhere", min(ahead.values()) > 1))
    return found


def draw(plate, fig) -> None:
    """Bars of GB/s per table, one panel per shape; the line is the read rate."""
    from .. import figure

    shapes = list(dict.fromkeys(r["shape"] for r in plate.rows))
    tables = [t for t in TABLES if t in {r["table"] for r in plate.rows}]
    ceiling = plate.card["read_rate"]["gb_s"]
    axes = cases.axes_grid(fig, 1, len(shapes))
    for ax, shape in zip(axes, shapes, strict=True):
        own = [r for r in plate.rows if r["shape"] == shape]
        for r in own:
            y = tables.index(r["table"])
            colour = "#D55E00" if r["table"] == PRODUCTION else "#0072B2"
            ax.barh(y, r["gb_s"], 0.62, color=colour)
            inside = r["gb_s"] > 0.55 * ceiling
            ax.annotate(
                f"{figure.number(r['gb_s'])} GB/s\n{figure.number(r['us'])} us", (r["gb_s"], y),
                (-6 if inside else 6, 0), textcoords="offset points", va="center",
                ha="right" if inside else "left", fontsize=11.5,
                color="white" if inside else figure.DARK,
                bbox=None if inside else {"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
        ax.axvline(ceiling, color=figure.DARK, linewidth=1.5)
        ax.set_xlim(0, 1.06 * ceiling)
        ax.set_title(f"{shape}\n{own[0]['rows']:,} x {own[0]['cols']:,}", loc="left")
        ax.set_xticks([0, 2000, 4000] if ceiling > 2500 else [0, 500, 1000])
    axes[0].set_yticks(range(len(tables)), tables)
    axes[0].set_ylim(len(tables) - 0.5, -0.5)
    for ax in axes:
        ax.set_xlabel("weights read [GB/s]", loc="left")
