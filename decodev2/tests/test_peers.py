"""The matched peers without a GPU: our step on the CPU's kernels, torch's int4 products on the CPU,
stand-ins for bitsandbytes and llama-bench, and what the experiment makes of rows."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import types
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_gemv_experiments import texts_that_collide
from test_model_experiments import made

from decodev2 import graph, persistent, plan, prefill, state, step
from decodev2.errors import DecodeError
from decodev2.lab import (
    bench,
    card,
    cases,
    commands,
    figure,
    llama_bench,
    page,
    peer_products,
    plate,
    random_gguf,
)  # fmt: skip
from decodev2.lab.experiments import decode_step, peers
from decodev2.nf4 import LEVELS

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TOY = replace(
    plan.TINY_LLAMA, name="toy", hidden=128, n_q=4, n_kv=2, head_dim=32, intermediate=256,
    vocab=256, max_seq=64, qkv_bias=True, tied=True, model_type="qwen2",
)  # fmt: skip
RATE = {"gb_s": 4600.0, "method": "given"}
SMALL = ["step at 9", "prompt of 7", "prompt of 20"]


def defaults(**changed) -> dict:
    known = {key: value for key, (value, _) in peers.PARAMS.items()}
    assert set(changed) <= set(known)
    return known | changed


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf", reason="needs the fetch extra")


# ---- stand-ins ----

FAKE = """#!{python}
import json, pathlib, subprocess, sys, time
how = {how!r}
said = dict(zip(sys.argv[1::2], sys.argv[2::2]))
pathlib.Path({seen!r}).write_text(json.dumps(said))
print("ggml_cuda_init: found 1 CUDA devices", file=sys.stderr)
if how == "fails":
    print("main: error: failed to load model '/x'\\n", file=sys.stderr)
    sys.exit(1)
if how == "hangs":
    child = subprocess.Popen(["sleep", "60"])
    pathlib.Path({seen!r}).write_text(str(child.pid))
    child.wait()
assert open(said["-m"], "rb").read(4) == b"GGUF"
common = dict(build_commit="0c1e570", build_number=5, gpu_info="A Card", backends="CUDA",
              n_ubatch=8, n_depth=0)
if how == "sees no card":
    common["gpu_info"] = ""
prompts = [] if said["-p"] == "0" else [int(n) for n in said["-p"].split(",")]
out = [common | dict(n_prompt=n, n_gen=0, samples_ns=[n * 300000 + i for i in range(5)])
       for n in (prompts[:-1] if how == "leaves one out" else prompts)]
