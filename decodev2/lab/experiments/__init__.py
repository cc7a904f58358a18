"""Experiments: one module each, found by listing this folder.

A module has

    TITLE, QUESTION, PREDICTION   texts; the prediction holds its arithmetic
    PARAMS     {name: (default, help)}
    COLUMNS    of its rows, [{"name", "unit"}, ...], see `plate.Measured`
    DEPENDS    glob patterns of the kernels below csrc/ that it runs
    DEVICE     "cuda" or "cpu": where it runs, and whose plate it makes; "none": its rows are a
               transcription, nothing is measured, and `run --all` leaves it out
    APART      True (may be left out): checks tools or builds for minutes, no speed of a kernel;
               `run --all` names it and leaves it out
    measure(params, progress) -> plate.Measured
               `progress(done, total, text)` reports how far the run is

and, where they are used,

    draw(plate, fig)   for a figure of {"kind": "own"}
    claims(plate) -> [(text, bool), ...]
               for its page: what must not change between runs, such as which of two is faster or
               an error bound; the texts hold no times
    host_timed(row, column) -> bool
               for `regress`: is this time made by Python, the host or its disk? It is then told,
               but not held against the recorded one
    TOGGLES    {column: (param, choices)} for the panel of its page. `param` is a list parameter,
               whose default holds some of the choices or, if it is [], stands for all; each row
               holds its choice in `column`. So a panel can look choices up in a plate, or measure
               with one of each
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType

from ...errors import DecodeError


def names() -> list[str]:
    """Names of all experiments, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def get(name: str) -> ModuleType:
    """The experiment module called `name`. Raises DecodeError listing what there is."""
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise DecodeError(f"experiment {name!r} does not exist; {hint}")
    return importlib.import_module(f"{__name__}.{name}")
