"""The notebooks as committed: their form, and that the nbval run over them can fail.

`problems` says what is wrong with a notebook's form; every rule in it is broken here once on
purpose. The values themselves are compared by `pytest --nbval`, and the tests at the end see to it
that such a run notices one altered id and needs no installed kernel of any name.
"""

import ast
import copy
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FIRST = FOLDER / "00_one_token.ipynb"
SANITIZE = FOLDER / "sanitize.cfg"

MAX_BYTES = 200_000
MAX_CODE_CELLS = 12
MAX_LINES = 12
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
PERSONAL_PATH = re.compile(r"/(?:home|root|Users)/|\b[A-Za-z]:\\+Users\\|/tmp/")
REMAKE = (
    "remake it: jupyter nbconvert --to notebook --execute --inplace "
    "--ExecutePreprocessor.record_timing=False --ClearMetadataPreprocessor.enabled=True "
    "--ClearMetadataPreprocessor.clear_cell_metadata=False "
    """--ClearMetadataPreprocessor.preserve_nb_metadata_mask='{"kernelspec",("""
    """"language_info","name")}' NOTEBOOK"""
)

needs_nbval = pytest.mark.skipif(
    not (importlib.util.find_spec("nbval") and importlib.util.find_spec("ipykernel")),
    reason="nbval or ipykernel is not installed (the test extra brings both)",
)


# ---- the form of a notebook ----


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def tags(cell: dict) -> list[str]:
    return cell["metadata"].get("tags", [])


