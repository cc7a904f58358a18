"""TokenLoop, the plain executor: the same ids as the oracle and as Decode V2."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decodev2 import oracle, runner, tokenloop
from decodev2.load import load_weights
from decodev2.plan import MEDIUM_LLAMA, TINY_INTERNLM, TINY_LLAMA, RopeScaling
from decodev2.state import allocate_state
from decodev2.synth import build
from decodev2.tokenloop import TokenLoop

MODELS = {
    "tiny-llama": (TINY_LLAMA, 0),
    "tiny-internlm": (TINY_INTERNLM, 1),
    "medium-llama": (MEDIUM_LLAMA, 2),
    "biases": (replace(TINY_LLAMA, name="qwen", qkv_bias=True, model_type="qwen2"), 3),
    "llama3 rope": (
        replace(TINY_LLAMA, name="rope", max_seq=64,
                rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32)), 4,
    ),
    "7 queries per KV head": (replace(TINY_LLAMA, name="gqa", n_q=14, n_kv=2), 5),
    "tied, eps 1e-2": (replace(TINY_LLAMA, name="tied", tied=True, rms_eps=1e-2), 6),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_logits_equal_oracle_and_decodev2(name):
    spec, seed = MODELS[name]
    model = build(spec, seed)
    weights, state = load_weights(model), allocate_state(spec)
    for length in (1, 4, min(40, spec.max_seq - 8)):
        prompt = np.random.default_rng(length).integers(0, spec.vocab, length).tolist()
        plain = tokenloop.generate(weights, prompt, 8)
        assert plain.ids == oracle.greedy(model, prompt, 8)
        resident = runner.generate(state, weights, prompt, 8)
        assert plain.ids == resident.ids and plain.stop_reason == resident.stop_reason

        loop, rows = TokenLoop(weights), []
        for token_id in prompt:
            loop.feed(token_id)
            rows.append(loop.logits[0].numpy().copy())
        want = oracle.step_logits(model, prompt)
        np.testing.assert_allclose(np.stack(rows), want, rtol=0, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_on_cuda_the_oracle_s_ids(name):
    spec, seed = MODELS[name]
    model = build(spec, seed)
    weights = load_weights(model, "cuda")
    for length in (1, 4):
        prompt = np.random.default_rng(length).integers(0, spec.vocab, length).tolist()
        expected = oracle.greedy(model, prompt, 8)
        assert tokenloop.generate(weights, prompt, 8).ids == expected


def test_it_keeps_no_step_state_of_decodev2():
    """A baseline that shared the resident step would measure nothing: its cache grows instead."""
    loop = TokenLoop(load_weights(build(TINY_LLAMA, 0)))
    for n in range(1, 4):
        loop.feed(n)
        assert loop.position == n and isinstance(loop.position, int)
        assert all(keys.shape == (2, n, 16) for keys in loop.keys)
        assert all(values.shape == (2, n, 16) for values in loop.values)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
