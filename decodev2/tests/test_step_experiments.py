"""The step experiments without a GPU: every `measure` with the CPU's kernels in place of CUDA's,
ncu's output, and what they make of rows; with one, `measure` on the smallest parameters."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from decodev2 import graph, linear, native, nf4, oracle, plan, state, step, synth, toggles
from decodev2.errors import DecodeError
from decodev2.lab import bench, card, cases, commands, experiments, figure, ncu, plate
from decodev2.lab.experiments import (
    attention,
    counters,
    lab_log,
    limits,
    prefill_chunks,
    step_graph,
    step_mix,
)
from decodev2.load import load_weights

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NAMES = ("limits", "attention", "step_graph", "prefill_chunks", "step_mix", "counters")
CARD = {
    "device": "cuda", "slug": "toy-card", "cpu": {}, "os": "", "versions": {},
    "gpu": {"name": "Toy", "driver": None}, "read_rate": {"gb_s": 4500.0, "method": "given"},
}  # fmt: skip


def nothing(done: int, total: int, text: str) -> None:
    assert 0 <= done <= total and text


def defaults(name: str, **changed) -> dict:
    known = {k: value for k, (value, _) in experiments.get(name).PARAMS.items()}
    assert set(changed) <= set(known)
    return known | changed


def made(name: str, measured: plate.Measured) -> plate.Plate:
    """The plate of a result, which `save` would take."""
    module = experiments.get(name)
    result = plate.Plate(
        experiment=name, title=module.TITLE, question=module.QUESTION,
        prediction=module.PREDICTION, verdict=measured.verdict, card=measured.card, params={},
        columns=measured.columns, rows=measured.rows, figure=measured.figure,
        notes=measured.notes, code=card.code_state(),
    )  # fmt: skip
    value = plate.clean(result)
    assert plate.problems(value) == []
    return plate.Plate(**value)


# ---- the CPU's kernels in the place of CUDA's ----------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """`measure` runs its own code on the CPU: its checks are real, its times are given."""
    for module in (limits, attention, step_graph, prefill_chunks, step_mix):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(cases, "begin", lambda name: CARD["read_rate"])
    monkeypatch.setattr(cases, "end", lambda rate: CARD | {"read_rate": rate})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    monkeypatch.setattr(
        graph, "capture", lambda live, weights: graph.DecodeGraph(
            types.SimpleNamespace(replay=functools.partial(step.greedy_decode, live, weights))
        ),
    )  # fmt: skip
    stand = types.SimpleNamespace(seconds=5e-4, launches=[], captured=[])

    def replay_of(launch, device):
        stand.captured.append(launch)
        return launch

    monkeypatch.setattr(graph, "replay_of", replay_of)

    def graph_times(run, launches, runs=9, warmup=2):
        for i in range(min(launches, 3)):
            run(i)
        stand.launches.append(launches)
        return [stand.seconds * (1 + 0.01 * i) for i in range(runs)]

    def event_times(run, runs=9, warmup=2):
        run()
        return [stand.seconds * 20] * runs

    monkeypatch.setattr(bench, "graph_times", graph_times)
    monkeypatch.setattr(bench, "event_times", event_times)
    return stand


@pytest.fixture
def limits_kernels(monkeypatch, on_cpu):
    """read_all and rms on CPU tensors; `skip` leaves the last words of a read out."""
    stand = types.SimpleNamespace(skip=0, drift=0.0)

    def read_all(words, checksum):
        assert words.dtype == torch.int32 and words.is_contiguous() and words.numel() % 4 == 0
        seen = words.numpy()[: len(words) - stand.skip]
        checksum[0] = int(checksum[0]) ^ int(np.bitwise_xor.reduce(seen))

    def rms(x, weight, eps, out, pdl):
        assert isinstance(pdl, bool)
        native.cpu().rms(x, weight, eps, out)
        out += stand.drift

    kernels = {"read_rate": types.SimpleNamespace(read_all=read_all),
               "step": types.SimpleNamespace(rms=rms)}  # fmt: skip
    monkeypatch.setattr(native, "cuda", kernels.__getitem__)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda *a: types.SimpleNamespace(multi_processor_count=5),
    )  # fmt: skip
    monkeypatch.setattr(limits, "SIZES_MB", (4, 2))
    return stand


def test_limits_measure(limits_kernels, on_cpu):
    wanted = ["read 4 MB", "read 2 MB", "copy 1640 MB", *limits.NODES]
    result = made("limits", limits.measure(defaults("limits", what=wanted, runs=3), nothing))
    assert [r["what"] for r in result.rows] == wanted
    assert on_cpu.launches.count(limits.CHAIN) == 2 * len(limits.NODES)
    read = result.rows[1]
    assert read["gb_s"] == pytest.approx(2e6 / (505e-6) / 1e9)
    assert result.rows[-1]["gb_s"] is None and result.rows[-1]["gb_s_reason"]


def test_limits_sees_a_read_that_leaves_words_out(limits_kernels):
    limits_kernels.skip = 1
    with pytest.raises(DecodeError, match="read 2 MB: checksum is"):
        limits.measure(defaults("limits", what=["read 2 MB"]), nothing)


def test_limits_sees_a_wrong_node(limits_kernels):
    limits_kernels.drift = 1e-3
    with pytest.raises(DecodeError, match="chain of norms is off"):
        limits.measure(defaults("limits", what=["node, 1 CTA"]), nothing)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 1001])
def testexclusive_or(n):
    words = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int32)
    assert limits.exclusive_or(words) == int(np.bitwise_xor.reduce(words.numpy()))


def test_the_fit_finds_cost_and_rate():
    rows = [{"kind": "read", "mb": mb, "us": 3.5 + mb * 1e3 / 4000} for mb in (2, 12, 1640)]
    assert limits.fit(rows) == pytest.approx((3.5, 4000))
    assert limits.fit(rows[:2]) is None


@pytest.fixture
def narrow(monkeypatch):
    """Shapes of a few heads under the names that the experiments know."""
    tiny = replace(plan.TINY_LLAMA, qkv_bias=False)
    monkeypatch.setattr(plan, "named_spec", lambda name: tiny)
    return tiny


def test_attention_measure(on_cpu, narrow):
    lengths = [1, "100", 2000]
    params = defaults("attention", length=lengths, shape=["3B"], cold_mb=2, runs=3)
    result = made("attention", attention.measure(params, nothing))
    assert len(result.rows) == 3 * len(attention.KERNELS)
    assert {r["length"] for r in result.rows} == {1, 100, 2000}
    assert all(0 < r["error_before"] < 1e-5 for r in result.rows if r["length"] > 1)
    last = result.rows[2]
    assert last["floor_us"] == pytest.approx(2 * 2000 * 2 * 16 * 2 / 4500 * 1e-3)


def test_attention_without_a_kernel(on_cpu, narrow, monkeypatch):
    without = tuple(c for c in toggles.CHOICES["attention"] if c != "sdpa")
    monkeypatch.setitem(toggles.CHOICES, "attention", without)
    params = defaults("attention", length=[100], shape=["3B"], cold_mb=2, runs=2)
    result = made("attention", attention.measure(params, nothing))
    (row,) = (r for r in result.rows if r["attention"] == "sdpa")
    assert row["us"] is None and "no attention sdpa" in row["us_reason"]
    experiments.get("attention").draw(result, figure_of())


@pytest.mark.parametrize(
    "harm",
    [
        lambda c, live: c.attn.mul_(1.01),
        lambda c, live: live.kv.v[-1][2:].zero_(),  # a write past the new row
        lambda c, live: live.kv.k[-1][1].add_(0.5),
        lambda c, live: c.attn.fill_(torch.nan),
    ],
)
def test_attention_sees_wrong_kernels(narrow, monkeypatch, harm):
    spec = attention._spec("", 1)
    live = state.allocate_state(spec, "cpu", 1)
    real = attention.ops.attention

    def wrong(c, live, layer, in_step):
        real(c, live, layer, in_step)
        harm(c, live)

    assert attention._check(live, 2, "one_launch") < 1e-5
    monkeypatch.setattr(attention.ops, "attention", wrong)
    with pytest.raises(DecodeError, match="one_launch at 2"):
        attention._check(live, 2, "one_launch")


def test_attention_that_forgets_the_newest_row_is_seen(narrow, monkeypatch):
    """At 2,000 tokens one row of equal size would hide below the bounds."""
    live = state.allocate_state(attention._spec("", 1), "cpu", 1)
    real = attention.ops.attention

    def short(c, live, layer, in_step):
        real(c, live, layer, in_step)
        c.valid_len.sub_(1)
        kv = live.kv
        native.cpu().attn(c.q, kv.k[layer], kv.v[layer], c.valid_len, live.scores, c.attn)
        c.valid_len.add_(1)

    monkeypatch.setattr(attention.ops, "attention", short)
    with pytest.raises(DecodeError, match="sdpa at 2000 is off"):
        attention._check(live, 2000, "sdpa")


def test_step_graph_measure(on_cpu):
    result = made("step_graph", step_graph.measure(defaults("step_graph", runs=2), nothing))
    assert [(r["linear"], r["how"]) for r in result.rows] == [
        ("mma", "eager"), ("mma", "graph"), ("gemv", "eager"), ("gemv", "graph"),
    ]  # fmt: skip
    model = synth.build(plan.MEDIUM_LLAMA, 2)
    for prompt, name in zip(step_graph.PROMPTS, ("ids_before", "ids_after"), strict=True):
        expected = " ".join(map(str, oracle.greedy(model, prompt, step_graph.NEW_IDS)))
        assert {r[name] for r in result.rows} == {expected}
    assert result.rows[3]["old_ms"] == 0.698
    assert dict(step_graph.claims(result))["all ways choose the same ids"]


def test_step_graph_sees_other_ids(on_cpu, monkeypatch):
    real = step.ops.head

    def wrong(c, state, weights):
        real(c, state, weights)
        state.next_token.fill_(7)

    monkeypatch.setattr(step.ops, "head", wrong)
    with pytest.raises(DecodeError, match="gemv, eager leaves the oracle at position"):
        step_graph.measure(defaults("step_graph", linear=["gemv"], how=["eager"]), nothing)


@pytest.fixture
def short_prompts(monkeypatch, on_cpu):
    """Prompts and chunks for the CPU, which takes 64 columns at most; wgmma is the same kernel."""
    monkeypatch.setattr(prefill_chunks, "CHUNKS", (1, 16, 32, 64))
    monkeypatch.setattr(prefill_chunks, "PROMPTS", (5, 40, 70))
    monkeypatch.setattr(prefill_chunks, "MAX_SEQS", (48, 80))
    monkeypatch.setattr(linear, "has_wgmma", lambda device: True)


def prefill_measured(**changed) -> plate.Plate:
    params = defaults("prefill_chunks", shape="tiny-llama", runs=2, **changed)
    return made("prefill_chunks", prefill_chunks.measure(params, nothing))


def test_prefill_measure(short_prompts, on_cpu):
    result = prefill_measured()
    ways = {
        (max_seq, c): [
            (r["prompt"], r["kernel"], r["launch"])
            for r in result.rows
            if (r["max_seq"], r["chunk"]) == (max_seq, c)
        ]
        for max_seq, c in itertools.product((48, 80), (1, 16, 32, 64))
    }
    assert ways[80, 1] == ways[48, 1] == [(n, "gemv", "graph") for n in (5, 40, 70)]
    by_mma, by_wgmma = (
        [(n, kernel, launch) for n in (40, 70) for launch in ("eager", "graph")]
        for kernel in ("mma", "wgmma")
    )
    assert ways[80, 16] == [(5, "mma", "eager"), *by_mma]
    assert sorted(ways[80, 32]) == sorted(
        [(5, "mma", "eager"), (5, "wgmma", "eager"), *by_mma, *by_wgmma]
    )
    eager = [(n, kernel, "eager") for n in (5, 40) for kernel in ("mma", "wgmma")]
    both = [(70, kernel, launch) for kernel in ("mma", "wgmma") for launch in ("eager", "graph")]
    assert ways[80, 64] == eager + both
    assert ways[48, 16] == [(5, "mma", "eager"), (40, "mma", "graph"), (70, "mma", "graph")]
    assert len(result.rows) == sum(map(len, ways.values()))
    too_long = [r for r in result.rows if r["ms"] is None]
    assert {(r["max_seq"], r["prompt"]) for r in too_long} == {(48, 70)}
    assert "70 does not fit 48 slots" in too_long[0]["ms_reason"]
    checked = [r for r in result.rows if r["error_before"] is not None]
    assert len(checked) == sum(r["chunk"] > 1 for r in result.rows) - 3
    assert all(max(r["error_before"], r["error_after"]) < 1e-5 for r in checked)
    by_graph = [r for r in result.rows if r["chunk"] > 1 and r["launch"] == "graph" and r["ms"]]
    assert len(on_cpu.captured) == len(by_graph) == 10
    (row,) = (r for r in result.rows if (r["chunk"], r["prompt"], r["launch"]) == (32, 70, "graph")
              and (r["max_seq"], r["kernel"]) == (80, "mma"))  # fmt: skip
    assert row["passes"] == 3 and row["tok_s"] == pytest.approx(70 / row["ms"] * 1e3)


def test_prefill_of_one_way(short_prompts, monkeypatch):
    one = {"chunk": [64], "prompt": [70], "max_seq": [80], "launch": ["eager"]}
    (row,) = prefill_measured(**one, kernel=["wgmma"]).rows
    assert (row["chunk"], row["kernel"], row["launch"]) == (64, "wgmma", "eager")
    with pytest.raises(DecodeError, match=r"no such chunk: .* wgmma at 17; a graph needs"):
        prefill_measured(chunk=[16], kernel=["wgmma"])
    with pytest.raises(DecodeError, match="no such chunk"):
        prefill_measured(chunk=[64], prompt=[5], launch=["graph"])
    monkeypatch.setattr(linear, "has_wgmma", lambda device: False)
    result = prefill_measured(**one)
    assert [row["kernel"] for row in result.rows] == ["mma"]
    assert result.notes[-1] == "No wgmma: the card is not sm_90."
    with pytest.raises(DecodeError, match="wgmma at 17, on sm_90 only"):
        prefill_measured(**one, kernel=["wgmma"])


def test_prefill_sees_a_chunk_that_loses_a_column(on_cpu, monkeypatch):
    monkeypatch.setattr(prefill_chunks, "PROMPTS", (20,))
    monkeypatch.setattr(prefill_chunks, "MAX_SEQS", (48,))
    real = prefill_chunks.prefill.forward_prefill
    monkeypatch.setattr(
        prefill_chunks.prefill, "forward_prefill",
        lambda live, weights, ids, full: real(live, weights, [*ids[:3], 0, *ids[4:]], full=full),
    )  # fmt: skip
    with pytest.raises(DecodeError, match="chunks of 16, prompt 20: logits are off"):
        prefill_measured(chunk=[16])


def test_prefill_sees_a_graph_that_does_nothing(short_prompts, monkeypatch):
    monkeypatch.setattr(graph, "replay_of", lambda launch, device: lambda: None)
    with pytest.raises(DecodeError, match="chunks of 16, prompt 40: logits are off"):
        prefill_measured(chunk=[16], launch=["graph"])


@pytest.fixture
def with_candidates(monkeypatch, on_cpu):
    """The CPU's head leaves no candidates behind: `choose` has something to read here too."""
    real = state.allocate_state

    def allocate(spec, device, chunk):
        return replace(real(spec, device, chunk), candidates=(torch.zeros(264), torch.zeros(264)))

    monkeypatch.setattr(state, "allocate_state", allocate)


