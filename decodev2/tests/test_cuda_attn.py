"""The CUDA attention kernels against NumPy in float64: heads, lengths, splits, dirty tails, RoPE
and the cache they write."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from decodev2 import native
from decodev2.nf4 import bf16_bits, bf16_to_f32
from decodev2.plan import TINY_LLAMA
from decodev2.rope import rope_tables

EXTENSIONS = {
    "decode": "attn", "rope_kv": "attn_prefill", "prefill": "attn_prefill",
    "one_warp": "ladder_attn", "flash_two_launch": "ladder_attn",
}  # fmt: skip
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
HEAD_DIMS = (16, 32, 64, 128)
HEADS = ((2, 2), (4, 2), (9, 3), (14, 2), (16, 2), (20, 2), (12, 4))  # 1 to 10 queries per KV head
# A split is 64 positions, a cluster of them 512.
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 511, 512, 513, 1025, 2000, 2048)
MERGES = {"auto": 0, "last CTA": 1, "cluster": 2}
TOLERANCE = 3e-4  # of the largest |value|; queries and weights are split into two bf16


# ---- the reference ----


def bf16(x: np.ndarray) -> np.ndarray:
    return bf16_to_f32(bf16_bits(np.asarray(x, np.float32)))


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RoPE in float64. x [n, heads, head_dim], cos and sin [n, head_dim]."""
    x, cos, sin = (a.astype(np.float64) for a in (x, cos[:, None], sin[:, None]))
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """q [n_q, head_dim] over keys and values [length, n_kv, head_dim] -> [n_q, head_dim]."""
    n_kv, head_dim = keys.shape[1:]
    grouped = q.astype(np.float64).reshape(n_kv, -1, head_dim)
    scores = grouped @ keys.astype(np.float64).transpose(1, 2, 0) / np.sqrt(head_dim)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = weights @ values.astype(np.float64).transpose(1, 0, 2)
    return (out / weights.sum(axis=-1, keepdims=True)).reshape(-1, head_dim)


def test_the_reference_is_softmax():
    q = np.array([[2.0, 0.0]])
    keys = np.array([[[0.0, 9.0]], [[np.sqrt(2) / 2 * np.log(3), 0.0]]])
    values = np.array([[[4.0, 0.0]], [[0.0, 8.0]]])
    np.testing.assert_allclose(attend(q, keys, values), [[1.0, 6.0]])
    turned = rotate(np.array([[[1.0, 0.0]]]), np.array([[0.0, 0.0]]), np.array([[1.0, 1.0]]))
    np.testing.assert_array_equal(turned, [[[0.0, 1.0]]])


# ---- one launch ----


