"""What the command line calls: run an experiment, list, draw, lint. Each returns an exit status.

Standard output carries the result only; progress and everything a run prints go to standard error,
so `--json` output can be parsed. Errors are DecodeError: one line, for the caller to print.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..errors import DecodeError
from . import card, experiments, notebooks, plate
from .plate import Plate

DEFAULT_RUNS = Path("runs")


def run_command(
    name: str,
    params: Sequence[str] = (),
    runs_dir: str | Path = DEFAULT_RUNS,
    as_json: bool = False,
    save: bool = True,
) -> int:
    """Measure experiment `name` with `params` ("key=value" texts), save, draw and index its plate.

    Prints the plate's path, or with `as_json` the plate. With `save=False` nothing is written and
    the plate is printed.
    """
    module = experiments.get(name)
    values = parse_params(module.PARAMS, params, name)
    with contextlib.redirect_stdout(sys.stderr), _progress(name) as progress:
        made = record(name, values, progress)
        path = None
        if save:
            path = plate.save(made, runs_dir)
            plate.draw(path)
            plate.index(runs_dir)
    if as_json or path is None:
        sys.stdout.write(plate.dumps(plate.clean(made)))
    else:
        print(path)
    return 0


def run_all_command(
    params: Sequence[str] = (),
    runs_dir: str | Path = DEFAULT_RUNS,
    as_json: bool = False,
    stale: bool = False,
) -> int:
    """Record every experiment that this machine can run: those for CUDA where there is a device,
    else those for the CPU. Those that stand APART are named and left out. A plate of the same
    experiment, card and parameters is superseded: it goes once the new one is saved.

    `params` go to the experiments that have them. With `stale` only those whose newest plate here
    was made by other kernels run. One line per experiment; 1 if any of them failed, whose old plate
    stays.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = [name for name in experiments.names() if experiments.get(name).DEVICE == device]
    apart = [name for name in chosen if getattr(experiments.get(name), "APART", False)]
    chosen = [name for name in chosen if name not in apart]
    _check_known(params, chosen)
    slug = card.card(device)["slug"]
    results = []
    for name in chosen:
        old = plate.latest(runs_dir, name, slug)
        if stale and old and card.is_current(plate.load(old).code):
            continue
        results.append(_run_one(name, params, Path(runs_dir)))
        if not as_json:
            print(_result_line(results[-1]), flush=True)
    plate.index(runs_dir)
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        total = sum(result["seconds"] for result in results)
        print(f"{len(results)} experiments in {total:.0f} s")
        if apart:
            print(f"left out, to be run by name: {', '.join(apart)}")
    return 1 if any(result["error"] for result in results) else 0


def _check_known(params: Sequence[str], names: Sequence[str]) -> None:
    known = {key for name in names for key in experiments.get(name).PARAMS}
    for text in params:
        key = text.partition("=")[0]
        if key not in known:
            raise DecodeError(f"no experiment here has the parameter {key!r}")


def _run_one(name: str, params: Sequence[str], runs_dir: Path) -> dict:
    module = experiments.get(name)
    own = [text for text in params if text.partition("=")[0] in module.PARAMS]
    started, path, error = time.perf_counter(), None, None
    try:
        with contextlib.redirect_stdout(sys.stderr), _progress(name) as progress:
            made = record(name, parse_params(module.PARAMS, own, name), progress)
            path = plate.save(made, runs_dir)
            plate.draw(path)
            _remove_superseded(path)
    except Exception as failure:  # the next experiment does not depend on this one
        error = f"{type(failure).__name__}: {failure}".split("\n", 1)[0]
    return {
        "experiment": name,
        "plate": path and path.as_posix(),
        "seconds": time.perf_counter() - started,
        "verdict": plate.load(path).verdict if path else None,
        "error": error,
    }