@pytest.mark.usefixtures("with_candidates")
def test_step_mix_measure():
    params = defaults("step_mix", shape="tiny-llama", runs=3)
    result = made("step_mix", step_mix.measure(params, nothing))
    assert [r["op"] for r in result.rows] == [*step_mix.CHOICES] * 2
    first = {r["op"]: r for r in result.rows[: len(step_mix.CHOICES)]}
    ops_sum = sum(first[op]["total_us"] for op in step_mix.OPS)
    assert first[step_mix.SUM]["us"] == pytest.approx(ops_sum)
    assert sum(first[op]["part"] for op in step_mix.OPS) == pytest.approx(100)
    assert first["qkv"]["times"] == 2 and first["head"]["times"] == 1
    packed = sum(first[op]["mb"] * first[op]["times"] for op in (*step_mix.PER_LAYER, "head"))
    assert first[step_mix.GRAPH]["mb"] == pytest.approx(packed)


@pytest.mark.usefixtures("with_candidates")
@pytest.mark.parametrize("op", ["head", step_mix.SUM, step_mix.GRAPH])
def test_step_mix_of_one_op(op):
    params = defaults("step_mix", shape="tiny-llama", op=[op], position=[100], runs=2)
    result = made("step_mix", step_mix.measure(params, nothing))
    step_mix.draw(result, figure_of())  # no roofline without all ops
    (row,) = result.rows
    assert (row["op"], row["position"]) == (op, 100)
    assert (row["part"] is None) == (op != step_mix.SUM)


