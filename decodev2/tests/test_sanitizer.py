"""The experiment `sanitizer`: what it makes of a tool's words, and that its target runs alone."""

from __future__ import annotations

import subprocess
import types

import pytest
import torch

from decodev2.lab import sanitizer_target
from decodev2.lab.experiments import sanitizer
from decodev2.lab.plate import Measured

CLEAN = """========= COMPUTE-SANITIZER
left out: one kernel a token, the device is sm_86, needs sm_90 or newer
left out: hand-offs, needs sm_90 or newer
71 cases done
========= ERROR SUMMARY: 0 errors
"""
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at persistent_step
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""


@pytest.mark.parametrize(
    "output, found",
    [
        ("84 cases done\n========= ERROR SUMMARY: 0 errors\n",
         (84, 0, "ERROR SUMMARY: 0 errors")),
        ("parted at /a/b/c\n========= ERROR SUMMARY: 2 errors\n",
         (0, 2, "ERROR SUMMARY: 2 errors; the target: parted at ...")),
        ("84 cases done\n" + RACES,
         (84, 3, "RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning); "
                 "first: Error: Race reported between Write access at persistent_step")),
        ("========= COMPUTE-SANITIZER\n========= Barrier error detected. Divergent thread(s) in "
         "block\n=========     at attend+0x80 in /a/b/c.cuh:7\n========= ERROR SUMMARY: 8 errors\n",
         (0, 8, "ERROR SUMMARY: 8 errors; first: Barrier error detected. Divergent thread(s) in "
                "block at attend+0x80 in ...:7; the target: nothing was printed")),
        ("Traceback\nboom at /a/b/c.py", (0, 1, "boom at ...")),
        ("", (0, 1, "nothing was printed")),
    ],
)  # fmt: skip
def test_what_a_tool_said(output, found):
    assert sanitizer.parse(output) == found


def test_what_was_left_out_is_told():
    cases, reports, summary = sanitizer.parse(CLEAN)
    assert (cases, reports) == (71, 0)
    assert summary.endswith("needs sm_90 or newer; left out: hand-offs, needs sm_90 or newer")


@pytest.fixture
def played(monkeypatch):
    """`measure` with a tool that prints what `said` holds; what was run with which flags."""
    said, runs = {}, []

    def run(command, env, **options):
        runs.append((command, env.get("DECODEV2_NVCC_FLAGS")))
        tool = command[command.index("--tool") + 1] if "--tool" in command else "build"
        if said.get(tool) is None and tool != "build":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return types.SimpleNamespace(returncode=0, stdout=said.get(tool, ""), stderr="")

    monkeypatch.setattr(sanitizer.subprocess, "run", run)
    monkeypatch.setattr(sanitizer.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: name)
    monkeypatch.setattr(sanitizer.card, "card", lambda device: {"device": device})
    return said, runs


def measured(tools: list[str]) -> Measured:
    return sanitizer.measure({"tools": tools, "timeout_s": 5}, lambda *_: None)


def test_a_row_for_each_tool(played):
    said, runs = played
    said |= {"memcheck": CLEAN, "racecheck": "71 cases done\n" + RACES}
    made = measured(["memcheck", "synccheck", "racecheck"])
    assert [(r["tool"], r["cases"], r["reports"]) for r in made.rows] == [
        ("memcheck", 71, 0), ("synccheck", 0, 1), ("racecheck", 71, 3)
    ]  # fmt: skip
    assert made.rows[1]["summary"] == "stopped after 5 s"
    assert made.verdict.startswith("Not as predicted: memcheck: 0 reports in 71 cases; ")
    assert made.verdict.endswith("; not all of it can run on this card.")
    flags = [flags for command, flags in runs if "--tool" in command]
    assert flags == [None, None, sanitizer.FLAGS["racecheck"]]
    said |= {"synccheck": "84 cases done\n========= ERROR SUMMARY: 0 errors\n"}
    made = measured(["synccheck"])
    assert made.verdict == "As predicted: synccheck: 0 reports in 84 cases."


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", sanitizer_target.KINDS, ids=lambda kind: kind.__name__)
def test_the_target_runs_without_a_tool(kind, capsys):
    done = kind()
    torch.cuda.synchronize()
    assert done > 0 or capsys.readouterr().out.startswith("left out: ")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