def _remove_superseded(path: Path) -> None:
    """Other plates of the experiment, card and parameters of the one at `path`, with figures."""
    new = plate.load(path)
    for old in plate.plate_paths(path.parent):
        other = plate.load(old)
        if old != path and (other.card["slug"], other.params) == (new.card["slug"], new.params):
            old.unlink()
            old.with_suffix(".png").unlink(missing_ok=True)


def _result_line(result: dict) -> str:
    said = f"FAILED: {result['error']}" if result["error"] else result["verdict"]
    return f"{result['experiment']} ({result['seconds']:.0f} s): {said}"


def record(name: str, params: dict, progress=lambda done, total, text: None) -> Plate:
    """Measure with complete `params` and return the plate, not saved. What notebooks call."""
    module = experiments.get(name)
    measured = module.measure(params, progress)
    made = Plate(
        experiment=name,
        title=module.TITLE,
        question=module.QUESTION,
        prediction=module.PREDICTION,
        verdict=measured.verdict,
        card=measured.card or card.card(module.DEVICE),
        params={key: _without_folder(value) for key, value in params.items()},
        columns=measured.columns,
        rows=measured.rows,
        figure=measured.figure,
        notes=measured.notes,
        code=card.code_state(module.DEPENDS) | {"switches": _switches()},
    )
    return made


def _switches() -> dict:
    """Which kernels stood behind the ops when the run began; an experiment turns its own."""
    from .. import toggles

    names = ("CHR_NF4_DECODE", "CHR_NF4_GEMV_NR", "DECODEV2_NVCC_FLAGS", "DECODEV2_CPU_ISA")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    return {"toggles": asdict(toggles.current), "environment": given}


def _without_folder(value):
    """A path says where somebody keeps files; its last part says which file it was."""
    return Path(value).name if isinstance(value, str) and ("/" in value or "\\" in value) else value


@contextlib.contextmanager
def _progress(name: str):
    from tqdm.auto import tqdm

    with tqdm(desc=name, file=sys.stderr, disable=None, leave=False) as bar:

        def report(done: int, total: int, text: str) -> None:
            bar.total = total
            bar.set_postfix_str(text, refresh=False)
            bar.update(done - bar.n)

        yield report


def parse_params(known: dict, given: Sequence[str], name: str = "experiment") -> dict[str, object]:
    """Defaults of `known` ({name: (default, help)}) with "key=value" texts of the default's type.

    Lists are separated by commas. Raises DecodeError for a text without "=", an unknown or repeated
    name, or a value of another type.
    """
    values = {key: default for key, (default, _) in known.items()}
    unknown = [text.partition("=")[0] for text in given if text.partition("=")[0] not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known) or 'none'}"
        raise DecodeError(f"{name} has no parameter {', '.join(map(repr, unknown))}; {hint}")
    for key, value in notebooks.key_values(given):
        values[key] = _convert(key, value, known[key][0])
    return values


def _convert(key: str, text: str, default: object):
    if isinstance(default, bool):
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in words:
            raise DecodeError(f"parameter {key} is {text!r}, needs true or false")
        return words[text.lower()]
    if isinstance(default, int | float):
        kind, what = (int, "a whole number") if isinstance(default, int) else (float, "a number")
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or value != value or value in (float("inf"), float("-inf")):
            raise DecodeError(f"parameter {key} is {text!r}, needs {what}")
        return value
    if isinstance(default, list):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def list_command(runs_dir: str | Path = DEFAULT_RUNS, as_json: bool = False) -> int:
    """Print every experiment with its question, parameters and plates recorded in `runs_dir`."""
    table = {}
    for name in experiments.names():
        m = experiments.get(name)
        table[name] = {
            "title": m.TITLE,
            "question": m.QUESTION,
            "device": m.DEVICE,
            "params": {k: {"default": v, "help": text} for k, (v, text) in m.PARAMS.items()},
            "plates": [p.as_posix() for p in plate.plate_paths(Path(runs_dir) / name)],
        }
    if as_json:
        print(json.dumps(table, indent=1, sort_keys=True))
        return 0
    for name, entry in table.items():
        print(f"{name}  [{entry['device']}]\n  {entry['question']}")
        for key, parameter in entry["params"].items():
            default = parameter["default"]
            shown = ",".join(default) if isinstance(default, list) else default
            print(f"    {f'{key}={shown}':<32} {parameter['help']}")
        for path in entry["plates"]:
            print(f"  {path}")
    return 0


