"""Plates: one recorded result each, as a JSON file, with the figure drawn from it.

    runs/<experiment>/<card slug>-<YYYYMMDD>-<hash8>.json    the plate; hash8 is over its contents
    runs/<experiment>/<the same>.png                         a pure function of that JSON

`save` refuses a plate that `lint` would refuse, so a wrong number is an error on the day it is
measured. A value that a run could not produce is `Missing(why)`: null with the reason beside it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import numbers
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

from ..errors import PlateError

# 1  2026-11: first.
SCHEMA = 1

CEILING_SLACK = 0.02  # of the measured read rate: two honest measurements differ by this much
PRODUCT_TOLERANCE = 1e-3  # of rate x time = amount: the three are written from one run
INDEX_NAME = "README.md"


@dataclass(frozen=True)
class Missing:
    """A value that could not be measured, and why. Saved as null plus `<name>_reason`."""

    reason: str


@dataclass(frozen=True)
class Measured:
    """What an experiment returns.

    columns: [{"name", "unit"}, ...] in display order. `unit` is "" for text, "1" for plain numbers.
      A "GB/s" column is checked against the card's read rate unless it has "unbounded": why not.
    rows: one dict per case with exactly the columns' names (plus `<name>_reason` beside a null).
    figure: None, or what `figure.bars` draws; {"kind": "own"} when the experiment has `draw`.
    card: `card.card(...)` of the run, when it measured the read rate itself; else made afterwards.
    """

    columns: list[dict]
    rows: list[dict]
    verdict: str
    figure: dict | None = None
    notes: list[str] = field(default_factory=list)
    card: dict | None = None


@dataclass(frozen=True)
class Plate:
    """One recorded result. `created` is UTC, ISO 8601 with seconds. See `Measured` for the rest."""

    experiment: str
    title: str
    question: str
    prediction: str
    verdict: str
    card: dict
    params: dict
    columns: list[dict]
    rows: list[dict]
    code: dict
    figure: dict | None = None
    notes: list[str] = field(default_factory=list)
    created: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    )
    schema: int = SCHEMA


# ---- JSON, strictly ----


def clean(value: object, where: str = "plate") -> object:
    """Plain JSON values of `value`. NaN and infinities become null, with a `<key>_reason` beside.

    NumPy scalars and arrays, tuples, dataclasses and dates are converted; a Path gives its last
    part only (plates hold no folders). Raises PlateError for anything else, naming the place.
    """
    if isinstance(value, Mapping):
        return _clean_dict(value, where)
    if is_dataclass(value) and not isinstance(value, type | Missing):
        return _clean_dict({f.name: getattr(value, f.name) for f in fields(value)}, where)
    if hasattr(value, "tolist") and getattr(value, "ndim", 0):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [clean(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, bool) or _reason(value):
        return None if _reason(value) else value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Path):
        return value.name
    if isinstance(value, datetime.date):
        return value.isoformat()
    if hasattr(value, "item") and not isinstance(value, numbers.Number):  # 0-d array, numpy.bool
        return clean(value.item(), where)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise PlateError(f"{where} is a {type(value).__name__}; a plate holds plain values only")


def _clean_dict(value: Mapping, where: str) -> dict:
    out = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise PlateError(f"{where} has the key {key!r}; needs text keys")
        out[key] = clean(item, f"{where}.{key}")
    for key, item in value.items():
        if (reason := _reason_within(item)) and not out.get(f"{key}_reason"):
            out[f"{key}_reason"] = reason
    return out


def _reason(value: object) -> str | None:
    """Why a scalar cannot be a JSON number, or None if it can."""
    if isinstance(value, Missing):
        return value.reason
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        if math.isnan(value):
            return "not a number (NaN)"
        if math.isinf(value):
            return "not finite (infinity)" if value > 0 else "not finite (minus infinity)"
    return None


def _reason_within(item: object) -> str | None:
    """The reason of a scalar, or of the first bad entry of a (nested) list or array."""
    if hasattr(item, "tolist") and not isinstance(item, numbers.Number):
        item = item.tolist()
    if isinstance(item, list | tuple):
        for index, entry in enumerate(item):
            if reason := _reason_within(entry):
                return f"entry {index}: {reason}"
        return None
    return _reason(item)


def dumps(value: object) -> str:
    """Canonical text of plain values: sorted keys, one space of indent, no NaN, final new line."""
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, indent=1, ensure_ascii=False)
        text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise PlateError(f"not JSON: {error}") from None
    return text + "\n"


def parse(text: str) -> object:
    """JSON with what Python lets through refused: NaN, Infinity, 1e999 and doubled keys."""

    def refuse(constant: str):
        raise PlateError(f"holds the constant {constant}, which is not JSON; needs null")

    def finite(digits: str) -> float:
        number = float(digits)
        return number if math.isfinite(number) else refuse(digits)

    def once(pairs: list) -> dict:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            doubled = next(key for key in keys if keys.count(key) > 1)
            raise PlateError(f"holds the key {doubled!r} twice")
        return dict(pairs)

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=once)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlateError(f"not valid JSON ({error})") from None


def content_hash(value: object) -> str:
    """64 hex digits over the canonical text of a plate, its dict, or what `parse` gave."""
    return hashlib.sha256(dumps(clean(value)).encode()).hexdigest()


# ---- save and load ----


def save(plate: Plate, runs_dir: str | Path) -> Path:
    """Write a plate under `runs_dir` and return its path. Raises PlateError if `lint` would refuse.

    A unique temporary file is renamed into place: readers see the whole plate or none.
    """
    value = clean(plate)
    if found := problems(value):
        raise PlateError(f"plate {plate.experiment!r} is not saved: {found[0]}")
    path = Path(runs_dir) / value["experiment"] / file_name(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, dumps(value).encode())
    return path


def file_name(value: dict) -> str:
    """<card slug>-<YYYYMMDD>-<hash8>.json of a plate's dict."""
    date = value["created"][:10].replace("-", "")
    return f"{value['card']['slug']}-{date}-{content_hash(value)[:8]}.json"


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside `path` under a name of its own, then rename. Nothing is left after a failure."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: str | Path) -> Plate:
    """Read one plate. Raises PlateError, naming the file, unless strict JSON of this schema."""
    return _plate(_read(Path(path)), Path(path))