@dataclass(frozen=True)
class Problem:
    """Inputs in NumPy. q, k, v [n, heads, head_dim]; the caches hold bf16 values."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    keys: np.ndarray  # [max_seq, n_kv, head_dim]
    values: np.ndarray
    cos: np.ndarray  # [max_seq, head_dim]
    sin: np.ndarray


@dataclass(frozen=True)
class Answer:
    out: np.ndarray  # [n, n_q, head_dim]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    keys: np.ndarray  # uint16 [max_seq, n_kv, head_dim], the bits
    values: np.ndarray
    valid_len: np.ndarray


@functools.lru_cache(maxsize=4)
def tables(head_dim: int, max_seq: int):
    return rope_tables(replace(TINY_LLAMA, head_dim=head_dim, max_seq=max_seq))


def problem(n_q, n_kv, head_dim, max_seq, n=1, seed=0) -> Problem:
    rng = np.random.default_rng([seed, n_q, n_kv, head_dim, max_seq, n])

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    return Problem(
        normal(n, n_q, head_dim), normal(n, n_kv, head_dim), normal(n, n_kv, head_dim),
        bf16(normal(max_seq, n_kv, head_dim)), bf16(normal(max_seq, n_kv, head_dim)),
        *tables(head_dim, max_seq),
    )  # fmt: skip


def launch(
    p: Problem, positions, *kernels: str, rope: bool, merge: int = 0, pdl: bool = False,
    poison: float = np.nan, repeats: int = 1,
) -> list[Answer]:  # fmt: skip
    """Run `kernels` in order on fresh device buffers, `repeats` times on the same ones.

    Cache slots from the first position on hold `poison`, as do the output and the scratch. The
    columns of q, k and v are parts of one wider row, as in the arena.
    """
    (n, n_q, head_dim), (max_seq, n_kv, _) = p.q.shape, p.keys.shape
    positions = np.asarray(positions, np.int64)
    start = int(np.clip(positions.min(), 0, max_seq))

    def cache(values: np.ndarray) -> torch.Tensor:
        dirty = values.copy()
        dirty[start:] = poison
        return torch.from_numpy(bf16_bits(dirty).view(np.int16)).cuda().view(torch.bfloat16)

    attn = native.cuda("attn")
    keys, values = cache(p.keys), cache(p.values)
    cos, sin = (torch.from_numpy(t).cuda() for t in (p.cos, p.sin))
    position = torch.from_numpy(positions).cuda()
    valid_len = (position + 1).to(torch.int32) if not rope else torch.full_like(position, -7).int()
    counters = torch.zeros(n_q, dtype=torch.int32, device="cuda")
    floats = attn.partial_floats(n_q, n_kv, head_dim, max_seq)
    columns = np.concatenate([a.reshape(n, -1) for a in (p.q, p.k, p.v)], axis=1)
    answers = []
    for _ in range(repeats):
        qkv = torch.from_numpy(columns).cuda()
        q, k, v = qkv.split([n_q * head_dim, n_kv * head_dim, n_kv * head_dim], dim=1)
        partials = torch.full((floats,), torch.nan, device="cuda")
        out = torch.full((n, n_q * head_dim), torch.nan, device="cuda")
        for kernel in kernels:
            run = getattr(native.cuda(EXTENSIONS[kernel]), kernel)
            run(q, k, v, cos, sin, position, valid_len, keys, values, partials, counters, out,
                rope, merge, pdl)  # fmt: skip
        assert not counters.any()
        answers.append(
            Answer(
                *(t.cpu().numpy().reshape(n, -1, head_dim) for t in (out, q, k, v)),
                *(t.view(torch.int16).cpu().numpy().view(np.uint16) for t in (keys, values)),
                valid_len.cpu().numpy(),
            )
        )
    return answers


def run_decode(p: Problem, length: int, merge: int = 0, **options) -> Answer:
    """One column at position length - 1, RoPE and cache write inside; repeats must be equal."""
    first, *others = launch(p, [length - 1], "decode", rope=True, merge=merge, repeats=3, **options)
    for other in others:
        assert_same(other, first)
    return first


def assert_same(a: Answer, b: Answer) -> None:
    for name in ("out", "keys", "values", "valid_len"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def assert_written(p: Problem, answer: Answer, positions, poison: float = np.nan) -> None:
    """The rows at `positions` are bf16 of rotated k and of v; all others are as they were."""
    for found, before in ((answer.keys, p.keys), (answer.values, p.values)):
        expected = bf16_bits(before).copy()
        expected[min(positions) :] = bf16_bits(np.float32(poison))
        untouched = np.setdiff1d(np.arange(len(before)), positions)
        np.testing.assert_array_equal(found[untouched], expected[untouched])
    positions = np.asarray(positions)
    np.testing.assert_array_equal(answer.values[positions], bf16_bits(p.v))
    exact = rotate(p.k, p.cos[positions], p.sin[positions])
    written = bf16_to_f32(answer.keys[positions]).astype(np.float64)
    # the kernel rotates in float32: within half a unit of bf16, and a float32 rounding of the terms
    half_unit = 2.0 ** (np.floor(np.log2(np.abs(exact) + 1e-30)) - 8)
    slack = 4e-7 * np.abs(p.k).max()
    assert (np.abs(written - exact) <= half_unit + slack).all()
    assert (written != 0).any()


def assert_attends(p: Problem, answer: Answer, lengths, tolerance: float = TOLERANCE) -> None:
    """Each column against float64 over the keys and values that are now in the cache."""
    positions = np.asarray(lengths) - 1
    q = rotate(p.q, p.cos[positions], p.sin[positions])
    keys, values = bf16_to_f32(answer.keys), bf16_to_f32(answer.values)
    for column, length in enumerate(lengths):
        expected = attend(q[column], keys[:length], values[:length])
        largest = np.abs(values[:length]).max()
        error = np.abs(answer.out[column] - expected).max()
        assert error <= tolerance * largest, (column, length, error / largest)


def supports(merge: int) -> bool:
    return merge != MERGES["cluster"] or torch.cuda.get_device_capability()[0] >= 9


# ---- decoding ----


@needs_cuda
@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("n_q, n_kv", HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode(head_dim, n_q, n_kv, merge):
    if not supports(MERGES[merge]):
        pytest.skip("clusters need compute capability 9.0")
    p = problem(n_q, n_kv, head_dim, 2048)
    for length in LENGTHS:
        answer = run_decode(p, length, MERGES[merge])
        assert_written(p, answer, [length - 1])
        assert_attends(p, answer, [length])
        assert answer.valid_len == length
        np.testing.assert_array_equal(answer.q, p.q)  # the query is rotated in registers


@needs_cuda
@pytest.mark.parametrize("n_q, n_kv, max_seq", [(8, 4, 5000), (4, 2, 9000), (6, 6, 2100)])
@pytest.mark.parametrize("merge", MERGES)
def test_decode_with_several_tiles_per_split(n_q, n_kv, max_seq, merge):
    if not supports(MERGES[merge]):
        pytest.skip("clusters need compute capability 9.0")
    p = problem(n_q, n_kv, 64, max_seq)
    for length in (1, 64, 2047, 2048, 2049, 2112, 2113, 4096, 4097, max_seq - 1, max_seq):
        if length <= max_seq:
            answer = run_decode(p, length, MERGES[merge])
            assert_written(p, answer, [length - 1])
            assert_attends(p, answer, [length])


@needs_cuda
@pytest.mark.parametrize("max_seq", [1, 2, 16, 63, 64, 65, 130])
def test_decode_in_a_small_cache(max_seq):
    p = problem(6, 2, 16, max_seq)
    for length in range(1, max_seq + 1, max(1, max_seq // 16)):
        answer = run_decode(p, length)
        assert_written(p, answer, [length - 1])
        assert_attends(p, answer, [length])


@needs_cuda
@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf, 0.0])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_lies_past_the_live_prefix_is_not_read(head_dim, poison):
    p = problem(14, 2, head_dim, 600)
    for length in (1, 63, 64, 65, 128, 511, 512, 513, 600):
        clean = run_decode(p, length, poison=0.0)
        dirty = run_decode(p, length, poison=poison)
        np.testing.assert_array_equal(dirty.out, clean.out)
        columns = launch(p, [length - 1], "rope_kv", "prefill", rope=False, poison=poison)[0]
        assert_attends(p, columns, [length])


@needs_cuda
def test_programmatic_launch_changes_nothing():
    p = problem(16, 2, 128, 2048)
    for length in (1, 64, 777, 2048):
        assert_same(run_decode(p, length, pdl=True), run_decode(p, length))


# ---- the other kernels ----


@needs_cuda
@pytest.mark.parametrize("n_q, n_kv", HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_all_kernels_agree(head_dim, n_q, n_kv):
    p = problem(n_q, n_kv, head_dim, 2048, seed=1)
    ways = {
        "rope apart": (("rope_kv", "decode"), False),
        "prefill": (("rope_kv", "prefill"), False),
        "one_warp": (("rope_kv", "one_warp"), False),
        "two_launch": (("flash_two_launch",), True),
    }
    for length in LENGTHS:
        one_launch = run_decode(p, length)
        for name, (kernels, rope) in ways.items():
            first, second = launch(p, [length - 1], *kernels, rope=rope, repeats=2)
            assert_same(first, second)
            assert_written(p, first, [length - 1])
            assert_attends(p, first, [length])
            assert first.valid_len == length, name
            # half a unit of bf16 may fall either way when RoPE is computed in another place
            difference = np.abs(first.out - one_launch.out).max()
            assert difference <= 3e-3 * np.abs(bf16_to_f32(first.values[:length])).max(), name


@needs_cuda
@pytest.mark.parametrize("position", [-1, 40, 41, 10**6])
@pytest.mark.parametrize(
    "kernels, rope",
    [(("decode",), True), (("rope_kv",), False), (("flash_two_launch",), True)],
    ids=["decode", "rope_kv", "two_launch"],
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_position_outside_the_cache_writes_nothing(head_dim, kernels, rope, position):
    p = problem(4, 2, head_dim, 40)
    # the memory around the cache belongs to other layers: make it part of a larger block
    block = torch.full((3, 2, 40, 2, head_dim), 7.0, dtype=torch.bfloat16, device="cuda")
    before = block.clone()
    q, k, v = (torch.from_numpy(a.reshape(1, -1)).cuda() for a in (p.q, p.k, p.v))
    cos, sin = (torch.from_numpy(t).cuda() for t in (p.cos, p.sin))
    partials = torch.zeros(native.cuda("attn").partial_floats(4, 2, head_dim, 40), device="cuda")
    at = torch.tensor([position], device="cuda")
    valid_len = torch.zeros(1, dtype=torch.int32, device="cuda")
    counters = torch.zeros(4, dtype=torch.int32, device="cuda")
    out = torch.zeros(1, 4 * head_dim, device="cuda")
    for kernel in kernels:
        getattr(native.cuda(EXTENSIONS[kernel]), kernel)(
            q, k, v, cos, sin, at, valid_len, block[1, 0], block[1, 1], partials, counters, out,
            rope, 0, False,
        )  # fmt: skip
    torch.cuda.synchronize()
    assert torch.equal(block, before)


# ---- prefill ----


@needs_cuda
@pytest.mark.parametrize("n", [1, 2, 7, 16, 31, 33, 64])
@pytest.mark.parametrize("n_q, n_kv", HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_equals_decoding_column_by_column(head_dim, n_q, n_kv, n):
    p = problem(n_q, n_kv, head_dim, 300, n=n, seed=2)
    for start in (0, 63, 200):
        positions = list(range(start, start + n))
        lengths = [position + 1 for position in positions]
        first, second = launch(p, positions, "rope_kv", "prefill", rope=False, repeats=2)
        assert_same(first, second)
        assert_written(p, first, positions)
        assert_attends(p, first, lengths)
        turned = rotate(p.q, p.cos[positions], p.sin[positions])
        np.testing.assert_allclose(first.q, turned, atol=1e-6 * np.abs(p.q).max(), rtol=1e-6)
        warps = launch(p, positions, "rope_kv", "one_warp", rope=False)[0]
        assert_attends(p, warps, lengths)
        # the same columns, one at a time, over the cache that prefill left
        keys, values = bf16_to_f32(first.keys), bf16_to_f32(first.values)
        for column in (0, n // 2, n - 1):
            alone = Problem(
                *(a[column : column + 1] for a in (p.q, p.k, p.v)), keys, values, p.cos, p.sin
            )
            decoded = run_decode(alone, lengths[column])
            difference = np.abs(decoded.out[0] - first.out[column]).max()
            assert difference <= 2 * TOLERANCE * np.abs(values[: lengths[column]]).max()


@needs_cuda
def test_columns_may_come_in_any_order_of_positions():
    """Each column has its own prefix: nothing may take the last one's length for all."""
    p = problem(6, 2, 64, 300, n=5, seed=3)
    positions = [207, 205, 209, 206, 208]
    answer = launch(p, positions, "rope_kv", "prefill", rope=False)[0]
    assert_written(p, answer, positions)
    assert_attends(p, answer, [position + 1 for position in positions])