def test_step_mix_sees_a_wrong_step(on_cpu, monkeypatch):
    real = graph.capture

    def wrong(live, weights):
        other = load_weights(synth.random_packed(weights.spec, 1), "cpu")
        return real(live, other)

    monkeypatch.setattr(graph, "capture", wrong)
    with pytest.raises(DecodeError, match="the step at 100 is off"):
        step_mix.measure(defaults("step_mix", shape="tiny-llama", op=["head"]), nothing)


# ---- ncu -----------------------------------------------------------------------------------------

HEADER = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
          "Block Size", "Grid Size", "Device", "CC"]  # fmt: skip
UNITS = {
    "gpu__time_duration.sum": "ns", "dram__bytes_read.sum": "byte",
    "launch__registers_per_thread": "register/thread",
}  # fmt: skip
VALUES = {
    "dram__bytes_read.sum": "165,300,992", "gpu__time_duration.sum": "46,720",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "77.31",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed": "68.90",
    "launch__registers_per_thread": "96",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "45.77",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "n/a",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "15.94",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "27.90",
}  # fmt: skip
RING = "void decodev2::<unnamed>::gemv_ring<(int)16, (int)4, (int)1>(decodev2::GemvArguments)"


def wide_csv(kernels: list[str], values: dict = VALUES, units: dict = UNITS) -> str:
    """What `ncu --csv --page raw` writes: its own lines, header, units, a row per launch."""
    out = ["==PROF== Connected to process 4711 (python)",
           '==PROF== Profiling "gemv_ring": 0%....50%....100% - 9 passes']  # fmt: skip
    rows = [HEADER + list(values)]
    rows.append([""] * len(HEADER) + [units.get(name, "%") for name in values])
    for i, kernel in enumerate(kernels):
        head = [str(i), "4711", "python3.12", "127.0.0.1", kernel, "1", "7", "(576, 1, 1)",
                "(132, 1, 1)", "0", "9.0"]  # fmt: skip
        rows.append(head + list(values.values()))
    out += [",".join(f'"{cell}"' for cell in row) for row in rows]
    return "\n".join([*out, "==PROF== Disconnected from process 4711", ""])


