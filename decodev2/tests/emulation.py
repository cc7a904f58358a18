"""CUDA sources on the emulator of tests/emulator: its threads are fibers on the CPU."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from decodev2 import native

HERE = Path(__file__).resolve().parent / "emulator"


def skip_without_it(**how) -> None:
    """Skip where the emulator cannot run; `how` goes to `pytest.skip`."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the emulator switches fibers on x86-64 only", **how)
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler (c++)", **how)


def build(tmp_path_factory, name: str, *flags: str) -> ctypes.CDLL:
    """emulator/`name`.cpp, which includes a source of csrc, as a shared library."""
    skip_without_it()
    path = tmp_path_factory.mktemp("emulator") / f"{name}.so"
    command = [
        "c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-DDECODEV2_EMULATED", *flags, f"-I{HERE}",
        f"-I{native.csrc_folder()}", "-Wno-unknown-pragmas", "-Wno-attributes",
        str(HERE / f"{name}.cpp"), "-o", str(path),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=300)
    return ctypes.CDLL(str(path))
