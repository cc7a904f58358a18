"""The models that experiments can use: HF folders with their packed `.chr`, found in one folder."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from . import card


@dataclass(frozen=True)
class Model:
    """One packed model: `folder` is its HF folder, `chr` the packed file in it or beside it."""

    name: str
    folder: Path
    chr: Path


def find(folder: str | Path, only: list[str] | None = None) -> list[Model]:
    """Packed models below `folder` by name; `only` picks some of them, in its own order.

    A model is a sub-folder X with a config.json and a `.chr` inside it or beside it as X*.chr. A
    relative folder that is not here is taken from the checkout, as pages run in notebooks/. Raises
    ModelError when there is none, or when a name in `only` is not among them.
    """
    root = Path(folder)
    if not root.is_dir() and (card.PROJECT / root).is_dir():
        root = card.PROJECT / root
    found = {}
    for config in sorted(root.glob("*/config.json")) if root.is_dir() else []:
        own = config.parent
        beside = glob.escape(own.name)
        files = sorted(own.glob("*.chr")) or sorted(root.glob(f"{beside}.chr"))
        files = files or sorted(root.glob(f"{beside}.*.chr"))
        for path in files:
            name = own.name if len(files) == 1 else path.stem
            found[name] = Model(name, own, path)
    if not found:
        raise ModelError(f"{root}: no packed model; needs HF folders with a .chr in or beside them")
    for name in only or []:
        if name not in found:
            raise ModelError(f"model {name!r} is not in {root}; there are {', '.join(found)}")
    return [found[name] for name in only or found]
