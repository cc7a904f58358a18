"""The resident step on CUDA: graph against eager, streams and devices, ties, end tokens, batched
reads, many requests, prompt chunks, architectures, memory and every toggle, against the oracle."""

from __future__ import annotations

import functools
import gc
import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from test_cuda_ladder import STEPS as ROW_STEPS
from test_cuda_wgmma import PREFILLS
from tiny import chain, run_of

from decodev2 import gates, graph, ops, oracle, runner, step, toggles, tokenloop
from decodev2.errors import ModelError, StepError
from decodev2.load import load_weights
from decodev2.nf4 import Packed
from decodev2.plan import (
    MEDIUM_LLAMA,
    REAL_SHAPES,
    TINY_INTERNLM,
    TINY_LLAMA,
    RopeScaling,
    top_names,
    with_max_seq,
)
from decodev2.prefill import consume_prompt, forward_prefill
from decodev2.session import open_session
from decodev2.state import allocate_state, load_token, reset
from decodev2.synth import SynthModel, build, internlm_twin, random_packed

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CAP = gates.CAPS["cuda"]  # largest logit difference to the oracle; logits are of size 1 to 10
NEAR_TIE = 0.02  # margin of the oracle below which another id may be chosen
PROMPT = [3, 1, 4, 1]

QWEN = replace(TINY_LLAMA, name="tiny-qwen", qkv_bias=True, model_type="qwen2")
LLAMA3 = replace(
    TINY_LLAMA, name="llama3", max_seq=48, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
)
SMALL_X = replace(TINY_LLAMA, name="eps", rms_eps=1e-2)
MODELS = {
    "tiny-llama": (TINY_LLAMA, 0, {}),
    "tiny-internlm": (TINY_INTERNLM, 1, {}),
    "medium-llama": (MEDIUM_LLAMA, 2, {}),
    "large q/k/v biases": (QWEN, 3, {"bias_std": 3.0}),
    "llama3 rope": (LLAMA3, 4, {}),
    "linear rope": (replace(LLAMA3, rope_scaling=RopeScaling("linear", 4.0)), 5, {}),
    "eps 1e-2, tiny x": (SMALL_X, 6, {"embed_std": 1e-3}),
    "9 heads over 3": (
        replace(TINY_LLAMA, name="smol", hidden=576, n_q=9, n_kv=3, head_dim=64), 7, {},
    ),
    "14 heads over 2": (
        replace(QWEN, name="qwen", hidden=896, n_q=14, n_kv=2, head_dim=64), 8, {},
    ),
    "ffn 1376": (replace(TINY_LLAMA, name="ffn-1376", intermediate=1376), 9, {}),
    "ffn 96": (replace(TINY_LLAMA, name="ffn-96", intermediate=96), 10, {}),
    "head_dim 128": (replace(TINY_LLAMA, name="hd-128", n_q=2, n_kv=1, head_dim=128), 12, {}),
    "head_dim 32": (replace(TINY_LLAMA, name="hd-32", n_q=3, n_kv=1, head_dim=32), 13, {}),
    "tied": (replace(TINY_LLAMA, name="tied", tied=True), 14, {}),
    "odd widths": (
        replace(TINY_LLAMA, name="odd", hidden=100, intermediate=77, vocab=131), 15, {},
    ),
}  # fmt: skip


@functools.cache
def prepared(name: str):
    """(model, weights on the device) of one entry of MODELS."""
    spec, seed, options = MODELS[name]
    model = build(spec, seed, **options)
    return model, load_weights(model, "cuda")


@pytest.fixture(params=["gemv", "mma"])
def linear(request):
    with toggles.using(linear=request.param):
        yield request.param


def decode(state, weights, prompt, count, eos=(), by=None, **options) -> runner.Result:
    """Ids by the eager step, or by a graph's replay."""
    replay = by.replay if by is not None else None
    return runner.generate(state, weights, prompt, count, eos, step=replay, **options)


def assert_oracle_ids(model, prompt, ids) -> None:
    """Id for id; where they part first, only by a near tie of the oracle."""
    want = oracle.step_logits(model, list(prompt) + list(ids)[:-1])[len(prompt) - 1 :]
    parting = oracle.first_parting(want, ids)
    assert parting is None or parting.margin < NEAR_TIE, str(parting)


