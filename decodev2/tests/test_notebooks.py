"""The notebooks: form and numbers as committed, and how pages are run, remade and compared.

`notebooks.problems` says what is wrong with a page; every rule in it is broken here once on
purpose, on a small page of this file's own. The values themselves are compared by `pytest --nbval`,
and the tests at the end see to it that such a run notices one altered digit and needs no installed
kernel of any name.
"""

import copy
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_page import toy_plate, use_toy, write_toy

from decodev2 import cli
from decodev2.errors import DecodeError
from decodev2.lab import notebooks, plate
from decodev2.lab.notebooks import MAX_BYTES, MAX_CODE_CELLS, MAX_LINES, code_cells, load, texts

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SANITIZE = FOLDER / "sanitize.cfg"

needs_kernel = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel", "ipywidgets"))),
    reason="nbclient, ipykernel or ipywidgets is not installed (the lab extra brings them)",
)
needs_nbval = pytest.mark.skipif(
    not (importlib.util.find_spec("nbval") and importlib.util.find_spec("ipywidgets")),
    reason="nbval or ipywidgets is not installed (the test extra brings both)",
)


# ---- the pages as committed ----


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_page(path):
    assert notebooks.problems(path) == [], notebooks.REMAKE


def test_committed_folder():
    names = [path.name for path in NOTEBOOKS]
    assert names and names[0].startswith("00_")
    assert [line for line in notebooks.folder_problems(FOLDER) if "named" in line] == []
    assert len({name[:2] for name in names}) == len(names), "two notebooks share a number"


# ---- a page of our own ----


def markdown(name: str, text: str, **metadata) -> dict:
    return {"cell_type": "markdown", "id": name, "metadata": metadata, "source": text}


def code(name: str, text: str, *tags: str) -> dict:
    metadata = {"tags": list(tags)} if tags else {}
    return {"cell_type": "code", "id": name, "metadata": metadata, "source": text,
            "execution_count": None, "outputs": []}  # fmt: skip


def write_page(path: Path, experiments: Path) -> None:
    """The page as somebody wrote it: without outputs, with an editor's metadata."""
    imports = (
        "from decodev2.lab import experiments, page, widgets\n\n"
        f"experiments.__path__.append({str(experiments)!r})"
    )
    cells = [
        markdown("title", "# Sorting\n\n**Question.** Does a heap beat a full sort?", editor="x"),
        code("parameters", 'MODE = "replay"\nRUNS = 3', "parameters"),
        code("imports", imports, "nbval-ignore-output"),
        markdown(
            "predicted", "## Prediction\n\nAt 500 numbers the heap takes half: 15 us for 30 us."
        ),
        code("plate", 'made = page.plate("toy_sort", MODE, runs=RUNS)\npage.table(made)'),
        code("figure", "page.draw(made)"),
        code("claims", "page.claims(made)", "fact"),
        code("panel", 'widgets.panel("toy_sort", made, size=20000)'),
        code("verdict", "page.verdict(made)"),
        markdown("learned", "## What we learned\n\nThe heap took 20.0 us, the sort 40.0 us."),
    ]
    metadata = {"kernelspec": {"name": "lab-env", "display_name": "Lab", "language": "python"}}
    text = json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def workbook(tmp_path_factory):
    """A folder with notebooks/00_sort.ipynb, remade, its plate in runs/ and its experiment."""
    if not all(map(importlib.util.find_spec, ("nbclient", "ipykernel", "ipywidgets"))):
        pytest.skip("nbclient, ipykernel or ipywidgets is not installed")
    folder = tmp_path_factory.mktemp("workbook")
    with pytest.MonkeyPatch.context() as patch:
        runs = use_toy(folder, patch)
        plate.draw(plate.save(toy_plate(), runs))
        plate.index(runs)
        write_page(folder / "notebooks" / "00_sort.ipynb", write_toy(folder))
        notebooks.remake([folder / "notebooks" / "00_sort.ipynb"])
    return folder


@pytest.fixture
def page_path(workbook, tmp_path, monkeypatch):
    """Path of a copy of the page that a test may spoil; plates go to tmp_path / "runs"."""
    use_toy(tmp_path, monkeypatch)
    for name in ("notebooks", "runs"):
        shutil.copytree(workbook / name, tmp_path / name)
    return tmp_path / "notebooks" / "00_sort.ipynb"


def change(path: Path, action) -> None:
    """Apply `action` to the notebook in a file."""
    notebook = load(path)
    action(notebook)
    path.write_text(json.dumps(notebook), encoding="utf-8")


def by_id(notebook: dict, name: str) -> dict:
    return next(cell for cell in notebook["cells"] if cell["id"] == name)