def test_ncu_table_is_parsed():
    ((name, metrics), _) = ncu.parse(wide_csv([RING, RING]))
    assert name == RING
    assert metrics == pytest.approx(
        {"us": 46.72, "occupancy": 27.9, "dram": 77.31, "tensor": 15.94, "lsu": 68.9,
         "issue": 45.77, "dram_bytes": 165300992.0, "registers": 96.0}
    )  # fmt: skip


def test_ncu_units_that_are_not_base_ones():
    text = wide_csv(
        [RING], VALUES | {"gpu__time_duration.sum": "46.72", "dram__bytes_read.sum": "165.30"},
        UNITS | {"gpu__time_duration.sum": "us", "dram__bytes_read.sum": "Mbyte"},
    )  # fmt: skip
    ((_, metrics),) = ncu.parse(text)
    assert (metrics["us"], metrics["dram_bytes"]) == pytest.approx((46.72, 165.3e6))


def test_ncu_without_a_counter_or_a_table():
    less = {k: v for k, v in VALUES.items() if not k.startswith("l1tex")}
    ((_, metrics),) = ncu.parse(wide_csv([RING], less | {"dram__bytes_read.sum": "nan"}))
    assert metrics["lsu"] is None and metrics["dram_bytes"] is None and metrics["us"]
    with pytest.raises(DecodeError, match="no table"):
        ncu.parse("==PROF== Disconnected from process 4711\n")


class Ncu:
    """Stands in for `subprocess.run`: writes what ncu and its child would."""

    def __init__(self, monkeypatch, table: str, errors: list | None, stderr: str = ""):
        monkeypatch.setattr(ncu, "find_ncu", lambda: "ncu")
        self.table, self.errors, self.stderr, self.commands = table, errors, stderr, []

    def __call__(self, command, **options):
        self.commands.append(command)
        with open(command[command.index("--log-file") + 1], "w") as file:
            file.write(self.table)
        if self.errors is not None:
            out = command[command.index("decodev2.lab.ncu") + 1]
            with open(out, "w") as file:
                json.dump(self.errors, file)
        return types.SimpleNamespace(returncode=0, stdout="", stderr=self.stderr)


TWO = [("gemv", "o_proj"), ("gemv", "lm_head")]


def test_ncu_collects_in_order(monkeypatch):
    run = Ncu(monkeypatch, wide_csv([RING, RING]), [1e-5, 2e-5])
    first, second = ncu.collect(TWO, run)
    assert (first.error, second.error, first.metrics["dram"]) == (1e-5, 2e-5, 77.31)
    (command,) = run.commands
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[-2:] == ["gemv:o_proj", "gemv:lm_head"]
    assert command[command.index("--profile-from-start") + 1] == "off"
    assert command[command.index("--replay-mode") + 1] == "kernel"


NEWER = [("one kernel a token", "3B step at 100"), ("prompt by wgmma", "gate_proj x 256"),
         ("prompt by mma", "gate_proj x 256")]  # fmt: skip
IN_ONE = "void decodev2::<unnamed>::persistent_step<(int)128, (bool)0>(PersistentArguments)"