def forced_logits(state, weights, ids) -> np.ndarray:
    """Row i after ids[i], one `forward_decode` per id."""
    reset(state)
    rows = []
    for position, token_id in enumerate(ids):
        load_token(state, token_id)
        state.position.fill_(position)
        step.forward_decode(state, weights)
        rows.append(state.logits.clone())
    return torch.cat(rows).cpu().numpy()


def ids_of(spec, n, seed=9) -> list[int]:
    return np.random.default_rng(seed).integers(0, spec.vocab, n).tolist()


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    assert np.isfinite(found).all()
    return float(np.abs(found - expected).max())


# ---- models: biases (A5), scaled RoPE (A9), eps (A12), widths (A13) ----


@needs_cuda
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_every_position(name, linear):
    model, weights = prepared(name)
    ids = ids_of(model.spec, min(44, model.spec.max_seq))
    found = forced_logits(allocate_state(model.spec, "cuda"), weights, ids)
    assert worst(found, oracle.step_logits(model, ids)) < CAP


@needs_cuda
@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_by_graph(name, linear):
    model, weights = prepared(name)
    state = allocate_state(model.spec, "cuda")
    captured = graph.capture(state, weights)
    prompt = [i % model.spec.vocab for i in PROMPT]
    eager = decode(state, weights, prompt, 9)
    replayed = decode(state, weights, prompt, 9, by=captured)
    assert replayed.ids == eager.ids
    assert_oracle_ids(model, prompt, replayed.ids)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("large q/k/v biases", None),
        ("llama3 rope", {"rope_scaling": None}),
        ("eps 1e-2, tiny x", {"rms_eps": 1e-5}),
    ],
)
def test_what_these_models_would_show(name, changes):
    """Without the bias, the scaling or the eps the oracle itself is far outside the cap."""
    spec, seed, options = MODELS[name]
    model = build(spec, seed, **options)
    if changes:
        wrong = SynthModel(replace(spec, **changes), model.tensors)
    else:
        kept = {n: np.zeros_like(t) if n.endswith(".bias") else t for n, t in model.tensors.items()}
        wrong = SynthModel(spec, kept)
    ids = ids_of(spec, min(44, spec.max_seq))
    a, b = oracle.step_logits(model, ids)[-1], oracle.step_logits(wrong, ids)[-1]
    assert np.abs(a - b).max() > 10 * CAP


@needs_cuda
def test_internlm_twin_gives_the_same_bits(linear):
    model = build(replace(TINY_LLAMA, name="six", hidden=96, n_q=6, n_kv=2, head_dim=16), 0)
    twin = internlm_twin(model)
    ids = ids_of(model.spec, 12)
    a, b = (
        forced_logits(allocate_state(m.spec, "cuda"), load_weights(m, "cuda"), ids)
        for m in (model, twin)
    )
    np.testing.assert_array_equal(a, b)
    assert worst(a, oracle.step_logits(twin, ids)) < CAP


@needs_cuda
@pytest.mark.parametrize("name", ["tiny-llama", "medium-llama", "14 heads over 2", "odd widths"])
def test_every_buffer_of_a_step(name):
    """Norm and RoPE as kernels of their own, so that their results are in the arena."""
    model, weights = prepared(name)
    state = allocate_state(model.spec, "cuda")
    with toggles.using(norm="alone", attention="rope_apart"):
        for position, token_id in enumerate(PROMPT):
            load_token(state, token_id)
            state.position.fill_(position)
            seen = step.trace(state, weights)
    kv = oracle.KVCache.empty(model.spec)
    oracle.step_logits(model, PROMPT[:-1], 0, kv)
    expected = oracle.trace(model, PROMPT[-1:], len(PROMPT) - 1, kv)
    del seen["final"], expected["final"]  # the head norms on the way in
    rows = oracle.diff(seen, expected)
    assert all(row.max_abs < CAP for row in rows), oracle.format_diff(rows)


# ---- C1: graph, streams, devices, failed captures ----


@pytest.fixture(scope="module")
def medium():
    """(model, weights) with room for 50 tokens and more."""
    model = build(with_max_seq(MEDIUM_LLAMA, 64), 2)
    return model, load_weights(model, "cuda")


