"""Plates: strict JSON, atomic files, tampering found, figures that are a function of the JSON."""

from __future__ import annotations

import copy
import datetime
import json
import os
import shutil
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from decodev2.errors import PlateError
from decodev2.lab import experiments, figure, plate
from decodev2.lab.plate import Missing, Plate

CARD = {
    "device": "cpu",
    "slug": "toy-cpu-2t",
    "cpu": {"model": "Toy CPU", "threads_used": 2},
    "gpu": None,
    "os": "Linux",
    "versions": {"python": "3.11.0"},
    "read_rate": {"gb_s": 40.0, "method": "given"},
}
CODE = {
    "commit": "0123456789abcdef",
    "dirty": False,
    "csrc": "aaaaaaaaaaaa",
    "package": "bbbbbbbbbbbb",
    "depends": {"patterns": [], "files": [], "hash": None},
}
COLUMNS = [
    {"name": "model", "unit": ""},
    {"name": "executor", "unit": ""},
    {"name": "tokens", "unit": "tokens"},
    {"name": "s", "unit": "s"},
    {"name": "tok_s", "unit": "tok/s"},
    {"name": "tok_s_best", "unit": "tok/s"},
    {"name": "tok_s_worst", "unit": "tok/s"},
    {"name": "bytes_per_token", "unit": "B"},
    {"name": "gb_s", "unit": "GB/s"},
    {"name": "ceiling", "unit": "tok/s"},
]
FIGURE = {
    "kind": "bars",
    "value": "tok_s",
    "label": "executor",
    "group": "model",
    "low": "tok_s_worst",
    "high": "tok_s_best",
    "mark": "ceiling",
    "mark_text": "read rate / bytes",
    "also": ["gb_s"],
}


def row(model: str, executor: str, tok_s: float, size: float) -> dict:
    return {
        "model": model,
        "executor": executor,
        "tokens": 64,
        "s": 64 / tok_s,
        "tok_s": tok_s,
        "tok_s_best": tok_s * 1.04,
        "tok_s_worst": tok_s * 0.97,
        "bytes_per_token": size,
        "gb_s": tok_s * size * 1e-9,
        "ceiling": 40e9 / size,
    }


def make(**changes) -> Plate:
    rows = [
        row(model, executor, base * factor, size)
        for model, size, base in (("small", 76e6, 200.0), ("large", 262e6, 70.0))
        for executor, factor in (("decodev2", 1.0), ("tokenloop", 0.3))
    ]
    values = {
        "experiment": "toy_decode",
        "title": "Toy decode",
        "question": "How fast?",
        "prediction": "Half of the ceiling.",
        "verdict": "As predicted.",
        "card": copy.deepcopy(CARD),
        "params": {"runs": 5},
        "columns": copy.deepcopy(COLUMNS),
        "rows": rows,
        "code": copy.deepcopy(CODE),
        "figure": dict(FIGURE),
        "created": "2026-01-31T12:00:00Z",
    }
    return Plate(**(values | changes))


