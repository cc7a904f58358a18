"""compute-sanitizer over every kind of kernel: memory, races, barriers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from ...errors import DecodeError
from .. import card
from ..plate import Measured

TITLE = "compute-sanitizer: memory, shared-memory races, barriers"
QUESTION = "Does any kernel read or write where it must not, race, or misuse a barrier?"
PREDICTION = "No report from memcheck, synccheck and racecheck, and the oracle's ids under each."
PARAMS = {
    "tools": (["memcheck", "synccheck", "racecheck"], "tools, separated by commas"),
    "timeout_s": (150, "seconds after which a tool is stopped"),
}
DEPENDS = ("*.cu", "*.cuh", "*.h")
DEVICE = "cuda"
APART = True
TARGET = ("-m", "decodev2.lab.sanitizer_target")
# racecheck does not follow a __syncwarp into an mbarrier, nor a counter in shared memory: one lane
# that arrives or counts for its warp looks like a race to it. In this build every lane arrives for
# itself, also where a counter says that a slot of the persistent step's ring has been read.
FLAGS = {"racecheck": "-DDECODEV2_EVERY_LANE_ARRIVES"}
COLUMNS = [
    {"name": "tool", "unit": ""},
    {"name": "cases", "unit": "cases"},
    {"name": "reports", "unit": "reports"},
    {"name": "seconds", "unit": "s"},
    {"name": "built_with", "unit": ""},
    {"name": "summary", "unit": ""},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per tool. A tool that reports, or a target that fails under it, is a row that says
    so."""
    if not torch.cuda.is_available():
        raise DecodeError("sanitizer needs a CUDA device")
    tool_path = shutil.which("compute-sanitizer")
    if not tool_path:
        raise DecodeError("compute-sanitizer was not found; it comes with the CUDA toolkit")
    rows = []
    for index, tool in enumerate(params["tools"]):
        progress(index, len(params["tools"]), tool)
        rows.append(_row(tool_path, tool, params["timeout_s"]))
    bad = [row for row in rows if row["reports"] or not row["cases"]]
    verdict = "; ".join(f"{r['tool']}: {r['reports']} reports in {r['cases']} cases" for r in rows)
    if any("left out" in row["summary"] for row in rows):
        verdict += "; not all of it can run on this card"
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=f"{'Not as predicted' if bad else 'As predicted'}: {verdict}.",
        card=card.card("cuda"),
    )


def claims(plate) -> list[tuple[str, bool]]:
    """What a kernel change must not change."""
    return [
        (f"{row['tool']} finds nothing", row["reports"] == 0 and row["cases"] > 0)
        for row in plate.rows
    ]


def host_timed(row: dict, column: str) -> bool:
    """How long a tool takes says nothing about the kernels."""
    return True


def parse(output: str) -> tuple[int, int, str]:
    """(cases, reports, summary) of what a tool and the target under it printed. The summary is the
    tool's line, its first report and where, what was left out, and the last word of a target that
    did not come to its end."""
    done = re.search(r"(\d+) cases done", output)
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output)
    counts = [int(n) for line in summaries for n in re.findall(r"(\d+) (?:error|hazard)", line)]
    if not summaries:
        return 0, 1, _last_line(output)
    first = re.search(r"^=+ (?!COMPUTE-|\w+ SUMMARY)(\S.*)(?:\n=+ +(at .*))?", output, re.MULTILINE)
    told = [f"first: {' '.join(filter(None, first.groups()))}"] if first else []
    if not done:
        told.append(f"the target: {_last_line(re.sub('(?m)^=+ .*', '', output))}")
    summary = "; ".join([summaries[-1], *told, *re.findall(r"left out: .*", output)])
    return int(done.group(1)) if done else 0, max(counts, default=1), _plain(summary)


def _row(tool_path: str, tool: str, timeout_s: int) -> dict:
    flags = FLAGS.get(tool, "")
    environment = os.environ | ({"DECODEV2_NVCC_FLAGS": flags} if flags else {})
    if flags:  # a build of its own, not under the tool's clock
        build = "from decodev2 import native; native.build_cuda()"
        subprocess.run([sys.executable, "-c", build], env=environment, check=True)
    command = [tool_path, "--tool", tool, sys.executable, *TARGET]
    started = time.perf_counter()
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
        output = run.stdout + run.stderr
    except subprocess.TimeoutExpired:
        output = f"stopped after {timeout_s} s"
    seconds = time.perf_counter() - started
    cases, reports, summary = parse(output)
    return {
        "tool": tool,
        "cases": cases,
        "reports": reports,
        "seconds": seconds,
        "built_with": flags or "the usual flags",
        "summary": summary.strip("= "),
    }


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return _plain(lines[-1])[:200] if lines else "nothing was printed"


def _plain(text: str) -> str:
    """Without the paths of a machine."""
    return re.sub(r"(?:/[\w.+-]+){2,}", "...", text)
