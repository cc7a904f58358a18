"""Building the CUDA kernels: from nothing, a second time, side by side, and after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ... import native
from ...errors import DecodeError
from .. import card
from ..plate import Measured

TITLE = "Cold build of every CUDA kernel, and builds that were killed or met another"
QUESTION = "How long does the first use take, and does anything break a build for good?"
PREDICTION = (
    "Every extension is one nvcc and one C++ compile, all side by side: under 90 s from nothing. "
    "A second process compiles nothing. A killed build and two builds at once end as one good one."
)
PARAMS = {"extension": ("step", "the one that is killed and built by two processes at once")}
DEPENDS = ("*.cu", "*.cuh", "*.h", "*_binding.cpp")
DEVICE = "cuda"
APART = True
LIMIT_S = 90
COLUMNS = [
    {"name": "case", "unit": ""},
    {"name": "seconds", "unit": "s"},
    {"name": "compiled", "unit": "extensions"},
    {"name": "expected", "unit": "extensions"},
    {"name": "ok", "unit": ""},
]
ALL = "from decodev2 import native; native.build_cuda()"
ONE = "from decodev2 import native; native.cuda({!r})"


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per case, each in the empty cache that the first one filled."""
    if not torch.cuda.is_available():
        raise DecodeError("cold_build needs a CUDA device")
    name = params["extension"]
    if name not in native.CUDA_EXTENSIONS:
        known = ", ".join(native.CUDA_EXTENSIONS)
        raise DecodeError(f"extension {name!r} is unknown; there are {known}")
    rows = []

    def row(case: str, code: str, expected: int, at_once: int = 1) -> None:
        progress(len(rows), 4, case)
        rows.append({"case": case, "expected": expected} | _build(code, cache, at_once, expected))

    with tempfile.TemporaryDirectory() as cache:
        row("everything, from nothing", ALL, len(native.CUDA_EXTENSIONS))
        row("a second process", ALL, 0)
        _forget(name, cache)
        _kill_half_way(name, cache)
        row(f"{name} after a build that was killed", ONE.format(name), 1)
        _forget(name, cache)
        row(f"{name} by two processes at once", ONE.format(name), 1, at_once=2)
    first = rows[0]
    held = all(r["ok"] for r in rows) and first["seconds"] < LIMIT_S
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=(
            f"{'As predicted' if held else 'Not as predicted'}: {first['seconds']:.0f} s from "
            f"nothing on {os.cpu_count()} cores, {rows[1]['seconds']:.1f} s for a second process."
        ),
        card=card.card("cuda"),
    )


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on any card."""
    return [(row["case"], row["ok"]) for row in plate.rows]


def host_timed(row: dict, column: str) -> bool:
    """Compilers run on the host."""
    return True


def _build(code: str, cache: str, at_once: int, expected: int) -> dict:
    started = time.perf_counter()
    children = [_start(code, cache) for _ in range(at_once)]
    said = [child.communicate()[1] for child in children]
    seconds = time.perf_counter() - started
    compiled = sum(text.count("compiled in") for text in said)
    ok = compiled == expected and all(child.returncode == 0 for child in children)
    return {"seconds": seconds, "compiled": compiled, "ok": ok}


def _start(code: str, cache: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"DECODEV2_CACHE": cache},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _forget(name: str, cache: str) -> None:
    """Make the next build of one extension a real one: its finished mark and its objects go."""
    for folder in Path(cache).glob(f"decodev2_{name}_*"):
        for path in folder.iterdir():
            if path.suffix in (".so", ".o") or path.name == "complete":
                path.unlink()


def _kill_half_way(name: str, cache: str) -> None:
    """Start a build and kill it with all its compilers once it is compiling."""
    child = _start(ONE.format(name), cache)
    for line in child.stderr:
        if "compiling" in line:
            break
    time.sleep(3)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