def texts(value) -> list[str]:
    """Every string in an output, at any depth, pictures left out."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [t for key, item in value.items() if key != "image/png" for t in texts(item)]
    if isinstance(value, list):
        return [t for item in value for t in texts(item)]
    return []


def assigned_names(code: str) -> list[str]:
    """Names that plain assignments in `code` define."""
    return [
        target.id
        for node in ast.parse(code).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]


def used_names(code: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def problems(notebook: dict, size: int) -> list[str]:
    """What is wrong with the form of a notebook of `size` bytes, one line each."""
    return [
        *_file_problems(notebook, size),
        *_shape_problems(notebook),
        *_parameter_problems(code_cells(notebook)),
        *_run_problems(code_cells(notebook)),
    ]


def _file_problems(notebook: dict, size: int) -> list[str]:
    found = []
    if size >= MAX_BYTES:
        found.append(f"{size} bytes, needs fewer than {MAX_BYTES}")
    if "widgets" in notebook["metadata"]:
        found.append("widget metadata is saved")
    rest = {key: value for key, value in notebook["metadata"].items() if key != "widgets"}
    if rest != NOTEBOOK_METADATA:
        found.append(f"notebook metadata is {rest}, needs {NOTEBOOK_METADATA}")
    for number, cell in enumerate(notebook["cells"]):
        volatile = sorted(cell["metadata"].keys() - {"tags"})
        if volatile:
            found.append(f"cell {number}: metadata {', '.join(volatile)}, only tags may stay")
    return found


def _shape_problems(notebook: dict) -> list[str]:
    found, cells = [], notebook["cells"]
    first, last = cells[0], cells[-1]
    if first["cell_type"] != "markdown" or not re.match(r"# .*\n(?s:.)*\?", source(first)):
        found.append("the first cell is not a title with a question")
    if last["cell_type"] != "markdown" or "what we learned" not in source(last).lower():
        found.append("the last cell does not say what we learned")
    code = code_cells(notebook)
    if len(code) > MAX_CODE_CELLS:
        found.append(f"{len(code)} code cells, at most {MAX_CODE_CELLS}")
    for number, cell in enumerate(code):
        lines = len(source(cell).splitlines())
        if lines > MAX_LINES:
            found.append(f"code cell {number}: {lines} lines, at most {MAX_LINES}")
    return found


def _parameter_problems(code: list[dict]) -> list[str]:
    tagged = [i for i, cell in enumerate(code) if "parameters" in tags(cell)]
    if len(tagged) != 1:
        return [f"{len(tagged)} cells are tagged parameters, needs one"]
    (at,) = tagged
    names = assigned_names(source(code[at]))
    later = set().union(*(used_names(source(cell)) for cell in code[at + 1 :]))
    found = [] if names else ["the parameters cell sets nothing"]
    return found + [f"parameter {name} is never used" for name in names if name not in later]


def _run_problems(code: list[dict]) -> list[str]:
    found = []
    counts = [cell["execution_count"] for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"execution counts {counts}, not from one run top to bottom")
    for number, cell in enumerate(code):
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            found.append(f"code cell {number}: holds an error")
        if any(output.get("name") == "stderr" for output in cell["outputs"]):
            found.append(f"code cell {number}: keeps stderr (a build's words, or a warning)")
        if any(PERSONAL_PATH.search(text) for text in texts(cell["outputs"])):
            found.append(f"code cell {number}: a path of one machine is in its output")
    compared = [cell for cell in code if "nbval-ignore-output" not in tags(cell)]
    if not any(texts(cell["outputs"]) for cell in compared):
        found.append("no output is left to compare")
    if len(compared) <= len(code) / 2:
        found.append(f"only {len(compared)} of {len(code)} code cells are compared")
    return found


def test_notebooks_are_numbered_from_00():
    assert FIRST in NOTEBOOKS
    for path in NOTEBOOKS:
        assert re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name), path.name
    numbers = [path.name[:2] for path in NOTEBOOKS]
    assert len(set(numbers)) == len(numbers), "two notebooks share a number"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_form(path):
    found = problems(load(path), path.stat().st_size)
    assert not found, "\n".join([path.name, *found, REMAKE])


# ---- each rule, broken once ----


def _code(index):
    return lambda notebook: code_cells(notebook)[index]


def _save_widgets(notebook):
    notebook["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}


def _name_my_kernel(notebook):
    notebook["metadata"]["kernelspec"]["name"] = "lab-env"


def _keep_python_version(notebook):
    notebook["metadata"]["language_info"]["version"] = "3.11.7"


def _keep_cell_times(notebook):
    _code(3)(notebook)["metadata"]["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}


def _untag_parameters(notebook):
    for cell in code_cells(notebook):
        cell["metadata"].pop("tags", None)


def _tag_parameters_twice(notebook):
    _code(-1)(notebook)["metadata"]["tags"] = ["parameters"]


def _add_unused_parameter(notebook):
    _code(0)(notebook)["source"] += ["\n", "MAX_SEQQ = 32"]


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
    def change(notebook):
        output = {"output_type": "stream", "name": "stdout", "text": [text]}
        _code(2)(notebook)["outputs"].append(output)

    return change


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
    _code(2)(notebook)["source"] = ["x = 1\n"] * (MAX_LINES + 1)


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
    "kernel name": (_name_my_kernel, "notebook metadata is"),
    "python version": (_keep_python_version, "notebook metadata is"),
    "cell times": (_keep_cell_times, "metadata execution"),
    "no parameters": (_untag_parameters, "0 cells are tagged parameters"),
    "two parameters": (_tag_parameters_twice, "2 cells are tagged parameters"),
    "unused parameter": (_add_unused_parameter, "parameter MAX_SEQQ is never used"),
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


@pytest.mark.parametrize(("change", "said"), BROKEN.values(), ids=list(BROKEN))
def test_broken_form_is_noticed(change, said):
    notebook = load(FIRST)
    change(notebook)
    found = problems(notebook, 1000)
    assert any(said in line for line in found), found


def test_size_limit():
    notebook = load(FIRST)
    assert problems(notebook, MAX_BYTES - 1) == []
    assert problems(notebook, MAX_BYTES) == [f"{MAX_BYTES} bytes, needs fewer than {MAX_BYTES}"]


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
    for text in texts([cell["outputs"] for cell in code_cells(load(FIRST))]):
        assert sanitised(text) == text


# ---- nbval itself ----


def nbval(folder: Path, *options: str, **environment: str) -> tuple[dict[str, str], str]:
    """Strict nbval over `folder` in a new process -> {"stem cell n": outcome}, all it printed.

    Jupyter sees no folder of the user's: kernels can come from the interpreter's own prefix alone.
    """
    own = folder / "jupyter"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    env["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), env.get("PYTHONPATH", "")])
    for key in ("JUPYTER_PATH", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        env[key] = str(own / key.lower())
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    options = ("--nbval", "--nbval-sanitize-with", str(SANITIZE), *options)
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, str(folder)],
        cwd=folder,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=900,  # the kernels may have to be compiled first
        check=False,
    )
    printed = done.stdout + done.stderr
    # pytest splits such a name at its dots too: one_token::ipynb::Cell 3
    seen = re.findall(r"(\w+)(?:\.|::)ipynb::Cell (\d+) (PASSED|FAILED|ERROR)", printed)
    outcomes = {f"{stem} cell {number}": outcome for stem, number, outcome in seen}
    assert (done.returncode == 0) == (set(outcomes.values()) == {"PASSED"}), printed
    return outcomes, printed


def place(cell_id: str) -> str:
    """nbval's name of a code cell of the first notebook."""
    ids = [cell["id"] for cell in code_cells(load(FIRST))]
    return f"{FIRST.stem} cell {ids.index(cell_id)}"