@needs_cuda
def test_eager_equals_replay_for_50_tokens(medium, linear):
    model, weights = medium
    state, fresh = (allocate_state(model.spec, "cuda") for _ in range(2))
    captured = graph.capture(state, weights)
    eager = decode(fresh, weights, PROMPT, 50)
    replayed = decode(state, weights, PROMPT, 50, by=captured)
    assert replayed.ids == eager.ids and len(eager.ids) == 50
    assert torch.equal(state.logits, fresh.logits)
    assert torch.equal(state.kv.k, fresh.kv.k) and torch.equal(state.kv.v, fresh.kv.v)
    assert_oracle_ids(model, PROMPT, eager.ids)


@needs_cuda
def test_under_a_user_stream(medium, linear):
    """Everything runs on the current stream: the default one is kept busy meanwhile."""
    model, weights = medium
    expected = decode(allocate_state(model.spec, "cuda"), weights, PROMPT, 50).ids
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        state = allocate_state(model.spec, "cuda")
        captured = graph.capture(state, weights)
        assert torch.cuda.current_stream() == stream
    torch.cuda._sleep(2**31)  # about a second of the default stream
    with torch.cuda.stream(stream):
        eager = decode(state, weights, PROMPT, 50).ids
        replayed = decode(state, weights, PROMPT, 50, by=captured).ids
        assert not torch.cuda.default_stream().query(), "something waited for the default stream"
    torch.cuda.synchronize()
    assert eager == replayed == expected
    # captured on one stream, replayed on another
    assert decode(state, weights, PROMPT, 50, by=captured).ids == expected


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device only")
def test_on_another_device(medium, linear):
    model, weights = medium
    expected = decode(allocate_state(model.spec, "cuda"), weights, PROMPT, 50).ids
    assert torch.cuda.current_device() == 0
    there, state = load_weights(model, "cuda:1"), allocate_state(model.spec, "cuda:1")
    before = torch.cuda.memory_allocated(0)
    captured = graph.capture(state, there)
    assert decode(state, there, PROMPT, 50).ids == expected
    assert decode(state, there, PROMPT, 50, by=captured).ids == expected
    assert torch.cuda.current_device() == 0 and torch.cuda.memory_allocated(0) == before
    assert state.logits.device.index == 1


@needs_cuda
def test_capture_leaves_the_request_where_it_was(medium):
    model, weights = medium
    state = allocate_state(model.spec, "cuda")
    reset(state, (5,))
    consume_prompt(state, weights, PROMPT)
    live = ("token", "position", "valid_len", "next_token", "finished", "eos_ids")
    before = {name: getattr(state, name).clone() for name in live}
    captured = graph.capture(state, weights)
    assert all(torch.equal(getattr(state, name), before[name]) for name in live)
    ids = [int(state.token)]
    for _ in range(7):
        captured.replay()
        ids.append(int(state.token))
    assert ids == decode(allocate_state(model.spec, "cuda"), weights, PROMPT, 8).ids


@pytest.fixture
def reads_back(monkeypatch):
    """An op that reads the position on the host: legal in an eager step, fatal in a capture."""
    head = ops.head

    def wrong(c, state, weights):
        state.position.item()
        head(c, state, weights)

    monkeypatch.setattr(ops, "head", wrong)