# ---- each rule of the form, broken once ----


def _code(index):
    return lambda notebook: code_cells(notebook)[index]


def _save_widgets(notebook):
    notebook["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}


def _save_view(notebook):
    data = {notebooks.WIDGET_VIEW: {"model_id": "a1"}, "text/plain": ["VBox()"]}
    output = {"output_type": "display_data", "data": data, "metadata": {}}
    by_id(notebook, "panel")["outputs"].append(output)


def _name_my_kernel(notebook):
    notebook["metadata"]["kernelspec"]["name"] = "lab-env"


def _keep_python_version(notebook):
    notebook["metadata"]["language_info"]["version"] = "3.11.7"


def _keep_cell_times(notebook):
    _code(3)(notebook)["metadata"]["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}


def _untag_parameters(notebook):
    by_id(notebook, "parameters")["metadata"].pop("tags")


def _tag_parameters_twice(notebook):
    _code(-1)(notebook)["metadata"]["tags"] = ["parameters"]


def _add_unused_parameter(notebook):
    by_id(notebook, "parameters")["source"] += ["\n", "MAX_SEQQ = 32"]


def _move_parameters(notebook):
    cells = notebook["cells"]
    cells[1], cells[2] = cells[2], cells[1]


def _commit_measure(notebook):
    by_id(notebook, "parameters")["source"] = ['MODE = "measure"\n', "RUNS = 3"]


def _put_mode_second(notebook):
    by_id(notebook, "parameters")["source"] = ["RUNS = 3\n", 'MODE = "replay"']


def _claim_nothing(notebook):
    by_id(notebook, "claims")["metadata"] = {}


def _shuffle(notebook):
    cells = notebook["cells"]
    places = [i for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
    a, b = places[3], places[4]
    cells[a], cells[b] = cells[b], cells[a]


def _run_twice(notebook):
    for cell in code_cells(notebook):
        cell["execution_count"] += len(code_cells(notebook))


def _strip_counts(notebook):
    for cell in code_cells(notebook):
        cell["execution_count"] = None


def _strip_outputs(notebook):
    for cell in code_cells(notebook):
        cell["outputs"] = []


def _ignore_all(notebook):
    for cell in code_cells(notebook)[1:]:
        cell["metadata"]["tags"] = ["nbval-ignore-output"]


def _print(text):
    def action(notebook):
        output = {"output_type": "stream", "name": "stdout", "text": [text]}
        _code(2)(notebook)["outputs"].append(output)

    return action


def _hide_path_in_table(notebook):
    data = {"text/html": ["<td>/home/ada/models</td>"], "text/plain": ["0"]}
    output = {"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": 3}
    _code(2)(notebook)["outputs"].append(output)


def _fail(notebook):
    output = {"output_type": "error", "ename": "KeyError", "evalue": "'q'", "traceback": []}
    _code(2)(notebook)["outputs"].append(output)


def _keep_build_words(notebook):
    text = ["compiling the cpu kernels (about a minute, once) ...\n", "compiled in 39 s\n"]
    output = {"output_type": "stream", "name": "stderr", "text": text}
    _code(1)(notebook)["outputs"].append(output)


def _write_long_cell(notebook):
    _code(2)(notebook)["source"] = ["x = RUNS, MODE\n"] * (MAX_LINES + 1)


def _add_cells(notebook):
    extra = copy.deepcopy(_code(-1)(notebook))
    for count in range(len(code_cells(notebook)) + 1, MAX_CODE_CELLS + 2):
        notebook["cells"].insert(-1, extra | {"execution_count": count})


def _drop_question(notebook):
    notebook["cells"][0]["source"] = ["# One token"]


def _drop_lesson(notebook):
    del notebook["cells"][-1]


BROKEN = {
    "widgets": (_save_widgets, "widget metadata is saved"),
    "view": (_save_view, "the view of a widget is saved"),
    "kernel name": (_name_my_kernel, "notebook metadata is"),
    "python version": (_keep_python_version, "notebook metadata is"),
    "cell times": (_keep_cell_times, "metadata execution"),
    "no parameters": (_untag_parameters, "0 cells are tagged parameters"),
    "two parameters": (_tag_parameters_twice, "2 cells are tagged parameters"),
    "unused parameter": (_add_unused_parameter, "parameter MAX_SEQQ is never used"),
    "late parameters": (_move_parameters, "code stands before the parameters cell"),
    "measure committed": (_commit_measure, "does not begin with MODE = 'replay'"),
    "mode second": (_put_mode_second, "does not begin with MODE = 'replay'"),
    "no fact": (_claim_nothing, "no cell is tagged fact"),
    "shuffled": (_shuffle, "not from one run top to bottom"),
    "second run": (_run_twice, "not from one run top to bottom"),
    "no counts": (_strip_counts, "not from one run top to bottom"),
    "no outputs": (_strip_outputs, "no output is left to compare"),
    "all ignored": (_ignore_all, "code cells are compared"),
    "linux home": (_print("/home/ada/models/x.chr\n"), "a path of one machine"),
    "mac home": (_print("loaded /Users/ada/x.chr\n"), "a path of one machine"),
    "windows home": (_print("C:\\Users\\ada\\x.chr\n"), "a path of one machine"),
    "root home": (_print(f"'/{'root'}/.cache/decodev2'\n"), "a path of one machine"),
    "path in html": (_hide_path_in_table, "a path of one machine"),
    "stderr": (_keep_build_words, "keeps stderr"),
    "error": (_fail, "holds an error"),
    "long cell": (_write_long_cell, f"{MAX_LINES + 1} lines, at most"),
    "many cells": (_add_cells, f"{MAX_CODE_CELLS + 1} code cells, at most"),
    "no question": (_drop_question, "not a title with a question"),
    "no lesson": (_drop_lesson, "does not say what we learned"),
}


def test_a_remade_page_has_no_problem(page_path):
    assert notebooks.problems(page_path) == []
    assert notebooks.folder_problems(page_path.parent) == []


@pytest.mark.parametrize(("action", "said"), BROKEN.values(), ids=list(BROKEN))
def test_broken_form_is_noticed(page_path, action, said):
    change(page_path, action)
    found = notebooks.problems(page_path)
    assert any(said in line for line in found), found


def test_size_limit(page_path):
    notebook = load(page_path)
    assert notebooks.form_problems(notebook, MAX_BYTES - 1) == []
    found = notebooks.form_problems(notebook, MAX_BYTES)
    assert found == [f"{MAX_BYTES} bytes, needs fewer than {MAX_BYTES}"]


@pytest.mark.parametrize("text", ["", "{}", '{"cells": []}', "[1]", "not JSON"])
def test_a_file_that_is_no_notebook(tmp_path, text):
    path = tmp_path / "notebooks" / "00_x.ipynb"
    path.parent.mkdir()
    path.write_text(text)
    (found,) = notebooks.problems(path)
    assert found.startswith("not a notebook")


def test_names_and_numbers_of_pages(page_path):
    for name in ("00_other.ipynb", "intro.ipynb"):
        (page_path.parent / name).write_bytes(page_path.read_bytes())
    assert notebooks.folder_problems(page_path.parent) == [
        f"{page_path.parent / 'intro.ipynb'}: is not named like 07_one_idea.ipynb",
        f"{page_path.parent}: two notebooks have the number 00",
    ]


# ---- numbers in the prose ----

SEEN = ["The heap took 20.0 us.", "8.00x, 8.00 x or 8.00 × the best", "2,000 us or 2000 us"]
PLAIN = [
    "2 x 3 tiles, 16 x 128", "layer 7, 512 positions, 3 layers", "the 1980s", "RTX 3080 Ti",
    "`max_seq` 2048, item 12", "1.5 xylophones, 3 slots, 5 msec", "v1.2 s_max, a4 x b5",
]  # fmt: skip
UNSEEN = {
    "It took 20.1 us.": "20.1 us",
    "It took 20 us.": "20 us",
    "3.99x as fast": "3.99x",
    "3.99 x as fast": "3.99 x",
    "3.99 × as fast": "3.99 ×",
    "1,234 tok/s": "1,234 tok/s",
    "reads 77.7 GB/s": "77.7 GB/s",
    "holds 71 MB of it": "71 MB",
    "73 % of it": "73 %",
    "73% of it": "73%",
    "in 12.5 s": "12.5 s",
    "in 12.5 ms": "12.5 ms",
    "in 12.5 µs.": "12.5 µs",
    "(0.5ms)": "0.5ms",
}


@pytest.mark.parametrize("text", SEEN + PLAIN)
def test_numbers_that_an_output_shows_or_that_were_not_measured(page_path, text):
    change(page_path, lambda notebook: by_id(notebook, "learned")["source"].append(text))
    assert notebooks.problems(page_path) == []


@pytest.mark.parametrize(("text", "number"), UNSEEN.items(), ids=list(UNSEEN))
def test_numbers_that_nothing_shows(page_path, text, number):
    change(page_path, lambda notebook: by_id(notebook, "learned")["source"].append(f" {text}"))
    found = f"cell 9: {number} is in no text output and in no loaded plate"
    assert notebooks.problems(page_path) == [found]


def test_a_prediction_may_name_numbers_that_nothing_shows(page_path):
    change(
        page_path, lambda notebook: by_id(notebook, "predicted").update(source="It takes 15 us.")
    )
    (found,) = notebooks.problems(page_path)
    assert "15 us is in no text output" in found
    tagged = {"source": "It takes 15 us.", "metadata": {"tags": ["prediction"]}}
    change(page_path, lambda notebook: by_id(notebook, "predicted").update(tagged))
    assert notebooks.problems(page_path) == []


def test_words_of_a_loaded_plate_count_and_others_do_not(page_path, tmp_path):
    change(page_path, lambda notebook: by_id(notebook, "learned")["source"].append(" 12.5 us"))
    assert len(notebooks.problems(page_path)) == 1
    runs = tmp_path / "runs"
    plate.save(toy_plate(experiment="other", notes=["noise 12.5 us"]), runs)
    assert len(notebooks.problems(page_path)) == 1
    plate.save(toy_plate(notes=["noise 12.5 us"], created="2025-01-01T00:00:00Z"), runs)
    assert len(notebooks.problems(page_path)) == 1  # an older plate, which the page does not show
    plate.save(toy_plate(notes=["noise 12.5 us"], created="2027-01-01T00:00:00Z"), runs)
    assert notebooks.problems(page_path) == []


def test_numbers_in_pictures_and_styles_are_not_read(page_path):
    def hide(notebook):
        by_id(notebook, "learned")["source"].append(" 77 us")
        data = {"image/png": "77", "text/html": ["<style>td { width: 77 }</style><td a='77'>"]}
        output = {"output_type": "display_data", "data": data, "metadata": {}}
        by_id(notebook, "figure")["outputs"].append(output)

    change(page_path, hide)
    assert len(notebooks.problems(page_path)) == 1


# ---- parameters and execution ----


def test_parameters(page_path):
    assert notebooks.parameters(load(page_path)) == {"MODE": "replay", "RUNS": 3}
    cell = code("p", "A = (1, 2)\nB = A[0] + 1\nprint(A)", "parameters")
    assert notebooks.parameters({"cells": [cell]}) == {"A": (1, 2), "B": "A[0] + 1"}


def test_execute_puts_parameters_after_the_tagged_cell(page_path):
    def show(notebook):
        by_id(notebook, "imports")["source"] = ["print(MODE, RUNS)"]
        del notebook["cells"][3:]

    change(page_path, show)
    before = page_path.read_bytes()
    done = notebooks.execute(page_path, {"RUNS": [1, "b"], "MODE": "measure"})
    assert [cell["id"] for cell in done["cells"][1:3]] == ["parameters", "injected-parameters"]
    assert texts(code_cells(done)[2]["outputs"][0]["text"]) == ["measure [1, 'b']\n"]
    assert page_path.read_bytes() == before


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"RUN": 1}, "00_sort.ipynb: parameter 'RUN' does not exist; did you mean RUNS?"),
        ({"seeds": 1}, "00_sort.ipynb: parameter 'seeds' does not exist; there are MODE, RUNS"),
        ({"RUNS": float("nan")}, "00_sort.ipynb: parameter RUNS is nan, needs a literal"),
        ({"MODE": "x"}, "00_sort.ipynb: code cell 2 failed: DecodeError: MODE is 'x', needs"),
    ],
)
def test_execute_says_what_is_wrong_in_one_line(page_path, params, said):
    with pytest.raises(DecodeError) as caught:
        notebooks.execute(page_path, params)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_a_run_with_parameters_writes_beside_the_page(page_path, tmp_path, capsys):
    def show(notebook):
        by_id(notebook, "imports")["source"] = ["print(MODE, RUNS)"]
        del notebook["cells"][3:]

    change(page_path, show)
    before, out = page_path.read_bytes(), tmp_path / "mine.ipynb"
    folder = ["--folder", str(page_path.parent)]
    name = page_path.stem
    assert (
        cli.main(["notebooks", name, "-p", "RUNS=5", "-p", "MODE=x y", "-o", str(out), *folder])
        == 0
    )
    assert capsys.readouterr().out.strip() == str(out)
    assert texts(code_cells(load(out))[2]["outputs"][0]["text"]) == ["x y 5\n"]
    assert page_path.read_bytes() == before
    for arguments, said in (
        ([name, "-p", "RUNS=5"], "a run with parameters needs one page and -o FILE"),
        ([name, "-p", "RUNS", "-o", str(out)], "parameter 'RUNS' has no value"),
        ([name, "-p", "RUN=1", "-o", str(out)], "did you mean RUNS?"),
        ([name, "-p", "RUNS=1", "-p", "RUNS=2", "-o", str(out)], "'RUNS' is given twice"),
        ([name, "-o", str(page_path)], "is the page itself"),
        ([name, "-o", str(tmp_path / "no" / "f.ipynb")], "its folder does not exist"),
    ):
        assert cli.main(["notebooks", *arguments, *folder]) != 0
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert page_path.read_bytes() == before


