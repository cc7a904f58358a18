"""The state of a request: what it holds, how it starts over, and what a dirty cache may not do."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from decodev2 import oracle, step
from decodev2.arena import Arena
from decodev2.errors import ModelError
from decodev2.kv import GraphSafeKV
from decodev2.load import load_weights
from decodev2.plan import (
    CUDA_MAX_N,
    LIVE_MAX_N,
    MEDIUM_LLAMA,
    TINY_INTERNLM,
    TINY_LLAMA,
    chunk_on,
    with_max_seq,
)
from decodev2.prefill import consume_prompt
from decodev2.state import MAX_EOS_IDS, UNUSED, allocate_state, load_token, reset
from decodev2.synth import build

SEEDED = [(TINY_LLAMA, 0), (TINY_INTERNLM, 1)]
PROMPT = [3, 1, 4, 1]


def tensors_of(value, seen=None):
    """Every tensor in a dataclass and the dataclasses it holds; views of one memory once."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        seen.setdefault(value.untyped_storage().data_ptr(), value)
    elif is_dataclass(value):
        for field in fields(value):
            tensors_of(getattr(value, field.name), seen)
    return list(seen.values())


def greedy_run(state, weights, prompt, steps):
    """Ids of prefill and `steps` greedy steps, and the logits of each."""
    consume_prompt(state, weights, prompt)
    ids, logits = [int(state.token)], [state.logits.clone()]
    for _ in range(steps):
        step.greedy_decode(state, weights)
        ids.append(int(state.token))
        logits.append(state.logits.clone())
    return ids, torch.cat(logits)


def test_buffers_have_the_contracts_names_types_and_sizes():
    state = allocate_state(TINY_LLAMA)
    for name, dtype in (
        ("token", torch.int64),
        ("position", torch.int64),
        ("valid_len", torch.int32),
        ("next_token", torch.int64),
        ("finished", torch.uint8),
    ):
        tensor = getattr(state, name)
        assert tensor.dtype == dtype and tensor.shape == (1,), name
    assert state.kv.k.shape == state.kv.v.shape == (2, 16, 2, 16)
    assert state.cos.shape == state.sin.shape == (16, 16)
    assert state.logits.shape == (1, 32) and state.logits.dtype == torch.float32
    assert len(state.prompt.token) == 16  # a chunk is never longer than the cache
    assert len(allocate_state(MEDIUM_LLAMA, chunk=7).prompt.token) == 7
    small = (state.next_token, state.finished, state.eos_ids, state.history)
    whole = sum(t.nbytes for t in tensors_of(state)) - sum(t.nbytes for t in small)
    assert state.nbytes == whole > state.kv.nbytes + state.logits.nbytes


@pytest.mark.parametrize(
    ("max_seq", "chunk", "columns"),
    [(600, None, LIVE_MAX_N), (600, 48, 48), (20, None, 20), (20, 48, 20), (1, None, 1)],
)
def test_a_chunk_is_the_devices_and_fits_the_cache(max_seq, chunk, columns):
    assert (chunk_on("cpu"), chunk_on("cuda")) == (LIVE_MAX_N, CUDA_MAX_N)
    for device in ("cpu", torch.device("cpu")):
        state = allocate_state(with_max_seq(TINY_LLAMA, max_seq), device, chunk)
        assert len(state.prompt.token) == columns


def test_first_columns_share_memory():
    arena = allocate_state(MEDIUM_LLAMA, chunk=8).prompt
    assert arena.first(8) is arena
    part = arena.first(3)
    for field in fields(Arena):
        whole, view = getattr(arena, field.name), getattr(part, field.name)
        assert view.shape == (3, *whole.shape[1:]) and view.data_ptr() == whole.data_ptr()


def test_reset_touches_the_request_and_not_the_cache():
    state = allocate_state(TINY_LLAMA)
    state.position.fill_(9)
    state.valid_len.fill_(10)
    state.finished.fill_(1)
    state.kv.k.fill_(7.0)
    state.kv.v.fill_(8.0)
    addresses = [t.data_ptr() for t in tensors_of(state)]
    reset(state, (5, 9))
    assert int(state.position) == int(state.valid_len) == int(state.finished) == 0
    assert state.eos_ids.tolist() == [5, 9] + [UNUSED] * (MAX_EOS_IDS - 2)
    assert (state.kv.k == 7.0).all() and (state.kv.v == 8.0).all()
    reset(state)  # end tokens of the request before must not stop this one
    assert state.eos_ids.tolist() == [UNUSED] * MAX_EOS_IDS
    assert [t.data_ptr() for t in tensors_of(state)] == addresses


