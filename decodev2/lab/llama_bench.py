"""llama.cpp's own benchmark as a process of its own: found, run with a time-out, its JSON read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import DecodeError
from . import card

PROGRAM = "llama-bench"
NEW_TOKENS = 128  # of its decode test, at positions 0 to 127


@dataclass(frozen=True)
class Found:
    """`prompts` {length: seconds of each run}; `decode` seconds of each run of NEW_TOKENS. `gpu` is
    "" where it saw none; `batch` is how many columns of a prompt go through the model at a time."""

    build: str
    gpu: str
    batch: int
    prompts: dict[int, list[float]]
    decode: list[float]


def find(given: str = "") -> str:
    """Path of llama-bench: `given`, or the one on PATH. Raises DecodeError."""
    found = shutil.which(given or PROGRAM)
    if not found:
        raise DecodeError(
            f"{given} is no program; needs llama.cpp's {PROGRAM}"
            if given
            else f"llama.cpp's {PROGRAM} is not on PATH; parameter llama_bench names it"
        )
    return found


def run(program: str, gguf: Path, prompts: Sequence[int], timeout_s: float) -> Found:
    """Time prompts of these lengths and the decoding of NEW_TOKENS, all layers on the first GPU.

    Raises DecodeError: it cannot be started, fails, prints something else or takes longer than
    `timeout_s`, when it and whatever it started are ended.
    """
    lengths = [str(n) for n in prompts] or ["0"]  # 0 leaves its usual prompt out
    command = [
        program, "-m", str(gguf), "-ngl", "99", "-sm", "none", "-fa", "1",
        "-p", ",".join(lengths), "-n", str(NEW_TOKENS), "-o", "json",
    ]  # fmt: skip
    output, said = _output(command, timeout_s)
    return parse(output, prompts, said)


def parse(output: str, prompts: Sequence[int], said: str = "nothing was said") -> Found:
    """What its JSON holds; `said` explains in the error why there is none. Raises DecodeError."""
    try:
        entries = json.loads(output)
        by_test = {(e["n_prompt"], e["n_gen"], e.get("n_depth", 0)): e for e in entries}
        seconds = {test: [ns * 1e-9 for ns in e["samples_ns"]] for test, e in by_test.items()}
        first = entries[0]
        build = f"{first['build_number']} ({first['build_commit']})"
        gpu, batch = str(first["gpu_info"]), int(first["n_ubatch"])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise DecodeError(f"{PROGRAM} printed no results of its tests ({said})") from None
    wanted = {n: (n, 0, 0) for n in prompts} | {0: (0, NEW_TOKENS, 0)}
    for n, test in wanted.items():
        what = f"prompt of {n}" if n else f"decoding of {NEW_TOKENS}"
        if not all(s > 0 for s in seconds.get(test) or [0]):
            raise DecodeError(f"{PROGRAM} timed no {what} ({said})")
    return Found(build, gpu, batch, {n: seconds[wanted[n]] for n in prompts}, seconds[wanted[0]])


def _output(command: list[str], timeout_s: float) -> tuple[str, str]:
    """(standard output, last line of standard error) of a command that succeeds."""
    # Files, not pipes: what a wrapper script leaves behind would keep a pipe open past the timeout.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

        def text(file) -> str:
            file.seek(0)
            return file.read().decode("utf-8", "replace")

        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=sys.platform != "win32",
            )  # fmt: skip
        except OSError as error:
            raise DecodeError(f"{command[0]} cannot be started ({error.strerror})") from None
        try:
            status = process.wait(timeout_s)
        except BaseException as error:  # an interrupt does not reach a session of its own
            card.kill_group(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            said = _last_line(text(err))
            raise DecodeError(f"{PROGRAM} did not finish in {timeout_s:g} s ({said})") from None
        said = _last_line(text(err))
        if status:
            raise DecodeError(f"{PROGRAM} failed with status {status} ({said})")
        return text(out), said


def _last_line(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was said"
