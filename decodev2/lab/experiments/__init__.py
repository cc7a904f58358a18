"""Experiments: one module each, found by listing this folder.

A module has TITLE, QUESTION, PREDICTION (texts), PARAMS ({name: (default, help)}), DEPENDS (glob
patterns of the kernels below csrc/ that it runs), DEVICE ("cpu" or "cuda"),
`measure(params, progress) -> plate.Measured` and, for {"kind": "own"} figures, `draw(plate, fig)`.
`progress(done, total, text)` reports how far the run is.
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