def write(folder: Path, notebook: dict, name: str = FIRST.name) -> None:
    (folder / name).write_text(json.dumps(notebook), encoding="utf-8")


def alter(cell: dict, mime: str | None, old: str, new: str) -> None:
    """Change one place in what a cell printed (mime None) or showed."""
    for output in cell["outputs"]:
        text = output.get("text") if mime is None else output.get("data", {}).get(mime)
        for i, line in enumerate(text or []):
            if old in line:
                text[i] = line.replace(old, new, 1)
                return
    raise AssertionError(f"{old!r} is not in the output of cell {cell['id']}")


@needs_nbval
def test_an_altered_id_fails_the_strict_run(tmp_path):
    notebook = load(FIRST)
    by_id = {cell["id"]: cell for cell in code_cells(notebook)}
    alter(by_id["model"], None, "[15, 14,", "[15, 13,")
    alter(by_id["ids"], "text/plain", "Decode V2  [5, 24,", "Decode V2  [5, 25,")
    alter(by_id["chunks"], "text/html", "<td>5</td>", "<td>6</td>")
    write(tmp_path, notebook)
    outcomes, printed = nbval(tmp_path, "--nbval-current-env")
    failed = {name for name, outcome in outcomes.items() if outcome != "PASSED"}
    assert failed == {place("model"), place("ids"), place("chunks")}, printed
    assert len(outcomes) == len(code_cells(notebook))


@needs_nbval
def test_current_env_needs_no_kernelspec(tmp_path):
    """The committed notebook under a kernel name that nobody has, and a `python3` that lies."""
    notebook = load(FIRST)
    notebook["metadata"]["kernelspec"]["name"] = "lab-env"
    write(tmp_path, notebook)
    probe = copy.deepcopy(notebook)
    probe["metadata"]["kernelspec"]["name"] = "python3"
    cell = next(cell for cell in code_cells(probe) if cell["id"] == "model")
    cell["source"] = ["import os, sys\n", "print(sys.executable == os.environ['EXPECTED'])"]
    cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["True\n"]}]
    probe["cells"] = [cell]
    write(tmp_path, probe, "probe.ipynb")
    kernel = tmp_path / "jupyter" / "jupyter_path" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [str(tmp_path / "no-such-python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")

    outcomes, printed = nbval(tmp_path, "--nbval-current-env", EXPECTED=sys.executable)
    assert set(outcomes.values()) == {"PASSED"}, printed
    assert len(outcomes) == len(code_cells(notebook)) + 1

    # Without the option both notebooks fail, so the pass above is the option's doing.
    outcomes, printed = nbval(tmp_path, EXPECTED=sys.executable)
    assert "NoSuchKernel" in printed and "no-such-python" in printed
    assert "PASSED" not in outcomes.values(), printed


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