def _read(path: Path) -> object:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlateError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise PlateError(f"{path}: not UTF-8 text ({error.reason})") from None
    except PlateError as error:
        raise PlateError(f"{path}: {error}") from None


def _plate(value: object, path: Path) -> Plate:
    if found := _shape_problems(value):
        raise PlateError(f"{path}: {found[0]}")
    return Plate(**value)


def plate_paths(runs_dir: str | Path) -> list[Path]:
    """Every plate below `runs_dir`, sorted by path."""
    return sorted(p for p in Path(runs_dir).rglob("*.json") if not p.name.startswith("."))


def latest(runs_dir: str | Path, experiment: str, slug: str | None = None) -> Path | None:
    """The newest plate of an experiment (on the card `slug`, if given), or None."""
    plates = [(load(p), p) for p in plate_paths(Path(runs_dir) / experiment)]
    dated = [(p.created, path) for p, path in plates if slug in (None, p.card["slug"])]
    return max(dated)[1] if dated else None


# ---- lint ----

_TYPES = {
    "schema": int,
    "experiment": str,
    "title": str,
    "question": str,
    "prediction": str,
    "verdict": str,
    "created": str,
    "card": dict,
    "params": dict,
    "columns": list,
    "rows": list,
    "code": dict,
    "figure": dict | None,
    "notes": list,
}
_CARD_KEYS = ("device", "slug", "cpu", "gpu", "os", "versions", "read_rate")
_CODE_KEYS = ("commit", "dirty", "csrc", "package", "depends")
_ABSOLUTE_PATH = re.compile(r"(?:^|[\s'\"=:(,])(?:/[\w.+-]+){2,}|(?:^|\W)[A-Za-z]:\\|(?:^|\s)~/")


