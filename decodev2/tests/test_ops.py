"""The step's other CPU operations: attention, RMS norm, RoPE with the cache write, commit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decodev2 import native, rope
from decodev2.plan import TINY_LLAMA
from decodev2.state import allocate_state

POISONS = (float("nan"), 1e30, float("-inf"))


# ---- attention ----


def exact_attention(q, k, v, valid):
    """float64 softmax(q K^T / sqrt(head_dim)) V: q [n, n_q, hd], k and v [T, n_kv, hd]."""
    n, n_q, head_dim = q.shape
    group = n_q // k.shape[1]
    out = np.zeros((n, n_q, head_dim))
    for i in range(n):
        for h in range(n_q):
            keys, values = (a[: valid[i], h // group].astype(np.float64) for a in (k, v))
            scores = keys @ q[i, h].astype(np.float64) / np.sqrt(head_dim)
            weight = np.exp(scores - scores.max())
            out[i, h] = weight @ values / weight.sum()
    return out


def attend(q, k, v, valid, slots=None, poison=float("nan")):
    """The kernel's answer; cache slots past the longest length, scratch and output are
    poisoned."""
    n, n_q, head_dim = q.shape
    slots = slots or len(k)
    caches = []
    for part in (k, v):
        cache = torch.full((slots, *part.shape[1:]), poison)
        cache[: len(part)] = torch.from_numpy(part)
        caches.append(cache)
    scores = torch.full((n_q, slots + 16), float("nan"))
    memory = torch.full((n * n_q * head_dim + 128,), -7.25e31)
    out = memory[64:-64].view(n, n_q * head_dim)
    out.fill_(float("nan"))
    native.cpu().attn(
        torch.from_numpy(q.reshape(n, -1)),
        *caches,
        torch.tensor(valid, dtype=torch.int32),
        scores,
        out,
    )
    assert (memory[:64] == -7.25e31).all() and (memory[-64:] == -7.25e31).all()
    return out.view(n, n_q, head_dim).numpy()


def random_heads(n, n_q, n_kv, head_dim, length, seed=0):
    rng = np.random.default_rng([seed, n_q, n_kv, head_dim, length])
    q = 2 * rng.standard_normal((n, n_q, head_dim), np.float32)
    k, v = rng.standard_normal((2, length, n_kv, head_dim), np.float32)
    return q, k, v


LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 300)


@pytest.mark.parametrize("head_dim", (16, 32, 64, 128))
@pytest.mark.parametrize("group", (1, 2, 3, 7, 8))
def test_attention_matches_float64(head_dim, group, isa):
    for length in LENGTHS:
        q, k, v = random_heads(2, 2 * group, 2, head_dim, length)
        valid = [length, max(1, length // 2)]
        want = exact_attention(q, k, v, valid)
        # `slots - length` dead slots, among them none
        for extra in (0, 1, 20):
            got = attend(q, k, v, valid, slots=length + extra)
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("length", LENGTHS)
def test_dead_slots_are_not_read(length, poison, isa):
    q, k, v = random_heads(1, 4, 2, 32, length)
    clean = attend(q, k, v, [length])
    np.testing.assert_array_equal(attend(q, k, v, [length], length + 33, poison), clean)
    # Also inside the arrays, past a shorter row's own length.
    short = max(1, length - 1)
    k[short:], v[short:] = poison, poison
    want = attend(q, k[:short].copy(), v[:short].copy(), [short])
    np.testing.assert_array_equal(attend(q, k, v, [short]), want)


def test_one_row_at_a_time_gives_the_same_bits(set_threads, isa):
    q, k, v = random_heads(5, 6, 2, 64, 40)
    valid = [36, 37, 38, 39, 40]
    together = attend(q, k, v, valid)
    for threads in (1, 2, 3):
        set_threads(threads)
        np.testing.assert_array_equal(attend(q, k, v, valid), together)
        for i in range(5):
            alone = attend(q[i : i + 1], k, v, valid[i : i + 1])
            np.testing.assert_array_equal(alone[0], together[i])


@pytest.mark.parametrize("length", LENGTHS)
def test_very_negative_scores_are_real_scores(length, isa):
    """All scores are about -1e5, in exact arithmetic; the softmax must still tell them apart."""
    q = np.full((1, 1, 16), 200.0, np.float32)
    k = np.full((length, 1, 16), -125.0, np.float32)  # 16 * 200 * -125 / 4 = -1e5
    k[:, 0, 0] += np.arange(length, dtype=np.float32) % 8 / 64  # + 0.78 per step
    v = random_heads(1, 1, 1, 16, length)[2]
    want = exact_attention(q, k, v, [length])
    for poison in (float("nan"), 0.0, 1e30):  # a slot of zeros would score 0 and win
        got = attend(q, k, v, [length], length + 17, poison)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", (1e-20, 1.0, 30.0, 1e4))
def test_scores_of_any_size(size, isa):
    """From all equal to one that takes all the weight; nothing overflows."""
    q, k, v = random_heads(1, 3, 1, 64, 33)
    q *= np.float32(size)
    got = attend(q, k, v, [33], 40)
    # float32 scores of size s are off by s * 1e-7; a weight is off by as much, relatively
    np.testing.assert_allclose(got, exact_attention(q, k, v, [33]), rtol=0, atol=2e-5 * (1 + size))
    assert np.isfinite(got).all()
    weights_sum_to_one = attend(q, k, np.ones_like(v), [33], 40)
    np.testing.assert_allclose(weights_sum_to_one, 1.0, rtol=1e-6)


def test_length_is_clamped_to_the_cache(isa):
    q, k, v = random_heads(1, 4, 2, 32, 20)
    full = attend(q, k, v, [20])
    for valid in (21, 1000, 2**31 - 1):
        np.testing.assert_array_equal(attend(q, k, v, [valid]), full)
    first = attend(q, k, v, [1])
    for valid in (0, -5):
        np.testing.assert_array_equal(attend(q, k, v, [valid]), first)


def test_attention_refuses_what_does_not_fit():
    q, k = torch.zeros(1, 64), torch.zeros(4, 2, 16)
    valid, scores, out = torch.ones(1, dtype=torch.int32), torch.zeros(4, 20), torch.zeros(1, 64)
    attn = native.cpu().attn
    attn(q, k, k, valid, scores, out)
    for bad in (
        (q, torch.zeros(4, 2, 24), torch.zeros(4, 2, 24), valid, scores, out),  # head_dim 24
        (q, torch.zeros(4, 3, 16), torch.zeros(4, 3, 16), valid, scores, out),  # 4 heads over 3
        (q, k, k.double(), valid, scores, out),
        (q, k, k[:3], valid, scores, out),
        (q, k, k, valid.long(), scores, out),
        (q, k, k, valid, torch.zeros(4, 19), out),
        (q, k, k, valid, scores, torch.zeros(1, 63)),
    ):
        with pytest.raises(ValueError) as caught:
            attn(*bad)
        assert "\n" not in str(caught.value)


# ---- rms ----


@pytest.mark.parametrize("hidden", (1, 2, 15, 16, 17, 64, 100, 576, 2047))
@pytest.mark.parametrize(("eps", "size"), [(1e-6, 1.0), (1e-2, 1e-3), (1e-5, 1e3), (1e-5, 0.0)])
def test_rms_matches_float64(hidden, eps, size, isa):
    rng = np.random.default_rng(hidden)
    x = (size * rng.standard_normal((3, hidden))).astype(np.float32)
    weight = (1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt(np.mean(x64**2, axis=1, keepdims=True) + eps) * weight
    memory = torch.full((3 * hidden + 128,), -7.25e31)
    out = memory[64:-64].view(3, hidden)
    native.cpu().rms(torch.from_numpy(x), torch.from_numpy(weight), eps, out)
    np.testing.assert_allclose(out.numpy(), want, rtol=3e-6, atol=1e-30)
    assert (memory[:64] == -7.25e31).all() and (memory[-64:] == -7.25e31).all()
    for i in range(3):
        alone = torch.full((1, hidden), float("nan"))
        native.cpu().rms(torch.from_numpy(x[i : i + 1]), torch.from_numpy(weight), eps, alone)
        np.testing.assert_array_equal(alone[0].numpy(), out[i].numpy())


def test_rms_refuses_a_weight_of_another_width():
    x = torch.zeros(1, 64)
    for weight, out in ((32, 64), (128, 64), (64, 32)):
        with pytest.raises(ValueError) as caught:
            native.cpu().rms(x, torch.ones(weight), 1e-5, torch.zeros(1, out))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError):
        native.cpu().rms(torch.zeros(64), torch.ones(64), 1e-5, torch.zeros(64))


# ---- rope and the cache write ----


def random_qkv(spec, n, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((n, width), dtype=np.float32)
        for width in (spec.q_dim, spec.kv_dim, spec.kv_dim)
    ]


def rope_kv(state, layer, position, q, k, v):
    kv = state.kv
    native.cpu().rope_kv(q, k, v, state.cos, state.sin, position, kv.k[layer], kv.v[layer])


@pytest.mark.parametrize("head_dim", (16, 32, 64, 128))
@pytest.mark.parametrize("positions", [[0], [15], [3, 4, 5], [9, 2]])
def test_rope_kv_rotates_and_writes_only_its_slots(head_dim, positions):
    spec = replace(TINY_LLAMA, head_dim=head_dim, hidden=4 * head_dim)
    state = allocate_state(spec)
    for cache in (state.kv.k, state.kv.v):
        cache.fill_(float("nan"))
    q, k, v = random_qkv(spec, len(positions))
    tensors = [torch.from_numpy(a.copy()) for a in (q, k, v)]
    rope_kv(state, 1, torch.tensor(positions), *tensors)

    cos, sin = (t[positions][:, None] for t in rope.rope_tables(spec))
    for got, before in ((tensors[0], q), (tensors[1], k)):
        heads = before.reshape(len(positions), -1, head_dim)
        want = rope.apply_rope(heads, cos, sin)
        np.testing.assert_allclose(got.numpy().reshape(heads.shape), want, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(tensors[2].numpy(), v)
    for cache, rows in ((state.kv.k, tensors[1]), (state.kv.v, tensors[2])):
        np.testing.assert_array_equal(
            cache[1, positions].reshape(len(positions), -1).numpy(), rows.numpy()
        )
        others = [t for t in range(spec.max_seq) if t not in positions]
        assert cache[1, others].isnan().all() and cache[0].isnan().all()


@pytest.mark.parametrize("position", [-1, 16, 17, 2**40, -(2**40)])
def test_a_position_outside_the_cache_writes_nothing(position):
    state = allocate_state(TINY_LLAMA)
    memory = [torch.full((3, 16, 2, 16), 5.0) for _ in "kv"]  # layer 1 of 3: neighbours each side
    state = replace(state, kv=replace(state.kv, k=memory[0], v=memory[1]))
    q, k, v = (torch.from_numpy(a) for a in random_qkv(TINY_LLAMA, 1))
    before = [q.clone(), k.clone(), v.clone()]
    rope_kv(state, 1, torch.tensor([position]), q, k, v)
    assert all((cache == 5.0).all() for cache in memory)
    for now, was in zip((q, k, v), before, strict=True):
        assert torch.equal(now, was)


def test_rope_kv_refuses_what_does_not_fit():
    state = allocate_state(TINY_LLAMA)
    q, k, v = (torch.from_numpy(a) for a in random_qkv(TINY_LLAMA, 1))
    at = torch.zeros(1, dtype=torch.int64)
    for bad in ((q[:, :60].contiguous(), k, v, at), (q, k[:, :16].contiguous(), v, at),
                (q, k, v, at.int()), (q, k, v.double(), at)):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            rope_kv(state, 0, bad[3], *bad[:3])
        assert "\n" not in str(caught.value)


# ---- commit ----


@pytest.mark.parametrize(("chosen", "ends"), [(7, 1), (3, 1), (8, 0), (-1, 0)])
def test_commit_moves_token_position_history_and_flag(chosen, ends):
    token, position, flag = torch.tensor([1]), torch.tensor([9]), torch.zeros(1, dtype=torch.uint8)
    eos, history = torch.tensor([3, 7, -2, -1]), torch.full((12,), -5)
    commit = native.cpu().commit
    commit(token, position, torch.tensor([chosen]), flag, eos, history)
    assert (int(token), int(position), int(flag)) == (chosen, 10, ends)
    assert eos.tolist() == [3, 7, -2, -1]
    assert history[10] == chosen and (history[:10] == -5).all() and history[11] == -5
    if ends:  # nothing moves after the end
        commit(token, position, torch.tensor([4]), flag, eos, history)
        assert (int(token), int(position), int(flag)) == (chosen, 10, 1)
        assert history[11] == -5


def test_commit_writes_no_history_past_its_end():
    memory = torch.full((4,), -5)
    flag = torch.zeros(1, dtype=torch.uint8)
    for start in (2, 50, -9):
        native.cpu().commit(
            torch.tensor([0]), torch.tensor([start]), torch.tensor([6]), flag,
            torch.tensor([-1]), memory[:3],
        )  # fmt: skip
    assert memory.tolist() == [-5] * 4


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