def test_a_page_without_parameters_takes_none(page_path):
    change(page_path, _untag_parameters)
    with pytest.raises(DecodeError, match="parameter 'MODE' does not exist; there are none"):
        notebooks.execute(page_path, {"MODE": "measure"})


def test_a_dead_kernel_and_a_missing_package_are_one_line(page_path, monkeypatch):
    def die(notebook):
        by_id(notebook, "imports")["source"] = ["import os\n", "os._exit(3)"]

    change(page_path, die)
    with pytest.raises(DecodeError, match="the kernel died"):
        notebooks.execute(page_path)
    monkeypatch.setitem(sys.modules, "nbclient", None)
    with pytest.raises(DecodeError, match=r"nbclient is not installed.*decodev2\[lab\]"):
        notebooks.execute(page_path)


# ---- remake ----


def test_remake_gives_the_same_bytes_again(page_path):
    before = page_path.read_bytes()
    assert notebooks.remake([page_path]) == [page_path]
    assert page_path.read_bytes() == before
    assert [p.name for p in page_path.parent.iterdir()] == [page_path.name]


def test_remake_drops_views_and_keeps_their_twins(page_path):
    panel = by_id(load(page_path), "panel")
    assert [sorted(output["data"]) for output in panel["outputs"]] == [
        ["text/html", "text/plain"],
        ["image/png", "text/plain"],
    ]
    bare, twin = ({notebooks.WIDGET_VIEW: {}, "text/plain": "VBox()"} for _ in range(2))
    twin["text/html"] = "<b>8.00</b>"
    outputs = [{"output_type": "display_data", "data": d, "metadata": {}} for d in (bare, twin)]
    cell = code("c", "x", "fact") | {"outputs": outputs}
    cell["metadata"] |= {"collapsed": True}
    (kept,) = notebooks.stripped({"cells": [cell], "metadata": {"widgets": {}}})["cells"]
    assert kept["metadata"] == {"tags": ["fact"]}
    assert [o["data"].keys() for o in kept["outputs"]] == [{"text/plain", "text/html"}]