def lint(path: str | Path) -> list[str]:
    """Everything wrong with a plate file, or with all plates (and the index) below a folder.

    One line each, starting with the file. An empty list means clean. Needs Pillow for the figures.
    """
    path = Path(path)
    if not path.exists():
        return [f"{path}: no such file or folder"]
    if path.is_file():
        return [f"{path}: {problem}" for problem in _file_problems(path)]
    found = [line for plate_path in plate_paths(path) for line in lint(plate_path)]
    for png in sorted(path.rglob("*.png")):
        if not png.with_suffix(".json").exists():
            found.append(f"{png}: no plate of that name; a figure is drawn from one")
    found += [f"{left}: left over from an interrupted run" for left in sorted(path.rglob(".*.tmp"))]
    index_path = path / INDEX_NAME
    if index_path.exists() and not found:
        if index_path.read_text(encoding="utf-8") != index_text(path):
            found.append(f"{index_path}: does not list these plates; write the index again")
    return found


def _file_problems(path: Path) -> list[str]:
    try:
        value = _read(path)
    except PlateError as error:
        return [str(error).removeprefix(f"{path}: ")]
    found = problems(value)
    if found:
        return found
    if path.read_text(encoding="utf-8") != dumps(value):
        found.append("is not in canonical form (sorted keys, one space of indent)")
    if path.name != file_name(value):
        found.append(f"is named otherwise than its contents say: {file_name(value)}")
    if path.parent.name != value["experiment"]:
        found.append(f"is not in a folder named {value['experiment']!r}")
    return found + _png_problems(path.with_suffix(".png"), value)


def _png_problems(png: Path, value: dict) -> list[str]:
    if value["figure"] is None:
        return [f"{png.name} exists, but the plate has no figure"] if png.exists() else []
    if not png.exists():
        return [f"{png.name} is missing; draw it"]
    from .figure import SIZE_PX, png_facts

    try:
        facts = png_facts(png)
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for a bad PNG
        return [f"{png.name} is not a readable PNG ({error})".replace(str(png), png.name)]
    found = []
    if facts["plate"] != content_hash(value):
        found.append(f"{png.name} was drawn from other contents; draw it again")
    if facts["pixels"] != facts["pixels_found"]:
        found.append(f"{png.name} was changed after it was drawn; draw it again")
    if facts["size"] != SIZE_PX:
        found.append(f"{png.name} is {facts['size']} pixels, needs {SIZE_PX}")
    return found