def draw_command(targets: Sequence[str | Path] = (DEFAULT_RUNS,), as_json: bool = False) -> int:
    """Draw plates, or all below folders; print what was written. A runs folder, which has one
    folder per experiment, gets its index too."""
    written = []
    for target in map(Path, targets):
        if not target.exists():
            raise DecodeError(f"{target}: no such file or folder; needs a plate or a runs folder")
        paths = plate.plate_paths(target) if target.is_dir() else [target]
        for path in paths:
            if png := plate.draw(path):
                written.append(png.as_posix())
        if target.is_dir() and all(path.parent != target for path in paths):
            written.append(plate.index(target).as_posix())
    print(json.dumps(written, indent=1) if as_json else "\n".join(written))
    return 0


def _stale(runs_dir: Path) -> list[str]:
    """Plates that nothing newer replaces although the kernels they ran have changed."""
    newest: dict[tuple, tuple[str, Path]] = {}
    for path in plate.plate_paths(runs_dir):
        with contextlib.suppress(DecodeError):  # a plate that cannot be read was named already
            made = plate.load(path)
            key = (made.experiment, made.card.get("slug"), plate.dumps(plate.clean(made.params)))
            newest[key] = max(newest.get(key, ("", path)), (made.created, path))
    return [
        f"{path}: the kernels it ran have changed since; record it again (run --all --stale)"
        for _, path in sorted(newest.values(), key=lambda pair: pair[1])
        if not card.is_current(plate.load(path).code)
    ]


def _not_held(runs_dir: Path) -> list[str]:
    """What an experiment claims of every run and its plate does not show. A finding, no fault of
    the plate: it was measured so."""
    found = []
    for path in plate.plate_paths(runs_dir):
        with contextlib.suppress(DecodeError):  # such a plate was named already
            made = plate.load(path)
            claims = getattr(experiments.get(made.experiment), "claims", lambda _: [])
            found += [f"{path}: does not hold: {text}" for text, holds in claims(made) if not holds]
    return found


def lint_command(targets: Sequence[str | Path] = (DEFAULT_RUNS,), as_json: bool = False) -> int:
    """Print every problem of plates, or of all plates below folders; 1 if there is any.

    The pages of the workbook are checked too where a folder `notebooks` lies beside a runs folder.
    Of each experiment, card and set of parameters the newest plate must be of today's kernels.
    What a plate says does not hold is printed, too; it is no problem of the plate.
    """
    folders = [Path(target) for target in targets]
    beside = dict.fromkeys(f.parent / "notebooks" for f in folders if f.is_dir())
    pages = [folder for folder in beside if folder.is_dir()]
    found = [problem for target in targets for problem in plate.lint(target)]
    found += [problem for folder in pages for problem in notebooks.folder_problems(folder)]
    found += [problem for folder in folders if folder.is_dir() for problem in _stale(folder)]
    if as_json:
        print(json.dumps(found, indent=1))
        return 1 if found else 0
    for remark in (line for folder in folders if folder.is_dir() for line in _not_held(folder)):
        print(remark)
    if found:
        print("\n".join(found))
    else:
        count = sum(len(plate.plate_paths(f)) if f.is_dir() else 1 for f in folders)
        text = f"{count} {'plate' if count == 1 else 'plates'}"
        if pages:
            count = sum(len(list(folder.glob("*.ipynb"))) for folder in pages)
            text += f", {count} {'notebook' if count == 1 else 'notebooks'}"
        print(f"{text}, no problem")
    return 1 if found else 0