def test_ncu_knows_the_names_of_the_kernels(monkeypatch):
    """What ncu is told to look for is in csrc."""
    names = [
        "void decodev2::<unnamed>::nf4_wgmma<(int)256>(decodev2::<unnamed>::KernelArguments)",
        "void decodev2::<unnamed>::nf4_gemm<(int)8>(decodev2::<unnamed>::KernelArguments)",
    ]
    run = Ncu(monkeypatch, wide_csv([IN_ONE, *names]), [1e-3, 1e-5, 1e-5])
    assert [counted.error for counted in ncu.collect(NEWER, run)] == [1e-3, 1e-5, 1e-5]
    (command,) = run.commands
    pattern = command[command.index("--kernel-name") + 1].removeprefix("regex:")
    assert set(pattern.split("|")) == {"persistent_step", "nf4_wgmma", "nf4_gemm"}
    with pytest.raises(DecodeError, match="where prompt by wgmma of gate_proj x 256 should be"):
        ncu.collect(NEWER, Ncu(monkeypatch, wide_csv([IN_ONE, *names[::-1]]), [1e-3, 1e-5, 1e-5]))
    sources = "".join(p.read_text() for p in native.csrc_folder().glob("*.cu*"))
    for kernel in ncu.KERNELS.values():
        found = re.findall(rf"__global__ void[^{{;]*?\b(?:{kernel.name})\(", sources)
        assert found, kernel.name


def test_ncu_looks_at_one_launch_only(monkeypatch):
    events = []
    monkeypatch.setattr(ncu.torch.cuda, "synchronize", lambda: events.append("wait"))
    for name in ("start", "stop"):
        monkeypatch.setattr(ncu.torch.cuda.profiler, name, lambda name=name: events.append(name))
    with ncu._looked_at():
        events.append("launch")
    assert events == ["wait", "start", "launch", "wait", "stop"]


@pytest.mark.parametrize(
    "table, errors, stderr, message",
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
         "Performance Counters on the target device 0.", None, "", "ERR_NVGPUCTRPERM"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", None, "",
         "ncu: Failed to initialize the profiler: LibraryNotLoaded"),
        ("==WARNING== No kernels were profiled.", [1e-5], "", "profiled no kernel"),
        ("", None, "Traceback\nRuntimeError: no kernel image", "RuntimeError: no kernel image"),
        (wide_csv([RING]), [1e-5, 2e-5], "", "saw 1 kernels, needs 2"),
        (wide_csv([RING, "rms_kernel(RmsArguments)"]), [1e-5, 2e-5], "", "saw rms_kernel"),
    ],
)  # fmt: skip
def test_ncu_that_measures_nothing_gives_one_line(monkeypatch, table, errors, stderr, message):
    with pytest.raises(DecodeError, match=message) as found:
        ncu.collect(TWO, Ncu(monkeypatch, table, errors, stderr))
    assert "\n" not in str(found.value)


def test_ncu_that_refuses_a_name_is_asked_again(monkeypatch):
    good = Ncu(monkeypatch, wide_csv([RING, RING]), [1e-5, 2e-5])
    unknown = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
    bad = Ncu(monkeypatch, f"==ERROR== Failed to find metric {unknown}", None)

    def run(command, **options):
        asked = command[command.index("--metrics") + 1].split(",")
        return (bad if unknown in asked else good)(command, **options)

    assert len(ncu.collect(TWO, run)) == 2
    assert len(good.commands) == len(bad.commands) == 1


def test_ncu_too_slow_or_absent(monkeypatch):
    def slow(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(ncu, "find_ncu", lambda: "ncu")
    with pytest.raises(DecodeError, match="did not finish in 300 s"):
        ncu.collect(TWO, slow)
    monkeypatch.undo()
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu.Path, "is_file", lambda path: False)
    with pytest.raises(DecodeError, match="not on PATH"):
        counters.measure(defaults("counters"), nothing)


def test_product_error_sees_one_wrong_row():
    packed = synth.random_matrix(48, 128, np.random.default_rng(0))
    x = np.random.default_rng(1).standard_normal(128).astype(np.float32)
    y = nf4.matmul_f32(packed, x[:, None])[:, 0]
    assert ncu.product_error(packed, x, y) < 1e-6
    y[7] += 0.1
    assert ncu.product_error(packed, x, y) > 1e-3
    y[7] = np.nan
    assert not ncu.product_error(packed, x, y) < 1


def counted(occupancy=28.0, dram=77.0, us=46.7, tensor: float | None = 16.0, error=1e-5):
    metrics = {"us": us, "occupancy": occupancy, "dram": dram, "tensor": tensor, "lsu": 69.0,
               "issue": 45.0, "dram_bytes": 165.3e6, "registers": 96.0}  # fmt: skip
    return ncu.Counted("kernel", metrics, error)


@pytest.fixture
def profiled(monkeypatch, on_cpu):
    monkeypatch.setattr(ncu, "find_ncu", lambda: "ncu")
    answers = {("prompt by wgmma", shape): counted(tensor=55.0) for shape in ncu.PROMPT_SHAPES}
    step = counted(error=1e-2)
    answers[NEWER[0]] = replace(step, metrics=step.metrics | {"dram_bytes": 1648e6})
    monkeypatch.setattr(ncu, "collect", lambda ts: [answers.get(t, counted()) for t in ts])
    monkeypatch.setattr(counters, "_why_not", lambda kernel: None)
    return answers