def problems(value: object) -> list[str]:
    """What is wrong with a plate's parsed JSON, apart from its file and figure."""
    found = _shape_problems(value)
    if found:
        return found
    for name in ("experiment", "title", "question", "prediction", "verdict"):
        if not value[name].strip():
            found.append(f"{name} is empty")
    if not re.fullmatch(r"[a-z0-9_]+", value["experiment"]):
        found.append(f"experiment {value['experiment']!r} is no module name")
    try:
        datetime.datetime.strptime(value["created"], "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        found.append(f"created is {value['created']!r}, needs UTC like 2026-01-31T12:00:00Z")
    found += _card_problems(value["card"]) + _code_problems(value["code"])
    columns = _column_problems(value["columns"])
    found += columns
    if not columns:
        found += _row_problems(value) + _figure_problems(value)
    found += [f"{where} holds an absolute path" for where in _paths_within(value, "plate")]
    return found


def _shape_problems(value: object) -> list[str]:
    """Is it an object with exactly the schema's fields, of the schema's types?"""
    if not isinstance(value, dict):
        return [f"is a {type(value).__name__}, needs one JSON object"]
    if value.get("schema") != SCHEMA or isinstance(value["schema"], bool):
        return [f"schema is {value.get('schema')!r}, this version knows {SCHEMA}"]
    found = [f"{name} is missing" for name in _TYPES if name not in value]
    found += [f"{name} is no field of a plate" for name in value if name not in _TYPES]
    for name, kind in _TYPES.items():
        if name in value and not isinstance(value[name], kind):
            found.append(f"{name} is a {type(value[name]).__name__}")
    if not found and not all(isinstance(note, str) for note in value["notes"]):
        found.append("notes holds something other than text")
    return found


def _card_problems(card: dict) -> list[str]:
    found = [f"card.{key} is missing" for key in _CARD_KEYS if key not in card]
    if found:
        return found
    if not isinstance(card["slug"], str) or not re.fullmatch(r"[a-z0-9-]+", card["slug"]):
        found.append(f"card.slug is {card['slug']!r}, needs lower case, digits and dashes")
    if card["device"] not in ("cpu", "cuda"):
        found.append(f"card.device is {card['device']!r}, needs 'cpu' or 'cuda'")
    if card["device"] == "cuda" and not card["gpu"]:
        found.append("card.gpu is null on a CUDA plate")
    rate = card["read_rate"]
    if not isinstance(rate, dict) or "gb_s" not in rate:
        return [*found, "card.read_rate.gb_s is missing"]
    if rate["gb_s"] is None:
        if not rate.get("gb_s_reason"):
            found.append("card.read_rate.gb_s is null without a reason")
    elif not _is_number(rate["gb_s"]) or rate["gb_s"] <= 0:
        found.append(f"card.read_rate.gb_s is {rate['gb_s']!r}, needs a positive number")
    return found


def _code_problems(code: dict) -> list[str]:
    found = [f"code.{key} is missing" for key in _CODE_KEYS if key not in code]
    for key in ("commit", "dirty", "csrc", "package"):
        if key in code and code[key] is None and not code.get(f"{key}_reason"):
            found.append(f"code.{key} is null without a reason")
    depends = code.get("depends")
    if depends is not None and (not isinstance(depends, dict) or "hash" not in depends):
        found.append("code.depends.hash is missing")
    return found


def _column_problems(columns: list) -> list[str]:
    found, seen = [], set()
    if not columns:
        return ["columns is empty"]
    for column in columns:
        if not isinstance(column, dict) or not isinstance(column.get("name"), str):
            found.append(f"column {column!r} has no name")
            continue
        name = column["name"]
        if name in seen:
            found.append(f"column {name!r} is there twice")
        seen.add(name)
        if not isinstance(column.get("unit"), str):
            found.append(f"column {name!r} has no unit (text has the unit '')")
        if extra := set(column) - {"name", "unit", "unbounded"}:
            found.append(f"column {name!r} has the unknown key {min(extra)!r}")
        if "unbounded" in column and not (
            isinstance(column["unbounded"], str) and column["unbounded"].strip()
        ):
            found.append(f"column {name!r}: unbounded needs the reason as text")
    return found


def _row_problems(value: dict) -> list[str]:
    if not value["rows"]:
        return ["rows is empty"]
    found = []
    names = [column["name"] for column in value["columns"]]
    for index, row in enumerate(value["rows"]):
        if not isinstance(row, dict):
            found.append(f"row {index} is a {type(row).__name__}, needs an object")
            continue
        found += [f"row {index} lacks {name!r}" for name in names if name not in row]
        for name in row:
            base = name.removesuffix("_reason")
            if name not in names and (base == name or base not in names or row[base] is not None):
                found.append(f"row {index} has {name!r}, which is no column")
        for column in value["columns"]:
            if column["name"] in row:
                problem = _cell_problem(row, column, value["card"])
                found += [f"row {index} {column['name']}: {problem}"] if problem else []
        found += [f"row {index} {problem}" for problem in _product_problems(row)]
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell_problem(row: dict, column: dict, card: dict) -> str | None:
    cell, unit = row[column["name"]], column["unit"]
    if cell is None:
        reason = row.get(f"{column['name']}_reason")
        told = isinstance(reason, str) and reason.strip()
        return None if told else "null without a reason beside it"
    if not unit:
        return "a number without a unit" if _is_number(cell) else None
    if not _is_number(cell):
        return f"{cell!r} in a column of {unit}"
    if unit.endswith("/s") and cell <= 0 and not column["name"].endswith("_std"):
        return f"{cell!r} {unit} is a failed run, not a rate; needs null and a reason"
    if unit in ("s", "ms", "us", "ns") and cell < 0:
        return f"{cell!r} {unit} is before the start"
    if unit == "GB/s" and "unbounded" not in column and isinstance(card.get("read_rate"), dict):
        ceiling = card["read_rate"].get("gb_s")
        if not _is_number(ceiling):
            return "cannot be checked: the card has no measured read rate"
        if cell > ceiling * (1 + CEILING_SLACK):
            return f"{cell:.1f} GB/s is above the card's measured {ceiling:.1f} GB/s"
    return None


def _product_problems(row: dict) -> list[str]:
    """Rates must be amounts over times, and medians lie between best and worst.

    By name, for each prefix `P_` (or none) whose parts are there: `P_tok_s` x `P_s` = `P_tokens`,
    `P_gb_s` x `P_s` = `P_bytes`, `P_gb_s` = `P_tok_s` x `P_bytes_per_token`.
    """
    number = {name: cell for name, cell in row.items() if _is_number(cell)}
    found = []
    for name in number:
        for ending, amount, unit in (("tok_s", "tokens", 1.0), ("gb_s", "bytes", 1e-9)):
            if name != ending and not name.endswith(f"_{ending}"):
                continue
            prefix = name.removesuffix(ending)
            seconds = number.get(f"{prefix}s", number.get(f"{prefix}ms", math.nan))
            seconds *= 1.0 if f"{prefix}s" in number else 1e-3
            done = number.get(f"{prefix}{amount}", math.nan)
            if _differ(number[name] * seconds, done * unit):
                found.append(f"{name}: {number[name]:g} x {seconds:g} s is not {done:g} {amount}")
            if ending == "gb_s":
                per_token = number.get(f"{prefix}bytes_per_token", math.nan)
                tokens = number.get(f"{prefix}tok_s", math.nan)
                if _differ(number[name], tokens * per_token * 1e-9):
                    found.append(f"{name}: is not {tokens:g} tok/s x {per_token:g} bytes")
        best, worst = number.get(f"{name}_best"), number.get(f"{name}_worst")
        if best is not None and worst is not None:
            if not min(best, worst) <= number[name] <= max(best, worst):
                found.append(f"{name}: {number[name]:g} is not between best and worst")
    return found


def _differ(a: float, b: float) -> bool:
    """Do two numbers differ by more than rounding? An absent one (NaN) differs from nothing."""
    return abs(a - b) > PRODUCT_TOLERANCE * max(abs(a), abs(b))


def _figure_problems(value: dict) -> list[str]:
    figure = value["figure"]
    if figure is None or figure.get("kind") == "own":
        return []
    from .figure import bars_problems

    return [f"figure: {problem}" for problem in bars_problems(figure, value["columns"])]


def _paths_within(value: object, where: str):
    if isinstance(value, str) and _ABSOLUTE_PATH.search(value):
        yield where
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _paths_within(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _paths_within(item, f"{where}[{index}]")


# ---- figure and index ----


def draw(path: str | Path) -> Path | None:
    """Draw the figure of a saved plate beside it; None if the plate has no figure."""
    path = Path(path)
    plate = load(path)
    if plate.figure is None:
        return None
    from .figure import png_bytes

    png = path.with_suffix(".png")
    write_atomic(png, png_bytes(plate, content_hash(plate)))
    return png


def index(runs_dir: str | Path) -> Path:
    """Write `runs_dir`/README.md: one line per plate, the same bytes for the same plates."""
    path = Path(runs_dir) / INDEX_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, index_text(runs_dir).encode())
    return path


def index_text(runs_dir: str | Path) -> str:
    """The index as Markdown: experiments by name, newest plate first."""
    plates = [(load(path), path) for path in plate_paths(runs_dir)]
    plates.sort(key=lambda pair: pair[1].as_posix())
    plates.sort(key=lambda pair: pair[0].created, reverse=True)
    plates.sort(key=lambda pair: pair[0].experiment)
    lines = ["# Plates", "", "Generated from the plates in this folder; do not edit by hand.", ""]
    if not plates:
        return "\n".join([*lines, "No plate yet."]) + "\n"
    lines += ["| experiment | question | card | date | predicted | verdict | files |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for plate, path in plates:
        link = path.relative_to(runs_dir).as_posix()
        files = f"[plate]({link})"
        if plate.figure is not None:
            files += f" [figure]({link.removesuffix('.json')}.png)"
        texts = (plate.question, plate.card["slug"], plate.created[:10], plate.prediction)
        cells = [plate.experiment, *texts, plate.verdict]
        lines.append("| " + " | ".join([*map(_cell_text, cells), files]) + " |")
    return "\n".join(lines) + "\n"


def _cell_text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