# ---- C5: very negative scores and splits without a key ----


def negative_scores(head_dim: int, length: int, max_seq: int) -> Problem:
    """All scores about -1e5, exact in float32, within a few units of each other; no rotation.

    The score is the sum over equal large products plus that of the last dim, which varies.
    """
    rng = np.random.default_rng(length)
    n_q, n_kv = 14, 2
    q = np.full((1, n_q, head_dim), 512.0, np.float32)
    q[:, :, -1] = 1.0
    large = bf16(-1e5 * np.sqrt(head_dim) / (512.0 * (head_dim - 1)))
    keys = np.full((max_seq, n_kv, head_dim), large, np.float32)
    keys[:, :, -1] = rng.integers(-8, 9, (max_seq, n_kv))
    values = bf16(rng.standard_normal((max_seq, n_kv, head_dim), dtype=np.float32))
    k, v = keys[length - 1][None], values[length - 1][None]
    cos, sin = np.ones((max_seq, head_dim), np.float32), np.zeros((max_seq, head_dim), np.float32)
    return Problem(q, k, v, keys, values, cos, sin)


@needs_cuda
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 512, 513, 2000])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_of_minus_100000_still_win(head_dim, length):
    p = negative_scores(head_dim, length, 2048)
    scores = np.einsum("d,td->t", p.q[0, 0], p.keys[:length, 0]) / np.sqrt(head_dim)
    assert (-1.1e5 < scores).all() and (scores < -0.9e5).all()
    for merge in MERGES.values():
        if supports(merge):
            # float32 has units of 1/128 there: weights are good to a few per cent
            assert_attends(p, run_decode(p, length, merge), [length], tolerance=5e-2)
    for kernels, rope in (
        (("rope_kv", "prefill"), False), (("rope_kv", "one_warp"), False),
        (("flash_two_launch",), True),
    ):  # fmt: skip
        assert_attends(p, launch(p, [length - 1], *kernels, rope=rope)[0], [length], 5e-2)