def test_counters_measure(profiled):
    profiled["gemv", "o_proj"] = counted(dram=23.0, us=5.1)
    profiled["mma", "o_proj"] = counted(tensor=None)
    profiled["row-major, table in shared", "lm_head"] = counted(dram=27.0)
    result = made("counters", counters.measure(defaults("counters"), nothing))
    assert len(result.rows) == 4 * 4 + 2 * 2 + 2 * 2 + 1
    mma = next(r for r in result.rows if (r["kernel"], r["shape"]) == ("mma", "o_proj"))
    assert mma["tensor"] is None and mma["tensor_reason"]
    large = next(r for r in result.rows if (r["kernel"], r["shape"]) == ("gemv", "lm_head"))
    assert large["mb"] == pytest.approx(165.306368) and large["dram_mb"] == pytest.approx(165.3)
    step = next(r for r in result.rows if r["kernel"] == "one kernel a token")
    # 36 layers of 77.1 million weights and the head, and the keys and values of 101 positions
    assert step["mb"] == pytest.approx((36 * 77.07e6 + 151936 * 2048) * 17 / 32e6 + 3.72, rel=1e-3)
    assert len(counters.claims(result)) == 8
    assert all(holds for _, holds in counters.claims(result))
    assert "one kernel for a token keeps memory 77 % busy" in result.verdict
    assert "gate_proj x 256: the tensor pipe is 55 % busy by warpgroups, 16 by warps" in (
        result.verdict
    )  # fmt: skip
    experiments.get("counters").draw(result, figure_of())


def test_counters_leave_out_what_the_card_cannot_run(profiled, monkeypatch):
    monkeypatch.setattr(counters, "_why_not", lambda kernel: "sm_86" if kernel == "mma" else None)
    result = made("counters", counters.measure(defaults("counters"), nothing))
    assert "mma" not in {row["kernel"] for row in result.rows}
    assert result.notes[-1] == "mma was left out: sm_86."
    with pytest.raises(DecodeError, match="mma: sm_86"):
        counters.measure(defaults("counters", kernel=["mma"]), nothing)


def test_counters_claims_fail_when_they_should(profiled):
    profiled["gemv", "o_proj"] = counted(occupancy=93.0)
    result = made("counters", counters.measure(defaults("counters"), nothing))
    broken = [text for text, holds in counters.claims(result) if not holds]
    assert len(broken) == 4 and "every profiled launch computed the right result" not in broken


def test_counters_refuses_what_does_not_exist_or_is_wrong(profiled):
    with pytest.raises(DecodeError, match="attention has no shape lm_head; it has 3B at 100"):
        params = defaults("counters", kernel=["attention"], shape=["lm_head"])
        counters.measure(params, nothing)
    profiled["mma", "o_proj"] = counted(error=math.nan)
    with pytest.raises(DecodeError, match="mma of o_proj is off by nan"):
        counters.measure(defaults("counters", kernel=["mma"], shape=["o_proj"]), nothing)


# ---- the transcription ---------------------------------------------------------------------------


def test_the_lab_log_plate(tmp_path):
    path = plate.save(commands.record("lab_log", {}), tmp_path)
    plate.draw(path)
    assert plate.lint(path) == []
    result = plate.load(path)
    assert all(holds for _, holds in lab_log.claims(result))
    numbers = [r["number"] for r in result.rows]
    assert len(set(numbers)) == len(numbers)  # old_card finds a row by its number
    assert result.card["gpu"]["name"] == "NVIDIA GeForce RTX 3080"


def test_the_lab_log_numbers_of_other_experiments_agree():
    rows = {r["number"]: r for r in lab_log.log_rows()}
    for (kernel, how), ms in step_graph.OLD_MS.items():
        assert rows[f"step {kernel} {how}"]["step_ms"] == ms
    assert (rows["12"]["prefill_ms"], rows["13"]["prefill_ms"]) == prefill_chunks.OLD
    assert {n.partition(" ")[2] for n in rows if n.startswith("gemv ")} == set(cases.SHAPES)
    for name, shape in cases.SHAPES.items():
        row = rows[f"gemv {name}"]
        assert (row["rows"], row["cols"]) == shape
        n_bytes = cases.weight_bytes(*shape) + 4 * shape[1]  # packed, scales and x
        assert row["gb_s"] == pytest.approx(n_bytes / row["gemv_us"] * 1e-3, rel=0.03)


# ---- verdicts, claims and figures of rows --------------------------------------------------------


def figure_of():
    from matplotlib.figure import Figure

    return Figure(figsize=(12, 7))


def limits_rows(scale=1.0, fixed=3.5) -> list[dict]:
    rows = []
    for what in limits.WHAT:
        if what in limits.NODES:
            us = (1.1 if "all" in what else 0.96) - (0.3 if "programmatic" in what else 0)
            none = plate.Missing("moves nothing")
            row = {"kind": "node", "mb": none, "us": us * scale, "floor_us": none, "gb_s": none,
                   "share": none}  # fmt: skip
        else:
            mb = int(what.split()[1])
            us = fixed * scale + mb * 1e3 / (4600 if what.startswith("read") else 4250)
            row = {"kind": what.split()[0], "mb": mb, "us": us}
            cases.add_rates(row, mb * 1e6, 4600.0)
        rows.append({"what": what, "runs": 9, "us_best": row["us"], "us_worst": row["us"]} | row)
    return rows


def attention_rows(scale=1.0) -> list[dict]:
    base = {"one_launch": (3.1, 0.0005), "two_launch": (4.2, 0.001), "rope_apart": (4.6, 0.0005),
            "sdpa": (61.0, 0.0), "one_warp": (4.0, 0.11)}  # fmt: skip
    rows = []
    for shape in attention.SHAPES:
        for kernel, (fixed, slope) in base.items():
            for length in attention.LENGTHS:
                us = (fixed + slope * length) * scale
                row = {"shape": shape, "attention": kernel, "length": length, "us": us,
                       "us_best": us, "us_worst": us, "runs": 9, "error_before": 1e-5,
                       "error_after": 1e-5}  # fmt: skip
                cases.add_rates(row, 1000.0 * length, 4600.0)
                rows.append(row)
    return rows