out.append(common | dict(n_prompt=0, n_gen=int(said["-n"]), samples_ns=[320000000] * 5))
print("llama_model_load: nonsense" if how == "prints garbage" else json.dumps(out, indent=2))
"""


@pytest.fixture
def fake_bench(tmp_path):
    """`make(how)` writes a llama-bench that behaves like that, and returns its path; `make.seen` is
    the file in which it leaves what it was asked."""

    def make(how: str = "works"):
        path = tmp_path / "llama-bench"
        path.write_text(FAKE.format(python=sys.executable, how=how, seen=str(make.seen)))
        path.chmod(0o755)
        return str(path)

    make.seen = tmp_path / "seen.json"
    return make


def quantize_4bit(w, blocksize, quant_type):
    assert quant_type == "nf4" and w.dtype == torch.bfloat16
    blocks = w.float().view(-1, blocksize)
    state = types.SimpleNamespace(absmax=blocks.abs().amax(1), shape=w.shape)
    levels = torch.from_numpy(LEVELS.copy())
    codes = (blocks / state.absmax[:, None]).unsqueeze(2).sub(levels).abs().argmin(2).flatten()
    return (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], state


def dequantize_4bit(codes, state):
    nibbles = torch.cat([codes >> 4, codes & 15], 1).long().view(len(state.absmax), -1)
    values = torch.from_numpy(LEVELS.copy())[nibbles] * state.absmax[:, None]
    return values.view(state.shape).bfloat16()


def matmul_4bit(x, codes, state):
    return x @ dequantize_4bit(codes, state).T


def int4pack(codes: torch.Tensor, inner_k_tiles: int) -> torch.Tensor:
    """torch packs bytes whose high nibble is the even column on CUDA, plain numbers on the CPU."""
    assert codes.dtype == torch.uint8 and inner_k_tiles == 8
    numbers = torch.stack([codes >> 4, codes & 15], 2).flatten(1).int()
    return torch._convert_weight_to_int4pack_for_cpu(numbers, 1)


@pytest.fixture
def libraries(monkeypatch):
    """Both libraries on the CPU: torch's own kernel, and a bitsandbytes of a few lines."""
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", int4pack)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", torch._weight_int4pack_mm_for_cpu)
    package = types.ModuleType("bitsandbytes")
    package.__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None)
    package.matmul_4bit = matmul_4bit
    package.functional = types.SimpleNamespace(
        quantize_4bit=quantize_4bit, dequantize_4bit=dequantize_4bit
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", package.functional)
    return package


@functools.cache
def a_card() -> dict:
    return card.card("cpu") | {"device": "cuda", "slug": "a-card", "gpu": {"name": "A Card"}}


@pytest.fixture
def on_cpu(monkeypatch, libraries):
    """`measure` runs its own code on the CPU: its checks are real, its times are given."""

    def replayed(live, weights):
        take = functools.partial(step.greedy_decode, live, weights)
        return graph.DecodeGraph(types.SimpleNamespace(replay=take))

    def graph_times(run, launches, runs=9, warmup=2):
        for i in range(launches):
            run(i)
        return [1e-5] * runs

    def event_times(run, runs=9, warmup=2):
        run()
        return [1e-3] * runs

    def repeat(run, runs=7, warmup=2, **_):
        run()
        return [2e-3] * runs

    monkeypatch.setattr(peers, "DEVICE", "cpu")
    monkeypatch.setattr(plan, "named_spec", {"toy": TOY}.__getitem__)
    monkeypatch.setattr(cases, "begin", lambda name: RATE)
    monkeypatch.setattr(cases, "end", lambda rate: a_card() | {"read_rate": rate})
    monkeypatch.setattr(graph, "capture", replayed)
    monkeypatch.setattr(graph, "replay_of", lambda launch, device: launch)
    monkeypatch.setattr(bench, "graph_times", graph_times)
    monkeypatch.setattr(bench, "event_times", event_times)
    monkeypatch.setattr(bench, "repeat", repeat)
    monkeypatch.setattr(persistent, "why_not", lambda spec: "needs sm_90")
    monkeypatch.setattr(llama_bench.shutil, "which", lambda name: name if "/" in name else None)


def toy(**changed) -> dict:
    return defaults(**{"shape": "toy", "max_seq": 64, "chunk": 8, "runs": 3, "cases": SMALL}
                    | changed)  # fmt: skip


# ---- measure ----


def test_measure_everything(on_cpu, gguf, fake_bench, monkeypatch):
    monkeypatch.setattr(persistent, "why_not", lambda spec: None)
    monkeypatch.setattr(
        peers, "taken", lambda way, live, weights: graph.capture(live, weights).replay
    )
    result = commands.record("peers", toy(llama_bench=fake_bench()))
    assert plate.problems(plate.clean(result)) == []
    assert [(row["what"], row["peer"]) for row in result.rows] == [
        *(("step at 9", peer) for peer in peers.PEERS),
        ("prompt of 7", peers.GRAPH), ("prompt of 7", peers.LLAMA),
        ("prompt of 20", peers.GRAPH), ("prompt of 20", peers.LLAMA),
    ]  # fmt: skip
    rows = {(row["what"], row["peer"]): row for row in result.rows}
    asked = json.loads(fake_bench.seen.read_text())
    assert asked["-p"] == "7,20" and asked["-n"] == "128" and asked["-ngl"] == "99"
    theirs, ours = rows["step at 9", peers.LLAMA], rows["step at 9", peers.GRAPH]
    assert theirs["ms"] == pytest.approx(2.5) and theirs["tok_s"] == pytest.approx(400)
    assert theirs["ratio"] == pytest.approx(2.5) and ours["ratio"] == pytest.approx(1)
    assert theirs["runs"] == 5 and theirs["mb"] == random_gguf.bytes_per_token(TOY) / 1e6
    assert ours["error_before"] < 1e-5 and ours["error_after"] < 1e-5
    prompt, long = (rows[f"prompt of {n}", peers.GRAPH] for n in (7, 20))
    assert prompt["tok_s"] == pytest.approx(3500) and prompt["how"] == "chunks of 8"
    assert long["floor_ms"] == pytest.approx(3 * ours["floor_ms"])  # three passes
    assert rows["prompt of 20", peers.LLAMA]["ms"] == pytest.approx(6)
    products = rows["step at 9", "torch int4 products alone"]
    assert products["how"].startswith("9 products") and products["ms"] == pytest.approx(0.09)
    assert products["mb"] == pytest.approx(sum(m * k for m, k in peers._products(TOY)) * 9 / 16e6)
    assert 0 < products["error_before"] < 1e-2
    notes = " ".join(result.notes)
    assert "build 5 (0c1e570), on A Card" in notes and "lower bound" in notes
    assert "left out" not in notes and "Noise band 0.0 %" in notes
    assert figure.png_bytes(result, plate.content_hash(result))


def test_what_is_absent_is_said(on_cpu, monkeypatch):
    for name in ("bitsandbytes", "bitsandbytes.functional"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = commands.record("peers", toy())
    assert {row["peer"] for row in result.rows} == {peers.GRAPH, "torch int4 products alone"}
    assert [note for note in result.notes if "left out" in note] == [
        "bitsandbytes NF4 products alone left out: bitsandbytes is not installed.",
        "llama.cpp left out: llama.cpp's llama-bench is not on PATH; parameter llama_bench names "
        "it.",
        "decodev2 in one kernel left out: needs sm_90.",
    ]
    assert plate.problems(plate.clean(result)) == []
    only = commands.record("peers", toy(cases=["prompt of 7"]))
    assert [row["peer"] for row in only.rows] == [peers.GRAPH]
    assert not any("products" in note for note in only.notes), "no step, so they are not missed"


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"peers": ["llama.cpp"]}, "llama.cpp: .* is not on PATH"),
        ({"llama_bench": "no/such"}, "llama.cpp: no/such is no program"),
        ({"peers": ["decodev2 in one kernel"]}, "decodev2 in one kernel: needs sm_90"),
        ({"peers": ["nonsense"]}, "peer 'nonsense' is unknown; there are decodev2, "),
        ({"cases": ["step at 64"]}, "case 'step at 64' is unknown; needs"),
        ({"peers": ["torch int4 products alone"], "cases": ["prompt of 7"]},
         "torch int4 products alone takes no prompt"),
    ],
)  # fmt: skip
def test_what_was_asked_for_and_cannot_be_had_is_one_line(on_cpu, monkeypatch, changed, words):
    monkeypatch.setattr(llama_bench.shutil, "which", lambda name: None)
    with pytest.raises(DecodeError, match=words) as error:
        peers.measure(toy(**changed), lambda *_: None)
    assert "\n" not in str(error.value)


