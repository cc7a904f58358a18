"""The panel of toggles, without browser or kernel: walking a plate, measuring, saving it."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

if not all(map(importlib.util.find_spec, ("pandas", "ipywidgets"))):
    pytest.skip("pandas or ipywidgets is not installed (lab extra)", allow_module_level=True)

from test_page import on_cuda, toy_plate, use_toy

from decodev2.errors import BuildError, DecodeError
from decodev2.lab import experiments, page, plate, widgets


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return use_toy(tmp_path, monkeypatch)


@pytest.fixture
def toy(runs):
    return experiments.get("toy_sort")


@pytest.fixture
def shown(monkeypatch):
    """What `display` is given: (data, display_id, update)."""
    given = []

    def display(data, raw, display_id=None, update=False):
        assert raw
        given.append((data, display_id, update))

    monkeypatch.setattr(widgets, "display", display)
    return given


def without_gpu(toy, monkeypatch):
    monkeypatch.setattr(toy, "DEVICE", "cuda")
    monkeypatch.setattr(page, "cuda_is_there", lambda: False)


def press(panel, button="run"):
    getattr(panel, button).click()
    return said_of(panel)


def said_of(panel) -> str:
    """What the panel's error line says."""
    return re.sub("<[^>]*>", "", panel.error.value)


def controls(panel) -> list[str]:
    """Descriptions of every control that the panel shows."""

    def walk(widget):
        yield getattr(widget, "description", "")
        for child in getattr(widget, "children", ()):
            yield from walk(child)

    return [text for text in walk(panel.box) if text]


# ---- without a GPU: walking the plate ----


def test_a_toggle_walks_the_rows(runs, toy, monkeypatch):
    without_gpu(toy, monkeypatch)
    panel = widgets.panel("toy_sort", on_cuda(toy_plate()), size=20000)
    assert controls(panel) == ["size", "way"]  # nothing to press
    first = panel.table(), panel.figure()
    assert panel.status.value.startswith("size 20000, full sort: 2,000 us, 8.00 x the best<br>")
    assert "rows that compete: 2; recorded on Some GPU, 2026-01-02" in panel.status.value
    panel.boxes["way"].value = "heap"
    assert panel.status.value.startswith("size 20000, heap: 250 us, the best<br>")
    panel.boxes["size"].value = 500
    assert panel.status.value.startswith("size 500, heap: 20.0 us, the best<br>")
    for before, after in zip(first, (panel.table(), panel.figure()), strict=True):
        for mime in before:
            assert before[mime] != after[mime]


def test_the_chosen_row_and_only_it_is_marked(runs):
    panel = widgets.panel("toy_sort", toy_plate(), size=500, way="heap")
    for way in ("heap", "full sort"):
        panel.boxes["way"].value = way
        rows = panel.table()["text/html"].split("<tr")[2:]  # after the head's row
        marked = ["background" in row for row in rows]
        assert marked == [f">{way}<" in row for row in rows] and marked.count(True) == 1
        (chosen,) = (line for line in panel.table()["text/plain"].splitlines() if "chosen" in line)
        assert way in chosen


def test_combinations_that_the_plate_lacks_are_said(runs, toy, monkeypatch):
    without_gpu(toy, monkeypatch)
    panel = widgets.panel("toy_sort", on_cuda(toy_plate(rows=toy_plate().rows[:3])), way="heap")
    panel.boxes["size"].value = 20000
    assert panel.status.value.startswith("no row has these choices<br>rows that compete: 1")
    assert {"text/html", "text/plain"} == panel.table().keys() and "image/png" in panel.figure()
    small = widgets.panel("toy_sort", on_cuda(toy_plate(rows=toy_plate().rows[:2])))
    assert [value for _, value in small.boxes["size"].options] == [500]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"wey": "heap"}, "toggle 'wey' does not exist; did you mean 'way'?"),
        ({"way": "heep"}, "way 'heep' does not exist; did you mean 'heap'?"),
        ({"compare": ["ways"]}, "toggle 'ways' does not exist; did you mean 'way'?"),
    ],
)
def test_a_wrong_start_is_refused(runs, given, said):
    with pytest.raises(DecodeError) as caught:
        widgets.panel("toy_sort", toy_plate(), **given)
    assert said in str(caught.value)


def test_a_panel_starts_on_a_row_and_alike_with_and_without_a_gpu(runs, toy, monkeypatch):
    made = on_cuda(toy_plate(rows=toy_plate().rows[1:]))  # not the first choice of `way`
    live = widgets.panel("toy_sort", made)
    assert live.choices == {"size": 500, "way": "heap"}
    assert widgets.panel("toy_sort", made, size="20000").choices["way"] == "full sort"
    without_gpu(toy, monkeypatch)
    walked = widgets.panel("toy_sort", made)
    assert (walked.table(), walked.figure()) == (live.table(), live.figure())
    assert walked.status.value == live.status.value


