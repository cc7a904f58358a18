"""What the pages of the workbook (notebooks/) call: a plate, its table, figure, claims and verdict.

    made = page.plate("gemv_shapes", MODE, shapes=SHAPES)
    page.table(made, ["shape", "us", "share"], where={"kernel": "gemv"})
    page.draw(made)

With MODE "replay" a page shows recorded plates and runs anywhere; with "measure" it makes new ones.
Plates lie in $DECODEV2_RUNS, or in the checkout's runs/. What is displayed depends on the plate
alone, so a fresh run of a page can be compared with the committed one.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas

from ..errors import DecodeError
from . import card, commands, experiments
from . import figure as figures
from . import plate as plates
from .plate import Plate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES = ("replay", "measure")
LAB_LOG = "lab_log"  # the plate that transcribes the lab log of the old card
TIME_UNITS = ("us", "ms", "s", "ns")
SAME_WORK = 0.02  # floors differ by this much with the read rate, which is measured each time
INLINE_COLOURS = 64  # a palette makes a figure on a page a third of the plate's PNG
# What a column's name repeats of its unit; the header says it once.
_UNIT_WORDS = {
    "GB/s": "gb_s", "tok/s": "tok_s", "us": "us", "ms": "ms", "s": "s", "ns": "ns", "MB": "mb",
    "GB": "gb", "GiB": "gib", "MiB": "mib", "KiB": "kib",
}  # fmt: skip


def runs_dir() -> Path:
    """Where plates are read and written: $DECODEV2_RUNS, or the checkout's runs/."""
    return Path(os.environ.get("DECODEV2_RUNS") or card.PROJECT / "runs")


def no_such(what: str, name: object, known: Iterable[object]) -> DecodeError:
    """The error for a name that is not among `known`: it tells the nearest, or all there are."""
    words = [str(word) for word in known]
    near = difflib.get_close_matches(str(name), words, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(words) or 'none'}"
    return DecodeError(f"{what} {name!r} does not exist; {hint}")


def cuda_is_there() -> bool:
    """Can kernels run on a CUDA device of this machine?"""
    import torch

    return torch.cuda.is_available()


# ---- the plate of a page ----


def plate(name: str, mode: str = "replay", **params) -> Plate:
    """The plate of experiment `name`: the newest recorded one ("replay") or a new one ("measure").

    `params` are parameters of the experiment. A new plate is measured with them (defaults for the
    rest), saved, drawn and indexed. A recorded one is taken from a CUDA card if there is one, and
    then made with these values if there is one; a line is printed where its values differ. Raises
    DecodeError for another mode, an unknown or mistyped parameter, or a missing plate or device.
    """
    if mode not in MODES:
        raise DecodeError(f"MODE is {mode!r}, needs 'replay' or 'measure'")
    if mode == "measure":
        return _measure(name, complete(name, params))
    if params or name in experiments.names():
        complete(name, params)
    made = plates.load(_recorded(name, params))
    given = plates.clean(params)
    differ = [key for key, value in given.items() if made.params.get(key) != value]
    for key in differ:
        print(f"replay: this plate was measured with {key} = {made.params.get(key)!r}")
    return made


def complete(name: str, given: dict) -> dict:
    """Every parameter of experiment `name`: `given`, checked, and defaults for the rest."""
    known = experiments.get(name).PARAMS
    values = {key: default for key, (default, _) in known.items()}
    for key, value in given.items():
        if key not in known:
            raise no_such(f"{name}: parameter", key, known)
        values[key] = _typed(key, value, values[key])
    return values


