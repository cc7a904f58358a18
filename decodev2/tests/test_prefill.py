"""The prompt in chunks: every chunk size gives the same bits as one token at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decodev2 import oracle, step
from decodev2.load import load_weights
from decodev2.plan import MEDIUM_LLAMA, TINY_INTERNLM, TINY_LLAMA, with_max_seq
from decodev2.prefill import consume_prompt, forward_prefill
from decodev2.state import allocate_state, load_token, reset
from decodev2.synth import build

CHUNKS = (1, 7, 12, 16, 32, 64)
SPECS = {
    "tiny-llama": (with_max_seq(TINY_LLAMA, 64), 0),
    "tiny-internlm": (with_max_seq(TINY_INTERNLM, 64), 1),
    "medium-llama": (with_max_seq(MEDIUM_LLAMA, 64), 2),
    "biases, odd widths": (
        replace(TINY_LLAMA, name="odd", hidden=576, n_q=9, n_kv=3, intermediate=96, max_seq=64,
                qkv_bias=True, model_type="qwen2"), 3,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=SPECS)
def case(request):
    spec, seed = SPECS[request.param]
    model = build(spec, seed)
    return model, load_weights(model)


def prompt_of(spec, n):
    return np.random.default_rng(n).integers(0, spec.vocab, n).tolist()


def one_by_one(model, weights, prompt):
    """The state after teacher-forcing the prompt through the N = 1 step."""
    state = allocate_state(model.spec)
    for position, token_id in enumerate(prompt):
        load_token(state, token_id)
        state.position.fill_(position)
        step.forward_decode(state, weights)
    return state


def poisoned(spec, chunk):
    state = allocate_state(spec, chunk=chunk)
    for tensor in (state.kv.k, state.kv.v, state.logits, state.panel, state.scores):
        tensor.fill_(float("nan"))
    return state


@pytest.mark.parametrize("n", (1, 33, 40, 64))
def test_chunks_give_the_bits_of_single_tokens(case, n):
    model, weights = case
    prompt = prompt_of(model.spec, n)
    want = one_by_one(model, weights, prompt)
    for chunk in CHUNKS:
        state = poisoned(model.spec, chunk)
        forward_prefill(state, weights, prompt)
        assert torch.equal(state.logits, want.logits), chunk
        assert torch.equal(state.kv.k[:, :n], want.kv.k[:, :n]), chunk
        assert torch.equal(state.kv.v[:, :n], want.kv.v[:, :n]), chunk
        assert state.kv.k[:, n:].isnan().all() and state.kv.v[:, n:].isnan().all()
        assert int(state.next_token) == int(want.next_token)
        assert (int(state.position), int(state.valid_len)) == (n - 1, n)


def test_a_smaller_chunk_than_the_states_gives_the_same_bits(case):
    model, weights = case
    prompt = prompt_of(model.spec, 40)
    want = one_by_one(model, weights, prompt)
    state = allocate_state(model.spec, chunk=32)
    for chunk in (1, 7, 16, 32, 1000, None):  # at most the state's own 32 are taken
        reset(state)
        state.kv.k.fill_(float("nan"))
        forward_prefill(state, weights, prompt, chunk)
        assert torch.equal(state.logits, want.logits)
        assert torch.equal(state.kv.k[:, :40], want.kv.k[:, :40])


def test_prefill_matches_the_oracle(case):
    model, weights = case
    for n in (1, 4, 40, 64):
        prompt = prompt_of(model.spec, n)
        state = poisoned(model.spec, 32)
        kv = oracle.KVCache.empty(model.spec)
        forward_prefill(state, weights, prompt)
        want = oracle.step_logits(model, prompt, 0, kv)[-1]
        assert np.abs(state.logits[0].numpy() - want).max() < 1e-4
        assert int(state.next_token) == int(np.argmax(want))
        for mine, its in ((state.kv.k, kv.k), (state.kv.v, kv.v)):
            np.testing.assert_allclose(mine[:, :n].numpy(), its[:, :n], rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", (1, 7, 32))
def test_decoding_goes_on_from_any_chunk_size(case, chunk):
    model, weights = case
    prompt = prompt_of(model.spec, 40)
    state = allocate_state(model.spec, chunk=chunk)
    consume_prompt(state, weights, prompt)
    assert (int(state.position), int(state.valid_len)) == (40, 40)
    ids = [int(state.token)]
    for _ in range(8):
        step.greedy_decode(state, weights)
        ids.append(int(state.token))
    assert ids == oracle.greedy(model, prompt, 9)
    assert int(state.position) == int(state.valid_len) == 48


def test_columns_do_not_see_the_tokens_after_them(case):
    """Changing the last prompt id changes no key or value before it."""
    model, weights = case
    prompt = prompt_of(model.spec, 20)
    states = []
    for last in (1, 2):
        state = allocate_state(model.spec)
        forward_prefill(state, weights, [*prompt[:-1], last])
        states.append(state)
    a, b = states
    assert torch.equal(a.kv.k[:, :19], b.kv.k[:, :19])
    assert torch.equal(a.kv.v[:, :19], b.kv.v[:, :19])
    assert not torch.equal(a.kv.k[:, 19], b.kv.k[:, 19])
    assert not torch.equal(a.logits, b.logits)


def test_thread_count_changes_no_bit(case, set_threads, isa):
    model, weights = case
    prompt, found = prompt_of(model.spec, 40), []
    for threads in (1, 2, 3):
        set_threads(threads)
        state = allocate_state(model.spec)
        consume_prompt(state, weights, prompt)
        step.greedy_decode(state, weights)
        found.append((state.logits.clone(), state.kv.k[:, :41].clone()))
    for logits, keys in found[1:]:
        assert torch.equal(logits, found[0][0]) and torch.equal(keys, found[0][1])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