@needs_cuda
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_only_key_wins_whatever_its_score(head_dim):
    """Length 1 and many splits: the output is the value, to the bit."""
    p = problem(16, 2, head_dim, 2048, seed=4)
    for scale in (1e4, -1e4, 0.0, 1e-20):
        scaled = replace(p, q=p.q * np.float32(scale))
        expected = np.repeat(bf16(p.v), 8, axis=1)
        for merge in MERGES.values():
            if supports(merge):
                np.testing.assert_array_equal(run_decode(scaled, 1, merge).out, expected)
        np.testing.assert_array_equal(
            launch(scaled, [0], "rope_kv", "prefill", rope=False)[0].out, expected
        )


@needs_cuda
@pytest.mark.parametrize("winner", [0, 62, 63, 64, 128, 511, 512, 699])
def test_one_high_score_among_very_negative_ones(winner):
    """All other splits weigh nothing: no NaN, and the winner's value comes out to the bit."""
    p = negative_scores(64, 700, 2048)
    keys = p.keys.copy()
    keys[winner] = 0.0
    p = replace(p, keys=keys, k=keys[699][None])
    expected = np.repeat(p.values[winner][None], 7, axis=1)
    for merge in MERGES.values():
        if supports(merge):
            np.testing.assert_array_equal(run_decode(p, 700, merge).out, expected)