def test_a_width_that_no_kernel_takes(on_cpu, monkeypatch):
    narrow = {"narrow": replace(TOY, intermediate=200)}
    monkeypatch.setattr(plan, "named_spec", narrow.__getitem__)
    params = toy(shape="narrow", peers=["torch int4 products alone"])
    with pytest.raises(DecodeError, match="needs rows by 8 and columns by 128, not 128 x 200"):
        peers.measure(params, lambda *_: None)


def test_a_full_disk_is_seen_before_the_file_is_written(on_cpu, gguf, fake_bench, monkeypatch):
    space = types.SimpleNamespace(free=10**5)
    monkeypatch.setattr(peers.shutil, "disk_usage", lambda folder: space)
    monkeypatch.setattr(random_gguf, "write", lambda *_: pytest.fail("written"))
    with pytest.raises(DecodeError, match=r"take 0\.0 GB and the temporary folder has 0\.0 free"):
        peers.measure(toy(llama_bench=fake_bench()), lambda *_: None)


def test_wrong_results_stop_the_run(on_cpu, libraries, monkeypatch):
    monkeypatch.setattr(libraries, "matmul_4bit", lambda *a: 1.1 * matmul_4bit(*a))
    with pytest.raises(DecodeError, match=r"bitsandbytes NF4, 256 x 128, is off by .*e-0"):
        peers.measure(toy(peers=["bitsandbytes NF4 products alone"]), lambda *_: None)
    chunked = prefill.forward_prefill

    def forgets(live, weights, ids, chunk=None, full=None):
        chunked(live, weights, ids[1:], chunk, full)

    monkeypatch.setattr(prefill, "forward_prefill", forgets)
    with pytest.raises(DecodeError, match="a prompt of 7 is off by"):
        peers.measure(toy(peers=[peers.GRAPH]), lambda *_: None)
    monkeypatch.setattr(peers, "taken", lambda *_: lambda: None)
    with pytest.raises(DecodeError, match="the step at 9 is off by nan"):
        peers.measure(toy(peers=[peers.GRAPH]), lambda *_: None)


