"""`run --all` and the staleness of plates: what is recorded again, what goes, what stays."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decodev2 import cli
from decodev2.errors import DecodeError
from decodev2.lab import card, commands, experiments, plate
from decodev2.lab.plate import Measured

READ_RATE = {"gb_s": 40.0, "method": "made up"}


def experiment(name: str, device: str = "cpu", fails: bool = False) -> types.ModuleType:
    """An experiment with one row, of the parameter `count`."""
    module = types.ModuleType(name)
    module.TITLE, module.QUESTION, module.PREDICTION = name, "How many?", "Three."
    module.PARAMS, module.DEPENDS, module.DEVICE = {"count": (3, "how many")}, (), device

    def measure(params, progress):
        if fails:
            raise DecodeError("the sensor fell off\nand broke")
        return Measured([{"name": "n", "unit": "1"}], [{"n": params["count"]}], f"{name} counted.")

    module.measure = measure
    return module


@pytest.fixture
def lab(monkeypatch):
    """Three experiments, of which one fails, one only where there is CUDA; no CUDA here."""
    modules = {
        m.__name__: m
        for m in (
            experiment("counts"),
            experiment("breaks", fails=True),
            experiment("on_a_card", "cuda"),
            experiment("copied", "none"),
        )
    }
    monkeypatch.setattr(experiments, "names", lambda: sorted(modules))
    monkeypatch.setattr(experiments, "get", modules.__getitem__)
    monkeypatch.setattr(card, "measure_read_rate", lambda *_: READ_RATE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return modules


def test_one_failure_stops_nothing_and_is_told(lab, tmp_path, capsys):
    assert commands.run_all_command(runs_dir=tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("breaks (") and "FAILED: DecodeError: the sensor fell off" in lines[0]
    )
    assert "broke" not in lines[0]
    assert "counts counted." in lines[1] and lines[2].startswith("2 experiments in ")
    assert len(lines) == 3
    assert [p.parent.name for p in plate.plate_paths(tmp_path)] == ["counts"]
    assert "counts" in (tmp_path / "README.md").read_text()
    del lab["breaks"]
    assert commands.run_all_command(runs_dir=tmp_path, as_json=True) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["experiment"] == "counts" and result["error"] is None
    assert Path(result["plate"]).is_file()


def test_one_that_stands_apart_is_named_and_left_out(lab, tmp_path, capsys):
    del lab["breaks"]
    lab["checks"] = experiment("checks")
    lab["checks"].APART = True
    assert commands.run_all_command(runs_dir=tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "left out, to be run by name: checks"
    assert [p.parent.name for p in plate.plate_paths(tmp_path)] == ["counts"]


def test_a_new_plate_takes_the_place_of_its_like(lab, tmp_path, monkeypatch):
    del lab["breaks"]
    commands.run_all_command(runs_dir=tmp_path)
    commands.run_all_command(["count=4"], runs_dir=tmp_path)
    (first, other) = plate.plate_paths(tmp_path)
    elsewhere = replace(plate.load(first), card=plate.load(first).card | {"slug": "another-card"})
    kept = {other, plate.save(elsewhere, tmp_path)}
    counts = {plate.load(p).params["count"] for p in (first, other)}
    assert counts == {3, 4}
    (old,) = (p for p in (first, other) if plate.load(p).params["count"] == 3)
    kept = {*plate.plate_paths(tmp_path)} - {old}
    lab["counts"].TITLE = "counts, again"  # so that the new plate differs within this second
    commands.run_all_command(runs_dir=tmp_path)
    assert not old.exists() and all(path.exists() for path in kept)
    assert len(plate.plate_paths(tmp_path)) == len(kept) + 1
    assert plate.lint(tmp_path) == []


def test_stale_records_only_what_other_kernels_made(lab, tmp_path, capsys, monkeypatch):
    del lab["breaks"]
    commands.run_all_command(runs_dir=tmp_path)
    assert commands.run_all_command(runs_dir=tmp_path, stale=True) == 0
    assert "0 experiments" in capsys.readouterr().out.splitlines()[-1]
    assert commands.lint_command([tmp_path]) == 0
    capsys.readouterr()
    (path,) = plate.plate_paths(tmp_path)
    made = plate.load(path)
    depends = {"patterns": ["cpu/**/*"], "files": [], "hash": "0123456789ab"}
    path.unlink()
    path = plate.save(replace(made, code=made.code | {"depends": depends}), tmp_path)
    plate.index(tmp_path)
    assert commands.lint_command([tmp_path]) == 1
    assert capsys.readouterr().out.strip() == (
        f"{path}: the kernels it ran have changed since; record it again (run --all --stale)"
    )
    assert commands.run_all_command(runs_dir=tmp_path, stale=True) == 0
    assert "1 experiments" in capsys.readouterr().out.splitlines()[-1]
    assert commands.lint_command([tmp_path]) == 0


def test_an_unknown_parameter_is_refused_before_anything_runs(lab, tmp_path):
    with pytest.raises(DecodeError, match="no experiment here has the parameter 'cuont'"):
        commands.run_all_command(["cuont=1"], runs_dir=tmp_path)
    assert plate.plate_paths(tmp_path) == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run"], "run needs the name of an experiment, or --all"),
        (["run", "limits", "--all"], "run needs the name of an experiment, or --all"),
        (["run", "limits", "--stale"], "--stale goes with --all"),
    ],
)
def test_the_command_line_wants_one_of_the_two(arguments, words, capsys):
    assert cli.main(arguments) != 0
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_plate_says_which_switches_were_set(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("CHR_NF4_GEMV_NR", "4")
    made = commands.record("counts", {"count": 3})
    assert made.code["switches"]["environment"]["CHR_NF4_GEMV_NR"] == "4"
    assert made.code["switches"]["toggles"]["linear"] in ("mma", "gemv", "rows")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
