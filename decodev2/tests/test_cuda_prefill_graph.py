"""A full chunk of a prompt as a CUDA graph: its bits are those of a chunk launched from Python.

What is launched, captured and replayed when is tested without a card, too: there a replay is the
launch itself.
"""

from __future__ import annotations

import contextlib
import types

import numpy as np
import pytest
import torch
from test_cuda_wgmma import needs_wgmma

from decodev2 import graph, step, toggles
from decodev2.load import load_weights
from decodev2.plan import CUDA_MAX_N, MEDIUM_LLAMA, TINY_LLAMA, with_max_seq
from decodev2.prefill import consume_prompt
from decodev2.session import open_session
from decodev2.state import allocate_state, reset
from decodev2.synth import build

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NEW_IDS = 4


def prompt_of(spec, length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, spec.vocab, length).tolist()


def lengths_of(chunk: int) -> tuple[int, ...]:
    """Prompts with no, one and several full chunks, with and without a rest; not in order."""
    return 3 * chunk, chunk - 1, chunk, 3 * chunk + 5, chunk + 1, 2 * chunk, 1


def after(state, weights, prompt, chunk, full=None):
    """(logits, keys, values, ids) of a new request: the prompt and a few greedy steps."""
    reset(state)
    state.kv.k.fill_(torch.nan)
    state.kv.v.fill_(torch.nan)
    state.logits.fill_(torch.nan)
    consume_prompt(state, weights, prompt, chunk, full)
    assert int(state.position) == int(state.valid_len) == len(prompt)
    logits, ids = state.logits.clone(), [int(state.token)]
    keys, values = (cache[:, : len(prompt)].clone() for cache in (state.kv.k, state.kv.v))
    assert state.kv.k[:, len(prompt) :].isnan().all(), "a key past the prompt"
    for _ in range(NEW_IDS):
        step.greedy_decode(state, weights)
        ids.append(int(state.token))
    return logits, keys, values, ids


def assert_same(found, expected) -> None:
    assert found[3] == expected[3]
    for a, b in zip(found[:3], expected[:3], strict=True):
        assert not a.isnan().any() and torch.equal(a, b)


# ---- without a card ------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """What ChunkGraphs do: "launch" a pass, "capture", "replay" (here: the launch itself)."""
    events, forward = [], graph.forward

    def launched(columns, state, weights):
        events.append("launch")
        forward(columns, state, weights)

    def replay_of(launch, device):
        events.append("capture")

        def replay():
            events.append("replay")
            forward(*launch.args)

        return replay

    monkeypatch.setattr(graph, "forward", launched)
    monkeypatch.setattr(graph, "replay_of", replay_of)
    return events


@pytest.fixture(scope="module")
def tiny():
    spec = with_max_seq(TINY_LLAMA, 64)
    return load_weights(build(spec, 0))


def test_full_chunks_are_launched_captured_and_replayed(tiny, seen):
    state, plain = (allocate_state(tiny.spec, chunk=16) for _ in range(2))
    full = graph.full_chunk(state, tiny)
    expected = {
        15: [], 16: ["launch"], 53: ["capture", "replay", "replay", "replay"], 1: [],
        33: ["replay", "replay"],
    }  # fmt: skip
    for length, events in expected.items():
        seen.clear()
        prompt = prompt_of(tiny.spec, length)
        assert_same(after(state, tiny, prompt, 16, full), after(plain, tiny, prompt, 16))
        assert seen == events, length


def test_a_chunk_of_another_size_is_not_its_business(tiny, seen):
    state = allocate_state(tiny.spec, chunk=16)
    full = graph.full_chunk(state, tiny, 8)
    assert len(full.columns.token) == 8
    expected = after(state, tiny, prompt_of(tiny.spec, 40), 16)
    assert_same(after(state, tiny, prompt_of(tiny.spec, 40), 16, full), expected)
    assert seen == ["launch"]  # the rest of 8
    assert_same(after(state, tiny, prompt_of(tiny.spec, 40), 8, full), expected)
    assert seen == ["launch", "capture", *["replay"] * 5]


