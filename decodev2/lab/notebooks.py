"""The pages of the workbook (notebooks/*.ipynb) as files: run, remake, check, compare.

A page is committed with the outputs of one run from top to bottom. `remake` makes that run and
keeps nothing that differs from run to run; `problems` says where a page is not of that form, or
states a number that none of its outputs shows; `regress` runs pages again and compares.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import DecodeError
from . import card, experiments
from . import plate as plates

MAX_BYTES = 200_000
MAX_CODE_CELLS = 12
MAX_LINES = 12
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
INJECTED = "injected-parameters"  # papermill's name for it
PICTURES = ("image/png", "image/jpeg", "image/svg+xml")
CELL_TIMEOUT_S = 900  # the first cell may have to compile kernels
TIME_UNITS = ("ns", "us", "ms", "s")
BOUND = (0.7, 1.4)  # of a time over the recorded one
REMAKE = "remake it: decodev2 notebooks --remake"

_PERSONAL_PATH = re.compile(r"/(?:home|root|Users)/|\b[A-Za-z]:\\+Users\\|/tmp/")
# A number and a unit of measured things. "8 x 4" is a product, "1.5 x" and "1.5x" are ratios.
MEASURED = re.compile(
    r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)"
    r"(?:\s?(?:[uµμ]s|ms|tok/s|[GT]B/s|MB|%|[x×](?!\s*\d))|\s+s)(?![\w/])"
)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


# ---- reading ----


def find(names: Iterable[str] = (), folder: str | Path = "notebooks") -> list[Path]:
    """Paths of pages by path, name or number ("07", "7"), or of all in `folder`. Raises
    DecodeError."""
    there = sorted(Path(folder).glob("*.ipynb"))
    found = []
    for name in names:
        if name.endswith(".ipynb") and Path(name).is_file():
            found.append(Path(name))
        elif name and Path(name).is_dir():
            pages = sorted(Path(name).glob("*.ipynb"))
            if not pages:
                raise DecodeError(f"{name}: no notebook is there")
            found += pages
        else:
            number = name.zfill(2) if name.isdigit() else name
            same = [p for p in there if name in (p.stem, p.name) or p.stem.split("_")[0] == number]
            if not same:
                raise _no_such("notebook", name, [p.stem for p in there])
            found += same
    if not (there or names):
        raise DecodeError(f"{folder}: no notebook is there")
    return found or there


def _no_such(what: str, name: str, known: list[str]) -> DecodeError:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
    return DecodeError(f"{what} {name!r} does not exist; {hint}")


def load(path: str | Path) -> dict:
    """The notebook at `path`. Raises DecodeError for a file that is none."""
    try:
        notebook = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DecodeError(f"{path}: not a notebook ({error})") from None
    if not isinstance(notebook, dict) or not notebook.get("cells"):
        raise DecodeError(f"{path}: not a notebook, it has no cells")
    return notebook


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def tags(cell: dict) -> list[str]:
    return cell["metadata"].get("tags", [])


def texts(value) -> list[str]:
    """Every string in an output, at any depth, pictures left out; lines of one text joined."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [t for key, item in value.items() if key not in PICTURES for t in texts(item)]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ["".join(value)]
    if isinstance(value, list):
        return [t for item in value for t in texts(item)]
    return []


def parameters(notebook: dict) -> dict[str, object]:
    """{name: value} of the cell tagged `parameters`; an expression that is no literal as text."""
    found: dict[str, object] = {}
    for cell in code_cells(notebook):
        if "parameters" not in tags(cell):
            continue
        for node in ast.parse(source(cell)).body:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Name):
                    try:
                        found[target.id] = ast.literal_eval(node.value)
                    except ValueError:
                        found[target.id] = ast.unparse(node.value)
    return found


# ---- running ----