def _typed(key: str, value: object, default: object) -> object:
    """`value` as the command line would give it, whose values have the default's type."""
    if isinstance(default, list) and isinstance(value, list | tuple):
        text = bool(default) and all(isinstance(item, str) for item in default)
        return [str(item) for item in value] if text else list(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is type(default):
        return value
    what = {bool: "true or false", int: "a whole number", float: "a number", list: "a list"}
    raise DecodeError(f"parameter {key} is {value!r}, needs {what.get(type(default), 'a text')}")


def _recorded(name: str, params: dict) -> Path:
    """Path of the plate that `plate(name, "replay", **params)` shows."""
    given = plates.clean(params)
    folders = dict.fromkeys((runs_dir(), card.PROJECT / "runs"))
    for folder in folders:  # the checkout's plates stand in for what a folder of one's own lacks
        ranked = []
        for path in plates.plate_paths(folder / name):
            made = plates.load(path)
            same = all(made.params.get(key) == value for key, value in given.items())
            ranked.append((made.card["device"] == "cuda", same, made.created, path))
        if ranked:
            return max(ranked)[-1]
    experiments.get(name)  # an unknown name gets the better error
    raise DecodeError(f"no plate of {name} is recorded; MODE = 'measure' makes one")


def _measure(name: str, params: dict) -> Plate:
    if experiments.get(name).DEVICE == "cuda" and not cuda_is_there():
        raise DecodeError(
            f"{name} needs a CUDA device and torch finds none; MODE = 'replay' shows its plate"
        )
    with _line(name) as progress:
        made = commands.record(name, params, progress)
    path = plates.save(made, runs_dir())
    plates.draw(path)
    plates.index(runs_dir())
    return plates.load(path)  # plain values, as a recorded plate has them


@contextlib.contextmanager
def _line(name: str):
    """One line below the cell that says how far the run is."""
    from IPython.display import display

    def show(text: str) -> dict:
        return {"text/plain": f"{name}: {text}"}

    handle = display(show("starts"), raw=True, display_id=True)

    def report(done: int, total: int, text: str) -> None:
        if handle:
            handle.update(show(f"{done}/{total} {text}"), raw=True)

    yield report


# ---- tables ----


class Table(pandas.DataFrame):
    """A DataFrame shown in full and without its row numbers, whatever pandas' options are."""

    def __repr__(self) -> str:
        with pandas.option_context("display.max_colwidth", None):
            return self.to_string(index=False, max_rows=None, max_cols=None)

    def _repr_html_(self) -> str:
        with pandas.option_context("display.max_colwidth", None):
            return self.to_html(index=False, border=0, max_rows=None, max_cols=None)


def table(
    plate: Plate,
    columns: list[str] | None = None,
    where: dict[str, object] | None = None,
    sort: str | None = None,
) -> Table:
    """Rows of a plate as texts with sensible digits, units in the header; "-" is a missing value.

    `columns` picks and orders columns. `where` keeps rows whose column has the value, or one of a
    list of values. `sort` is a column, "-column" for largest first. Raises DecodeError for an
    unknown column, or a value that no row has.
    """
    units = {column["name"]: column["unit"] for column in plate.columns}
    for name in [*(columns or ()), *(where or ()), *([sort.removeprefix("-")] if sort else ())]:
        if name not in units:
            raise no_such(f"{plate.experiment}: column", name, units)
    rows = sorted_rows(matching(plate.rows, where or {}), sort)
    names = columns or list(units)
    cells = {header(n, units[n]): [cell(row[n], units[n]) for row in rows] for n in names}
    return Table(cells)


def matching(rows: list[dict], where: dict[str, object]) -> list[dict]:
    """Rows whose columns have the values of `where`. Raises DecodeError for one that no row has."""
    for name, wanted in where.items():
        values = list(wanted) if isinstance(wanted, list | tuple | set) else [wanted]
        there = list(dict.fromkeys(row[name] for row in rows))
        for value in values:
            if value not in there:
                raise no_such(f"{name}", value, there)
        rows = [row for row in rows if row[name] in values]
    return rows


def sorted_rows(rows: list[dict], by: str | None) -> list[dict]:
    """Rows by a column ("-column": largest first), those without a value last."""
    if not by:
        return rows
    name = by.removeprefix("-")
    known = [row for row in rows if row[name] is not None]
    known.sort(key=lambda row: row[name], reverse=by.startswith("-"))
    return known + [row for row in rows if row[name] is None]


def header(name: str, unit: str) -> str:
    """A column's heading: us_best in us -> "best [us]", gb_s in GB/s -> "rate [GB/s]"."""
    words = name
    if ending := _UNIT_WORDS.get(unit):
        words = "_".join(part for part in f"_{name}_".split(f"_{ending}_") if part).strip("_")
        words = words or ("time" if unit in TIME_UNITS else "rate" if "/s" in unit else "size")
    words = words.replace("_", " ")
    said = unit in ("", "1") or words.split()[-1] == unit  # as in "new tokens"
    return words if said else f"{words} [{unit}]"


def cell(value: object, unit: str) -> str:
    """A value for people: three significant digits, "-" for a missing one."""
    if value is None:
        return "-"
    if unit == "" or isinstance(value, str | bool):
        return str(value)
    return figures.number(value)


# ---- figure, claims, verdict, the old card ----


def draw(plate: Plate) -> Figure:
    """The plate's figure as its experiment draws it; a page shows it at 1200 x 700 pixels."""
    if plate.figure is None:
        raise DecodeError(f"a plate of {plate.experiment} has no figure")
    fig = figures.figure(plate)

    def show() -> None:
        from IPython.display import display

        # matplotlib's own inline display would crop the margins and so change the size
        display({"image/png": png(fig), "text/plain": f"Figure: {plate.title}"}, raw=True)

    fig._ipython_display_ = show
    return fig


def png(fig: Figure) -> str:
    """Base64 of a figure's PNG with a small palette: a page keeps its outputs, so they are small.

    The figure is drawn again in the style of plates.
    """
    import base64

    import matplotlib.style
    import numpy as np
    from PIL import Image

    with matplotlib.style.context(["default", str(figures.STYLE)]):
        fig.canvas.draw()
    image = Image.fromarray(np.ascontiguousarray(np.asarray(fig.canvas.buffer_rgba())[..., :3]))
    image = image.quantize(
        INLINE_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    )
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def claims(plate: Plate) -> Table:
    """What must hold on every run of the experiment, and whether it does on this plate.

    From the experiment's `claims(plate) -> list of (text, bool)`; the texts hold no times.
    """
    module = experiments.get(plate.experiment)
    if not hasattr(module, "claims"):
        raise DecodeError(f"experiment {plate.experiment} makes no claims")
    pairs = [(text, bool(holds)) for text, holds in module.claims(plate)]
    return Table(pairs, columns=["claim", "holds"])


def verdict(plate: Plate) -> None:
    """Show what the plate predicted and found, on which card and when, and which plate it is."""
    from IPython.display import display

    rate = plate.card["read_rate"]["gb_s"]
    facts = [machine(plate), *([f"reads {figures.number(rate)} GB/s"] if rate else [])]
    facts += [plate.created[:10], f"{plate.experiment}/{plates.file_name(plates.clean(plate))}"]
    lines = [
        f"**Predicted.** {plate.prediction}",
        f"**Found.** {plate.verdict}",
        f"*{', '.join(facts)}*",
    ]
    text = "\n\n".join(lines)
    display({"text/markdown": text.replace("$", r"\$"), "text/plain": text}, raw=True)


def machine(plate: Plate) -> str:
    """Name of the device that a plate's numbers were measured on."""
    return (
        plate.card["gpu"]["name"] if plate.card["device"] == "cuda" else plate.card["cpu"]["model"]
    )


def old_card(*numbers: int | str) -> Table:
    """Rows of the lab log of the old card (RTX 3080), by their numbers: old_card(7, "3b")."""
    made = plates.load(_recorded(LAB_LOG, {}))
    number = made.columns[0]["name"]
    rows = {str(row[number]): row for row in made.rows}
    wanted = [str(n) for n in numbers] or list(rows)
    for n in wanted:
        if n not in rows:
            raise no_such("row of the lab log", n, rows)
    units = {column["name"]: column["unit"] for column in made.columns}
    return Table(
        {header(n, unit): [cell(rows[w][n], unit) for w in wanted] for n, unit in units.items()}
    )


# ---- which columns say what a row is ----


def key_columns(plate: Plate, first: Iterable[str] = ()) -> list[str]:
    """Columns that tell the rows of a plate apart: `first`, then texts, then whole numbers.

    Columns are added until no two rows are equal, so results are taken only when nothing else
    helps; rows that were measured twice stay equal.
    """
    units = {column["name"]: column["unit"] for column in plate.columns}
    keys = [name for name in first if name in units]

    def kinds(names: list[str]) -> int:
        return len({tuple(str(row[name]) for name in names) for row in plate.rows})

    texts = [n for n, unit in units.items() if unit == "" and n not in keys]
    whole = [
        n for n, unit in units.items()
        if unit not in ("", "runs") and "/" not in unit and unit not in TIME_UNITS
        and n not in keys and all(isinstance(row[n], int) for row in plate.rows)
    ]  # fmt: skip
    for name in texts + whole:
        if kinds(keys) == len(plate.rows):
            break
        if kinds([*keys, name]) > kinds(keys):
            keys.append(name)
    return keys


def main_column(plate: Plate) -> tuple[str, str, bool]:
    """(name, unit, is less better?) of what the plate's bars show, else of its first time, else of
    its first rate, else of a number."""
    if value := (plate.figure or {}).get("value"):
        (unit,) = [column["unit"] for column in plate.columns if column["name"] == value]
        return value, unit, not unit.endswith("/s")
    columns = [(c["name"], c["unit"]) for c in plate.columns if not c["name"].startswith("floor")]
    for name, unit in columns:
        if unit in TIME_UNITS:
            return name, unit, True
    for name, unit in columns:
        if unit.endswith("/s"):
            return name, unit, False
    for plain in (False, True):  # a plain number only when there is nothing else
        for name, unit in columns:
            if unit not in ("", "runs") and (unit != "1" or plain):
                return name, unit, True
    raise DecodeError(f"a plate of {plate.experiment} has no column to compare")


# ---- one row beside those that do the same work ----


def contest(
    plate: Plate, choices: dict[str, object], compare: Iterable[str] | None = None
) -> Plate:
    """The plate cut down to the rows that do the chosen work, each beside the best of them.

    `choices` holds one value for each column that can be chosen; of these, the columns `compare`
    compete (left out: `same_work`) and the others are held. If none can compete, shares of the
    floor are compared. Rows that differ in a column beyond `choices` do not compete. Rows gain
    `choices` (what they are), `is` ("chosen", "best") and `to_best` (how many times the best's
    time); the verdict is about the chosen rows, one line each.
    """
    ways = same_work(plate, choices) if compare is None else list(compare)
    share = not ways and any(column["name"] == "share" for column in plate.columns)
    name, unit, less = ("share", "%", False) if share else main_column(plate)
    held = {} if share else {c: value for c, value in choices.items() if c not in ways}
    keys = key_columns(plate, choices)
    full = [*held, *(key for key in keys if key not in held)]
    work = [key for key in keys if key not in choices]
    chosen = {tuple(row[key] for key in work) for row in plate.rows if agrees(row, choices)}
    rows = [
        row for row in plate.rows
        if agrees(row, held) and (not chosen or tuple(row[key] for key in work) in chosen)
    ]  # fmt: skip
    best: dict[tuple, dict] = {}
    for row in sorted_rows(rows, name if less else f"-{name}"):
        best.setdefault(tuple(row[key] for key in work), row)
    out, lines = [], []
    for row in rows:
        top = best[tuple(row[key] for key in work)]
        a, b = (row[name], top[name]) if less else (top[name], row[name])
        ratio = a / b if a and b else None
        words = ["chosen"] * agrees(row, choices) + ["best"] * (row is top and bool(ratio))
        label = _label(row, full[len(held) :] or full)
        out.append({"choices": label, "is": ", ".join(words), "to_best": ratio} | row)
        if ratio is None:
            out[-1]["to_best_reason"] = row.get(f"{name}_reason", "nothing to compare with")
        if "chosen" in words:
            lines.append(f"{_label(row, full)}: {_beside(out[-1], name, unit)}")
    what = header(name, unit).split(" [")[0]
    figure = {"kind": "bars", "value": name, "label": "choices", "also": ["to_best"],
              "axis": f"{what} (blue: chosen, green: best)"}  # fmt: skip
    if {f"{name}_best", f"{name}_worst"} <= {column["name"] for column in plate.columns}:
        figure |= {"low": f"{name}_best", "high": f"{name}_worst"}
    added = [{"name": n, "unit": u} for n, u in (("choices", ""), ("is", ""), ("to_best", "x"))]
    verdict = "\n".join(lines) or "no row has these choices"
    return replace(plate, rows=out, columns=added + plate.columns, verdict=verdict, figure=figure)


def _label(row: dict, keys: list[str]) -> str:
    """What a row is: "lm_head, nr 4". A number or a switch says little without its name."""
    words = {key: f"{key} {row[key]}" for key in keys}
    texts = (key for key in keys if isinstance(row[key], str) and not _bare(row[key]))
    return ", ".join((words | {key: row[key] for key in texts}).values())


def _bare(text: str) -> bool:
    return text.lower() in ("on", "off", "yes", "no", "true", "false") or text[:1].isdigit()


def agrees(row: dict, choices: dict[str, object]) -> bool:
    """Has the row these values? As texts: a list on the command line holds texts only."""
    return all(str(row[column]) == str(value) for column, value in choices.items())


def same_work(plate: Plate, columns: Iterable[str]) -> list[str]:
    """Those columns whose choices leave the work to do as it is: tokens, else the floor, else MB.

    A plate must show it: rows that differ in nothing but the column. Without any of the three
    columns all choices count as ways to do one work.
    """
    names = [column["name"] for column in plate.columns]
    floors = [name for name in names if name.startswith("floor")]
    amount = next((name for name in ("tokens", *floors, "mb") if name in names), None)
    keys = key_columns(plate, columns)

    def keeps_work(column: str) -> bool:
        seen: dict[tuple, list[float]] = {}
        for row in plate.rows:
            others = tuple(str(row[key]) for key in keys if key != column)
            if row[amount]:
                seen.setdefault(others, []).append(row[amount])
        groups = [group for group in seen.values() if len(group) > 1]
        return bool(groups) and all(max(g) <= min(g) * (1 + SAME_WORK) for g in groups)

    return [column for column in columns if amount is None or keeps_work(column)]


def _beside(row: dict, name: str, unit: str) -> str:
    if row[name] is None:
        return row["to_best_reason"]
    value = figures.number(row[name]) + f" {unit}" * (unit != "1")
    if row["to_best"] is None:
        return value
    times = "the best" if "best" in row["is"] else f"{figures.number(row['to_best'])} x the best"
    return f"{value}, {times}"