def test_a_card_that_llama_bench_does_not_see(on_cpu, gguf, fake_bench):
    with pytest.raises(DecodeError, match="llama-bench saw no GPU"):
        peers.measure(toy(llama_bench=fake_bench("sees no card")), lambda *_: None)


@pytest.mark.parametrize(
    "what, peer",
    [("step at 9", peer) for peer in peers.PEERS if peer != peers.ONE]
    + [("prompt of 7", "llama.cpp")],
)
def test_one_choice_of_each_toggle(on_cpu, gguf, fake_bench, what, peer):
    result = commands.record("peers", toy(cases=[what], peers=[peer], llama_bench=fake_bench()))
    (row,) = result.rows
    assert (row["what"], row["peer"]) == (what, peer)
    assert plate.problems(plate.clean(result)) == []
    assert result.verdict.startswith(f"{what}: ")
    assert all(holds for _, holds in peers.claims(plate.Plate(**plate.clean(result))))


def test_no_device_is_one_line():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(DecodeError, match="peers needs a CUDA device"):
        peers.measure(defaults(), lambda *_: None)


def test_what_a_graph_runs_on_stays_alive(monkeypatch):
    """The hand-offs of the one kernel are nobody else's: as long as its graph can be replayed,
    they must not be freed."""
    nothing = contextlib.nullcontext()
    side = types.SimpleNamespace(wait_stream=lambda other: None)
    for name, value in (
        ("device", lambda _: nothing), ("current_stream", lambda: side), ("Stream", lambda: side),
        ("stream", lambda _: nothing), ("graph", lambda *_, **__: nothing),
        ("CUDAGraph", types.SimpleNamespace), ("set_stream", lambda _: None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    kept = []

    def prepare(live, weights):
        one = torch.zeros(1)
        kept.append(weakref.ref(one))
        return one

    monkeypatch.setattr(persistent, "why_not", lambda spec: None)
    monkeypatch.setattr(persistent, "prepare", prepare)
    monkeypatch.setattr(persistent, "greedy_decode", lambda one: None)
    replay = decode_step.taken("persistent", state.allocate_state(TOY, "cpu", 1), None)
    gc.collect()
    assert kept[0]() is not None
    del replay
    gc.collect()
    assert kept[0]() is None


# ---- products of other libraries ----


@pytest.mark.parametrize("library", peer_products.LIBRARIES)
@pytest.mark.parametrize("rows, cols", [(128, 128), (64, 384)])
def test_products_agree_with_float32(libraries, library, rows, cols):
    assert peer_products.why_not(library, [(rows, cols)]) is None
    first, second = (peer_products.LIBRARIES[library](rows, cols, seed) for seed in (0, 1))
    found = peer_products.check(first, peer_products.column(cols))
    assert 0 < found < peer_products.ERROR_LIMIT / 2
    assert first.nbytes == rows * cols * 4.5 / 8
    w = first.dense()
    assert w.shape == (rows, cols) and w.dtype == torch.float32
    assert 0.1 < float(w.std()) * cols**0.5 < 3
    assert not torch.equal(w, second.dense()) and torch.equal(w, first.dense())
    with pytest.raises(DecodeError, match=f"{library}, {rows} x {cols}, is off by"):
        peer_products.check(replace(first, run=second.run), peer_products.column(cols))


# ---- llama-bench ----


def gguf_file(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_llama_bench_is_run_and_read(tmp_path, fake_bench):
    found = llama_bench.run(fake_bench(), gguf_file(tmp_path), [48, 512], 20)
    assert (found.build, found.gpu, found.batch) == ("5 (0c1e570)", "A Card", 8)
    assert found.prompts[512] == pytest.approx([0.1536] * 5) and len(found.prompts) == 2
    assert found.decode == pytest.approx([0.32] * 5)
    assert json.loads(fake_bench.seen.read_text()) == {
        "-m": str(tmp_path / "x.gguf"), "-ngl": "99", "-sm": "none", "-fa": "1", "-p": "48,512",
        "-n": "128", "-o": "json",
    }  # fmt: skip
    assert llama_bench.run(fake_bench(), gguf_file(tmp_path), [], 20).prompts == {}


@pytest.mark.parametrize(
    "how, words",
    [
        ("fails", r"failed with status 1 \(main: error: failed to load model '/x'\)"),
        ("prints garbage", r"printed no results of its tests \(ggml_cuda_init: found 1 CUDA"),
        ("leaves one out", r"timed no prompt of 512"),
    ],
)
def test_what_llama_bench_does_wrong_is_one_line(tmp_path, fake_bench, how, words):
    with pytest.raises(DecodeError, match=words) as error:
        llama_bench.run(fake_bench(how), gguf_file(tmp_path), [48, 512], 20)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"n_prompt": 1}]', "null", "[{}]"])
def test_output_of_another_form(text):
    with pytest.raises(DecodeError, match="printed no results of its tests"):
        llama_bench.parse(text, [48])


def alive(pid: int) -> bool:
    """Is it there, and no zombie that nobody has waited for?"""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(") ")[1][0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_llama_bench_that_hangs_is_ended_with_its_children(tmp_path, fake_bench):
    start = time.monotonic()
    with pytest.raises(DecodeError, match=r"did not finish in 1\.5 s \(ggml_cuda_init"):
        llama_bench.run(fake_bench("hangs"), gguf_file(tmp_path), [48], 1.5)
    assert time.monotonic() - start < 20
    child = int(fake_bench.seen.read_text())
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_interrupt_ends_it_too(tmp_path, fake_bench):
    code = (
        "import sys; from pathlib import Path; from decodev2.lab import llama_bench;"
        "llama_bench.run(sys.argv[1], Path(sys.argv[2]), [48], 60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, fake_bench("hangs"), str(gguf_file(tmp_path))],
        env=os.environ | {"PYTHONPATH": str(card.PROJECT)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if fake_bench.seen.exists() and fake_bench.seen.read_text().isdigit():
            break
        time.sleep(0.05)
    child = int(fake_bench.seen.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(20) != 0
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_llama_bench_is_found(tmp_path, fake_bench, monkeypatch):
    path = fake_bench()
    assert llama_bench.find(path) == path
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert llama_bench.find() == path
    os.chmod(path, 0o644)
    for given in (path, str(tmp_path / "absent")):
        with pytest.raises(DecodeError, match="is no program; needs llama"):
            llama_bench.find(given)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DecodeError, match="llama-bench is not on PATH"):
        llama_bench.find()


# ---- the random GGUF ----


def test_block_sizes_are_those_of_gguf(gguf):
    for kind, (weights, size, _, _) in random_gguf._BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (weights, size)
    assert gguf.LlamaFileType.MOSTLY_Q4_K_M == random_gguf.Q4_K_M


def test_which_matrix_gets_which_type():
    """Counted by hand for the 3B shape: 4 + 5 outer layers, every third of the 27 between."""
    found = random_gguf.matrices(plan.named_spec("qwen2.5-3b"))
    assert len(found) == 1 + 36 * 7
    assert found["token_embd"] == (151936, 2048, "Q6_K") and "output" not in found
    finer = [i for i in range(36) if found[f"blk.{i}.ffn_down"][2] == "Q6_K"]
    assert finer == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35]
    assert finer == [i for i in range(36) if found[f"blk.{i}.attn_v"][2] == "Q6_K"]
    for name in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert {found[f"blk.{i}.{name}"][2] for i in range(36)} == {"Q4_K"}
    untied = random_gguf.matrices(plan.named_spec("qwen2.5-7b"))
    assert (untied["token_embd"][2], untied["output"][2]) == ("Q4_K", "Q6_K")
    spec = plan.named_spec("qwen2.5-7b")
    assert random_gguf.nbytes(spec) - random_gguf.bytes_per_token(spec) == pytest.approx(
        152064 * 3584 / 256 * 144, rel=0.02
    )
    narrow = random_gguf.matrices(plan.named_spec("qwen2.5-0.5b"))  # 896 columns, 4864 in down
    assert narrow["blk.0.attn_v"][2] == "Q8_0" and narrow["blk.4.attn_q"][2] == "Q5_0"
    assert narrow["blk.4.ffn_down"][2] == "Q4_K"
    with pytest.raises(DecodeError, match="multiples of 32, 72 is none"):
        random_gguf.matrices(replace(TOY, hidden=72))


@pytest.mark.parametrize("spec", [TOY, replace(TOY, hidden=512, tied=False, qkv_bias=False)])
def test_a_random_gguf_is_read_back(tmp_path, gguf, spec):
    path = tmp_path / "toy.gguf"
    random_gguf.write(spec, path, 3)
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    arch = "qwen2" if spec.qkv_bias else "llama"
    assert fields["general.architecture"] == arch and fields["general.file_type"] == 15
    for key, value in (
        ("block_count", 2), ("embedding_length", spec.hidden), ("attention.head_count", 4),
        ("attention.head_count_kv", 2), ("attention.key_length", 32), ("vocab_size", 256),
        ("feed_forward_length", 256), ("rope.freq_base", pytest.approx(spec.rope_theta)),
    ):  # fmt: skip
        assert fields[f"{arch}.{key}"] == value, key
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    wanted = random_gguf.matrices(spec)
    assert set(tensors) == {f"{name}.weight" for name in wanted} | set(random_gguf.vectors(spec))
    for name, (rows, cols, kind) in wanted.items():
        tensor = tensors[f"{name}.weight"]
        assert tensor.tensor_type.name == kind and tensor.shape.tolist() == [cols, rows]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert values.shape == (rows, cols) and np.isfinite(values).all()
        assert 0.7 < values.std() * cols**0.5 < 1.4 and abs(values.mean()) * cols**0.5 < 0.1
    for name, length in random_gguf.vectors(spec).items():
        assert (tensors[name].data == (0 if name.endswith("bias") else 1)).all()
        assert len(tensors[name].data) == length
    assert sum(tensor.n_bytes for tensor in reader.tensors) == random_gguf.nbytes(spec)


# ---- rows made up here ----

STEP_MS = dict(zip(peers.PEERS, (1.149, 0.741, 2.497, 1.333, 2.375), strict=True))
PROMPT_MS = {48: (4.1, 9.5), 512: (32.7, 35.0), 2040: (126.0, 125.9)}


def rows(scale: float = 1.0, **changed) -> list[dict]:
    """Rows near what was measured apart; `changed` {peer without its last words: ms of a step}."""
    out = []
    how = ("CUDA graph", "one kernel", "positions 0 to 127", *["145 products, a lower bound"] * 2)
    for (peer, ms), words in zip(STEP_MS.items(), how, strict=True):
        ms = changed.get(peer.split(" ")[0], ms) * scale
        seconds = [ms * 1e-3 * (1 + 0.004 * i) for i in (-1, 0, 1)]
        mb = 1923.0 if peer == peers.LLAMA else 1735.5 if peer in peers.PRODUCTS else 1639.0
        out.append(peers._row(("step at", 100), peer, words, seconds, mb))
    for n, both in PROMPT_MS.items():
        for peer, ms, width in zip((peers.GRAPH, peers.LLAMA), both, (256, 512), strict=True):
            seconds = [scale * ms * 1e-3 * (1 + 0.01 * i) for i in (-1, 0, 1)]
            mb = -(-n // width) * (1923.0 if peer == peers.LLAMA else 1639.0)
            what = "batches" if peer == peers.LLAMA else "chunks"
            out.append(peers._row(("prompt of", n), peer, f"{what} of {width}", seconds, mb))
    for row in out:
        error = plate.Missing("its own") if row["peer"] == peers.LLAMA else 3e-3
        row |= {"error_before": error, "error_after": error}
    peers._add_rates(out, RATE["gb_s"])
    return out


def plate_of(found: list[dict]) -> plate.Plate:
    return made("peers", found, peers._verdict(found, 0.01))


def test_a_plate_as_predicted():
    result = plate_of(rows())
    assert result.verdict.startswith(
        "As predicted (2.5x llama.cpp, no products faster): step at 100"
    )
    assert (
        "decodev2 in one kernel 0.741 ms, 1,350 tok/s; decodev2 1.15 ms (1.55x)" in result.verdict
    )
    assert "llama.cpp 2.50 ms (3.37x)" in result.verdict
    assert "prompt of 2040: decodev2 126 ms; llama.cpp 126 ms (1.00x)." in result.verdict
    claims = dict(peers.claims(result))
    assert all(claims.values()) and len(claims) == 6
    (ours,) = (r for r in result.rows if (r["what"], r["peer"]) == ("step at 100", peers.ONE))
    assert ours["share"] == pytest.approx(100 * 1639 / 4600 / 0.741)


@pytest.mark.parametrize(
    "changed, claim",
    [
        ({"llama.cpp": 0.74}, "our step is faster than llama.cpp's"),
        ({"torch": 0.73}, "our whole step is faster than torch int4 products alone"),
        ({"bitsandbytes": 0.73}, "our whole step is faster than bitsandbytes NF4 products alone"),
    ],
)
def test_a_peer_that_wins_is_said(changed, claim):
    result = plate_of(rows(**changed))
    assert result.verdict.startswith("Not as predicted")
    assert [text for text, holds in peers.claims(result) if not holds] == [claim]


def test_inside_the_noise_no_product_is_slower():
    found = rows(torch=0.745)
    assert peers._verdict(found, 0.001).startswith("As predicted")
    assert peers._verdict(found, 0.01).startswith("Not as predicted")


def test_wrong_results_and_a_slower_prompt_fail_their_claims():
    found = rows()
    found[0]["error_after"], found[3]["error_before"] = 0.06, 0.03
    found[5] |= {"ms": 10.0, "ms_worst": 10.0, "tok_s": 4800.0}
    failed = [text for text, holds in peers.claims(plate_of(found)) if not holds]
    assert failed == [
        "our logits are those of other kernels, before and after",
        "products of other libraries agree with float32",
        "a prompt of 48 is faster than llama.cpp's",
    ]


def test_a_rate_above_the_cards_is_an_error():
    with pytest.raises(DecodeError, match=r"decodev2 in one kernel, step at 100: .* is above this"):
        rows(scale=0.4)


def test_times_of_the_host():
    timed = {(r["what"][:4], r["peer"]) for r in rows() if not peers.host_timed(r, "ms")}
    assert timed == {("step", peer) for peer in peers.PEERS if peer != peers.LLAMA}


@pytest.mark.parametrize("scale", [1.0, 3.3, 70.0])
def test_texts_of_the_figure_do_not_collide(scale):
    result = plate_of(rows(scale))
    assert texts_that_collide(figure.figure(result)) == []
    assert figure.png_bytes(result, plate.content_hash(result))


@pytest.mark.parametrize(
    "keep", ["step", "prompt", peers.GRAPH, peers.LLAMA, "int4", "prompt of 48"]
)
def test_a_part_of_the_rows_can_be_told_and_drawn(keep):
    found = [r for r in rows() if keep in r["what"] or keep in r["peer"]]
    for row in found:
        del row["ratio"]
    peers._add_rates(found, RATE["gb_s"])
    result = plate_of(found)
    assert texts_that_collide(figure.figure(result)) == []
    assert peers.claims(result) or keep in ("int4", "prompt of 48", peers.LLAMA)


def test_a_panel_can_walk_the_plate():
    pytest.importorskip("ipywidgets", reason="needs the lab extra")
    result = plate_of(rows())
    beside = page.contest(result, {"what": "step at 100", "peer": peers.LLAMA})
    assert [r["choices"] for r in beside.rows] == list(peers.PEERS)
    assert "llama.cpp: 2.50 ms, 3.37 x the best" in beside.verdict


# ---- the real kernels ----


@needs_cuda
def test_measure_on_a_gpu():
    params = defaults(shape="qwen2.5-0.5b", cases=["step at 5", "prompt of 9"], runs=3)
    result = commands.record("peers", params)
    assert plate.problems(plate.clean(result)) == []
    assert {peers.GRAPH, "torch int4 products alone"} <= {row["peer"] for row in result.rows}
    assert peers.claims(plate.Plate(**plate.clean(result)))[0][1] is True


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