def execute(path: str | Path, params: dict | None = None, **environment: str) -> dict:
    """Run a page from top to bottom in a fresh kernel and return it with its outputs, not written.

    `params` go into a cell after the one tagged `parameters`, as papermill does it. `environment`
    is added to the kernel's. Raises DecodeError, in one line, for a parameter that the page does
    not have, a value that is no literal, and a cell that fails.
    """
    path, notebook = Path(path), load(path)
    if params:
        _inject(notebook, params, path.name)
    return _run(notebook, path, environment)


def _inject(notebook: dict, params: dict, name: str) -> None:
    known = list(parameters(notebook))
    for key, value in params.items():
        if key not in known:
            raise _no_such(f"{name}: parameter", key, known)
        try:
            ast.literal_eval(repr(value))
        except (ValueError, SyntaxError):
            raise DecodeError(f"{name}: parameter {key} is {value!r}, needs a literal") from None
    at = next(i for i, cell in enumerate(notebook["cells"]) if "parameters" in tags(cell))
    notebook["cells"].insert(at + 1, {
        "cell_type": "code", "id": INJECTED, "execution_count": None, "outputs": [],
        "metadata": {"tags": [INJECTED]},
        "source": "\n".join(f"{key} = {value!r}" for key, value in params.items()),
    })  # fmt: skip


def _run(notebook: dict, path: Path, environment: dict[str, str]) -> dict:
    try:
        import nbclient
        import nbformat
    except ImportError as error:
        raise DecodeError(
            f"{error.name} is not installed; running a page needs the extra decodev2[lab]"
        ) from None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:  # no history of the user
        client = nbclient.NotebookClient(
            nbformat.reads(json.dumps(notebook), as_version=4),
            km=_kernel_manager(own),
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(path.parent)}},
        )
        places = [str(card.PROJECT), os.environ.get("PYTHONPATH")]
        env = os.environ | {"IPYTHONDIR": own, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        try:
            # 2: what kernels print past Python must not end up in the output of --json
            done = client.execute(env=env | environment, stdout=2, cleanup_kc=True)
        except nbclient.exceptions.CellExecutionError as error:
            raise DecodeError(_failure(client.nb, path, error)) from None
        except nbclient.exceptions.CellTimeoutError:
            raise DecodeError(f"{path.name}: a cell ran for more than {CELL_TIMEOUT_S} s") from None
        except nbclient.exceptions.DeadKernelError:
            raise DecodeError(f"{path.name}: the kernel died") from None
    return json.loads(nbformat.writes(done))


def _kernel_manager(folder: str):
    """A kernel of this very interpreter, whatever kernels are installed under whatever names."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class Own(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=Own())
    if os.name == "posix":  # sockets in a folder of our own: nobody else can read or connect
        manager.transport, manager.connection_file = "ipc", os.path.join(folder, "kernel.json")
    return manager


def _failure(notebook: dict, path: Path, error) -> str:
    cells = [cell for cell in code_cells(notebook) if cell.get("id") != INJECTED]
    at = next(i for i, c in enumerate(cells) if any(o.output_type == "error" for o in c.outputs))
    said = " ".join(f"{error.ename}: {error.evalue}".split())
    return f"{path.name}: code cell {at} failed: {said}"


def remake(paths: Iterable[str | Path]) -> list[Path]:
    """Run pages afresh and write them back with their outputs; returns the paths written.

    A page whose run fails stays as it is (DecodeError). Kept are sources, ids, tags, outputs and
    execution counts; views of widgets go, as they need the kernel that made them.
    """
    return [_write(stripped(execute(path)), Path(path)) for path in paths]


def _write(notebook: dict, path: Path) -> Path:
    import nbformat

    checked = nbformat.reads(json.dumps(notebook), as_version=4)
    text = nbformat.writes(checked, indent=1, ensure_ascii=False)
    plates.write_atomic(path, (text.rstrip("\n") + "\n").encode())
    return path


def stripped(notebook: dict) -> dict:
    """The notebook without what differs from run to run, machine to machine or editor to editor."""
    cells = []
    for cell in notebook["cells"]:
        kept = {"metadata": {"tags": tags(cell)} if tags(cell) else {}}
        if cell["cell_type"] == "code":
            kept["outputs"] = [o for o in map(_without_view, cell["outputs"]) if o]
        cells.append({k: v for k, v in cell.items() if k != "attachments" or v} | kept)
    return notebook | {"metadata": NOTEBOOK_METADATA, "cells": cells}


def _without_view(output: dict) -> dict | None:
    """An output without its widget view; None if only the widget's repr would be left."""
    data = output.get("data", {})
    if WIDGET_VIEW not in data:
        return output
    rest = {key: value for key, value in data.items() if key != WIDGET_VIEW}
    return output | {"data": rest} if rest.keys() - {"text/plain"} else None


# ---- the form of a page ----


def problems(path: str | Path, runs: str | Path | None = None) -> list[str]:
    """What is wrong with the page at `path`: its form, and numbers that nothing on it shows.

    `runs` is the folder of the plates that it may load (default: runs/ beside its folder).
    """
    path = Path(path)
    try:
        notebook = load(path)
    except DecodeError as error:
        return [str(error).removeprefix(f"{path}: ")]
    found = form_problems(notebook, path.stat().st_size)
    return found + number_problems(notebook, runs or path.resolve().parents[1] / "runs")


def folder_problems(folder: str | Path) -> list[str]:
    """What is wrong with the pages of a folder, one line each, starting with the file."""
    paths = sorted(Path(folder).glob("*.ipynb"))
    found = [f"{path}: {line}" for path in paths for line in problems(path)]
    for path in paths:
        if not re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name):
            found.append(f"{path}: is not named like 07_one_idea.ipynb")
    numbers = [path.name[:2] for path in paths]
    twice = sorted({n for n in numbers if numbers.count(n) > 1})
    return found + [f"{folder}: two notebooks have the number {n}" for n in twice]