def test_without_plate_and_device_there_is_no_panel(runs, toy, monkeypatch):
    without_gpu(toy, monkeypatch)
    with pytest.raises(DecodeError, match="no plate of toy_sort is recorded"):
        widgets.panel("toy_sort")


def test_an_experiment_without_toggles_has_no_panel(runs, toy, monkeypatch):
    monkeypatch.setattr(toy, "TOGGLES", {})
    with pytest.raises(DecodeError, match="toy_sort has no toggles"):
        widgets.panel("toy_sort", toy_plate())


def test_compare_names_what_competes(runs):
    panel = widgets.panel("toy_sort", toy_plate(), compare=["size"], size=20000, way="heap")
    assert panel.status.value.startswith("heap, size 20000: 250 us, 12.5 x the best")


def test_what_is_displayed_outlives_the_kernel(runs, shown):
    panel = widgets.panel("toy_sort", toy_plate())
    assert shown == []
    panel._ipython_display_()
    (view, _, _), (table, at_table, _), (figure, at_figure, _) = shown
    assert view.keys() == {widgets.VIEW} and at_table != at_figure
    assert table.keys() == {"text/html", "text/plain"}
    assert figure.keys() == {"image/png", "text/plain"}
    panel.boxes["way"].value = "heap"
    assert [(at, update) for _, at, update in shown[3:]] == [(at_table, True), (at_figure, True)]
    assert "heap" in shown[3][0]["text/plain"] and shown[3][0] != table


# ---- live ----


def test_run_measures_the_choices_and_appends(runs, toy, monkeypatch):
    asked = []
    measure = toy.measure
    monkeypatch.setattr(toy, "measure", lambda p, progress: asked.append(p) or measure(p, progress))
    recorded = toy_plate()
    panel = widgets.panel("toy_sort", recorded, way="heap")
    panel.runs.value = "4"
    assert press(panel) == ""
    assert asked == [recorded.params | {"sizes": [500], "ways": ["heap"], "runs": 4}]
    assert [(r["way"], r["runs"]) for r in panel.scratch.rows] == [("heap", 4)]
    assert "measured here on" in panel.status.value
    assert ": size 500, heap: 20.0 us, the best" in panel.status.value  # the recorded row beside it
    panel.boxes["way"].value = "full sort"
    assert panel.status.value.startswith("no row has these choices")
    assert press(panel) == ""
    assert [r["way"] for r in panel.scratch.rows] == ["heap", "full sort"]
    assert panel.scratch.params["ways"] == ["full sort", "heap"]
    assert "full sort" in panel.table()["text/plain"] and panel.base == recorded
    assert not runs.exists()  # nothing is written before it is asked for


def test_progress_and_words_are_shown_while_it_runs(runs, toy, monkeypatch):
    seen = []

    def measure(params, progress):
        progress(1, 4, "heap <of> 500")
        seen.append((panel.bar.value, panel.bar.max, panel.bar.layout.visibility))
        seen.append((panel.said.value, panel.run.disabled, panel.boxes["way"].disabled))
        assert not panel.runs.disabled  # a browser would drop what is being typed
        print("compiling\ncsrc (about a minute, once) ...")
        seen.append(panel.said.value)
        print("a warning", file=sys.stderr)
        seen.append(panel.said.value)
        raise BuildError("no compiler <here>")

    monkeypatch.setattr(toy, "measure", measure)
    panel = widgets.panel("toy_sort", toy_plate())
    assert press(panel) == "no compiler &lt;here&gt;"
    assert seen == [
        (1, 4, "visible"),
        ("1/4 heap &lt;of&gt; 500", True, True),
        "csrc (about a minute, once) ...",
        "a warning",
    ]
    assert panel.bar.layout.visibility == "hidden"
    assert not panel.run.disabled and not panel.boxes["way"].disabled


def test_without_a_plate_the_panel_waits_for_a_run(runs):
    panel = widgets.panel("toy_sort")
    assert panel.status.value == "Nothing is recorded yet: press Run."
    assert panel.table() == {"text/plain": "no rows yet"}
    assert press(panel) == ""
    assert "measured here" in panel.status.value and "image/png" in panel.figure()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("many", "parameter runs is &#x27;many&#x27;, needs a whole number"),
        ("", "parameter runs is &#x27;&#x27;, needs a whole number"),
        ("3.5", "parameter runs is &#x27;3.5&#x27;, needs a whole number"),
        ("0", "parameter runs is 0, needs at least 1"),
        ("-1", "parameter runs is -1, needs at least 1"),
    ],
)
def test_a_bad_value_is_said_at_once_and_the_panel_goes_on(runs, text, said):
    panel = widgets.panel("toy_sort", toy_plate())
    panel.runs.value = text
    assert said in panel.error.value
    assert press(panel) == said and panel.scratch is None
    panel.runs.value = "2"
    assert said not in panel.error.value
    assert press(panel) == "" and panel.scratch.rows[0]["runs"] == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DecodeError("gemv is off by 1e-1"), "gemv is off by 1e-1"),
        (ZeroDivisionError("division\nby zero"), "ZeroDivisionError: division by zero"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
)
def test_a_failed_run_is_said_and_keeps_the_rows(runs, toy, monkeypatch, error, said):
    panel = widgets.panel("toy_sort", toy_plate())
    assert press(panel) == ""
    before, measure = panel.scratch, toy.measure
    monkeypatch.setattr(toy, "measure", lambda *_: (_ for _ in ()).throw(error))
    assert press(panel) == said and panel.scratch == before
    monkeypatch.setattr(toy, "measure", measure)
    assert press(panel) == "" and len(panel.scratch.rows) == 2