def test_a_page_that_fails_stays_as_it_is(page_path):
    change(page_path, lambda notebook: by_id(notebook, "figure").update(source="1 / 0"))
    before = page_path.read_bytes()
    with pytest.raises(DecodeError, match="code cell 3 failed: ZeroDivisionError: division by"):
        notebooks.remake([page_path])
    assert page_path.read_bytes() == before
    assert [p.name for p in page_path.parent.iterdir()] == [page_path.name]


def test_no_installed_kernel_and_no_start_up_file_is_used(page_path, tmp_path, monkeypatch):
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [str(tmp_path / "no-such-python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text("print('a start-up file ran')\nRUNS = 7\n")
    for name in ("JUPYTER_PATH", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    def ask(notebook):
        by_id(notebook, "imports")["source"] = ["import sys\n", "print(sys.executable)"]
        del notebook["cells"][3:]

    change(page_path, ask)
    done = notebooks.execute(page_path)
    assert texts(code_cells(done)[1]["outputs"][0]["text"]) == [f"{sys.executable}\n"]


@needs_kernel
def test_numbers_are_there_without_a_kernel(page_path):
    nbconvert = pytest.importorskip("nbconvert", reason="nbconvert is not installed")
    html, _ = nbconvert.HTMLExporter().from_filename(str(page_path))
    text = re.sub(r"<[^>]*>|\s+", " ", html)
    for part in ("full sort chosen 8.00 2,000", "heap best 1.00 250", "every way was timed"):
        assert part in re.sub(" +", " ", text)
    assert html.count('src="data:image/png;base64,') == 2
    assert "widget-view" not in html and "model_id" not in html


def test_a_page_by_its_number(page_path):
    folder = page_path.parent
    for name in ("00", "0", "00_sort", "00_sort.ipynb", str(page_path)):
        assert notebooks.find([name], folder) == [page_path]
    for name in ("000", "1", "", "sort"):
        with pytest.raises(DecodeError, match="does not exist"):
            notebooks.find([name], folder)
    with pytest.raises(DecodeError, match="no notebook is there"):
        notebooks.find([str(Path(__file__).parent)])


# ---- regress ----


def test_regress_replays(page_path, tmp_path):
    report = notebooks.regress(page_path, "replay", tmp_path / "runs")
    assert (report["mode"], report["facts"], report["plates"]) == ("replay", 1, [])
    assert report["faults"] == []


def test_regress_notices_a_fact_that_changed(page_path, tmp_path):
    def lie(notebook):
        outputs = by_id(notebook, "claims")["outputs"]
        alter(outputs, "text/plain", "True", "False")

    change(page_path, lie)
    (fault,) = notebooks.regress(page_path, "replay", tmp_path / "runs")["faults"]
    assert fault.startswith("fact claims: ") and "committed" in fault and "False" in fault


def test_regress_measures_and_holds_times_against_the_recorded(page_path, tmp_path):
    """The toy's recorded plate is made up, so the times differ by far more than any bound."""
    runs = tmp_path / "runs"
    (recorded,) = plate.plate_paths(runs)
    report = notebooks.regress(page_path, "measure", runs, bound=(1e-9, 1e9))
    assert report["faults"] == [] and report["mode"] == "measure"
    (entry,) = report["plates"]
    assert entry["experiment"] == "toy_sort" and entry["times"] == 8  # us and us_best of 4 rows
    assert entry["against"] == recorded.name
    assert 0 < entry["low"] <= entry["high"]
    assert len(plate.plate_paths(runs)) == 2 and plate.lint(runs) == []
    again = notebooks.regress(page_path, "measure", runs, bound=(1e8, 1e9))
    assert len(again["faults"]) == 8 and "needs 1e+08 to 1e+09" in again["faults"][0]


def test_regress_reports_a_page_that_fails(page_path, tmp_path):
    change(page_path, lambda notebook: by_id(notebook, "figure").update(source="1 / 0"))
    report = notebooks.regress(page_path, "replay", tmp_path / "runs")
    assert report["faults"] == [
        "00_sort.ipynb: code cell 3 failed: ZeroDivisionError: division by zero"
    ]


def ratios(tmp_path, old: list, new, bound=notebooks.BOUND):
    runs = tmp_path / "old"
    known = [plate.save(made, runs) for made in old]
    return notebooks._ratios(new, known, bound)


def faster(made: plate.Plate, factor: float) -> plate.Plate:
    names = ("us", "us_best", "us_worst", "floor_us")
    rows = [row | {name: row[name] * factor for name in names} for row in made.rows]
    return replace(made, rows=rows, created="2026-05-05T05:05:05Z")


@pytest.mark.parametrize(
    ("factor", "good"), [(0.71, True), (1.39, True), (0.69, False), (1.41, False)]
)
def test_times_must_lie_in_the_bound(page_path, tmp_path, factor, good):
    entry, faults = ratios(tmp_path, [toy_plate()], faster(toy_plate(), factor))
    assert entry["low"] == pytest.approx(factor) == pytest.approx(entry["high"])
    assert (faults == []) is good and len(faults) == (0 if good else 8)
    if not good:
        assert faults[0].startswith(f"toy_sort: 500, full sort us is {factor:.2f} x the recorded")


def test_rows_are_matched_by_their_keys_not_their_order(page_path, tmp_path):
    made = faster(toy_plate(), 1.0)
    mixed = replace(made, rows=made.rows[::-1][:3])
    entry, faults = ratios(tmp_path, [toy_plate()], mixed)
    assert (entry["times"], entry["low"], entry["high"], faults) == (6, 1.0, 1.0, [])


def test_rows_measured_twice_are_matched_in_turn(page_path, tmp_path):
    def twice(made):
        return replace(made, rows=[*made.rows, *faster(made, 3.0).rows])

    entry, faults = ratios(tmp_path, [twice(toy_plate())], replace(twice(toy_plate()), notes=["n"]))
    assert (entry["times"], entry["low"], entry["high"], faults) == (16, 1.0, 1.0, [])


def test_the_newest_plate_of_the_same_card_and_parameters_counts(page_path, tmp_path):
    made = toy_plate()
    other_card = replace(made, card=made.card | {"slug": "other"}, created="2027-01-01T00:00:00Z")
    assert ratios(tmp_path, [other_card], made)[0]["against"] is None
    older, newer = (replace(made, created=f"2026-01-0{day}T00:00:00Z") for day in (3, 4))
    other = replace(made, params=made.params | {"runs": 9}, created="2026-01-05T00:00:00Z")
    entry, _ = ratios(tmp_path, [older, newer, other, other_card], faster(made, 1.0))
    assert entry["against"] == plate.file_name(plate.clean(newer))


def test_a_plate_without_a_comparable_time_is_a_fault(page_path, tmp_path):
    rows = [row | {"way": f"new {row['way']}"} for row in toy_plate().rows]
    _, faults = ratios(tmp_path, [toy_plate()], toy_plate(rows=rows))
    assert len(faults) == 1 and "no time has its like in" in faults[0]


def test_a_plate_that_holds_no_times_is_none(page_path, tmp_path):
    def without_times(made):
        kept = [c for c in made.columns if c["unit"] not in notebooks.TIME_UNITS]
        names = [c["name"] for c in kept]
        return replace(made, columns=kept, rows=[{n: row[n] for n in names} for row in made.rows])

    old = without_times(toy_plate())
    entry, faults = ratios(tmp_path, [old], replace(old, created="2026-05-05T05:05:05Z"))
    assert (entry["times"], entry["low"], faults) == (0, None, [])
    report = {"notebook": "n", "seconds": 1, "facts": 0, "plates": [entry], "faults": faults}
    assert notebooks._line(report).endswith("toy_sort: no times to compare")


def test_regress_needs_no_jupyterlab(page_path, tmp_path, monkeypatch):
    broken = tmp_path / "path" / "jupyterlab"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(broken.parent), str(FOLDER.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "decodev2", "regress", str(page_path), "--mode", "replay", "--json",
         "--runs", str(tmp_path / "runs")],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (report,) = plate.parse(done.stdout)
    assert report["facts"] == 1 and report["faults"] == []


# ---- the command line ----


def run(*arguments) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_notebooks_command(page_path, capsys):
    folder = page_path.parent
    assert run("notebooks", "--folder", folder) == 0
    assert "Sorting" in (listed := capsys.readouterr().out) and "MODE, RUNS" in listed
    assert run("notebooks", "--folder", folder, "--json", "00") == 0
    (row,) = plate.parse(capsys.readouterr().out)
    assert row["notebook"] == "00_sort.ipynb" and row["parameters"] == ["MODE", "RUNS"]
    assert run("notebooks", "--check", "--folder", folder) == 0
    assert capsys.readouterr().out == "1 notebook, no problem\n"
    change(page_path, _strip_counts)
    assert run("notebooks", "--check", page_path) == 1
    assert "not from one run top to bottom" in capsys.readouterr().out
    assert run("notebooks", "--remake", "--json", page_path) == 0
    assert plate.parse(capsys.readouterr().out) == []
    assert run("notebooks", "--folder", folder, "sorted") == 2
    assert "did you mean 00_sort?" in capsys.readouterr().err


def test_regress_command(page_path, tmp_path, capsys):
    place = ("--folder", page_path.parent, "--runs", tmp_path / "runs")
    assert run("regress", "--mode", "replay", *place) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"00_sort.ipynb +ok +\d+ s; 1 facts", line)
    assert run("regress", "00_sort", "--bound", "1e8", "1e9", *place) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "FAILED" in line and "toy_sort: 8 times" in line and "(and 7 more)" in line
    assert run("regress", "--bound", "2", "1", *place) == 2
    assert "bound is 2 to 1, needs 0 < low < high" in capsys.readouterr().err
    assert run("regress", "--folder", tmp_path) == 2
    assert "no notebook is there" in capsys.readouterr().err


def test_lint_checks_the_pages_beside_the_plates(page_path, tmp_path, capsys):
    assert run("lint", tmp_path / "runs") == 0
    assert capsys.readouterr().out == "1 plate, 1 notebook, no problem\n"
    change(page_path, _add_unused_parameter)
    assert run("lint", tmp_path / "runs") == 1
    assert f"{page_path}: parameter MAX_SEQQ is never used" in capsys.readouterr().out


# ---- the sanitise file ----


def sanitised(text: str) -> str:
    for regex, replacement in sanitise_pairs():
        text = re.sub(regex, replacement, text)
    return text


def sanitise_pairs() -> list[tuple[str, str]]:
    lines = SANITIZE.read_text(encoding="utf-8").splitlines()
    return [
        (line.removeprefix("regex: "), after.removeprefix("replace: "))
        for line, after in itertools.pairwise(lines)
        if line.startswith("regex: ") and after.startswith("replace: ")
    ]


@needs_nbval
def test_sanitise_file_reads_as_nbval_reads_it():
    from nbval.plugin import get_sanitize_patterns

    written = SANITIZE.read_text(encoding="utf-8")
    pairs = sanitise_pairs()
    assert pairs and get_sanitize_patterns(written) == pairs
    # nbval drops, in silence, a line that lost its partner
    for word in ("regex", "replace"):
        assert len(re.findall(rf"^\s*{word}\s*:", written, re.MULTILINE)) == len(pairs)


def test_sanitise_hides_what_varies_and_nothing_else():
    once, again = "<Lock object at 0x7f3c2a1b9d40>", "<Lock object at 0x5561e0>"
    assert sanitised(once) == sanitised(again) != once
    once, again = (f"/tmp/ipykernel_{n}/{n * 7}.py:1: UserWarning" for n in (411, 90210))
    assert sanitised(once) == sanitised(again) and "UserWarning" in sanitised(once)
    for kept in ("[5, 24, 20, 9]", "level 15 is 0x3F800000", "codes 1d357b77d61c", "40256 bytes"):
        assert sanitised(kept) == kept


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_sanitise_hides_nothing_of_a_committed_page(path):
    for text in texts([cell["outputs"] for cell in code_cells(load(path))]):
        assert sanitised(text) == text


# ---- nbval itself ----


def nbval(path: Path, *options: str, **environment: str) -> tuple[dict[str, str], str]:
    """Strict nbval over the pages beside `path` in a new process -> ({cell id: outcome}, printed).

    Jupyter sees no folder of the user's: kernels can come from the interpreter's own prefix alone.
    """
    own = path.parents[1] / "jupyter"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    env["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), env.get("PYTHONPATH", "")])
    for key in ("JUPYTER_PATH", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        env[key] = str(own / key.lower())
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    options = ("--nbval", "--nbval-sanitize-with", str(SANITIZE), *options)
    done = subprocess.run(
        [*command, "--rootdir", str(path.parent), *options, str(path)],
        cwd=path.parent,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    printed = done.stdout + done.stderr
    # pytest splits such a name at its dots too: 00_sort::ipynb::Cell 3
    seen = re.findall(r"\w+(?:\.|::)ipynb::Cell (\d+) (PASSED|FAILED|ERROR)", printed)
    ids = [cell["id"] for cell in code_cells(load(path))]
    outcomes = {ids[int(number)]: outcome for number, outcome in seen}
    assert (done.returncode == 0) == (set(outcomes.values()) == {"PASSED"}), printed
    return outcomes, printed


def alter(outputs: list[dict], mime: str | None, old: str, new: str) -> None:
    """Change one place in what a cell printed (mime None) or showed."""
    for output in outputs:
        text = output.get("text") if mime is None else output.get("data", {}).get(mime)
        for i, line in enumerate(text or []):
            if old in line:
                text[i] = line.replace(old, new, 1)
                return
    raise AssertionError(f"{old!r} is not in the output")


@needs_nbval
def test_an_altered_digit_fails_the_strict_run(page_path):
    outcomes, printed = nbval(page_path, "--nbval-current-env")
    assert set(outcomes.values()) == {"PASSED"}, printed
    assert len(outcomes) == len(code_cells(load(page_path)))

    def spoil(notebook):
        alter(by_id(notebook, "plate")["outputs"], "text/html", "2,000", "2,001")
        alter(by_id(notebook, "claims")["outputs"], "text/plain", "True", "Tru")
        alter(by_id(notebook, "panel")["outputs"], "text/plain", "8.00", "8.01")
        alter(by_id(notebook, "verdict")["outputs"], "text/markdown", "40.0", "40.1")

    change(page_path, spoil)
    outcomes, printed = nbval(page_path, "--nbval-current-env")
    failed = {name for name, outcome in outcomes.items() if outcome != "PASSED"}
    assert failed == {"plate", "claims", "panel", "verdict"}, printed
    assert len(outcomes) == len(code_cells(load(page_path)))


@needs_nbval
def test_current_env_needs_no_kernelspec(page_path):
    """The page under a kernel name that nobody has, and a `python3` that lies."""
    kernel = page_path.parents[1] / "jupyter" / "jupyter_path" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [str(kernel / "no-such-python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")

    def probe(notebook):
        cell = by_id(notebook, "claims")
        cell["source"] = ["import os, sys\n", "print(sys.executable == os.environ['EXPECTED'])"]
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["True\n"]}]

    change(page_path, probe)
    for name in ("lab-env", "python3"):
        change(
            page_path,
            lambda notebook, name=name: notebook["metadata"]["kernelspec"].update(name=name),
        )
        outcomes, printed = nbval(page_path, "--nbval-current-env", EXPECTED=sys.executable)
        assert set(outcomes.values()) == {"PASSED"}, printed

    # Without the option the page fails, so the passes above are the option's doing.
    outcomes, printed = nbval(page_path, EXPECTED=sys.executable)
    assert "no-such-python" in printed
    assert "PASSED" not in outcomes.values(), printed


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