def test_turned_toggles_start_it_anew(tiny, seen):
    state = allocate_state(tiny.spec, chunk=16)
    full, prompt = graph.full_chunk(state, tiny), prompt_of(tiny.spec, 48)
    for _ in range(2):
        for chosen in ({}, {"prefill": "mma"}):
            seen.clear()
            with toggles.using(**chosen):
                after(state, tiny, prompt, 16, full)
                after(state, tiny, prompt, 16, full)
            assert seen == ["launch", "capture", *["replay"] * 5]


def test_a_pass_that_fails_is_not_taken_for_done(tiny, seen, monkeypatch):
    state = allocate_state(tiny.spec, chunk=16)
    full, launch = graph.full_chunk(state, tiny), graph.forward

    def fails(*arguments):
        raise RuntimeError("no")

    monkeypatch.setattr(graph, "forward", fails)
    with pytest.raises(RuntimeError, match="no"):
        full.take()
    monkeypatch.setattr(graph, "forward", launch)
    full.take()
    assert seen == ["launch"]


def test_a_capture_that_fails_is_told_once(tiny, monkeypatch, capsys):
    """And every later pass is launched."""

    def refused(launch, side):
        raise RuntimeError("operation not permitted\nwhen a stream is capturing")

    monkeypatch.setattr(graph, "record", refused)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", types.SimpleNamespace)
    state, plain = (allocate_state(tiny.spec, chunk=16) for _ in range(2))
    full = graph.full_chunk(state, tiny)
    for length in (16, 53, 48):
        prompt = prompt_of(tiny.spec, length)
        assert_same(after(state, tiny, prompt, 16, full), after(plain, tiny, prompt, 16))
    said = "decodev2: no CUDA graph (operation not permitted); launching prompts eagerly\n"
    assert capsys.readouterr().err == said


def test_a_session_on_the_cpu_has_none(random_model):
    opened = open_session(random_model, device="cpu")
    assert opened.full is None
    opened.close()


# ---- on the card ---------------------------------------------------------------------------------

KERNELS = [
    pytest.param("mma", 7, marks=needs_cuda), pytest.param("mma", 64, marks=needs_cuda),
    pytest.param("mma", CUDA_MAX_N, marks=needs_cuda),
    pytest.param("wgmma", 64, marks=needs_wgmma),
    pytest.param("wgmma", CUDA_MAX_N, marks=needs_wgmma),
]  # fmt: skip


@pytest.fixture
def records(monkeypatch):
    """Every capture of a chunk."""
    made, record = [], graph.record

    def recorded(launch, side):
        made.append(record(launch, side))
        return made[-1]

    monkeypatch.setattr(graph, "record", recorded)
    return made


def medium(slots: int):
    spec = with_max_seq(MEDIUM_LLAMA, slots)
    return load_weights(build(spec, 21), "cuda")


@pytest.mark.parametrize("linear", ["gemv", "mma"])
@pytest.mark.parametrize("kernel, chunk", KERNELS)
def test_the_bits_of_eager_chunks(kernel, chunk, linear, records):
    weights = medium(3 * chunk + 5 + NEW_IDS)
    state, plain = (allocate_state(weights.spec, "cuda", chunk) for _ in range(2))
    full = graph.full_chunk(state, weights)
    with toggles.using(linear=linear, prefill=kernel):
        for length in (*lengths_of(chunk), *lengths_of(chunk)[::-1]):
            prompt = prompt_of(weights.spec, length)
            expected = after(plain, weights, prompt, chunk)
            assert_same(after(state, weights, prompt, chunk, full), expected)
    assert len(records) == 1 and full.again == records[0].replay


@needs_wgmma
def test_each_kernel_gets_its_own_graph(records):
    weights = medium(256)
    state, plain = (allocate_state(weights.spec, "cuda", 64) for _ in range(2))
    full, prompt = graph.full_chunk(state, weights), prompt_of(weights.spec, 200)
    seen = {}
    for count, kernel in enumerate(("mma", "wgmma", "mma"), 1):
        with toggles.using(linear="gemv", prefill=kernel):
            expected = after(plain, weights, prompt, 64)
            for _ in range(2):
                found = after(state, weights, prompt, 64, full)
                assert_same(found, expected)
        assert len(records) == count
        seen.setdefault(kernel, found[0])
        assert torch.equal(seen[kernel], found[0])
    assert not torch.equal(seen["mma"], seen["wgmma"]), "one kernel stood behind both"