def form_problems(notebook: dict, size: int) -> list[str]:
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
        found.append(f"widget metadata is saved; {REMAKE}")
    rest = {key: value for key, value in notebook["metadata"].items() if key != "widgets"}
    if rest != NOTEBOOK_METADATA:
        found.append(f"notebook metadata is {rest}, needs {NOTEBOOK_METADATA}; {REMAKE}")
    for number, cell in enumerate(notebook["cells"]):
        volatile = sorted(cell["metadata"].keys() - {"tags"})
        if volatile:
            found.append(f"cell {number}: metadata {', '.join(volatile)}, only tags may stay")
        if any(WIDGET_VIEW in output.get("data", {}) for output in cell.get("outputs", ())):
            found.append(f"cell {number}: the view of a widget is saved; {REMAKE}")
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
    values = parameters({"cells": [code[at]]})
    later = set().union(*(_used_names(source(cell)) for cell in code[at + 1 :]))
    found = [] if values else ["the parameters cell sets nothing"]
    if at:
        found.append("code stands before the parameters cell")
    if "MODE" in values:
        if next(iter(values)) != "MODE" or values["MODE"] != "replay":
            found.append("the parameters cell does not begin with MODE = 'replay'")
        if not any("fact" in tags(cell) for cell in code):
            found.append("no cell is tagged fact, so a new measurement is compared with nothing")
    return found + [f"parameter {name} is never used" for name in values if name not in later]