# ---- what the binding refuses ----


@needs_cuda
def test_arguments_that_do_not_fit_are_refused():
    attn = native.cuda("attn")
    p = problem(4, 2, 64, 128)
    q, k, v = (torch.from_numpy(a.reshape(1, -1)).cuda() for a in (p.q, p.k, p.v))
    good = {
        "q": q, "k": k, "v": v,
        "cos": torch.from_numpy(p.cos).cuda(), "sin": torch.from_numpy(p.sin).cuda(),
        "position": torch.zeros(1, dtype=torch.int64, device="cuda"),
        "valid_len": torch.ones(1, dtype=torch.int32, device="cuda"),
        "k_cache": torch.zeros(128, 2, 64, dtype=torch.bfloat16, device="cuda"),
        "v_cache": torch.zeros(128, 2, 64, dtype=torch.bfloat16, device="cuda"),
        "partials": torch.zeros(attn.partial_floats(4, 2, 64, 128), device="cuda"),
        "counters": torch.zeros(4, dtype=torch.int32, device="cuda"),
        "out": torch.zeros(1, 256, device="cuda"),
    }  # fmt: skip
    attn.decode(*good.values(), True, 0, False)
    bad = {
        "q": q[:, :200], "k": k[:, :64], "v": v.half(), "cos": good["cos"][:64],
        "sin": good["sin"].double(), "position": good["position"].int(),
        "valid_len": good["valid_len"].long(), "k_cache": good["k_cache"].float(),
        "v_cache": good["v_cache"][:64], "partials": good["partials"][:-1],
        "counters": good["counters"][:2], "out": good["out"][:, :128],
    }  # fmt: skip
    for name, value in bad.items():
        with pytest.raises(ValueError):
            attn.decode(*(good | {name: value}).values(), True, 0, False)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
