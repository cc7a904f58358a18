"""The lab around the plates: card, code state, timing, experiments and the commands."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

import decodev2
from decodev2 import native
from decodev2.errors import ContainerError, DecodeError, ModelError, PlateError
from decodev2.lab import bench, card, commands, experiments, models, plate
from decodev2.lab.experiments import codec_quality, cpu_decode
from decodev2.lab.plate import Measured, Missing

READ_RATE = {"gb_s": 40.0, "method": "given", "by_threads": {"1": 40.0}}


# ---- E3: the state of the code, whatever git says ----


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder shaped like the project, out of reach of the user's git settings."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    root = tmp_path / "project"
    (root / "decodev2" / "tests").mkdir(parents=True)
    (root / "csrc" / "cpu").mkdir(parents=True)
    (root / "decodev2" / "step.py").write_text("x = 1\n")
    (root / "csrc" / "cpu" / "gemv.cpp").write_text("int x;\n")
    (root / "csrc" / "gemv.cu").write_text("int y;\n")
    return root


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(root: Path, *arguments: str) -> str:
    identity = (
        "-c",
        "user.name=n",
        "-c",
        "user.email=e@example.org",
        "-c",
        "init.defaultBranch=main",
    )
    done = subprocess.run(
        ["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit_all(root: Path) -> str:
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "first")
    return git(root, "rev-parse", "HEAD")


def code_problems(state: dict) -> list[str]:
    return plate._code_problems(state)


@needs_git
def test_clean_checkout(project):
    head = commit_all(project)
    state = card.code_state(root=project)
    assert (state["commit"], state["dirty"]) == (head, False)
    assert "commit_reason" not in state
    assert code_problems(state) == []


@needs_git
@pytest.mark.parametrize("name", ["decodev2/step.py", "notebooks/00_new.ipynb", "csrc/gemv.cu"])
def test_changed_or_new_file_is_dirty(project, name):
    head = commit_all(project)
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("changed\n")
    state = card.code_state(root=project)
    assert (state["commit"], state["dirty"]) == (head, True)


@needs_git
def test_untracked_files_count_even_if_the_user_hides_them(project):
    commit_all(project)
    git(project, "config", "status.showUntrackedFiles", "no")
    (project / "decodev2" / "new.py").write_text("x\n")
    assert card.code_state(root=project)["dirty"] is True


@needs_git
def test_a_saved_plate_does_not_make_the_code_dirty(project):
    commit_all(project)
    (project / "runs" / "toy").mkdir(parents=True)
    (project / "runs" / "toy" / "a.json").write_text("{}")
    assert card.code_state(root=project)["dirty"] is False


@needs_git
def test_init_without_commit(project):
    git(project, "init")
    state = card.code_state(root=project)
    assert (state["commit"], state["commit_reason"]) == (None, "no commit yet")
    assert state["dirty"] is True
    assert code_problems(state) == []


@needs_git
def test_plain_folder(project):
    state = card.code_state(root=project)
    assert (state["commit"], state["commit_reason"]) == (None, "not a git repository")
    assert (state["dirty"], state["dirty_reason"]) == (None, "not a git repository")
    assert code_problems(state) == []


@needs_git
def test_foreign_owner(project, monkeypatch):
    commit_all(project)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    asked = subprocess.run(
        ["git", "-C", str(project), "status"], capture_output=True, text=True, env=os.environ
    )
    if "dubious ownership" not in asked.stderr:
        pytest.skip("this git does not check the owner")
    state = card.code_state(root=project)
    assert state["commit"] is None
    assert state["commit_reason"] == "git refuses a checkout that belongs to another user"
    assert state["dirty"] is None
    assert code_problems(state) == []


@needs_git
def test_installed_inside_another_repository(project, monkeypatch):
    outer = project.parent
    monkeypatch.delenv("GIT_CEILING_DIRECTORIES")
    (outer / ".gitignore").write_text("project/\nhome/\n")
    commit_all(outer)
    state = card.code_state(root=project)
    assert state["commit"] is None
    assert state["commit_reason"] == "the enclosing git repository does not hold this code"
    assert code_problems(state) == []


@needs_git
def test_a_hooks_git_dir_is_not_followed(project, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "f").write_text("1")
    commit_all(other)
    head = commit_all(project)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert card.code_state(root=project)["commit"] == head


def test_path_without_git(project, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(project))
    state = card.code_state(root=project)
    assert (state["commit"], state["commit_reason"]) == (None, "git is not installed")
    assert state["dirty"] is None
    assert code_problems(state) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform == "win32", reason="shell script as git")
@pytest.mark.parametrize(
    "script, reason",
    [
        ("sleep 30", "git did not answer in 0.3 s"),
        (
            "sleep 30 & sleep 30",
            "git did not answer in 0.3 s",
        ),  # a child that holds the output open
        ("echo /secret/folder: broken >&2; exit 3", "git rev-parse failed with status 3"),
    ],
)
def test_a_git_that_hangs_or_fails(project, monkeypatch, script, reason, capfd):
    fake = project / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    start = time.monotonic()
    state = card._git_state(project, timeout=0.3)
    assert time.monotonic() - start < 5
    assert state["commit_reason"] == reason
    assert capfd.readouterr() == ("", "")


def test_no_permission_to_run_git(project, monkeypatch):
    fake = project / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("not a program")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent))
    assert card.code_state(root=project)["commit"] is None


# ---- hashes of the code ----


def test_hashes_follow_content_and_names(project):
    first = card.csrc_hash(project)
    assert len(first) == 12
    assert int(first, 16) >= 0
    source = project / "csrc" / "gemv.cu"
    text = source.read_text()
    source.write_text(text + " ")
    assert card.csrc_hash(project) != first
    source.write_text(text)
    assert card.csrc_hash(project) == first
    source.rename(source.with_name("other.cu"))
    assert card.csrc_hash(project) != first


def test_line_ends_and_hidden_files_do_not_count(project):
    first = card.csrc_hash(project)
    (project / "csrc" / "gemv.cu").write_bytes(b"int y;\r\n")
    (project / "csrc" / ".gemv.cu.swp").write_bytes(b"x")
    (project / "csrc" / "__pycache__").mkdir()
    (project / "csrc" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert card.csrc_hash(project) == first


def test_text_cannot_move_between_files(project):
    a, b = project / "csrc" / "a.h", project / "csrc" / "b.h"
    a.write_text("one\n")
    b.write_text("two\n")
    first = card.csrc_hash(project)
    a.write_text("one\nb.h\ntwo\n")  # what the two looked like one after the other
    b.unlink()
    assert card.csrc_hash(project) != first


def test_tests_do_not_change_the_package_hash(project):
    first = card.package_hash(project)
    (project / "decodev2" / "tests" / "test_new.py").write_text("x")
    assert card.package_hash(project) == first
    (project / "decodev2" / "lab").mkdir()
    (project / "decodev2" / "lab" / "new.py").write_text("x")
    assert card.package_hash(project) != first


def test_dependencies_are_the_named_kernels_only(project):
    state = card.code_state(("cpu/**/*",), root=project)
    assert state["depends"]["files"] == ["cpu/gemv.cpp"]
    assert card.is_current(state, project)
    (project / "csrc" / "gemv.cu").write_text("changed")
    assert card.is_current(state, project)
    (project / "csrc" / "cpu" / "gemv.cpp").write_text("changed")
    assert not card.is_current(state, project)


def test_no_kernel_sources(project):
    shutil.rmtree(project / "csrc")
    state = card.code_state(("cpu/*",), root=project)
    assert (state["csrc"], state["csrc_reason"]) == (None, "no kernel sources found")
    assert state["depends"]["hash"] is None
    assert code_problems(state) == []


def test_the_code_in_use_is_that_of_the_import(monkeypatch):
    state = card.code_state()
    assert state["csrc"] == card._AT_IMPORT[0]
    assert state["package"] == card._AT_IMPORT[1]
    monkeypatch.setattr(card, "_AT_IMPORT", ("0" * 12, "1" * 12))
    state = card.code_state()
    assert (state["csrc"], state["package"]) == ("0" * 12, "1" * 12)
    assert state["changed_since_import"] is True


# ---- the card ----


def test_card_of_this_machine_passes_lint_and_is_plain():
    made = card.card("cpu", threads=2, read_rate=READ_RATE)
    assert plate._card_problems(made) == []
    assert plate.clean(made) == made
    assert made["cpu"]["threads_used"] == 2
    assert made["versions"]["numpy"] == np.__version__
    assert made["gpu"] is not None or made["gpu_reason"]
    text = json.dumps(made)
    import getpass
    import socket

    assert socket.gethostname() not in text or len(socket.gethostname()) < 4
    assert f'"{getpass.getuser()}"' not in text


def test_card_where_nothing_is_known(monkeypatch):
    monkeypatch.setattr(card, "_proc_cpuinfo", lambda: {})
    monkeypatch.setattr(card.platform, "processor", lambda: "")
    monkeypatch.setattr(card.platform, "machine", lambda: "")
    monkeypatch.delattr(card.os, "sysconf", raising=False)
    monkeypatch.delattr(card.os, "sched_getaffinity", raising=False)
    made = card.card("cpu", threads=1, read_rate=READ_RATE)
    assert made["slug"] == "unknown-1t"
    assert made["cpu"]["ram_gb"] is None
    assert plate._card_problems(made) == []


def test_card_of_a_gpu_is_named_after_it(monkeypatch):
    gpu = {"name": "NVIDIA H200", "driver": None, "driver_reason": "nvidia-ml-py is not installed"}
    monkeypatch.setattr(card, "_gpu", lambda: (gpu, None))
    made = card.card("cuda:0", threads=2, read_rate=READ_RATE)
    assert (made["slug"], made["device"]) == ("nvidia-h200", "cuda")
    assert plate._card_problems(made) == []
    assert card.card("cpu", threads=2, read_rate=READ_RATE)["slug"].endswith("-2t")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("AMD EPYC 9654 96-Core Processor 8t", "amd-epyc-9654-96-core-8t"),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz 6t", "intel-core-i7-8700-6t"),
        ("NVIDIA GeForce RTX 3080", "nvidia-geforce-rtx-3080"),
        ("///", "unknown"),
    ],
)
def test_slug(name, expected):
    assert card.slug(name) == expected


def test_read_rate_is_measured_and_threads_are_put_back(monkeypatch):
    import torch

    monkeypatch.setattr(card, "READ_BUFFER_MB", 64)
    before = torch.get_num_threads()
    rate = card.measure_read_rate(2, runs=2)
    assert torch.get_num_threads() == before
    assert set(rate["by_threads"]) == {"1", "2"}
    assert rate["gb_s"] == max(rate["by_threads"].values())
    assert 0.1 < rate["gb_s"] < 10_000
    assert rate["buffer_mb"] == 64


def test_the_faster_read_rate_is_kept():
    slow = READ_RATE | {"gb_s": 30.0}
    unknown = {"gb_s": None, "gb_s_reason": "no kernel"}
    assert card.faster_read_rate(slow, READ_RATE) is READ_RATE
    assert card.faster_read_rate(READ_RATE, slow) is READ_RATE
    assert card.faster_read_rate(unknown, slow) is slow


# ---- timing ----


class Device:
    """A clock, and work that is only queued by a call and done by `sync`."""

    def __init__(self):
        self.now = 0.0
        self.queued = 0.0
        self.log = []

    def work(self, name: str, seconds: float):
        def run():
            self.log.append(name)
            self.now += 0.001
            self.queued += seconds

        return run

    def sync(self):
        self.now += self.queued
        self.queued = 0.0

    def clock(self):
        return self.now


def test_without_sync_a_queue_looks_fast_and_with_it_right():
    device = Device()
    fast = bench.repeat(device.work("a", 1.0), runs=3, warmup=0, clock=device.clock)
    device = Device()
    right = bench.repeat(
        device.work("a", 1.0), runs=3, warmup=0, sync=device.sync, clock=device.clock
    )
    assert fast == pytest.approx([0.001] * 3)
    assert right == pytest.approx([1.001] * 3)


def test_warm_up_does_not_count():
    device = Device()
    lengths = iter([9.0, 5.0, 1.0, 1.0, 1.0])

    def run():
        device.queued += next(lengths)

    samples = bench.repeat(run, runs=3, warmup=2, sync=device.sync, clock=device.clock)
    assert samples == [1.0, 1.0, 1.0]


def test_alternating_series_turns_the_order_round():
    device = Device()
    samples = bench.alternate(
        {"a": device.work("a", 1.0), "b": device.work("b", 2.0)},
        runs=3, warmup=1, sync=device.sync, clock=device.clock,
    )  # fmt: skip
    assert "".join(device.log) == "abbaabba"
    assert samples["a"] == pytest.approx([1.001] * 3)
    assert samples["b"] == pytest.approx([2.001] * 3)


def test_ratios_cancel_drift():
    drift = np.linspace(1.0, 3.0, 9)
    result = bench.ratios(list(2.0 * drift), list(1.0 * drift))
    assert (result.median, result.best, result.worst) == (2.0, 2.0, 2.0)
    with pytest.raises(PlateError, match="3 and 2 runs"):
        bench.ratios([1, 2, 3], [1, 2])


def test_stats_of_times_and_rates():
    s = bench.stats([3.0, 1.0, 2.0, 10.0])
    assert (s.median, s.best, s.worst, s.mean, s.runs) == (2.5, 1.0, 10.0, 4.0, 4)
    assert s.std == pytest.approx(np.std([3, 1, 2, 10], ddof=1))
    r = bench.stats([3.0, 1.0, 2.0], best="max")
    assert (r.best, r.worst) == (3.0, 1.0)


def test_one_run_has_no_deviation():
    s = bench.stats([3.0])
    assert isinstance(s.std, Missing)
    cleaned = plate.clean(s)
    assert (cleaned["std"], cleaned["std_reason"]) == (None, "1 run has no deviation")


def test_no_run_has_no_stats():
    with pytest.raises(PlateError, match="no run was timed"):
        bench.stats([])


@pytest.mark.parametrize(
    "amount, seconds, words",
    [
        (0, 1.0, "0 tokens in 1 s"),
        (5, 0.0, "the clock did not work"),
        (5, -1.0, "the clock"),
        (5, math.inf, "the clock"),
        (5, math.nan, "the clock"),
    ],
)
def test_no_rate_of_a_failed_run(amount, seconds, words):
    missing = bench.rate(amount, seconds, "tokens")
    assert isinstance(missing, Missing)
    assert words in missing.reason


def test_rate():
    assert bench.rate(64, 2.0) == 32.0


def test_noise_band_decides_what_is_a_change():
    noise = bench.noise_band([1.0, 1.1, 0.9], [1.04, 1.05, 1.03])
    assert noise == pytest.approx(0.04)
    assert bench.noise_band([1.04], [1.0]) == pytest.approx(0.04)
    assert bench.compare(1.0, 0.97, noise) == "no change"
    assert bench.compare(1.0, 1.03, noise) == "no change"
    assert bench.compare(1.0, 0.95, noise) == "faster"
    assert bench.compare(1.0, 1.05, noise) == "slower"


def test_a_rate_above_the_ceiling_is_an_error():
    assert bench.check_floor(20e9, 1.0, 40.0) == pytest.approx(0.5)
    assert bench.check_floor(40.5e9, 1.0, 40.0) == pytest.approx(1.0125)  # inside the slack
    with pytest.raises(PlateError, match=r"down: 45\.0 GB/s is above .* 40\.0 GB/s"):
        bench.check_floor(45e9, 1.0, 40.0, "down")
    with pytest.raises(PlateError, match="positive time"):
        bench.check_floor(1e9, 0.0, 40.0)
    with pytest.raises(PlateError, match="positive time"):
        bench.check_floor(1e9, math.nan, 40.0)
    with pytest.raises(PlateError, match="ceiling"):
        bench.check_floor(1e9, 1.0, math.nan)


# ---- experiments ----


def test_experiments_are_found_in_order():
    assert experiments.names() == sorted(experiments.names())
    assert {"codec_quality", "cpu_decode", "lab_log"} <= set(experiments.names())


@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_is_complete(name):
    """It has what the docstring of `experiments` promises."""
    module = experiments.get(name)
    for text in (module.TITLE, module.QUESTION, module.PREDICTION):
        assert text.strip() == text != ""
    assert module.QUESTION.endswith("?")
    assert module.DEVICE in ("cpu", "cuda", "none")
    assert callable(module.measure) and isinstance(module.DEPENDS, tuple)
    assert module.DEVICE != "none" or module.DEPENDS == ()
    columns = [column["name"] for column in module.COLUMNS]
    assert all(column.keys() >= {"name", "unit"} for column in module.COLUMNS)
    assert len(set(columns)) == len(columns)
    for key, (default, help_text) in module.PARAMS.items():
        assert key.isidentifier()
        assert isinstance(default, bool | int | float | str | list)
        assert help_text
    for column, (param, choices) in getattr(module, "TOGGLES", {}).items():
        default, _ = module.PARAMS[param]
        assert column in columns and isinstance(default, list)
        assert set(map(str, default)) <= set(map(str, choices))
        assert len(set(map(str, choices))) == len(choices) > 1


def test_experiments_with_a_panel_have_toggles():
    folder = Path(__file__).resolve().parents[2] / "notebooks"
    for path in sorted(folder.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        for name in re.findall(r'\bwidgets\.panel\(\s*"(\w+)"', code):
            assert experiments.get(name).TOGGLES, f"{path.name}: {name}"


@pytest.mark.parametrize("name", experiments.names())
def test_claims_of_recorded_plates_are_facts(name):
    """Pairs of a text without a time and a truth value: what a page compares between runs."""
    module, runs = experiments.get(name), Path(__file__).resolve().parents[2] / "runs"
    paths = plate.plate_paths(runs / name)
    if not (hasattr(module, "claims") and paths):
        pytest.skip(f"{name} makes no claims or has no plate")
    for path in paths:
        made = module.claims(plate.load(path))
        assert made and all(isinstance(holds, bool) for _, holds in made)
        assert len({text for text, _ in made}) == len(made)
        timed = [text for text, _ in made if re.search(r"\d\s?(?:us|ms|tok/s|GB/s)\b", text)]
        assert timed == [], path.name


def test_depends_names_real_kernels():
    folder = card.csrc_folder()
    for name in experiments.names():
        for pattern in experiments.get(name).DEPENDS:
            assert card.files_hash(folder, (pattern,))[1], f"{name}: {pattern} matches nothing"


def test_an_unknown_experiment_gives_one_line():
    with pytest.raises(DecodeError, match="'cpu_decod' does not exist; did you mean cpu_decode"):
        experiments.get("cpu_decod")
    with pytest.raises(DecodeError) as error:
        experiments.get("zzz")
    assert f"known: {', '.join(experiments.names())}" in str(error.value)
    assert "\n" not in str(error.value)


# ---- models on disk ----


def put_model(root: Path, name: str, *chr_names: str) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "config.json").write_text("{}")
    for chr_name in chr_names:
        (root / chr_name).write_bytes(b"")


def test_models_are_found_inside_and_beside(tmp_path):
    put_model(tmp_path, "b", "b/b.nf4.chr")
    put_model(tmp_path, "a", "a.chr")
    put_model(tmp_path, "c", "c.nf4.chr")
    put_model(tmp_path, "c2", "c2/one.chr", "c2/two.chr")
    put_model(tmp_path, "unpacked")
    assert [m.name for m in models.find(tmp_path)] == ["a", "b", "c", "one", "two"]
    assert [m.chr.name for m in models.find(tmp_path, ["c", "a"])] == ["c.nf4.chr", "a.chr"]
    with pytest.raises(ModelError, match=r"'d' is not in .*; there are a, b, c"):
        models.find(tmp_path, ["d"])


def test_no_models(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelError, match="no packed model"):
            models.find(folder)


# ---- codec_quality ----


def tensor_row(name: str, kind: str, error: np.ndarray, original: np.ndarray, **more) -> dict:
    rmse = float(np.sqrt((error**2).mean()))
    energy = float(np.sqrt((original**2).mean()))
    return {
        "name": name,
        "kind": kind,
        "codec": "nf4",
        "shape": original.shape,
        "bytes": original.size * 17 // 32,
        "fault": None,
        "rmse": rmse,
        "rel_rmse": rmse / energy if energy else None,
        "max_abs": float(np.abs(error).max()),
    } | more


def test_errors_are_pooled_over_weights():
    rng = np.random.default_rng(0)
    originals = [rng.standard_normal((64, 64)), 5 * rng.standard_normal((32, 128))]
    originals.append(np.zeros((64, 64)))
    faults = [0.1 * rng.standard_normal(o.shape) for o in originals[:2]] + [np.zeros((64, 64))]
    rows = [tensor_row("t", "q", e, o) for e, o in zip(faults, originals, strict=True)]
    found = codec_quality._summary(rows)
    e, o = (np.concatenate([a.ravel() for a in arrays]) for arrays in (faults, originals))
    assert found["rmse"] == pytest.approx(np.sqrt((e**2).mean()))
    assert found["rel_rmse"] == pytest.approx(np.sqrt((e**2).sum() / (o**2).sum()))
    assert found["max_abs"] == np.abs(e).max()
    assert (found["tensors"], found["weights"]) == (3, 3 * 4096)
    assert found["bytes_per_weight"] == 17 / 32


def test_codec_quality_makes_a_clean_plate(tmp_path, monkeypatch):
    put_model(tmp_path / "models", "one", "one/one.chr")
    put_model(tmp_path / "models", "two", "two.chr")
    rng = np.random.default_rng(1)

    def verify(chr_path, against):
        assert (against / "config.json").is_file()
        w = rng.standard_normal((64, 64))
        zero = np.zeros((64, 64))
        return [
            tensor_row("model.embed_tokens", "embed", 0.093 * w, w),
            tensor_row("model.layers.0.self_attn.v_proj", "v", zero, zero),
            tensor_row("model.norm", "norm", zero[0], w[0], codec="bf16", bytes=128, rel_rmse=0.0),
        ]

    monkeypatch.setattr(codec_quality.pack, "verify", verify)
    monkeypatch.setattr(card, "measure_read_rate", lambda *_: READ_RATE)
    made = commands.record("codec_quality", {"models": str(tmp_path / "models"), "only": []})
    path = plate.save(made, tmp_path / "runs")
    plate.draw(path)
    assert plate.lint(path) == []
    assert made.params["models"] == "models"  # the last part of the path, not the path
    assert [(r["model"], r["kind"]) for r in made.rows] == [
        (m, k) for m in ("one", "two") for k in ("embed", "v", "norm")
    ]
    assert made.rows[0]["rel_rmse"] == pytest.approx(0.093)
    assert "As predicted: relative rmse from 0.0930" in made.verdict


def test_a_damaged_chr_is_no_result(tmp_path, monkeypatch):
    put_model(tmp_path, "one", "one/one.chr")
    w = np.ones((64, 64))
    rows = [tensor_row("q", "q", w, w, fault="q: checksum differs")]
    monkeypatch.setattr(codec_quality.pack, "verify", lambda *_: rows)
    with pytest.raises(ContainerError, match="one: q: checksum differs"):
        codec_quality.measure({"models": tmp_path, "only": []}, lambda *_: None)


# ---- cpu_decode, with executors of known speed ----


@pytest.fixture
def fake_sessions(monkeypatch, tmp_path):
    """`decodev2.session` with executors that report given times; gives a log of them."""
    put_model(tmp_path / "models", "toy", "toy/toy.chr")
    log = types.SimpleNamespace(opened=[], ran=[], closed=[], ids={}, decode_s={})

    class Session:
        packed_bytes, load_s, warmup_s = 10_000_000, 0.5, 0.25

        def __init__(self, executor):
            self.executor = executor

        def generate(self, prompt_ids, max_new_tokens, ignore_eos):
            assert ignore_eos
            assert all(0 <= i < 32 for i in prompt_ids)
            log.ran.append(self.executor)
            ids = [(sum(prompt_ids) + i) % 32 for i in range(max_new_tokens)]
            ids = log.ids.get(self.executor, lambda ids: ids)(ids)
            decode_s = log.decode_s.get(self.executor, 0.01) * (max_new_tokens - 1)
            return types.SimpleNamespace(ids=ids, prefill_s=0.1, decode_s=decode_s)

        def close(self):
            log.closed.append(self.executor)

    def open_session(folder, chr_path, executor, device, max_seq):
        assert (folder.name, chr_path.name, device) == ("toy", "toy.chr", "cpu")
        log.opened.append((executor, max_seq))
        return Session(executor)

    module = types.ModuleType("decodev2.session")
    module.open_session = open_session
    monkeypatch.setitem(sys.modules, "decodev2.session", module)
    monkeypatch.setattr(decodev2, "session", module, raising=False)
    spec = types.SimpleNamespace(vocab=32)
    monkeypatch.setattr("decodev2.plan.spec_from_folder", lambda folder: spec)
    monkeypatch.setattr(card, "measure_read_rate", lambda *_: READ_RATE)
    monkeypatch.setattr(cpu_decode, "SETTLE_S", 0.0)
    return log


def decode_params(tmp_path, **changes) -> dict:
    params = {key: default for key, (default, _) in cpu_decode.PARAMS.items()}
    return params | {"models": str(tmp_path / "models"), "threads": 1} | changes


def test_cpu_decode_makes_a_clean_plate(tmp_path, fake_sessions):
    import torch

    before = torch.get_num_threads()
    fake_sessions.decode_s = {"decodev2": 0.0004, "tokenloop": 0.002}
    seen = []
    made = commands.record(
        "cpu_decode", decode_params(tmp_path, runs=3), lambda *report: seen.append(report)
    )
    assert torch.get_num_threads() == before
    path = plate.save(made, tmp_path / "runs")
    plate.draw(path)
    assert plate.lint(path) == []
    ours, loop = made.rows
    assert ours["executor"] == "decodev2"
    assert ours["decode_tok_s"] == pytest.approx(2500)
    assert ours["decode_tokens"] == 63
    assert ours["decode_tok_s"] * ours["decode_s"] == pytest.approx(63)
    assert ours["decode_gb_s"] == pytest.approx(25.0)
    assert ours["share"] == pytest.approx(62.5)
    assert ours["ceiling_tok_s"] == pytest.approx(4000)
    assert ours["prompt_tok_s"] == pytest.approx(480)
    assert ours["noise"] == pytest.approx(0.0)
    assert (ours["runs"], ours["ids_agree"], loop["ids_agree"]) == (3, 64, 64)
    assert loop["decode_tok_s"] == pytest.approx(500)
    assert isinstance(loop["ratio_to_llama_cpp"], Missing)
    assert made.verdict == "As predicted. toy: 2500.0 tok/s, 62% of the ceiling."
    assert made.card["read_rate"] == READ_RATE
    assert fake_sessions.opened == [("decodev2", 512), ("tokenloop", 512)]
    assert fake_sessions.closed == ["decodev2", "tokenloop"]
    # Agreement, then rounds in turning order (1 warm-up + 3), then agreement again.
    letters = "".join(name[0] for name in fake_sessions.ran)
    assert letters == "dt" + "dt" + "td" + "dt" + "td" + "dt"
    assert all(done <= total for done, total, _ in seen)


def test_cpu_decode_refuses_a_rate_above_the_ceiling(tmp_path, fake_sessions):
    fake_sessions.decode_s = {"decodev2": 0.0002}  # 50 GB/s where 40 were measured
    with pytest.raises(PlateError, match=r"toy decodev2: 50\.0 GB/s is above"):
        cpu_decode.measure(decode_params(tmp_path), lambda *_: None)


def test_cpu_decode_refuses_other_ids(tmp_path, fake_sessions):
    fake_sessions.ids = {"tokenloop": lambda ids: [(i + 1) % 32 for i in ids]}
    with pytest.raises(DecodeError, match="toy tokenloop: first id is"):
        cpu_decode.measure(decode_params(tmp_path), lambda *_: None)


def test_cpu_decode_records_where_ids_part(tmp_path, fake_sessions):
    fake_sessions.ids = {"tokenloop": lambda ids: [*ids[:5], *((i + 1) % 32 for i in ids[5:])]}
    rows = cpu_decode.measure(decode_params(tmp_path), lambda *_: None).rows
    assert [row["ids_agree"] for row in rows] == [64, 5]


def test_cpu_decode_refuses_a_short_run(tmp_path, fake_sessions):
    fake_sessions.ids = {"decodev2": lambda ids: ids[:7]}
    with pytest.raises(DecodeError, match="toy decodev2: 7 ids, needs 64"):
        cpu_decode.measure(decode_params(tmp_path), lambda *_: None)


def test_one_run_still_makes_a_clean_plate(tmp_path, fake_sessions):
    made = commands.record("cpu_decode", decode_params(tmp_path, runs=1, warmup=0))
    path = plate.save(made, tmp_path / "runs")
    row = json.loads(path.read_text())["rows"][0]
    assert (row["decode_tok_s_std"], row["noise"]) == (None, None)
    assert "1 run" in row["noise_reason"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"new_tokens": 1}, "new_tokens is 1"),
        ({"runs": 0}, "runs is 0"),
        ({"max_seq": 64}, "are 112; max_seq is 64"),
        ({"gguf": "absent.gguf"}, "llama-cpp-python is not installed|absent.gguf: no such file"),
    ],
)
def test_cpu_decode_refuses_bad_parameters(tmp_path, fake_sessions, changes, words):
    with pytest.raises(DecodeError, match=words):
        cpu_decode.measure(decode_params(tmp_path, **changes), lambda *_: None)


def test_llama_cpp_stands_beside(tmp_path, fake_sessions, monkeypatch):
    def peer(gguf, params, threads):
        def run(prompt_ids, n):
            return list(range(n)), 0.2, 0.02 * (n - 1)

        return cpu_decode.Contestant(
            "llama.cpp", run, lambda: None, 12_000_000, 0.5, 0.1, packed=False
        )

    monkeypatch.setattr(cpu_decode, "_open_llama_cpp", peer)
    made = commands.record("cpu_decode", decode_params(tmp_path, gguf="some/toy.gguf"))
    assert [row["executor"] for row in made.rows] == ["decodev2", "tokenloop", "llama.cpp"]
    assert made.rows[0]["ratio_to_llama_cpp"] == pytest.approx(2.0)
    assert made.rows[2]["ratio_to_llama_cpp"] == pytest.approx(1.0)
    assert made.rows[2]["ids_agree"] == Missing("another quantisation of the model")
    assert made.params["gguf"] == "toy.gguf"
    path = plate.save(made, tmp_path / "runs")
    plate.draw(path)
    assert plate.lint(path) == []
    assert "2.00 x llama.cpp" in made.verdict


def test_prompts_stay_in_the_vocabulary_and_differ():
    first, second = (cpu_decode.prompt(48, 49152, seed) for seed in (0, 1))
    assert first != second
    assert len(set(first)) == 48
    assert all(0 <= i < 49152 for i in first + second)


# ---- parameters and commands ----

KNOWN = {
    "count": (5, "a number"),
    "rate": (0.5, "a share"),
    "deep": (False, "a switch"),
    "name": ("x", "a text"),
    "only": (["a"], "a list"),
}


def test_parameters_take_the_type_of_the_default():
    values = commands.parse_params(
        KNOWN, ["count=7", "rate=1", "deep=yes", "name=a=b", "only=p, q"]
    )
    assert values == {"count": 7, "rate": 1.0, "deep": True, "name": "a=b", "only": ["p", "q"]}
    assert type(values["rate"]) is float
    assert commands.parse_params(KNOWN, []) == {k: v for k, (v, _) in KNOWN.items()}
    assert commands.parse_params(KNOWN, ["only="])["only"] == []


@pytest.mark.parametrize(
    "given, words",
    [
        (["coutn=7"], "toy has no parameter 'coutn'; did you mean count?"),
        (["zzz=1", "yyy=2"], "toy has no parameter 'zzz', 'yyy'; known: count, rate"),
        (["zzz"], "toy has no parameter 'zzz'"),
        (["count"], "'count' has no value; needs count=VALUE"),
        (["count=1", "count=2"], "'count' is given twice"),
        (["count=1.5"], "count is '1.5', needs a whole number"),
        (["rate=nan"], "rate is 'nan', needs a number"),
        (["rate=inf"], "rate is 'inf', needs a number"),
        (["deep=maybe"], "deep is 'maybe', needs true or false"),
    ],
)
def test_wrong_parameters_give_one_line(given, words):
    with pytest.raises(DecodeError) as error:
        commands.parse_params(KNOWN, given, "toy")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def toy(monkeypatch):
    """An experiment `toy` that prints while it measures and draws its own figure."""
    module = types.ModuleType("toy")
    module.TITLE, module.QUESTION, module.PREDICTION = "Toy", "How many?", "Three."
    module.PARAMS = {"count": (3, "how many")}
    module.DEPENDS, module.DEVICE = (), "cpu"

    def measure(params, progress):
        print("compiling kernels (about 20 s, once)")
        progress(1, 1, "done")
        rows = [{"name": f"n{i}", "value": float(i)} for i in range(params["count"])]
        columns = [{"name": "name", "unit": ""}, {"name": "value", "unit": "1"}]
        return Measured(columns, rows, "As predicted.", {"kind": "own"})

    def draw(made, fig):
        ax = fig.subplots()
        ax.plot([row["value"] for row in made.rows])

    module.measure, module.draw = measure, draw
    real = experiments.get
    monkeypatch.setattr(experiments, "get", lambda name: module if name == "toy" else real(name))
    monkeypatch.setattr(card, "measure_read_rate", lambda *_: READ_RATE)
    return module


def test_run_saves_draws_and_indexes(tmp_path, toy, capsys):
    assert commands.run_command("toy", ["count=4"], tmp_path) == 0
    out = capsys.readouterr().out
    path = Path(out.strip())
    assert len(plate.load(path).rows) == 4
    assert plate.load(path).params == {"count": 4}
    assert path.with_suffix(".png").is_file()
    assert path.name in (tmp_path / "README.md").read_text()
    assert plate.lint(tmp_path) == []


def test_json_is_all_there_is_on_standard_output(tmp_path, toy, capsys):
    assert commands.run_command("toy", runs_dir=tmp_path, as_json=True) == 0
    captured = capsys.readouterr()

    def refuse(constant):
        raise AssertionError(constant)

    value = json.loads(captured.out, parse_constant=refuse)
    assert value == json.loads(plate.plate_paths(tmp_path)[0].read_text())
    assert "compiling kernels" in captured.err


def test_run_without_saving_leaves_nothing(tmp_path, toy, capsys):
    assert commands.run_command("toy", runs_dir=tmp_path, save=False) == 0
    assert json.loads(capsys.readouterr().out)["experiment"] == "toy"
    assert list(tmp_path.iterdir()) == []


def test_run_refuses_before_it_measures(tmp_path, toy, monkeypatch):
    monkeypatch.setattr(toy, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(DecodeError, match="toy has no parameter 'cuont'; did you mean count"):
        commands.run_command("toy", ["cuont=1"], tmp_path)
    with pytest.raises(DecodeError, match="does not exist"):
        commands.run_command("toyy", [], tmp_path)


def test_lint_tells_what_a_plate_says_does_not_hold(tmp_path, toy, capsys, monkeypatch):
    told = [("the second is the faster one", False), ("both are there", True)]
    monkeypatch.setattr(toy, "claims", lambda _: told, raising=False)
    commands.run_command("toy", runs_dir=tmp_path)
    capsys.readouterr()
    assert commands.lint_command([tmp_path]) == 0
    (path,) = plate.plate_paths(tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: does not hold: the second is the faster one",
        "1 plate, no problem",
    ]
    assert commands.lint_command([tmp_path], as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_lint_and_draw_commands(tmp_path, toy, capsys):
    commands.run_command("toy", runs_dir=tmp_path)
    assert commands.lint_command([tmp_path]) == 0
    assert "1 plate, no problem" in capsys.readouterr().out
    png = next(tmp_path.rglob("*.png"))
    png.unlink()
    assert commands.lint_command([tmp_path]) == 1
    assert "is missing; draw it" in capsys.readouterr().out
    assert commands.lint_command([tmp_path], as_json=True) == 1
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert commands.draw_command([tmp_path]) == 0
    assert png.is_file()
    capsys.readouterr()
    assert commands.draw_command([png.with_suffix(".json")]) == 0
    assert capsys.readouterr().out.strip() == str(png)
    with pytest.raises(DecodeError, match="no such file or folder"):
        commands.draw_command([tmp_path / "absent"])
    assert commands.lint_command([tmp_path / "absent"]) == 1


def test_list_names_every_experiment_parameter_and_plate(tmp_path, capsys):
    recorded = tmp_path / "cpu_decode" / "toy-20260131-01234567.json"
    recorded.parent.mkdir()
    recorded.write_text("{}")
    assert commands.list_command(tmp_path) == 0
    text = capsys.readouterr().out
    assert commands.list_command(tmp_path, as_json=True) == 0
    table = json.loads(capsys.readouterr().out)
    assert sorted(table) == experiments.names()
    for name, entry in table.items():
        assert name in text
        for key in entry["params"]:
            assert f"{key}=" in text
    assert table["cpu_decode"]["plates"] == [recorded.as_posix()]
    assert recorded.as_posix() in text
    assert commands.list_command(tmp_path / "absent") == 0


def test_the_lab_imports_without_torch_matplotlib_or_pandas():
    code = (
        "import sys, decodev2.lab, decodev2.lab.plate, decodev2.lab.card, decodev2.lab.commands\n"
        "heavy = {'torch', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    root = Path(decodev2.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_lab_modules_import_one_by_one():
    for name in ("bench", "card", "commands", "figure", "models", "plate"):
        importlib.import_module(f"decodev2.lab.{name}")


@pytest.mark.parametrize("name", [n for n in experiments.names() if experiments.get(n).DEPENDS])
def test_what_an_experiment_depends_on_holds_what_those_include(name):
    """A plate is stale when a header changes that its kernels include, however deep."""
    root = native.csrc_folder()
    _, files = card.files_hash(root, tuple(experiments.get(name).DEPENDS))
    missing = set()
    for file in files:
        for included in re.findall(r'#include "([^"]+)"', (root / file).read_text()):
            path = ((root / file).parent / included).resolve()
            if path.is_file() and path.relative_to(root.resolve()).as_posix() not in files:
                missing.add(f"{file} includes {included}")
    assert not missing


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