def _used_names(code: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def _run_problems(code: list[dict]) -> list[str]:
    found = []
    counts = [cell["execution_count"] for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"execution counts {counts}, not from one run top to bottom; {REMAKE}")
    for number, cell in enumerate(code):
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            found.append(f"code cell {number}: holds an error")
        if any(output.get("name") == "stderr" for output in cell["outputs"]):
            found.append(f"code cell {number}: keeps stderr (a build's words, or a warning)")
        if any(_PERSONAL_PATH.search(text) for text in texts(cell["outputs"])):
            found.append(f"code cell {number}: a path of one machine is in its output")
    compared = [cell for cell in code if "nbval-ignore-output" not in tags(cell)]
    if not any(texts(cell["outputs"]) for cell in compared):
        found.append("no output is left to compare")
    if len(compared) <= len(code) / 2:
        found.append(f"only {len(compared)} of {len(code)} code cells are compared")
    return found


# ---- the numbers in its prose ----


def number_problems(notebook: dict, runs: str | Path) -> list[str]:
    """Measured numbers in the prose that neither an output nor a loaded plate's text shows.

    A number counts as measured when a unit follows: us, ms, s, tok/s, GB/s, MB, % or x (a ratio).
    A prediction comes before the measurement: a cell tagged `prediction`, or whose heading has the
    word, is left out.
    """
    shown = set()
    for text in [*_output_texts(notebook), *_plate_texts(notebook, Path(runs))]:
        shown |= {_plain(number) for number in _NUMBER.findall(text)}
    found = []
    for at, cell in enumerate(notebook["cells"]):
        heading = re.match(r"#+ .*", source(cell))
        predicts = heading and "predict" in heading[0].lower()
        if cell["cell_type"] != "markdown" or predicts or "prediction" in tags(cell):
            continue
        for match in MEASURED.finditer(source(cell)):
            if _plain(match[1]) not in shown:
                found.append(f"cell {at}: {match[0]} is in no text output and in no loaded plate")
    return found


def _plain(number: str) -> str:
    return number.replace(",", "")


def _output_texts(notebook: dict) -> list[str]:
    """Texts that a reader sees. HTML without its markup, or a style would count."""
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return [re.sub(r"<style.*?</style>|<[^>]*>", " ", t, flags=re.S) for t in texts(outputs)]


def _plate_texts(notebook: dict, runs: Path) -> list[str]:
    """Words of the plates that the page's `plate(NAME, ...)` calls can show."""
    names = set()
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(source(cell))):
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "plate"
            if called and node.args and isinstance(node.args[0], ast.Constant):
                names.add(str(node.args[0].value))
    out = []
    for name in sorted(names):
        newest = {}  # of each set of parameters, as a page may ask for one of them
        for made in sorted(map(plates.load, plates.plate_paths(runs / name)), key=_created):
            newest[plates.dumps(made.params)] = made
        for made in newest.values():
            out += [made.prediction, made.verdict, *made.notes]
    return out


def _created(made: plates.Plate) -> str:
    return made.created


# ---- regress: the same page on this machine ----


def regress(
    path: str | Path,
    mode: str = "measure",
    runs: str | Path = "runs",
    bound: tuple[float, float] = BOUND,
) -> dict:
    """Run one page with MODE = `mode` and compare it with the committed one -> a report.

    Outputs of cells tagged `fact` must be equal. A plate that the run saved in `runs` is held
    against the newest one of that experiment and card: every time over its old value must lie in
    `bound`. Report: {notebook, mode, seconds, facts, plates: [{experiment, against, times, low,
    high}], faults: [one line each]}.
    """
    path, runs = Path(path), Path(runs).resolve()
    committed = load(path)
    params = {"MODE": mode} if "MODE" in parameters(committed) else {}
    report = {"notebook": path.name, "mode": mode if params else None, "facts": 0, "plates": []}
    known = [p for folder in {runs, card.PROJECT / "runs"} for p in plates.plate_paths(folder)]
    start, faults = time.monotonic(), []
    try:
        done = execute(path, params, DECODEV2_RUNS=str(runs))
    except DecodeError as error:
        done, faults = None, [str(error)]
    report["seconds"] = round(time.monotonic() - start, 1)
    if done:
        facts = {c["id"]: c for c in code_cells(committed) if "fact" in tags(c)}
        again = {c["id"]: c for c in code_cells(done)}
        report["facts"] = len(facts)
        for name, cell in facts.items():
            if words := _difference(cell["outputs"], again[name]["outputs"]):
                faults.append(f"fact {name}: {words}")
    for new in plates.plate_paths(runs):
        if new not in known:
            entry, found = _ratios(plates.load(new), known, bound)
            report["plates"].append(entry)
            faults += found
    return report | {"faults": faults}