@needs_cuda
def test_a_prompt_allocates_nothing_that_stays():
    """But what torch keeps for its graph: seed and offset of random numbers, two blocks, for the
    first live graph of a device or for each, by version. Two more graphs say which."""
    weights = medium(256)
    state = allocate_state(weights.spec, "cuda", 64)
    full, prompt = graph.full_chunk(state, weights), prompt_of(weights.spec, 200)
    others = []
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        others.append(graph.record(state.finished.zero_, torch.cuda.Stream()))
        of_a_graph = torch.cuda.memory_allocated() - before
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        consume_prompt(state, weights, prompt, 64, full)
        reset(state)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before + of_a_graph


@needs_cuda
def test_under_a_user_stream(records):
    """Captured and replayed on a stream of its own, then replayed on another."""
    weights = medium(256)
    state, plain = (allocate_state(weights.spec, "cuda", 64) for _ in range(2))
    full, prompt = graph.full_chunk(state, weights), prompt_of(weights.spec, 200)
    expected = after(plain, weights, prompt, 64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            assert_same(after(state, weights, prompt, 64, full), expected)
            assert torch.cuda.current_stream() == stream
    torch.cuda.synchronize()
    assert_same(after(state, weights, prompt, 64, full), expected)
    assert len(records) == 1


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device only")
def test_on_another_device(records):
    spec = with_max_seq(MEDIUM_LLAMA, 256)
    here, there = (load_weights(build(spec, 21), device) for device in ("cuda:0", "cuda:1"))
    plain, state = (allocate_state(spec, device, 64) for device in ("cuda:0", "cuda:1"))
    full, prompt = graph.full_chunk(state, there), prompt_of(spec, 200)
    expected = after(plain, here, prompt, 64)
    for _ in range(2):
        found = after(state, there, prompt, 64, full)
        assert_same([*(t.to("cuda:0") for t in found[:3]), found[3]], expected)
    assert len(records) == 1 and torch.cuda.current_device() == 0


@needs_cuda
def test_a_chunk_that_cannot_be_captured(monkeypatch, capfd):
    """It reads back in the middle: legal in a pass launched from Python, fatal in a capture."""
    weights = medium(256)
    state, plain = (allocate_state(weights.spec, "cuda", 64) for _ in range(2))
    full, prompt = graph.full_chunk(state, weights), prompt_of(weights.spec, 200)
    forward = graph.forward

    def wrong(columns, state, weights):
        columns.position[0].item()
        forward(columns, state, weights)

    expected = after(plain, weights, prompt, 64)
    monkeypatch.setattr(graph, "forward", wrong)
    capfd.readouterr()
    stream = torch.cuda.current_stream()
    for _ in range(2):
        assert_same(after(state, weights, prompt, 64, full), expected)
    said = capfd.readouterr().err
    assert said.startswith("decodev2: no CUDA graph (") and said.count("\n") == 1
    assert said.endswith("); launching prompts eagerly\n") and "captur" in said
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()


@needs_cuda
@pytest.mark.parametrize("step", ["graph", "persistent"])
def test_a_session_takes_full_chunks_by_graph(random_model, step, records):
    """The same ids as without it, request after request; the chunk is captured beside the step."""
    opened = open_session(random_model, device="cuda", chunk=16, step=step)
    prompts = [prompt_of(opened.spec, n) for n in (49, 15, 16, 17, 48, 33, 1)]
    assert len(opened.full.columns.token) == 16
    before = len(records)
    found = [opened.generate(prompt, 9).ids for prompt in prompts * 2]
    assert len(records) == before + 1
    opened.full = None
    assert [opened.generate(prompt, 9).ids for prompt in prompts * 2] == found
    opened.close()


@needs_cuda
def test_the_chunk_of_a_state_on_cuda():
    for slots, columns in ((600, CUDA_MAX_N), (20, 20)):
        state = allocate_state(with_max_seq(TINY_LLAMA, slots), "cuda")
        assert len(state.prompt.token) == columns


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
