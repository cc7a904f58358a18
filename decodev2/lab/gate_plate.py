"""The correctness gates as a plate: what was run, on which card, with which kernel sources.

A plate counts only for the very sources it names (`faults`), so that a machine without a GPU can
refuse kernels that nobody has checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ..errors import DecodeError
from . import card, plate
from .plate import Plate

EXPERIMENT = "gates"
# Patterns below csrc/ of the sources that a plate vouches for.
DEPENDS = {"cuda": ("*.cu", "*.cuh", "*.h", "*_binding.cpp"), "cpu": ("cpu/**/*", "refuse.h")}
COLUMNS = [
    {"name": "gate", "unit": ""},
    {"name": "model", "unit": ""},
    {"name": "kernels", "unit": ""},
    {"name": "measured", "unit": "1"},
    {"name": "limit", "unit": "1"},
    {"name": "ok", "unit": ""},
    {"name": "note", "unit": ""},
]


def record(device: str, progress: Callable[[int, int, str], None] = lambda *_: None) -> Plate:
    """Run every gate on `device` ("cpu" or "cuda") and return the plate, not saved.

    Raises BuildError, and DecodeError when the kernel sources change during the run.
    """
    from .. import gates, native

    code = card.code_state(DEPENDS[device])
    if device == "cuda":
        native.build_cuda()
    machine = card.card(device)  # first: a kernel that crashes takes the device with it
    rows, total = [], len(gates.expected_rows(device))
    for row in gates.run(device):
        rows.append(row)
        progress(len(rows), total, f"{row.model}, {row.kernels}: {row.gate}")
    if not card.is_current(code):
        raise DecodeError("the kernel sources changed while the gates ran; run them again")
    return Plate(
        experiment=EXPERIMENT,
        title=f"Correctness gates on {'CUDA' if device == 'cuda' else 'the CPU'}",
        question="Do these kernels compute what the float32 oracle computes, in every way to step?",
        prediction="Every gate passes on every model.",
        verdict=_verdict(rows),
        card=machine,
        params={
            "prompt": gates.PROMPT,
            "models": [f"{spec.name}, seed {seed}" for spec, seed in gates.cases(device)],
        },
        columns=COLUMNS,
        rows=[_row(row) for row in rows],
        code=code,
        notes=[f"{g.__name__}: {' '.join(g.__doc__.split())}" for g in gates.all_gates(device)],
    )


def _row(row) -> dict:
    """A row of the plate. What did not run here has no verdict, but a reason."""
    ok = plate.Missing(row.note) if row.ok is None else row.ok
    return asdict(row) | {"ok": ok, "note": _without_folders(row.note)}


def _verdict(rows: list) -> str:
    failed = [row for row in rows if row.ok is False]
    left_out = [row for row in rows if row.ok is None]
    paths = ", ".join(dict.fromkeys(row.kernels for row in left_out))
    rest = f" Not run here: {paths} ({len(left_out)} rows)." if left_out else ""
    if not failed:
        return f"Passed, {len(rows) - len(left_out)} rows.{rest}"
    names = ", ".join(dict.fromkeys(row.gate for row in failed))
    return f"FAILED: {names} ({len(failed)} of {len(rows)} rows).{rest}"


def _without_folders(text: str) -> str:
    """A plate holds no folders; the last part of a path says enough."""
    return re.sub(r"[^\s'\"=:(,]*/([^\s/'\":,)]*)", r"\1", text)


def faults(path: Path, device: str, root: Path = card.PROJECT) -> list[str]:
    """Why the plate at `path` does not vouch for today's kernels of `device`; empty if it does."""
    from .. import gates

    found = plate.lint(path)
    if found:
        return found
    made = plate.load(path)
    if made.experiment != EXPERIMENT or made.card["device"] != device:
        return [f"{path}: is not a plate of the gates on {device}"]
    if made.code["depends"].get("patterns") != list(DEPENDS[device]):
        found.append(f"{path}: names other sources than {', '.join(DEPENDS[device])}")
    elif not card.is_current(made.code, root):
        found.append(f"{path}: was made with kernel sources {made.code['depends']['hash']}")
    for ok, what in ((False, "failed"), (None, "did not run")):
        if gates_of := sorted({row["gate"] for row in made.rows if row["ok"] is ok}):
            found.append(f"{path}: {', '.join(gates_of)} {what}")
    rows = {(row["gate"], row["model"], row["kernels"]) for row in made.rows}
    if missing := gates.expected_rows(device) - rows:
        found.append(f"{path}: {len(missing)} rows are missing, e.g. {', '.join(min(missing))}")
    return found


def gates_command(device: str, runs_dir: str | Path, as_json: bool = False) -> int:
    """Run the gates, save their plate and index it; 1 when a gate failed.

    Prints failed rows, the verdict and the plate's path, or with `as_json` the plate. Gates of
    kernels that this card cannot run do not fail, but their plate does not vouch for the kernels.
    """
    import contextlib

    from ..session import pick_device
    from .commands import _progress

    device = pick_device(device)
    with contextlib.redirect_stdout(sys.stderr), _progress(EXPERIMENT) as progress:
        made = record(device, progress)
        path = plate.save(made, runs_dir)
        plate.index(runs_dir)
    failed = [row for row in made.rows if row["ok"] is False]
    if as_json:
        sys.stdout.write(plate.dumps(plate.clean(made)))
        return 1 if failed else 0
    for row in failed:
        print(
            f"failed  {row['gate']:24s}{row['model']:16s}{row['kernels']:20s}"
            f"{row['measured']:.4g}, limit {row['limit']:g}  {row['note']}".rstrip()
        )
    print(made.verdict)
    print(path)
    return 1 if failed else 0