def _difference(old: list[dict], new: list[dict]) -> str:
    """The first line that differs between two lists of outputs, pictures and widgets left out."""

    def lines(outputs: list[dict]) -> list[str]:
        kept = [output for output in map(_without_view, outputs) if output]
        parts = [output.get("data") or {"text": output.get("text", "")} for output in kept]
        return [line for part in parts for key in sorted(part) for text in texts({key: part[key]})
                for line in text.splitlines()]  # fmt: skip

    a, b = lines(old), lines(new)
    for was, now in zip(a, b, strict=False):
        if was != now:
            return f"{now.strip()!r}, committed {was.strip()!r}"
    return "" if len(a) == len(b) else f"{len(b)} lines, committed {len(a)}"


def _ratios(new: plates.Plate, known: list[Path], bound: tuple[float, float]):
    """({experiment, against, times, low, high}, faults) of a new plate against the newest old one
    of the same experiment and card, of the same parameters if there is one. Worst times are left
    out, for one hiccup makes them, and times of the host (`host_timed` of the experiment) are
    counted but not held to the bound."""
    from .page import key_columns

    entry = {"experiment": new.experiment, "against": None, "times": 0, "of_host": 0}
    entry |= {"low": None, "high": None}
    paths = [p for p in known if p.parent.name == new.experiment]
    same = [m for m in map(plates.load, paths) if m.card["slug"] == new.card["slug"]]
    if not same:
        return entry, []
    old = max(same, key=lambda made: (made.params == new.params, made.created))
    entry["against"] = plates.file_name(plates.clean(old))
    keys = sorted({*key_columns(new), *key_columns(old)})
    keys = [key for key in keys if all(key in row for row in (*new.rows, *old.rows))]
    times = [c["name"] for c in new.columns if c["unit"] in TIME_UNITS]
    times = [t for t in times if not t.startswith("floor") and not t.endswith(("_worst", "_std"))]
    if not times:  # a plate of errors or sizes; its page holds them as facts
        return entry, []
    before = _by_key(old.rows, keys)
    host_timed = getattr(experiments.get(new.experiment), "host_timed", lambda row, column: False)
    ratios, of_host = {}, set()
    for place, row in _by_key(new.rows, keys).items():
        for name in times:
            was = before.get(place, {}).get(name)
            if was and row[name]:
                ratios[place, name] = row[name] / was
                if host_timed(row, name) or host_timed(before[place], name):
                    of_host.add((place, name))
    if not ratios:
        return entry, [f"{new.experiment}: no time has its like in {entry['against']}"]
    held = [ratio for key, ratio in ratios.items() if key not in of_host] or list(ratios.values())
    entry |= {"times": len(ratios), "low": min(held), "high": max(held)}
    entry["of_host"] = len(of_host)
    return entry, [
        f"{new.experiment}: {', '.join(place[0])} {name} is {ratio:.2f} x the recorded time, "
        f"needs {bound[0]:g} to {bound[1]:g}"
        for (place, name), ratio in ratios.items()
        if (place, name) not in of_host and not bound[0] <= ratio <= bound[1]
    ]


def _by_key(rows: list[dict], keys: list[str]) -> dict[tuple, dict]:
    """Rows by the texts of their key columns and by how many rows before were equal in them."""
    out, count = {}, {}
    for row in rows:
        key = tuple(str(row[name]) for name in keys)
        count[key] = count.get(key, -1) + 1
        out[key, count[key]] = row
    return out


# ---- what the command line calls ----