def strict(text: str) -> object:
    """As a JavaScript or jq reader sees it."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def saved_with_figure(folder: Path, **changes) -> Path:
    path = plate.save(make(**changes), folder)
    plate.draw(path)
    return path


# ---- E1: what is not a number is null with a reason ----


@pytest.mark.parametrize(
    "value, words",
    [
        (float("nan"), "NaN"),
        (float("inf"), "infinity"),
        (-float("inf"), "minus infinity"),
        (np.float32("nan"), "NaN"),
        (np.float64("inf"), "infinity"),
        (np.float16("nan"), "NaN"),
        (np.array(float("nan")), "NaN"),
        (Missing("0 tokens were made"), "0 tokens were made"),
    ],
)
def test_a_failed_value_is_null_with_its_reason(tmp_path, value, words):
    rows = make().rows
    rows[0] |= {"tok_s": value, "gb_s": Missing("no rate")}
    path = plate.save(make(rows=rows), tmp_path)
    read = strict(path.read_text())["rows"][0]
    assert read["tok_s"] is None
    assert words in read["tok_s_reason"]
    assert read["gb_s_reason"] == "no rate"
    plate.draw(path)
    assert plate.lint(path) == []


def test_a_given_reason_is_kept():
    cleaned = plate.clean({"x": float("nan"), "x_reason": "the device was lost"})
    assert cleaned == {"x": None, "x_reason": "the device was lost"}


def test_nan_deep_inside_is_found_and_explained():
    value = {"a": [{"b": (1.0, np.nan)}], "c": np.array([[1.0, 2.0], [np.inf, 0.0]])}
    cleaned = strict(plate.dumps(plate.clean(value)))
    assert cleaned["a"] == [{"b": [1.0, None], "b_reason": "entry 1: not a number (NaN)"}]
    assert cleaned["c"] == [[1.0, 2.0], [None, 0.0]]
    assert cleaned["c_reason"] == "entry 1: entry 0: not finite (infinity)"


def test_numpy_torch_and_other_scalars_become_plain():
    import torch

    value = {
        "i": np.int64(7),
        "u": np.uint8(255),
        "f": np.float32(0.5),
        "l": np.longdouble(0.25),
        "b": np.bool_(True),
        "s": np.str_("text"),
        "a": np.arange(3, dtype=np.int16),
        "t": torch.tensor(3),
        "v": torch.tensor([0.5, 1.5]),
        "p": Path("some") / "folder" / "file.chr",
        "d": datetime.date(2026, 1, 31),
        "n": None,
        "k": (1, 2),
    }
    cleaned = plate.clean(value)
    assert cleaned == {
        "i": 7, "u": 255, "f": 0.5, "l": 0.25, "b": True, "s": "text", "a": [0, 1, 2],
        "t": 3, "v": [0.5, 1.5], "p": "file.chr", "d": "2026-01-31", "n": None, "k": [1, 2],
    }  # fmt: skip
    assert type(cleaned["i"]) is int
    assert type(cleaned["f"]) is float
    assert type(cleaned["l"]) is float
    assert type(cleaned["b"]) is bool
    assert type(cleaned["s"]) is str
    assert strict(plate.dumps(cleaned)) == cleaned


@pytest.mark.parametrize("value", [1 + 2j, object(), {1, 2}, b"bytes"])
def test_other_values_are_refused_by_place(value):
    with pytest.raises(PlateError, match=r"params\.odd\[1\] is a "):
        plate.clean({"odd": [0, value]}, "params")


def test_keys_must_be_text():
    with pytest.raises(PlateError, match="the key 1"):
        plate.clean({1: 2})


def test_a_bare_null_is_refused(tmp_path):
    rows = make().rows
    rows[1]["s"] = None
    with pytest.raises(PlateError, match=r"row 1 s: null without a reason"):
        plate.save(make(rows=rows), tmp_path)
    assert list(tmp_path.rglob("*.*")) == []


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_the_reader_refuses_what_is_not_json(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(f'{{"schema": {text}}}')
    with pytest.raises(PlateError, match=r"bad\.json: holds the constant"):
        plate.load(path)
    assert len(plate.lint(path)) == 1


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "not valid JSON"),
        (b'{"schema": 1', "not valid JSON"),
        (b"[1]", "is a list"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"schema": 1, "schema": 1}', "'schema' twice"),
        (b'{"schema": 2}', "schema is 2"),
        (b'{"schema": true}', "schema is True"),
        (b"{}", "schema is None"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_damaged_files_give_one_line(tmp_path, data, words):
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(PlateError) as error:
        plate.load(path)
    assert words in str(error.value)
    assert "bad.json" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(plate.lint(path)) == 1


def test_no_such_file(tmp_path):
    with pytest.raises(PlateError, match="No such file"):
        plate.load(tmp_path / "absent.json")
    assert plate.lint(tmp_path / "absent.json") == [
        f"{tmp_path / 'absent.json'}: no such file or folder"
    ]


# ---- save and load ----


def test_round_trip_and_name(tmp_path):
    made = make(notes=["read twice"], title="Größe | µs")
    path = plate.save(made, tmp_path)
    assert path.parent == tmp_path / "toy_decode"
    stem, date, digest = path.stem.rsplit("-", 2)
    assert (stem, date) == ("toy-cpu-2t", "20260131")
    assert digest == plate.content_hash(made)[:8]
    assert plate.load(path) == made
    text = path.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def test_saving_twice_gives_one_file_and_another_value_another_name(tmp_path):
    first, again = plate.save(make(), tmp_path), plate.save(make(), tmp_path)
    other = plate.save(make(verdict="Not as predicted."), tmp_path)
    assert first == again
    assert plate.plate_paths(tmp_path) == sorted([first, other])


def test_created_is_now_in_utc():
    values = make().__dict__ | {}
    del values["created"]
    made = datetime.datetime.strptime(Plate(**values).created, "%Y-%m-%dT%H:%M:%SZ")
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    assert abs((now - made).total_seconds()) < 60


@pytest.mark.parametrize("broken", ["os.replace", "os.fsync"])
def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch, broken):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(broken, fail)
    with pytest.raises(OSError, match="disk full"):
        plate.save(make(), tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "kept.txt"
    plate.write_atomic(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        plate.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_at_once_leave_one_whole_plate(tmp_path):
    made, errors = make(), []

    def write():
        try:
            for _ in range(5):
                plate.load(plate.save(made, tmp_path))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == plate.plate_paths(tmp_path)
    assert len(plate.plate_paths(tmp_path)) == 1


def test_latest_by_date_then_card(tmp_path):
    for created in ("2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z", "2026-01-01T00:00:00Z"):
        plate.save(make(created=created), tmp_path)
    other = plate.save(
        make(created="2026-01-02T00:00:00Z", card=CARD | {"slug": "other"}), tmp_path
    )
    assert "20260301" in plate.latest(tmp_path, "toy_decode").name
    assert plate.latest(tmp_path, "toy_decode", "other") == other
    assert plate.latest(tmp_path, "toy_decode", "absent") is None
    assert plate.latest(tmp_path, "absent") is None


# ---- lint: each kind of tampering is found ----


def change(value: dict, where: str, new: object) -> None:
    *path, last = where.split("/")
    for key in path:
        value = value[int(key) if isinstance(value, list) else key]
    key = int(last) if isinstance(value, list) else last
    if new is DELETE:
        del value[key]
    else:
        value[key] = new


DELETE = object()
NO_PREDICTION = ("prediction", DELETE)
TAMPERING = [
    ("schema", 99, "schema is 99"),
    (*NO_PREDICTION, "prediction is missing"),
    ("verdict", " ", "verdict is empty"),
    ("verdict", 3, "verdict is a int"),
    ("extra", 1, "extra is no field"),
    ("experiment", "Toy Decode", "no module name"),
    ("notes", [1], "notes holds"),
    ("created", "yesterday", "created is 'yesterday'"),
    ("created", "2026-02-30T12:00:00Z", "created is"),
    ("card/read_rate", DELETE, "card.read_rate is missing"),
    ("card/read_rate/gb_s", None, "null without a reason"),
    ("card/read_rate/gb_s", -1.0, "needs a positive number"),
    ("card/read_rate/gb_s", "40", "needs a positive number"),
    ("card/device", "tpu", "card.device is 'tpu'"),
    ("card/device", "cuda", "card.gpu is null on a CUDA plate"),
    ("card/slug", "../up", "card.slug is"),
    ("code/csrc", None, "code.csrc is null without a reason"),
    ("code/commit", None, "code.commit is null without a reason"),
    ("code/dirty", None, "code.dirty is null without a reason"),
    ("code/depends", DELETE, "code.depends is missing"),
    ("code/depends", {}, "code.depends.hash is missing"),
    ("columns", [], "columns is empty"),
    ("columns/3/unit", "", "a number without a unit"),
    ("columns/3/unit", DELETE, "has no unit"),
    ("columns/0/unit", "tok/s", "in a column of tok/s"),
    ("columns/3/name", "tok_s", "'tok_s' is there twice"),
    ("columns/3/colour", "red", "unknown key 'colour'"),
    ("columns/8/unbounded", "", "unbounded needs the reason"),
    ("columns/3/name", "seconds", "row 0 lacks 'seconds'"),
    ("rows", [], "rows is empty"),
    ("rows/0", [1], "row 0 is a list"),
    ("rows/1/s", DELETE, "row 1 lacks 's'"),
    ("rows/1/note", "hello", "'note', which is no column"),
    ("rows/1/s_reason", "no need", "'s_reason', which is no column"),
    ("rows/1/s", None, "row 1 s: null without a reason"),
    ("rows/1/s", True, "True in a column of s"),
    ("rows/1/s", "0.1", "'0.1' in a column of s"),
    ("rows/1/s", -0.1, "before the start"),
    ("rows/2/tok_s", 80.0, "is not 64 tokens"),
    ("rows/2/tokens", 63, "is not 63 tokens"),
    ("rows/2/tok_s", 0.0, "a failed run, not a rate"),
    ("rows/2/tok_s_worst", 71.0, "not between best and worst"),
    ("rows/2/gb_s", 20.0, "tok/s x 2.62e+08 bytes"),
    ("rows/2/gb_s", 41.0, "above the card's measured 40.0 GB/s"),
    ("card/read_rate/gb_s", 15.0, "above the card's measured 15.0 GB/s"),
    ("card/read_rate", {"gb_s": None, "gb_s_reason": "x"}, "cannot be checked"),
    ("figure/value", "absent", "value names 'absent'"),
    ("figure/label", "absent", "label names 'absent'"),
    ("figure/also", ["absent"], "also names 'absent'"),
    ("figure/value", "model", "no numeric column"),
    ("figure/kind", "pie", "kind is 'pie'"),
    ("figure/low", DELETE, "low and high go together"),
    ("figure/value", DELETE, "value is missing"),
    ("figure/scale", "cubic", "scale is 'cubic'"),
    ("figure/floor", "low", "floor is 'low'"),
    ("figure/colour", "red", "colour is no key"),
    ("params/models", "/home/somebody/models", "plate.params.models holds an absolute path"),
    ("notes", ["see C:\\runs\\old"], "notes[0] holds an absolute path"),
    # Nothing above is wrong with these two, but the file is not what its name says.
    ("verdict", "Better than predicted.", "named otherwise than its contents say"),
    ("card/slug", "other-cpu", "named otherwise than its contents say"),
]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """A clean plate with its figure, drawn once; copy its folder before changing anything."""
    path = saved_with_figure(tmp_path_factory.mktemp("drawn"))
    assert plate.lint(path) == []
    return path


@pytest.mark.parametrize("where, new, words", TAMPERING)
def test_lint_finds_tampering(tmp_path, drawn, where, new, words):
    shutil.copytree(drawn.parent, tmp_path / drawn.parent.name)
    path = tmp_path / drawn.parent.name / drawn.name
    value = json.loads(path.read_text())
    change(value, where, new)
    path.write_text(plate.dumps(value))
    found = plate.lint(path)
    assert any(words in line for line in found), found
    assert all(line.startswith(f"{path}: ") and "\n" not in line for line in found)
    assert plate.lint(tmp_path) == found


# Not those that no Plate can be made of, nor the last two, which are sound contents.
SAVEABLE = [case for case in TAMPERING[:-2] if case[0] != "extra" and case[:2] != NO_PREDICTION]


@pytest.mark.parametrize("where, new, words", SAVEABLE)
def test_save_refuses_what_lint_refuses(tmp_path, where, new, words):
    value = plate.clean(make())
    change(value, where, new)
    with pytest.raises(PlateError):
        plate.save(Plate(**value), tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_gb_s_is_checked_against_time_too():
    good = {"gb_s": 10.0, "s": 2.0, "bytes": 20e9}
    assert plate._product_problems(good) == []
    assert len(plate._product_problems(good | {"bytes": 21e9})) == 1
    assert plate._product_problems({"a_gb_s": 10.0, "a_ms": 2000.0, "a_bytes": 20e9}) == []
    assert len(plate._product_problems({"a_gb_s": 10.0, "a_ms": 2.0, "a_bytes": 20e9})) == 1


def test_unbounded_columns_may_beat_the_read_rate(tmp_path):
    columns = copy.deepcopy(COLUMNS)
    rows = [row("small", "decodev2", 1000.0, 76e6)]
    with pytest.raises(PlateError, match="above the card's measured"):
        plate.save(make(rows=rows, columns=columns), tmp_path)
    columns[8]["unbounded"] = "stays in the L3 cache"
    plate.save(make(rows=rows, columns=columns), tmp_path)


def test_lint_wants_canonical_text_and_the_right_folder(tmp_path):
    path = saved_with_figure(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("\n", "\r\n"), newline="")
    assert plate.lint(path) == []  # a checkout may translate line ends
    path.write_text(json.dumps(json.loads(text)))
    assert any("canonical" in line for line in plate.lint(path))
    path.write_text(text)
    moved = tmp_path / "elsewhere"
    path.parent.rename(moved)
    assert any("not in a folder named" in line for line in plate.lint(moved / path.name))


def test_lint_of_a_folder_finds_strays(tmp_path):
    path = saved_with_figure(tmp_path)
    plate.index(tmp_path)
    assert plate.lint(tmp_path) == []
    stray = path.with_name("stray.png")
    stray.write_bytes(path.with_suffix(".png").read_bytes())
    left = path.with_name(f".{path.name}.0.tmp")
    left.write_text("half")
    found = plate.lint(tmp_path)
    assert any("stray.png: no plate of that name" in line for line in found)
    assert any("left over" in line for line in found)
    assert len(found) == 2


# ---- the figure ----


def test_the_same_plate_gives_the_same_png(tmp_path):
    first = saved_with_figure(tmp_path / "a").with_suffix(".png").read_bytes()
    second = saved_with_figure(tmp_path / "b").with_suffix(".png").read_bytes()
    assert first == second
    assert b"matplotlib" not in first.lower()
    assert b"tIME" not in first


def test_the_png_does_not_depend_on_the_users_settings(tmp_path):
    import matplotlib

    first = saved_with_figure(tmp_path / "a").with_suffix(".png").read_bytes()
    odd = {
        "font.size": 30,
        "figure.dpi": 50,
        "axes.prop_cycle": matplotlib.cycler(color=["r"]),
        "axes.linewidth": 5,  # not in the style file
        "text.hinting": "none",  # looked up when drawn
    }
    with matplotlib.rc_context(odd):
        second = saved_with_figure(tmp_path / "b").with_suffix(".png").read_bytes()
    assert first == second


def test_another_plate_gives_another_png(tmp_path):
    first = saved_with_figure(tmp_path).with_suffix(".png").read_bytes()
    second = saved_with_figure(tmp_path, verdict="Not so.").with_suffix(".png").read_bytes()
    assert first != second


def test_the_png_is_1200_by_700_and_not_blank(tmp_path):
    from PIL import Image

    with Image.open(saved_with_figure(tmp_path).with_suffix(".png")) as image:
        assert image.size == (1200, 700)
        colours = dict((colour, n) for n, colour in image.convert("RGB").getcolors(1 << 20))
    assert colours[(255, 255, 255)] > 0.5 * 1200 * 700
    # Both series, in the first two colours of the style's cycle.
    assert colours[(0x00, 0x72, 0xB2)] > 5000
    assert colours[(0xE6, 0x9F, 0x00)] > 2000


def test_lint_wants_a_fresh_untouched_png(tmp_path):
    from PIL import Image, PngImagePlugin

    path = saved_with_figure(tmp_path)
    png = path.with_suffix(".png")
    good = png.read_bytes()

    png.unlink()
    assert plate.lint(path) == [f"{path}: {png.name} is missing; draw it"]

    other = saved_with_figure(tmp_path / "other", verdict="Not so.").with_suffix(".png")
    png.write_bytes(other.read_bytes())
    assert plate.lint(path) == [f"{path}: {png.name} was drawn from other contents; draw it again"]

    png.write_bytes(good)
    with Image.open(png) as image:
        image.load()
        info = PngImagePlugin.PngInfo()
        for key, text in image.text.items():
            info.add_text(key, text)
        image.putpixel((600, 350), (255, 0, 0))
        image.save(png, pnginfo=info)
    assert plate.lint(path) == [f"{path}: {png.name} was changed after it was drawn; draw it again"]

    png.write_bytes(good[: len(good) // 2])
    assert [line for line in plate.lint(path) if "not a readable PNG" in line]
    png.write_bytes(b"no picture")
    assert [line for line in plate.lint(path) if "not a readable PNG" in line]

    plate.draw(path)
    assert png.read_bytes() == good
    assert plate.lint(path) == []


def test_a_plate_without_figure_has_no_png(tmp_path):
    path = plate.save(make(figure=None), tmp_path)
    assert plate.draw(path) is None
    assert plate.lint(path) == []
    path.with_suffix(".png").write_bytes(b"left over")
    assert plate.lint(path) == [f"{path}: {path.stem}.png exists, but the plate has no figure"]


@pytest.mark.parametrize(
    "block",
    [
        {"kind": "bars", "value": "tok_s", "label": "executor", "group": "model", "scale": "log"},
        {"kind": "bars", "value": "tok_s", "label": "model", "floor": 30.0, "floor_text": "floor"},
        {"kind": "bars", "value": "tok_s", "label": "executor", "also": ["model", "gb_s"]},
    ],
)
def test_other_bar_figures_draw(tmp_path, block):
    rows = make().rows
    rows[1] |= {"tok_s": Missing("did not run"), "gb_s": Missing("did not run")}
    assert plate.lint(saved_with_figure(tmp_path, figure=block, rows=rows)) == []


def test_a_figure_says_what_was_found_and_where(tmp_path):
    fig = figure.figure(make())
    texts = [t.get_text() for t in (*fig.texts, *fig.axes[0].texts)]
    words = "\n".join(texts)
    for needed in ("Toy decode", "As predicted.", "Toy CPU, 2 threads", "40.0 GB/s", "012345678"):
        assert needed in words
    assert "[tok/s]" in fig.axes[0].get_xlabel()
    assert any("200 tok/s, 15.2 GB/s" in text for text in texts)


@pytest.mark.parametrize(
    "verdict, whole",
    [
        ("As predicted.", True),
        ("As predicted: " + "the same, " * 12 + "here.", True),
        ("Not as predicted: " + "a clause of a few words; " * 40 + "the end.", False),
        ("One sentence of words. " * 40, False),
        ("WWWW MMMM " * 60, False),
        ("word\nword " * 200, False),
    ],
)
@pytest.mark.parametrize("panels", [0, 1, 3])
def test_the_words_around_a_drawing_keep_clear_of_it(monkeypatch, verdict, whole, panels):
    """Whatever their length, and however many axes an experiment's own drawing has."""

    def draw(made, fig):
        for ax in fig.subplots(2, panels, squeeze=False).ravel():
            ax.set_title("W" * 15, loc="left")
            ax.set_xlabel("time [us]")

    if panels:
        monkeypatch.setattr(experiments, "get", lambda name: types.SimpleNamespace(draw=draw))
        block = {"kind": "own"}
    else:
        block = FIGURE | {"floor": 30.0, "floor_text": "the floor"}
    made = make(figure=block, verdict=verdict, title="A title of some words " * 5)
    fig = figure.figure(made)
    (found,) = (t for t in fig.texts if t not in (fig._suptitle, fig._supxlabel))
    lines = found.get_text().split("\n")
    assert len(lines) <= 3
    assert (" ".join(lines) == " ".join(verdict.split())) == whole
    assert whole or (lines[-1].endswith("…") and "; …" not in lines[-1])
    title, below = (t.get_window_extent() for t in (fig._suptitle, fig._supxlabel))
    words = found.get_window_extent()
    width, height = figure.SIZE_PX
    assert max(title.x1, words.x1, below.x1) < width and title.y1 < height and below.y0 > 0
    assert title.y0 > words.y1
    for ax in fig.axes:
        box = ax.get_tightbbox()
        assert below.y1 < box.y0 and box.y1 < words.y0 and 0 < box.x0 and box.x1 < width
    left, right = fig.axes[0].get_position(), fig.axes[-1].get_position()
    assert right.x1 - left.x0 > 0.8 and left.y1 - right.y0 > 0.4