@needs_cuda
def test_a_failed_capture_steps_eagerly(medium, reads_back, monkeypatch, capfd):
    model, weights = medium
    expected = decode(allocate_state(model.spec, "cuda"), weights, PROMPT, 20).ids
    state = allocate_state(model.spec, "cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            capfd.readouterr()
            assert graph.capture_or_none(state, weights) is None
            said = capfd.readouterr().err
            assert said.startswith("decodev2: no CUDA graph (") and said.count("\n") == 1
            assert said.endswith("); stepping eagerly\n") and "captur" in said
            assert torch.cuda.current_stream() == stream
            assert not torch.cuda.is_current_stream_capturing()
            assert decode(state, weights, PROMPT, 20).ids == expected
        torch.cuda.synchronize()
    monkeypatch.undo()  # with the cause gone the same state can be captured
    captured = graph.capture(state, weights)
    assert decode(state, weights, PROMPT, 20, by=captured).ids == expected
    torch.cuda.synchronize()


@needs_cuda
def test_a_session_whose_step_cannot_be_captured(reads_back, random_model, capfd):
    session = open_session(random_model, device="cuda")
    assert session.graph is None
    assert capfd.readouterr().err.count("no CUDA graph") == 1
    result = session.generate(PROMPT, 8)
    assert_oracle_ids(session.model, PROMPT, result.ids)
    session.close()


@needs_cuda
def test_a_session_replays_a_graph(random_model):
    session = open_session(random_model, device="cuda")
    assert session.device == "cuda" and session.graph is not None
    for prompt in (PROMPT, [7], list(range(50))):
        result = session.generate(prompt, 100)
        count = min(100, session.spec.max_seq - len(prompt) + 1)
        assert len(result.ids) == count
        assert_oracle_ids(session.model, prompt, result.ids)
    session.close()


# ---- C7: ties and NaN ----

WIDE = replace(TINY_LLAMA, name="wide-head", vocab=1024)


def with_head(model: SynthModel, change) -> SynthModel:
    """The model with `change(codes, scales)` done to a copy of its head."""
    name = top_names(model.spec)["lm_head"]
    head = model.tensors[name]
    codes, scales = head.codes.copy(), head.scales.copy()
    change(codes, scales)
    return SynthModel(model.spec, model.tensors | {name: Packed(codes, scales, head.shape)})


def chosen(model: SynthModel) -> tuple[int, np.ndarray]:
    """(next id, logits) after PROMPT; by prefill, by decoding and by graph it must be one id."""
    weights, state = load_weights(model, "cuda"), allocate_state(model.spec, "cuda")
    forward_prefill(state, weights, PROMPT)
    ids = {int(state.next_token)}
    load_token(state, PROMPT[-1])
    step.forward_decode(state, weights)
    ids.add(int(state.next_token))
    captured = graph.capture(state, weights)
    captured.replay()
    ids.add(int(state.token))
    assert len(ids) == 1, ids
    return ids.pop(), state.logits[0].cpu().numpy()


@needs_cuda
@pytest.mark.parametrize("variant", toggles.CHOICES["gemv"])
def test_the_lowest_id_wins_a_tie(variant, linear):
    model = build(WIDE, 3)
    logits = oracle.step_logits(model, PROMPT)[-1]
    best = int(logits.argmax())
    assert logits[best] > 0.5 and best not in (5, 900)

    def twins(codes, scales):
        for row in (5, 900):
            codes[row], scales[row] = codes[best], scales[best]

    with toggles.using(gemv=variant):
        found, seen = chosen(with_head(model, twins))
        assert seen[5] == seen[900] == seen[best] == seen.max()
        assert found == min(5, best)

        def one_unit_more(codes, scales):
            twins(codes, scales)
            for row in (5, 900, best):
                scales[row] *= np.float16(0.5)  # exact
            scales[900] = scales[900] * 2
            scales[5] = np.nextafter(scales[900], np.float16(0))

        found, seen = chosen(with_head(model, one_unit_more))
        assert seen[900] > seen[5] > seen[best] and found == 900


@needs_cuda
@pytest.mark.parametrize("variant", toggles.CHOICES["gemv"])
def test_nan_never_wins(variant):
    model = build(WIDE, 3)
    order = np.argsort(-oracle.step_logits(model, PROMPT)[-1])

    def poison(*rows):
        def change(codes, scales):
            scales[list(rows)] = np.nan

        return with_head(model, change)

    with toggles.using(gemv=variant):
        best, clean = chosen(model)
        for row in (0, int(order[-1]), 1023):
            if row != best:
                found, seen = chosen(poison(row))
                assert found == best and np.isnan(seen[row])
                np.testing.assert_array_equal(np.delete(seen, row), np.delete(clean, row))
        found, seen = chosen(poison(best))
        assert found == int(np.nanargmax(seen)) != best
        only = [row for row in range(1024) if row != 900]
        assert chosen(poison(*only))[0] == 900


@needs_cuda
@pytest.mark.parametrize("steps_per_read", [1, 8])
def test_no_finite_logit_is_an_error_and_the_state_is_usable(steps_per_read):
    model = build(TINY_LLAMA, 0)

    def damage(codes, scales):
        scales[:] = np.nan

    state = allocate_state(TINY_LLAMA, "cuda")
    damaged = load_weights(with_head(model, damage), "cuda")
    captured = graph.capture(state, damaged)
    for by in (None, captured):
        with pytest.raises(ModelError, match="no finite logit"):
            decode(state, damaged, PROMPT, 5, by=by, steps_per_read=steps_per_read)
    assert_oracle_ids(model, PROMPT, decode(state, load_weights(model, "cuda"), PROMPT, 8).ids)


# ---- end tokens, batched reads, the end of the context ----

COUNTING = replace(TINY_LLAMA, name="counting", max_seq=40)


@pytest.fixture(scope="module")
def counting():
    """(model, weights, state, graph): 1 -> 2 -> 3 .. -> 31 -> 0 -> 0."""
    model = chain(COUNTING, run_of(*range(1, 32)))
    weights, state = load_weights(model, "cuda"), allocate_state(COUNTING, "cuda")
    return model, weights, state, graph.capture(state, weights)


@needs_cuda
@pytest.mark.parametrize("by_graph", [False, True])
@pytest.mark.parametrize("eos", [(7,), (30, 7), (29, 31, 7, 30, 28, 27, 26, 25)])
def test_end_tokens_on_the_device(counting, by_graph, eos):
    _, weights, state, captured = counting
    by = captured if by_graph else None
    result = decode(state, weights, [1], 30, eos, by)
    assert result.ids == [2, 3, 4, 5, 6, 7] and result.stop_reason == "end token 7"
    assert int(state.finished) == 1 and int(state.token) == 7 and int(state.position) == 6
    history, keys = state.history.clone(), state.kv.k.clone()
    for _ in range(5):  # a finished request stands still
        captured.replay() if by_graph else step.greedy_decode(state, weights)
    assert int(state.finished) == 1 and int(state.token) == 7 and int(state.position) == 6
    assert torch.equal(state.history, history)
    untouched = [slot for slot in range(COUNTING.max_seq) if slot != 6]
    assert torch.equal(state.kv.k[:, untouched], keys[:, untouched])
    # the next request knows nothing of it
    assert decode(state, weights, [1], 8, (), by).ids == list(range(2, 10))
    assert int(state.finished) == 0


@needs_cuda
def test_the_first_new_token_may_be_an_end_token(counting):
    _, weights, state, captured = counting
    result = decode(state, weights, [4, 5], 9, (6, 7), captured, steps_per_read=8)
    assert result.ids == [6] and result.stop_reason == "end token 6"
    assert int(state.finished) == 1


@needs_cuda
def test_too_many_end_tokens_are_refused(counting):
    with pytest.raises(ModelError, match="9 end tokens"):
        reset(counting[2], tuple(range(9)))


@needs_cuda
@pytest.mark.parametrize("steps_per_read", [2, 3, 8, 64])
@pytest.mark.parametrize("eos", [(), (4,), (9,), (10,), (11,), (17,), (31, 12)])
def test_several_tokens_per_read(counting, eos, steps_per_read):
    """End tokens first, last and in the middle of a batch; the context's end; few new tokens."""
    _, weights, state, captured = counting
    for prompt in ([1], [9, 1], list(range(1, 31)), [0] * 38 + [1], [0] * 39 + [1]):
        for count in (1, 2, 7, 8, 9, 10, 100):
            told, batched = [], []
            one = decode(state, weights, prompt, count, eos, captured, on_token=told.append)
            many = decode(
                state, weights, prompt, count, eos, captured, on_token=batched.append,
                steps_per_read=steps_per_read,
            )  # fmt: skip
            assert many.ids == one.ids == told == batched
            assert many.stop_reason == one.stop_reason
            assert int(state.position) <= COUNTING.max_seq


@needs_cuda
@pytest.mark.parametrize("steps_per_read", [1, 8])
def test_the_end_of_the_context(counting, steps_per_read):
    _, weights, state, captured = counting
    options = {"by": captured, "steps_per_read": steps_per_read}
    for length in (38, 39, 40):
        prompt = [0] * (length - 1) + [1]
        full = decode(state, weights, prompt, 100, **options)
        assert full.stop_reason == "context full"
        assert full.ids == list(range(2, 2 + COUNTING.max_seq - length + 1))
        assert decode(state, weights, [3], 5, **options).ids == [4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="41 tokens"):
        decode(state, weights, [0] * 41, 1, **options)
    assert decode(state, weights, [3], 5, **options).ids == [4, 5, 6, 7, 8]


@needs_cuda
@pytest.mark.parametrize(("ahead", "in_time"), [(None, 6), (1, 6), (0, 0), (2, 6)])
def test_the_card_is_busy_while_ids_are_handed_out(counting, ahead, in_time):
    """Four batches of two long steps: a read waits for its own, those behind it are under way."""
    _, weights, state, captured = counting
    busy = []

    def slow():
        captured.replay()
        torch.cuda._sleep(2**27)  # some 70 ms

    result = runner.generate(
        state, weights, [1], 9, step=slow, steps_per_read=2, ahead=ahead,
        on_token=lambda _: busy.append(not torch.cuda.current_stream().query()),
    )  # fmt: skip
    assert result.ids == list(range(2, 11))
    assert busy == [False] + in_time * [True] + (8 - in_time) * [False]


@needs_cuda
@pytest.mark.parametrize("fails_at", [1, 4, 5, 12])
def test_a_fault_comes_with_the_ids_of_its_batch(counting, fails_at):
    _, weights, state, captured = counting
    fault = torch.zeros(1, dtype=torch.int32, device="cuda")
    taken, seen = [], []

    def take():
        captured.replay()
        taken.append(None)
        if len(taken) == fails_at:
            fault.fill_(3)

    def check():
        raise StepError("a step failed")

    with pytest.raises(StepError):
        runner.generate(
            state, weights, [1], 20, on_token=seen.append, step=take, steps_per_read=4,
            watch=(fault, check),
        )  # fmt: skip
    assert seen == list(range(2, 3 + (fails_at - 1) // 4 * 4))
    assert decode(state, weights, [3], 5, by=captured, steps_per_read=4).ids == [4, 5, 6, 7, 8]


# ---- many requests, and memory ----


@needs_cuda
def test_10000_replays_over_many_requests(medium):
    model, weights = medium
    state = allocate_state(model.spec, "cuda")
    captured = graph.capture(state, weights)
    prompts = [ids_of(model.spec, n, seed=n) for n in (1, 4, 17, 33)]
    expected = [decode(state, weights, p, 30, by=captured, steps_per_read=8).ids for p in prompts]
    for prompt, ids in zip(prompts, expected, strict=True):
        assert_oracle_ids(model, prompt, ids)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    replays, wrong = 0, 0
    for turn in itertools.count():
        if replays >= 10_000:
            break
        which = turn % len(prompts)
        ids = decode(state, weights, prompts[which], 30, by=captured, steps_per_read=8).ids
        wrong += ids != expected[which]
        replays += len(ids) - 1
    torch.cuda.synchronize()
    assert wrong == 0
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@needs_cuda
def test_memory_of_a_3b_model():
    """Packed weights, cache and arena, once: nothing dense beside them, nothing kept by loading."""
    spec = with_max_seq(REAL_SHAPES["qwen2.5-3b"], 2048)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    weights = load_weights(random_packed(spec, 0), "cuda")
    state = allocate_state(spec, "cuda")
    captured = graph.capture(state, weights)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    counted = weights.nbytes + state.nbytes
    assert abs(held / counted - 1) < 0.05, (held, counted)
    count = sum(
        rows * cols
        for rows, cols in (
            (spec.q_dim + 2 * spec.kv_dim, spec.hidden), (spec.hidden, spec.q_dim),
            (2 * spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate),
        )
    ) * spec.n_layers + spec.vocab * spec.hidden  # fmt: skip
    assert abs(weights.nbytes * 8 / count - 4.25) < 0.01  # bits per weight
    cache = 2 * spec.n_layers * spec.max_seq * spec.kv_dim * 2
    assert state.kv.nbytes == cache
    eager = decode(state, weights, [1, 2, 3], 20).ids
    assert decode(state, weights, [1, 2, 3], 20, by=captured, steps_per_read=8).ids == eager
    assert torch.cuda.memory_allocated() - before == held


# ---- prefill ----


@needs_cuda
@pytest.mark.parametrize("name", ["medium-llama", "llama3 rope", "14 heads over 2", "odd widths"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 64])
def test_prompt_chunks(name, chunk, linear):
    spec, seed, options = MODELS[name]
    model = build(with_max_seq(spec, 80), seed, **options)
    weights, state = load_weights(model, "cuda"), allocate_state(model.spec, "cuda", chunk=64)
    for length in (1, 6, 7, 8, 33, 63, 64, 65, 71):
        prompt = ids_of(model.spec, length, seed=length)
        reset(state)
        state.kv.k.fill_(torch.nan)
        state.kv.v.fill_(torch.nan)
        consume_prompt(state, weights, prompt, chunk)
        want = oracle.step_logits(model, prompt)[-1]
        assert worst(state.logits[0].cpu().numpy(), want) < CAP, length
        assert int(state.position) == int(state.valid_len) == length
        ids = [int(state.token)]
        for _ in range(4):  # decoding goes on over the cache that the chunks left
            step.greedy_decode(state, weights)
            ids.append(int(state.token))
        assert_oracle_ids(model, prompt, ids)


@needs_cuda
def test_chunks_of_many_columns_give_the_same_bits(medium):
    """Products of two columns and more go one way by mma, whatever the chunk."""
    model, weights = medium
    prompt = ids_of(model.spec, 60)
    seen = []
    with toggles.using(linear="mma", prefill="mma"):
        for chunk in (7, 16, 32, 64):
            state = allocate_state(model.spec, "cuda", chunk=64)
            forward_prefill(state, weights, prompt, chunk)
            seen.append(state.logits.clone())
    assert all(worst(a.cpu().numpy(), seen[0].cpu().numpy()) < CAP / 10 for a in seen)


# ---- toggles ----


OF_PANELS = (
    "norm",
    "attention",
    "act",
    "pdl",
)  # the others act on row-major weights: test_cuda_ladder


def combinations() -> list[dict]:
    """Every choice for panel weights with all others, but the GEMV variants alone."""
    every = [
        {"linear": linear} | dict(zip(OF_PANELS, values, strict=True))
        for linear in ("mma", "gemv")
        for values in itertools.product(*(toggles.CHOICES[name] for name in OF_PANELS))
    ]
    variants = [{"linear": "gemv", "gemv": variant} for variant in toggles.CHOICES["gemv"]]
    alone = [{"linear": "gemv", "ahead": "nothing"}, {"linear": "gemv", "attended": "float"}]
    return [*every, *variants, *alone]


def test_every_choice_is_tried():
    here = {(name, value) for chosen in combinations() for name, value in chosen.items()}
    by_rows = {(name, value) for chosen in ROW_STEPS.values() for name, value in chosen.items()}
    defaults = {(field.name, field.default) for field in fields(toggles.Toggles)}
    every = {(name, v) for name, values in toggles.CHOICES.items() for v in values}
    prompts = {(name, value) for chosen in PREFILLS for name, value in chosen.items()}
    assert here | by_rows | prompts | defaults | {("linear", "rows")} == every
    assert {field.name for field in fields(toggles.Toggles)} == set(toggles.CHOICES)


@needs_cuda
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-internlm", "medium-llama"])
@pytest.mark.parametrize(
    "chosen", combinations(), ids=lambda chosen: ",".join(map(str, chosen.values()))
)
def test_toggles(chosen, name):
    model, weights = prepared(name)
    state = allocate_state(model.spec, "cuda")
    with toggles.using(**chosen):
        captured = graph.capture(state, weights)
        eager = decode(state, weights, PROMPT, 9).ids
        logits = forced_logits(state, weights, ids_of(model.spec, 8))
    assert worst(logits, oracle.step_logits(model, ids_of(model.spec, 8))) < CAP
    # outside: the graph keeps the kernels it was captured with; only the prompt may take others
    replayed = decode(state, weights, PROMPT, 9, by=captured, steps_per_read=4).ids
    for ids in (eager, replayed):
        assert ids == oracle.greedy(model, PROMPT, 9)


# ---- the plain executor ----


@needs_cuda
@pytest.mark.parametrize("name", ["tiny-llama", "medium-llama", "large q/k/v biases", "tied"])
def test_tokenloop(name):
    model, weights = prepared(name)
    ids = tokenloop.generate(weights, PROMPT, 9).ids
    assert_oracle_ids(model, PROMPT, ids)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