def notebooks_command(names, folder="notebooks", again=False, check=False, as_json=False) -> int:
    """List pages, or remake and check them; 1 if a check found something."""
    paths = find(names, folder)
    if again:
        for path in paths:
            remake([path])
            if not as_json:
                print(f"remade {path}")
    if not (again or check):
        rows = [_listed(path) for path in paths]
        if as_json:
            print(json.dumps(rows, indent=1))
        for row in [] if as_json else rows:
            print(f"{row['notebook']:32s} {row['bytes'] / 1000:6.0f} kB  {row['title']}")
            print(f"{'':44s}{', '.join(row['parameters'])}")
        return 0
    found = [f"{path}: {line}" for path in paths for line in problems(path)]
    if not names:
        found = folder_problems(folder)
    _print_found(found, len(paths), as_json)
    return 1 if found else 0


def run_command(name: str, given: Iterable[str], out: str | Path, folder="notebooks") -> int:
    """Run one page with parameters ("KEY=VALUE", a value being a Python literal or a text) and
    write it, outputs and all, to `out`. The committed page stays as it is."""
    out = Path(out)
    if not out.parent.is_dir():
        raise DecodeError(f"{out}: its folder does not exist")
    (path,) = find([name], folder)
    if out.exists() and out.samefile(path):
        raise DecodeError(f"{out} is the page itself; needs another file to write to")
    params = {}
    for key, value in key_values(given):
        try:
            params[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            params[key] = value
    print(_write(stripped(execute(path, params)), out))
    return 0


def key_values(given: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(key, value) of texts "KEY=VALUE". Raises DecodeError for one without "=" or a second one of
    the same key."""
    seen = set()
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise DecodeError(f"parameter {text!r} has no value; needs {key}=VALUE")
        if key in seen:
            raise DecodeError(f"parameter {key!r} is given twice; needs one value")
        seen.add(key)
        yield key, value


def _listed(path: Path) -> dict:
    notebook = load(path)
    title = source(notebook["cells"][0]).splitlines()[0].removeprefix("# ")
    return {"notebook": path.name, "bytes": path.stat().st_size, "title": title,
            "parameters": list(parameters(notebook))}  # fmt: skip


def _print_found(found: list[str], count: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1))
    elif found:
        print("\n".join(found))
    else:
        print(f"{count} {'notebook' if count == 1 else 'notebooks'}, no problem")


def regress_command(names, mode="measure", runs="runs", bound=BOUND, folder="notebooks",
                    as_json=False) -> int:  # fmt: skip
    """Run pages and compare each with the committed one; a line each, 1 if anything differs."""
    if mode not in ("measure", "replay"):
        raise DecodeError(f"mode is {mode!r}, needs 'measure' or 'replay'")
    if not 0 < bound[0] < bound[1]:
        raise DecodeError(f"bound is {bound[0]:g} to {bound[1]:g}, needs 0 < low < high")
    paths = find(names, folder)
    reports = []
    for path in paths:
        reports.append(regress(path, mode, runs, bound))
        if not as_json:
            print(_line(reports[-1]), flush=True)
    if as_json:
        print(json.dumps(reports, indent=1))
    return 1 if any(report["faults"] for report in reports) else 0


def _line(report: dict) -> str:
    parts = [f"{report['seconds']:.0f} s", f"{report['facts']} facts"]
    for entry in report["plates"]:
        name = entry["experiment"]
        if entry["against"] is None:
            parts.append(f"{name}: first plate of this card")
        elif not entry["times"]:
            parts.append(f"{name}: no times to compare")
        else:
            low, high = entry["low"], entry["high"]
            parts.append(f"{name}: {entry['times']} times, {low:.2f} to {high:.2f} x recorded")
            if entry["of_host"]:
                parts[-1] += f", {entry['of_host']} of the host left out"
    state = "FAILED" if report["faults"] else "ok"
    line = f"{report['notebook']:32s} {state:7s}{'; '.join(parts)}"
    more = len(report["faults"]) - 1
    if report["faults"]:
        line += f"; {report['faults'][0]}" + f" (and {more} more)" * (more > 0)
    return line