@pytest.mark.parametrize(
    "text, lines, shown",
    [
        ("", 1, [""]),
        ("one two three four", 1, ["one two …"]),
        ("one two three four", 2, ["one two", "three four"]),
        ("one. two three four", 1, ["one. …"]),
        ("one; two three four", 1, ["one …"]),
        ("one. two; three four", 1, ["one. two …"]),
        ("one two three four", None, ["one two", "three four"]),
        ("more-than-a-line. one", 2, ["more-than-a-line.", "one"]),
        ("more-than-a-line. one", 1, ["more-than-a-line."]),
    ],
)
def test_a_text_is_cut_where_it_makes_sense(text, lines, shown):
    assert figure.fitted(text, len, 10, lines) == shown


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (0.0, "0"), (1234, "1,234"), (1234.5, "1,234"), (56.74, "56.7"), (0.0892, "0.0892")],
)
def test_numbers_for_people(value, text):
    assert figure.number(value) == text


# ---- the index ----


def test_the_index_lists_plates_and_goes_stale(tmp_path):
    old = saved_with_figure(tmp_path, created="2025-01-31T12:00:00Z", verdict="One | two\nthree")
    new = saved_with_figure(tmp_path)
    text = plate.index(tmp_path).read_text()
    assert text.index(new.name) < text.index(old.name)
    assert "One \\| two three" in text
    assert f"[figure](toy_decode/{new.stem}.png)" in text
    assert plate.index(tmp_path).read_text() == text
    assert plate.lint(tmp_path) == []
    (tmp_path / "README.md").write_text(text + "and one by hand\n")
    assert len(plate.lint(tmp_path)) == 1
    plate.index(tmp_path)
    new.unlink()
    new.with_suffix(".png").unlink()
    assert ["does not list these plates" in line for line in plate.lint(tmp_path)] == [True]


def test_the_index_of_nothing(tmp_path):
    assert "No plate yet" in plate.index(tmp_path / "runs").read_text()
    assert plate.lint(tmp_path) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