def test_a_row_that_lint_would_refuse_is_not_taken(runs, toy, monkeypatch):
    measure = toy.measure

    def too_fast(params, progress):
        made = measure(params, progress)
        made.rows[0]["us"] = -1.0
        return made

    monkeypatch.setattr(toy, "measure", too_fast)
    panel = widgets.panel("toy_sort", toy_plate())
    assert "refused: row 0 us: -1.0 us is before the start" in press(panel)
    assert panel.scratch is None and panel.save.disabled


def test_changed_code_starts_a_new_scratch_plate(runs, monkeypatch):
    panel = widgets.panel("toy_sort", toy_plate())
    press(panel)
    code = panel.scratch.code | {"csrc": "0" * 12}
    monkeypatch.setattr("decodev2.lab.card.code_state", lambda *_: code)
    press(panel)
    assert len(panel.scratch.rows) == 1 and panel.scratch.code == code


def test_save_as_plate(runs):
    panel = widgets.panel("toy_sort", toy_plate())
    assert panel.save.disabled
    press(panel)
    panel.boxes["way"].value = "heap"
    press(panel)
    assert not panel.save.disabled
    assert press(panel, "save") == ""
    (path,) = plate.plate_paths(runs)
    assert path.name in panel.said.value and plate.lint(runs) == []
    made = plate.load(path)
    assert [r["way"] for r in made.rows] == ["full sort", "heap"]
    assert made.verdict.startswith("2 rows. size 500, heap: ")
    assert made.notes == ["measured from the panel of a page, choice by choice"]
    assert page.plate("toy_sort") == made


def test_save_falls_back_to_bars_when_the_figure_needs_more_rows(runs, toy, monkeypatch):
    monkeypatch.setattr(toy, "draw", lambda plate, fig: plate.rows[3])
    panel = widgets.panel("toy_sort", toy_plate())
    press(panel)
    assert press(panel, "save") == ""
    assert plate.load(*plate.plate_paths(runs)).figure["kind"] == "bars"
    assert plate.lint(runs) == []


def test_a_plate_that_cannot_be_saved_is_said(runs):
    panel = widgets.panel("toy_sort", toy_plate())
    press(panel)
    runs.write_text("a file where the folder should be")
    assert "Error: " in press(panel, "save")
    runs.unlink()
    assert press(panel, "save") == "" and plate.lint(runs) == []


def walkable() -> list[str]:
    """Experiments with toggles and a plate in the checkout."""
    folder = page.card.PROJECT / "runs"
    recorded = [name for name in experiments.names() if plate.plate_paths(folder / name)]
    return [name for name in recorded if getattr(experiments.get(name), "TOGGLES", None)]


@pytest.mark.parametrize("name", walkable())
def test_each_recorded_plate_can_be_walked(name, monkeypatch):
    """Every choice that a recorded plate holds leads to a table and a figure."""
    monkeypatch.delenv("DECODEV2_RUNS", raising=False)
    monkeypatch.setattr(page, "cuda_is_there", lambda: False)
    made = page.plate(name)
    panel = widgets.panel(name, made)
    for column, box in panel.boxes.items():
        assert box.options, f"{column} has no choice that the plate holds"
        for _, value in box.options:
            box.value = value
            assert said_of(panel) == "" and panel.table()["text/html"]
    assert "image/png" in panel.figure()


@pytest.mark.skipif(not page.cuda_is_there(), reason="no CUDA device")
@pytest.mark.parametrize(
    "name, start",
    [("nr_sweep", {"shape": "k_proj", "nr": "2"}), ("gemv_shapes", {"shape": "q_proj"}),
     ("fusion", {"op": "qkv"}), ("attention", {"length": "100"})],
)  # fmt: skip
def test_run_measures_on_a_gpu(name, start, tmp_path, monkeypatch):
    made = page.plate(name)
    monkeypatch.setenv("DECODEV2_RUNS", str(tmp_path))
    panel = widgets.panel(name, made, **start)
    panel.runs.value = "3"
    assert press(panel) == "" and panel.scratch.rows
    assert all(page.agrees(row, panel.choices) for row in panel.scratch.rows)
    assert press(panel, "save") == "" and len(plate.plate_paths(tmp_path)) == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