def step_graph_rows(scale=1.0) -> list[dict]:
    ms = {("mma", "eager"): 0.21, ("mma", "graph"): 0.11, ("gemv", "eager"): 0.2,
          ("gemv", "graph"): 0.07}  # fmt: skip
    return [
        {"linear": a, "how": b, "ms": t * scale, "ms_best": t * scale, "ms_worst": t * scale,
         "runs": 15, "floor_ms": 0.001, "share": 1.0, "ids_before": "1 2", "ids_after": "3 4",
         "old_ms": step_graph.OLD_MS[a, b]}
        for (a, b), t in ms.items()
    ]  # fmt: skip


A_PASS = {  # ms that the card takes, by kernel and columns
    "mma": {16: 2.2, 32: 3.3, 64: 4.7, 128: 8.6, 256: 16.0},
    "wgmma": {64: 1.8, 128: 2.4, 256: 4.0},
}
PYTHON = 2.9  # ms until a pass is launched


def prefill_ms(n: int, c: int, kernel: str, launch: str) -> tuple[float, float]:
    """(ms, ms until launched) of a prompt."""
    if c == 1:
        return 1.2 * n, 0.6 * n
    card = A_PASS[kernel]
    passes = [(c, launch)] * (n // c) + [(n % c, "eager")] * (n % c > 0)
    takes = [(min(card[width] for width in card if width >= k), how) for k, how in passes]
    ms = sum(t if how == "graph" else max(t, PYTHON) for t, how in takes)
    return ms, sum(0.02 if how == "graph" else PYTHON for _, how in takes)


def prefill_rows(scale=1.0) -> list[dict]:
    rows, names = [], prefill_chunks._TIMED
    every = (list(prefill_chunks.KERNELS), list(prefill_chunks.LAUNCHES))
    for max_seq in prefill_chunks.MAX_SEQS:
        for c, n in itertools.product(prefill_chunks.CHUNKS, prefill_chunks.PROMPTS):
            for kernel, launch in prefill_chunks._ways(c, n, max_seq == 2048, *every):
                row = {"max_seq": max_seq, "prompt": n, "chunk": c, "kernel": kernel,
                       "launch": launch, "passes": -(-n // c), "tokens": n}  # fmt: skip
                if n > max_seq:
                    rows.append(row | {"runs": 0} | dict.fromkeys(names, plate.Missing("long")))
                    continue
                ms, host = (scale * t for t in prefill_ms(n, c, kernel, launch))
                ms *= 1.04 if max_seq == 2048 else 1
                error = plate.Missing("reference") if c == 1 else 1e-3
                rows.append(
                    row | {"ms": ms, "ms_best": ms, "ms_worst": ms, "runs": 3, "host_ms": host,
                           "tok_s": n / ms * 1e3, "floor_ms": 0.36 * row["passes"], "share": 30.0,
                           "error_before": error, "error_after": error}
                )  # fmt: skip
    return rows


def mix_rows(scale=1.0) -> list[dict]:
    per = {"embed": 2.1, "qkv": 3.8, "attention": 3.4, "project o": 3.6, "swiglu": 11.2,
           "project down": 7.6, "head": 45.0, "choose": 2.4}  # fmt: skip
    mb = {"embed": 0.001, "qkv": 2.8, "attention": 0.1, "project o": 2.2, "swiglu": 24.0,
          "project down": 12.0, "head": 165.3, "choose": 0.002}  # fmt: skip
    none, rows = plate.Missing("no check of its own"), []
    for position in step_mix.POSITIONS:
        here = []
        for op, us in per.items():
            us = us * scale + (2.0 if op == "attention" and position > 1000 else 0)
            times = 36 if op in step_mix.PER_LAYER else 1
            row = {"position": position, "op": op, "us": us, "us_best": us, "us_worst": us,
                   "runs": 11, "times": times, "total_us": us * times, "mb": mb[op],
                   "error_before": none, "error_after": none}  # fmt: skip
            here.append(row)
        total = sum(r["total_us"] for r in here)
        for op, us in ((step_mix.SUM, total), (step_mix.GRAPH, total * 1.05)):
            here.append(
                {"position": position, "op": op, "us": us, "us_best": us, "us_worst": us,
                 "runs": 11, "times": 1, "total_us": us, "mb": 1643.0, "error_before": 1e-3,
                 "error_after": 1e-3}
            )  # fmt: skip
        for row in here:
            row["part"] = 100 * row["total_us"] / total
            cases.add_rates(row, row["mb"] * 1e6, 4600.0)
        rows += here
    return rows


FABRICATED = {
    "limits": (limits_rows, lambda rows: limits._verdict(rows, 0.01)),
    "attention": (attention_rows, lambda rows: attention._verdict(rows, 0.01)),
    "step_graph": (step_graph_rows, lambda rows: step_graph._verdict(rows, 0.01)),
    "prefill_chunks": (prefill_rows, lambda rows: prefill_chunks._verdict(rows, 0.01)),
    "step_mix": (mix_rows, lambda rows: step_mix._verdict(rows, 0.01)),
}


def fabricated(name: str, **how) -> plate.Plate:
    build, verdict = FABRICATED[name]
    rows = build(**how)
    given = CARD | {"read_rate": {"gb_s": 4600.0, "method": "given"}}
    measured = plate.Measured(
        experiments.get(name).COLUMNS, rows, verdict(rows), {"kind": "own"}, card=given
    )
    return made(name, measured)


@pytest.mark.parametrize("scale", [1.0, 40.0], ids=["short", "long"])
@pytest.mark.parametrize("name", FABRICATED)
def test_figures_and_claims_of_fabricated_plates(name, scale):
    result = fabricated(name, scale=scale)
    assert 40 < len(result.verdict) and "Missing" not in result.verdict
    assert figure.png_bytes(result, plate.content_hash(result))
    holds = experiments.get(name).claims(result)
    assert len(holds) >= 2 and all(held for _, held in holds), holds
    assert all(not any(f" {unit}" in text for unit in ("us", "ms", "GB/s")) for text, _ in holds)


def test_claims_fail_when_they_should():
    def broken(name, change):
        result = fabricated(name)
        for row in result.rows:
            change(row)
        return [text for text, holds in experiments.get(name).claims(result) if not holds]

    def swap(row):
        if "what" in row and row["kind"] == "node":
            row["us"] = 2.0 - row["us"]
        if row.get("attention") == "one_launch":
            row["us"] = 1e6
        if (row.get("linear"), row.get("how")) == ("gemv", "graph"):
            row["ms"], row["ids_after"] = 99.0, "5"
        if row.get("chunk") == 32 and row["ms"]:
            row["ms"], row["error_after"] = 1e6, 0.5
        if row.get("op") == "qkv":
            row["total_us"] = 1e6

    assert len(broken("limits", swap)) == 2
    assert len(broken("attention", swap)) == 6
    assert len(broken("step_graph", swap)) == 3
    assert len(broken("prefill_chunks", swap)) == 6
    assert len(broken("step_mix", swap)) == 2

    def tilt(row):
        if row["attention"] == "sdpa":
            row["us"] += row["length"]

    assert [text for text in broken("attention", tilt) if "within a tenth" in text]

    def slow(row):
        if (row["kernel"], row["chunk"]) == ("wgmma", 256):
            row["ms"] = 1e6

    assert broken("prefill_chunks", slow) == ["full chunks of 256 are faster by wgmma than by mma"]


def test_verdicts_say_what_the_rows_say():
    assert "one warp per head is slower than SDPA, as on the old card" in (
        attention._verdict(attention_rows(), 0.01).replace("One warp", "one warp")
    )
    fast = attention_rows()
    for row in fast:
        if row["attention"] == "one_warp":
            row["us"] = 1.0
    assert "faster than SDPA, not as on the old card" in attention._verdict(fast, 0.01)
    assert "does not beat that sum" in step_mix._verdict(mix_rows(), 0.01)
    assert "equals that sum" in step_mix._verdict(mix_rows(), 0.06)
    slots = "2,048 slots instead of 512 cost +4.0 % (as predicted: nothing)"
    assert slots in prefill_chunks._verdict(prefill_rows(), 0.01)
    by_python = [row | {"host_ms": row["ms"]} for row in prefill_rows()]
    assert "slots instead of" not in prefill_chunks._verdict(by_python, 0.01)
    assert "(as predicted: 2 to 4 us)" in limits._verdict(limits_rows(), 0.01)
    assert "(not as predicted: 2 to 4 us)" in limits._verdict(limits_rows(fixed=9.0), 0.01)


def test_a_prompt_plate_that_is_older_than_wgmma_is_read(tmp_path):
    """It has one kernel, launched from Python, and no columns that say so."""
    new = fabricated("prefill_chunks")
    rows = [r for r in new.rows if r["kernel"] != "wgmma" and (r["launch"] == "eager"
            or r["chunk"] == 1)]  # fmt: skip
    rows = [{k: v for k, v in r.items() if k not in ("kernel", "launch")} for r in rows]
    columns = [c for c in new.columns if c["name"] not in ("kernel", "launch")]
    old = replace(new, rows=rows, columns=columns)
    assert figure.png_bytes(old, plate.content_hash(old))
    claims = prefill_chunks.claims(old)
    assert claims[-1] == ("every chunk's logits agree with one column a pass", True)
    assert len(claims) == 4 and all(holds for _, holds in claims)
    assert {prefill_chunks.host_timed(row, "ms") for row in rows if row["ms"]} == {True, False}
    if importlib.util.find_spec("ipywidgets"):
        from decodev2.lab import widgets

        panel = widgets.panel("prefill_chunks", old, compare=["chunk"], prompt=512, chunk=32)
        assert [*panel.boxes] == ["chunk", "prompt", "max_seq"]
        assert len(panel.view().rows) == len(prefill_chunks.CHUNKS)


def test_toggles_are_columns_and_choices_of_the_rows():
    for name in NAMES:
        module = experiments.get(name)
        names = [column["name"] for column in module.COLUMNS]
        for column, (param, choices) in module.TOGGLES.items():
            assert column in names and module.PARAMS[param][0] == []
            if name in FABRICATED:
                assert {r[column] for r in fabricated(name).rows} == set(choices)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_choices_give_one_line(name):
    module = experiments.get(name)
    for param, _ in module.TOGGLES.values():
        with pytest.raises(DecodeError, match="'nonsense' is unknown"):
            module.measure(defaults(name, **{param: ["nonsense"]}), nothing)


def test_modules_need_no_plotting_library():
    script = "import sys; from decodev2.lab import experiments as e\n"
    script += f"for n in {(*NAMES, 'lab_log')}: e.get(n)\n"
    script += "bad = {'matplotlib', 'pandas'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- with a GPU ----------------------------------------------------------------------------------

SMALLEST = {
    "limits": {"what": ["read 2 MB", "node, 1 CTA, programmatic"], "runs": 2},
    "attention": {"length": [100], "shape": ["0.5B"], "cold_mb": 20, "runs": 2},
    "step_graph": {"runs": 2},
    "prefill_chunks": {
        "shape": "qwen2.5-0.5b", "chunk": [64], "prompt": [512], "max_seq": [512], "runs": 1,
    },
    "step_mix": {"shape": "qwen2.5-0.5b", "position": [100], "runs": 2},
}  # fmt: skip


@needs_cuda
@pytest.mark.parametrize("name", SMALLEST)
def test_measure_on_a_gpu(name):
    params = defaults(name, **SMALLEST[name])
    result = made(name, experiments.get(name).measure(params, nothing))
    assert result.rows and result.card["device"] == "cuda"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