def test_too_many_end_tokens_are_refused():
    state = allocate_state(TINY_LLAMA)
    reset(state, tuple(range(MAX_EOS_IDS)))
    with pytest.raises(ModelError, match=f"9 end tokens, the state holds at most {MAX_EOS_IDS}"):
        reset(state, tuple(range(MAX_EOS_IDS + 1)))


@pytest.mark.parametrize(("spec", "seed"), SEEDED, ids=lambda v: getattr(v, "name", v))
def test_a_second_request_equals_a_fresh_state(spec, seed):
    weights = load_weights(build(spec, seed))
    used, fresh = allocate_state(spec), allocate_state(spec)
    greedy_run(used, weights, [30, 2, 2, 19, 7, 6], 9)  # another, longer request
    reset(used)
    ids, logits = greedy_run(used, weights, PROMPT, 8)
    want_ids, want_logits = greedy_run(fresh, weights, PROMPT, 8)
    assert ids == want_ids and torch.equal(logits, want_logits)
    assert torch.equal(used.kv.k[:, :12], fresh.kv.k[:, :12])


@pytest.mark.parametrize("poison", (1e4, 1e30, math.nan, math.inf, -math.inf))
@pytest.mark.parametrize(("spec", "seed"), SEEDED, ids=lambda v: getattr(v, "name", v))
def test_a_dirty_tail_is_ignored(spec, seed, poison):
    weights = load_weights(build(spec, seed))
    clean, dirty = allocate_state(spec), allocate_state(spec)
    for tensor in tensors_of(dirty):  # everything that a step must write before it reads
        if tensor.is_floating_point() and tensor is not dirty.cos and tensor is not dirty.sin:
            tensor.fill_(poison)
    want = greedy_run(clean, weights, PROMPT, 8)
    got = greedy_run(dirty, weights, PROMPT, 8)
    assert got[0] == want[0] and torch.equal(got[1], want[1])
    tail = dirty.kv.k[:, len(PROMPT) + 8 :]
    assert (tail.isnan() if math.isnan(poison) else tail == poison).all()


def test_one_live_slot_and_a_large_last_one():
    """The contract's own case: slot max_seq - 1 holds large values, valid_len is 1."""
    model = build(TINY_LLAMA, 0)
    weights, state = load_weights(model), allocate_state(TINY_LLAMA)
    state.kv.k[:, -1], state.kv.v[:, -1] = 1e4, 1e4
    load_token(state, 5)
    step.forward_decode(state, weights)
    assert int(state.valid_len) == 1
    want = oracle.step_logits(model, [5])
    np.testing.assert_allclose(state.logits.numpy(), want, rtol=0, atol=1e-4)
    assert int(state.next_token) == int(np.argmax(want))


def guarded_state(spec, margin=4):
    """A state whose cache lies inside a larger one, one layer and `margin` slots around it."""
    state = allocate_state(spec)
    memory, caches = [], []
    for _ in "kv":
        big = torch.full(
            (spec.n_layers + 2, spec.max_seq + 2 * margin, spec.n_kv, spec.head_dim), 123.0
        )
        memory.append(big)
        caches.append(big[1:-1, margin:-margin])
    return replace(state, kv=GraphSafeKV(*caches)), memory, margin


@pytest.mark.parametrize(("spec", "seed"), SEEDED, ids=lambda v: getattr(v, "name", v))
def test_nothing_is_written_past_the_last_slot(spec, seed):
    """Steps far beyond the end leave the cache, and all memory around it, as it was."""
    weights = load_weights(build(spec, seed))
    state, memory, margin = guarded_state(spec)
    consume_prompt(state, weights, PROMPT)
    for _ in range(spec.max_seq - len(PROMPT)):
        step.greedy_decode(state, weights)
    assert int(state.position) == spec.max_seq
    full = [m.clone() for m in memory]
    inside = [m[1:-1, margin:-margin] for m in full]
    assert all((part != 123.0).all() for part in inside)  # every slot was written ...
    for part in inside:
        part.fill_(123.0)
    assert all((m == 123.0).all() for m in full)  # ... and nothing around them
    before = [m.clone() for m in memory]
    for n in range(1, 6):
        step.greedy_decode(state, weights)
        assert int(state.position) == spec.max_seq + n
    for position in (-1, 10**9):
        state.position.fill_(position)
        step.forward_decode(state, weights)
    assert all(torch.equal(now, was) for now, was in zip(memory, before, strict=True))
    # The executor is usable afterwards.
    reset(state)
    assert greedy_run(state, weights, PROMPT, 8)[0] == oracle.greedy(build(spec, seed), PROMPT, 9)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
