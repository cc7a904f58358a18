"""The command line as a user meets it: what goes to which stream, exit codes, errors in one line.

Most commands run in this process, through `cli.main`; what only a real process can show (imports,
exit status, streams that fail) runs in one.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf import hf_config, hf_tensors, write_hf_folder
from tiny import BYTES, END_ID, write_model, write_tokenizer

from decodev2 import cli, doctor, native, oracle
from decodev2.load import open_model

ROOT = str(Path(native.__file__).parents[1])
KEYS = {
    "ids", "text", "stop_reason", "prompt_len", "executor", "device", "load_s", "warmup_s",
    "prefill_s", "decode_s", "decode_tok_s",
}  # fmt: skip


def command(*args, cwd=None, stdin="", **environment):
    """`python -m decodev2 ...` in a process of its own."""
    env = {**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "", **environment}
    env = {key: value for key, value in env.items() if value is not None}
    return subprocess.run(
        [sys.executable, "-m", "decodev2", *map(str, args)],
        env=env, cwd=cwd, capture_output=True, text=True, input=stdin, encoding="utf-8",
    )  # fmt: skip


@pytest.fixture
def run(capsys):
    """`cli.main` in this process: (exit status, stdout, stderr)."""

    def call(*args):
        capsys.readouterr()
        try:
            status = cli.main([str(a) for a in args])
        except SystemExit as stop:  # argparse
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def fails(run):
    """Run, expect exit status 2, nothing on stdout and one line on stderr; returns that line."""

    def call(*args):
        status, out, err = run(*args)
        assert status == 2 and out == "", (status, out, err)
        lines = err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("decodev2: "), err
        assert "Traceback" not in err
        return lines[0]

    return call


# ---- generate ----


@pytest.mark.parametrize("executor", ("decodev2", "tokenloop", "oracle"))
def test_json_is_one_object_and_nothing_else(run, talker, executor):
    status, out, err = run("generate", "--model", talker, "--prompt", "hi", "--json",
                           "--device", "cpu", "--executor", executor)  # fmt: skip
    assert status == 0 and err == ""
    assert out.count("\n") == 1 and out.endswith("}\n")

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    got = json.loads(out, parse_constant=no_constant)
    assert set(got) == KEYS
    assert got["ids"] == [*"né 🎉".encode(), END_ID] and got["text"] == "né 🎉"
    assert got["stop_reason"] == f"end token {END_ID}" and got["prompt_len"] == 5
    assert got["executor"] == executor and got["device"] == "cpu"
    assert got["prefill_s"] > 0 and got["decode_s"] > 0
    assert got["decode_tok_s"] == pytest.approx((len(got["ids"]) - 1) / got["decode_s"])


def test_a_rate_of_one_token_is_null(run, talker):
    _, out, _ = run("generate", "--model", talker, "--prompt", "a", "--json",
                    "--max-new-tokens", 1)  # fmt: skip
    assert json.loads(out)["decode_tok_s"] is None


def test_plain_output_is_the_text_alone(run, talker):
    status, out, err = run("generate", "--model", talker, "--prompt", "hi")
    assert (status, out) == (0, "né 🎉\n")
    assert len(err.splitlines()) == 1 and "9 new tokens" in err and f"end token {END_ID}" in err


def test_text_streams_while_it_is_made(talker, monkeypatch):
    """Each certain piece is written and flushed before the next token is computed."""
    seen = []

    class Stream(io.StringIO):
        def flush(self):
            seen.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Stream())
    assert cli.main(["generate", "--model", str(talker), "--prompt", "hi"]) == 0
    assert [s for i, s in enumerate(seen) if s not in seen[:i]][:4] == ["n", "né", "né ", "né 🎉"]


def test_options_of_generate(run, talker):
    def ids(*more):
        status, out, _ = run("generate", "--model", talker, "--json", "--prompt", "hi",
                             "--device", "cpu", *more)  # fmt: skip
        assert status == 0
        return json.loads(out)["ids"]

    whole = [*"né 🎉".encode(), END_ID]
    assert ids("--max-new-tokens", 3) == whole[:3]
    assert ids("--ignore-eos", "--max-new-tokens", 10) == [*whole, ord("x")]
    assert ids("--raw", "--max-new-tokens", 2) == [0, 0]  # no `<|answer|>` at the end
    assert ids("--max-seq", 8) == whole[:4]  # 5 of the prompt, then the context is full
    assert ids("--chr", talker.with_suffix(".chr"), "--threads", 1) == whole


def test_prompt_from_stdin(run, talker, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("four"))
    status, out, _ = run("generate", "--model", talker, "--json", "--prompt", "-")
    assert status == 0 and json.loads(out)["prompt_len"] == 7


def test_generate_as_a_process(talker, tmp_path):
    """In another folder, without CUDA, from a pipe: one object on stdout, nothing on stderr."""
    done = command("generate", "--model", talker, "--prompt", "-", "--json", stdin="hi",
                   cwd=tmp_path, CUDA_VISIBLE_DEVICES="")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == "né 🎉" and done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_an_error_as_a_process(talker):
    done = command("generate", "--model", talker, "--prompt", "x" * 100)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "decodev2: the prompt has 103 tokens, max_seq is 64\n"


# ---- what a user gets wrong ----


@pytest.fixture
def copy(random_model, tmp_path):
    folder = tmp_path / "tiny"
    shutil.copytree(random_model, folder)
    for path in random_model.parent.glob("tiny.chr*"):
        shutil.copy(path, tmp_path)
    return folder


def generate(folder, *more):
    fixed = ("--prompt", "hi", "--max-new-tokens", 2, "--device", "cpu")
    return ("generate", "--model", folder, *fixed, *more)


def test_wrong_paths(fails, copy, tmp_path):
    assert "no such folder" in fails(*generate(tmp_path / "nowhere"))
    assert "no config.json" in fails(*generate(tmp_path))
    missing = tmp_path / "no.chr"
    assert str(missing) in fails(*generate(copy, "--chr", missing))
    assert str(tmp_path) in fails(*generate(copy, "--chr", tmp_path))
    copy.with_suffix(".chr").write_bytes(b"")
    assert "tiny.chr" in fails(*generate(copy))
    copy.with_suffix(".chr").unlink()
    assert "tiny.chr" in fails(*generate(copy))


def test_files_that_do_not_belong_together(fails, copy, tmp_path):
    other = replace(BYTES, intermediate=192)
    write_model(tmp_path / "other", other, hf_tensors(other))
    said = fails(*generate(copy, "--chr", tmp_path / "other.chr"))
    assert "intermediate_size is 192" in said
    side_car = tmp_path / "tiny.chr.sum.json"
    shutil.copy(tmp_path / "other.chr.sum.json", side_car)
    assert "tiny.chr" in fails(*generate(copy))
    side_car.write_text("{}")
    assert "tiny.chr.sum.json" in fails(*generate(copy))
    side_car.write_text("not json")
    assert "tiny.chr.sum.json" in fails(*generate(copy))


def test_a_damaged_chr(fails, run, copy):
    path = copy.with_suffix(".chr")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = fails(*generate(copy))
    assert "tiny.chr" in said
    status, out, err = run("verify", path, "-q")
    assert status == 1 and "FAULT" in out and err.count("decodev2: ") == 1
    path.write_bytes(data[:-1])
    assert "tiny.chr" in fails(*generate(copy))


@pytest.mark.parametrize("max_seq", (0, -1, 65))
def test_max_seq_outside_the_model(fails, random_model, max_seq):
    said = fails(*generate(random_model, "--max-seq", max_seq))
    assert said == f"decodev2: max_seq {max_seq} is outside this model's 1..64"


def test_wrong_numbers(fails, run, random_model):
    for args, said in (
        (("--max-new-tokens", 0), "--max-new-tokens is 0, needs at least 1"),
        (("--max-new-tokens", -5), "--max-new-tokens is -5, needs at least 1"),
        (("--threads", 0), "--threads is 0, needs at least 1"),
        (("--max-seq", 4), "the prompt has 5 tokens, max_seq is 4"),
        (("--raw", "--prompt", ""), "the prompt has 0 tokens, needs at least 1"),
    ):
        assert fails(*generate(random_model, *args)) == f"decodev2: {said}"
    for args in (("--max-seq", "many"), ("--executor", "fast"), ("--device", "tpu")):
        status, out, err = run(*generate(random_model, *args))  # argparse: usage, then the error
        assert status == 2 and out == "" and "Traceback" not in err
        assert err.splitlines()[-1].startswith("decodev2 generate: error: argument")


def test_templates(fails, tmp_path):
    base = write_model(tmp_path / "base", BYTES, hf_tensors(BYTES), template=None)
    said = fails(*generate(base))
    assert "no chat template" in said and "generate --raw" in said
    refusing = "{{ raise_exception('only on Sundays') }}"
    folder = write_model(tmp_path / "refusing", BYTES, hf_tensors(BYTES), template=refusing)
    assert "only on Sundays" in fails(*generate(folder))
    broken = write_model(tmp_path / "broken", BYTES, hf_tensors(BYTES), template="{% if %}")
    assert "malformed" in fails(*generate(broken))


def test_prompt_bytes_that_are_no_text(fails, random_model):
    assert "no valid character" in fails(*generate(random_model, "--raw", "--prompt", "a\udcff"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_device_cuda_without_cuda(fails, random_model):
    said = fails(*generate(random_model, "--device", "cuda"))
    assert said.startswith("decodev2: device cuda: ") and "--device cpu" in said


def test_missing_compiler_is_one_line(random_model, tmp_path):
    done = command(*generate(random_model), CXX="/nonexistent", DECODEV2_CACHE=tmp_path / "cache")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "needs C++ compiler (/nonexistent)" in done.stderr


def test_wrong_instruction_set_is_one_line(random_model):
    done = command(*generate(random_model), DECODEV2_CPU_ISA="sse9")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "'sse9'" in done.stderr


def test_unknown_experiments_and_parameters(fails):
    said = fails("run", "no_such_thing")
    assert "'no_such_thing'" in said and "cpu_decode" in said
    assert "'speed'" in fails("run", "cpu_decode", "--param", "speed=9")
    assert "max_seq" in fails("run", "cpu_decode", "--param", "max_sek=9")
    assert "'many'" in fails("run", "cpu_decode", "--param", "max_seq=many")
    assert "needs max_seq=VALUE" in fails("run", "cpu_decode", "--param", "max_seq")


def test_unknown_commands(run):
    for args in ((), ("fly",), ("generate",), ("--no-such",)):
        status, out, err = run(*args)
        assert status == 2 and out == "" and "usage: decodev2" in err and "Traceback" not in err


# ---- pack and verify ----


def test_pack_then_generate_equals_the_oracle(run, tmp_path):
    """`head_dim` is not hidden / heads, tied: checked from the folder to the ids."""
    spec = replace(BYTES, hidden=128, head_dim=64, tied=True, eos_ids=())
    folder = write_hf_folder(tmp_path / "m", hf_config(spec), hf_tensors(spec))
    write_tokenizer(folder)
    status, out, _ = run("pack", folder, "-q", "--json")
    assert status == 0
    report = json.loads(out)
    assert Path(report["path"]) == tmp_path / "m.chr"
    assert report["file_bytes"] == (tmp_path / "m.chr").stat().st_size
    status, out, _ = run("verify", tmp_path / "m.chr", "--against", folder, "--json")
    assert status == 0 and all(row["fault"] is None for row in json.loads(out))
    _, out, _ = run(*generate(folder, "--json", "--max-new-tokens", 9))
    model = open_model(folder, tmp_path / "m.chr")
    assert json.loads(out)["ids"] == oracle.greedy(model, [256, *b"hi", 258, 257], 9)
    model.tensors.close()


def test_outputs_that_cannot_be_written(fails, copy, tmp_path):
    assert "no such folder" in fails("pack", copy, "-o", tmp_path / "no" / "m.chr")
    assert "is a folder" in fails("pack", copy, "-o", tmp_path)
    assert ".chr" in fails("pack", copy, "-o", tmp_path / "m.bin")
    (tmp_path / "file").touch()
    said = fails("pack", copy, "-o", tmp_path / "file" / "m.chr")
    assert str(tmp_path / "file") in said
    assert not list(tmp_path.glob("*.tmp*")) and not list(tmp_path.glob("m.*"))


def test_kernel_cache_that_cannot_be_written(random_model, tmp_path):
    (tmp_path / "file").touch()
    done = command(*generate(random_model), DECODEV2_CACHE=tmp_path / "file" / "cache")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and str(tmp_path / "file") in done.stderr


# ---- streams that fail ----


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ("", "1"))
def test_a_full_disk_is_one_line(unbuffered):
    env = {**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "decodev2", "doctor"],
            env=env, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "decodev2: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ("", "1"))
def test_a_reader_that_left_is_no_error_message(unbuffered):
    """`decodev2 ... | head`: quiet, with the status that shells give it."""
    env = {**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": unbuffered}
    child = subprocess.Popen(
        [sys.executable, "-m", "decodev2", "doctor"],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    child.stdout.close()
    error = child.stderr.read()
    assert child.wait() == 141 and error == ""
    child.stderr.close()


def test_interrupted(run, random_model, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("decodev2.session.open_session", interrupt)
    assert run(*generate(random_model)) == (130, "", "decodev2: interrupted\n")


# ---- help and doctor ----


def test_help_shows_examples(run):
    status, out, err = run("--help")
    assert status == 0 and err == ""
    for line in ("decodev2 doctor", "decodev2 pack", "decodev2 generate --model", "decodev2 run"):
        assert f"\n  {line}" in out
    for name in ("fetch", "pack", "verify", "generate", "chat", "run", "list", "draw", "lint"):
        status, text, _ = run(name, "--help")
        assert status == 0 and name in text and name in out
    assert run("--version")[1].startswith("decodev2 ")


@pytest.mark.parametrize("args", [("--help",), ("doctor",), ("list",)], ids=lambda a: a[0])
def test_without_cuda(args):
    done = command(*args, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout


def states(rows):
    return {row["item"]: row for row in rows}


def test_doctor_lists_everything_and_builds_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DECODEV2_CACHE", str(tmp_path / "cache"))
    status, out, _ = run("doctor", "--json")
    rows = states(json.loads(out))
    for item in ("python", "torch", "ninja", "C++ compiler", "nvcc", "GPU", "notebook kernel",
                 "kernel sources", "build cache", "models", "widths"):  # fmt: skip
        assert rows[item]["state"] in ("ok", "absent", "missing"), item
    assert status == (1 if any(r["state"] == "missing" for r in rows.values()) else 0)
    assert "64 columns" in rows["widths"]["found"]
    _, text, _ = run("doctor")
    assert len(text.splitlines()) == len(rows)
    assert not (tmp_path / "cache").exists()


def test_doctor_names_what_is_missing_with_the_fix(run, tmp_path, monkeypatch):
    """No ninja, no compiler, no nvcc, CUDA_HOME pointing at an empty folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "g++-99")
    monkeypatch.setattr(sys, "executable", "/nonexistent/bin/python")  # pip's ninja is beside it
    status, out, err = run("doctor", "--json")
    rows = states(json.loads(out))
    assert status == 1 and err == ""
    assert rows["ninja"] == {
        "item": "ninja", "state": "missing", "found": "not found", "fix": "pip install ninja",
    }  # fmt: skip
    assert rows["C++ compiler"]["state"] == "missing" and "CXX" in rows["C++ compiler"]["fix"]
    assert rows["nvcc"]["state"] == "absent" and rows["nvcc"]["fix"]
    assert rows["CUDA_HOME"]["found"] == f"{tmp_path} holds no bin/nvcc"
    assert rows["CUDA_HOME"]["fix"]
    _, text, _ = run("doctor")
    (line,) = [line for line in text.splitlines() if "ninja" in line]
    assert line.startswith("missing") and line.endswith("->  pip install ninja")


@pytest.mark.parametrize("name", ["python", "python3", "python3.11", sys.executable])
def test_doctor_knows_a_kernel_that_is_this_python(name, tmp_path, monkeypatch):
    _kernelspec(tmp_path, monkeypatch, name)
    check = doctor._notebook_kernel()
    assert check.state == "ok" and check.found == f"python3 is {sys.executable}"


def test_doctor_names_a_kernel_that_is_another_python(tmp_path, monkeypatch):
    _kernelspec(tmp_path, monkeypatch, "/opt/other/bin/python")
    check = doctor._notebook_kernel()
    assert check.state == "absent" and check.fix
    assert check.found == f"python3 is /opt/other/bin/python, not {sys.executable}"


def _kernelspec(folder: Path, monkeypatch, interpreter: str) -> None:
    """A kernel called python3 that comes before all others."""
    pytest.importorskip("jupyter_client")
    kernel = folder / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [interpreter, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(folder))


@pytest.mark.parametrize(
    "of_torch, capability, expected",
    [("13.0", (9, 0), {"GPU": "ok"}), ("13.0", (7, 5), {"GPU": "absent"}),
     ("12.8", (9, 0), {"GPU": "ok", "nvcc and torch": "absent"})],
)  # fmt: skip
def test_doctor_compares_card_nvcc_and_torch(of_torch, capability, expected, monkeypatch):
    card = types.SimpleNamespace(name="a card", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.version, "cuda", of_torch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(doctor, "_last_line", lambda command: "Build cuda_13.0.r13.0/compiler.1_0")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    found = {check.item: check.state for check in doctor._cuda() if check.item != "nvcc"}
    assert found == expected


def test_doctor_reports_a_cache_that_cannot_be_written(run, monkeypatch):
    monkeypatch.setenv("DECODEV2_CACHE", "/proc/nowhere/cache")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)  # as for other users
    status, out, _ = run("doctor", "--json")
    row = states(json.loads(out))["build cache"]
    assert status == 1 and row["state"] == "missing" and "DECODEV2_CACHE" in row["fix"]


# ---- chat ----


def chat(talker, lines, *more):
    done = command("chat", "--model", talker, *more, stdin=lines)
    assert "Traceback" not in done.stderr
    return done


def test_chat_answers_each_line_and_ends(talker):
    done = chat(talker, "hi\nwho?\n\n")
    assert done.returncode == 0
    assert done.stdout.count("né 🎉") == 2


def test_chat_goes_on_after_a_turn_that_fails(talker):
    done = chat(talker, f"{'x' * 100}\nhi\n")  # the first is too long; Ctrl-D ends
    assert done.returncode == 0 and done.stdout.count("né 🎉") == 1
    assert "decodev2: the prompt has 103 tokens, max_seq is 64" in done.stderr


def test_chat_refuses_at_the_start(fails, talker, tmp_path):
    said = fails("chat", "--model", talker, "--system", "be brief")
    assert "no system turn here" in said
    base = write_model(tmp_path / "base", BYTES, hf_tensors(BYTES), template=None)
    assert "generate --raw" in fails("chat", "--model", base)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
