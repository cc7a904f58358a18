"""The NF4 codec against its published rule, evaluated here by brute force."""

import tracemalloc
import warnings

import numpy as np
import pytest

from decodev2 import nf4
from decodev2.errors import CodecError

# As published; independent of the bit patterns in the module.
LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=np.float32,
)  # fmt: skip
WIDTHS = (1, 2, 63, 64, 65, 96, 127, 128, 576, 896, 1376)


def nearest(u):
    """The rule itself: smallest float32 squared distance, first index on ties."""
    u = np.asarray(u, dtype=np.float32).reshape(-1, 1)
    return ((u - LEVELS) ** 2).argmin(axis=1).astype(np.uint8)


def reference_encode(w):
    """Spec, group by group, in the plainest words: (codes [M, K_pad / 2], scales [M, groups])."""
    w = np.asarray(w).astype(np.float32)
    m, k = w.shape
    n_groups = -(-k // 64)
    codes = np.empty((m, n_groups * 32), np.uint8)
    scales = np.empty((m, n_groups), np.float16)
    for row in range(m):
        for g in range(n_groups):
            group = np.zeros(64, np.float32)
            part = w[row, g * 64 : (g + 1) * 64]
            group[: len(part)] = part
            scale = np.float16(np.abs(group).max() or 1.0)
            c = nearest(np.clip(group / np.float32(scale), -1, 1))
            codes[row, g * 32 : (g + 1) * 32] = c[0::2] + 16 * c[1::2]
            scales[row, g] = scale
    return codes, scales


def reference_decode(packed):
    m, k = packed.shape
    out = np.empty((m, packed.codes.shape[1] * 2), np.float32)
    out[:, 0::2] = LEVELS[packed.codes % 16]
    out[:, 1::2] = LEVELS[packed.codes // 16]
    return (out * np.repeat(packed.scales.astype(np.float32), 64, axis=1))[:, :k]


def codes_of(u):
    """Codes that `encode_nf4` gives to values in [-1, 1], each taken at scale 1."""
    u = np.asarray(u, dtype=np.float32)
    rows = -(-u.size // 63)
    w = np.zeros((rows, 64), np.float32)
    w[:, 63] = 1.0  # fixes the scale
    flat = np.zeros(rows * 63, np.float32)
    flat[: u.size] = u
    w[:, :63] = flat.reshape(rows, 63)
    packed = nf4.encode_nf4(w)
    assert (packed.scales == 1.0).all()
    codes = np.stack([packed.codes & 15, packed.codes >> 4], axis=2).reshape(rows, 64)
    return codes[:, :63].reshape(-1)[: u.size]


def neighbours(values, steps):
    """Each float32 value and the `steps` next ones on either side."""
    found = [np.asarray(values, np.float32)]
    for direction in (-2.0, 2.0):
        x = found[0]
        for _ in range(steps):
            x = np.nextafter(x, np.float32(direction))
            found.append(x)
    return np.concatenate(found)


# ---- golden values ----


def test_levels_are_the_published_ones():
    assert nf4.LEVELS.dtype == np.float32
    np.testing.assert_array_equal(nf4.LEVELS, LEVELS)
    assert nf4.LEVELS.view(np.uint32)[[0, 6, 7, 8, 15]].tolist() == [
        0xBF800000, 0xBDBA7871, 0, 0x3DA2FAFF, 0x3F800000,
    ]  # fmt: skip


def test_golden_rows():
    i = np.arange(64)
    w = np.stack([np.float32(i) / np.float32(63), np.float32(2 * i - 63) / np.float32(63)])
    packed = nf4.encode_nf4(w)
    assert packed.codes[0].tobytes().hex().upper() == (
        "778788889999A9AAAABABBBBCBCCCCCCDDDDDDDDEDEEEEEEEEEEEEFEFFFFFFFF"
    )
    assert packed.codes[1].tobytes().hex().upper() == (
        "00001011111121222233434454556676878899AABABBCCCCDDDDEEEEEEFEFFFF"
    )
    assert packed.scales.view(np.uint16).tolist() == [[0x3C00], [0x3C00]]
    error = np.abs(nf4.decode_nf4(packed).astype(np.float64) - w)
    assert np.sqrt((error**2).mean()) <= 0.05185
    assert error.max() <= 0.14508
    assert error.mean() <= 0.03980


def test_golden_two_columns():
    packed = nf4.encode_nf4([[0.0, 1.0]])
    assert packed.codes.tobytes().hex().upper() == "F7" + "77" * 31
    assert packed.scales.view(np.uint16).tolist() == [[0x3C00]]
    assert nf4.decode_nf4(packed).tolist() == [[0.0, 1.0]]


def test_selfcheck_passes_and_can_fail(monkeypatch):
    nf4.selfcheck()
    shifted = nf4.THRESHOLDS.copy()
    shifted[7] += 0.05
    monkeypatch.setattr(nf4, "THRESHOLDS", shifted)
    with pytest.raises(RuntimeError, match="golden row"):
        nf4.selfcheck()


# ---- decision thresholds ----


def test_thresholds_flip_exactly_where_the_rule_does():
    t = nf4.THRESHOLDS
    assert t.dtype == np.float32 and t.shape == (15,)
    below = np.nextafter(t, np.float32(-2))
    np.testing.assert_array_equal(nearest(t), np.arange(1, 16))
    np.testing.assert_array_equal(nearest(below), np.arange(15))


def test_codes_next_to_every_threshold_level_and_midpoint():
    middles = (LEVELS[:-1].astype(np.float64) + LEVELS[1:]) / 2
    points = np.concatenate([nf4.THRESHOLDS, LEVELS, middles.astype(np.float32)])
    u = neighbours(points, steps=200)
    u = u[np.abs(u) <= 1]
    np.testing.assert_array_equal(codes_of(u), nearest(u))


def test_codes_of_random_and_tiny_values():
    rng = np.random.default_rng(5)
    tiny = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1e-20, -1e-20], np.float32)
    bits = rng.integers(0, 0x3F800001, 300_000).astype(np.uint32)  # any magnitude up to 1.0
    bits |= rng.integers(0, 2, bits.size).astype(np.uint32) << 31
    u = np.concatenate([rng.uniform(-1, 1, 500_000), bits.view(np.float32), tiny])
    u = u.astype(np.float32)
    np.testing.assert_array_equal(codes_of(u), nearest(u))


# ---- whole matrices ----


@pytest.mark.parametrize("k", WIDTHS)
def test_encode_and_decode_follow_the_rule(k):
    rng = np.random.default_rng(k)
    w = rng.standard_normal((5, k)) * np.array([[1e-6], [0.02], [1.0], [40.0], [1e4]])
    packed = nf4.encode_nf4(w.astype(np.float32))
    codes, scales = reference_encode(w.astype(np.float32))
    np.testing.assert_array_equal(packed.codes, codes)
    np.testing.assert_array_equal(packed.scales.view(np.uint16), scales.view(np.uint16))
    assert packed.shape == (5, k) and packed.k_pad == -(-k // 64) * 64
    assert packed.nbytes == codes.nbytes + scales.nbytes
    assert nf4.packed_nbytes((5, k)) == (codes.nbytes, scales.nbytes)
    decoded = nf4.decode_nf4(packed)
    assert decoded.shape == (5, k) and decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded.view(np.uint32), reference_decode(packed).view(np.uint32))


@pytest.mark.parametrize("k", WIDTHS)
def test_a_group_never_crosses_a_row(k):
    """Rows of very different size, so a scale or tail from the wrong row shows grossly."""
    w = np.random.default_rng(k).uniform(0.5, 1.0, (7, k)).astype(np.float32)
    w *= (np.float32(10.0) ** np.arange(-3, 4, dtype=np.float32))[:, None]
    packed = nf4.encode_nf4(w)
    for row in range(7):
        alone = nf4.encode_nf4(w[row : row + 1])
        np.testing.assert_array_equal(packed.codes[row], alone.codes[0])
        np.testing.assert_array_equal(packed.scales[row], alone.scales[0])
    # Half the widest level gap plus the scale's own rounding.
    assert (np.abs(nf4.decode_nf4(packed) - w) <= 0.16 * w.max(axis=1, keepdims=True)).all()


def test_padding_columns_hold_the_zero_code():
    packed = nf4.encode_nf4(-np.ones((300, 65), np.float32))
    nibbles = np.stack([packed.codes & 15, packed.codes >> 4], axis=2).reshape(300, 128)
    assert (nibbles[:, :65] == 0).all() and (nibbles[:, 65:] == 7).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_other_float_types_and_layouts_are_taken_as_float32(dtype):
    w = np.random.default_rng(1).standard_normal((40, 100)).astype(dtype)
    want = nf4.encode_nf4(w.astype(np.float32))
    for same in (w, np.asfortranarray(w), np.repeat(w, 2, axis=1)[:, ::2], w.tolist()):
        got = nf4.encode_nf4(same)
        np.testing.assert_array_equal(got.codes, want.codes)
        np.testing.assert_array_equal(got.scales, want.scales)


def test_scale_rounded_below_the_largest_value_is_clipped():
    w = np.full((1, 64), 1.0004, np.float32)  # float16 rounds this to 1.0
    w[0, 1::2] = -1.0004
    packed = nf4.encode_nf4(w)
    assert packed.scales[0, 0] == 1.0
    assert set(packed.codes[0].tolist()) == {0x0F}


def test_many_chunks_give_the_same_as_one_row_at_a_time():
    w = np.random.default_rng(2).standard_normal((1500, 130)).astype(np.float32)
    packed = nf4.encode_nf4(w)
    codes, scales = reference_encode(w[::97])
    np.testing.assert_array_equal(packed.codes[::97], codes)
    np.testing.assert_array_equal(packed.scales[::97], scales)
    np.testing.assert_array_equal(nf4.decode_nf4(packed), reference_decode(packed))


def test_peak_memory_does_not_grow_with_the_matrix():
    w = np.random.default_rng(3).standard_normal((8192, 1024), dtype=np.float32)  # 32 MiB
    tracemalloc.start()
    packed = nf4.encode_nf4(w)
    encode_peak = tracemalloc.get_traced_memory()[1] - packed.nbytes
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    decoded = nf4.decode_nf4(packed)
    decode_peak = tracemalloc.get_traced_memory()[1] - held - decoded.nbytes
    tracemalloc.stop()
    assert encode_peak < 4e6, encode_peak
    assert decode_peak < 8e6, decode_peak


# ---- all-zero groups ----


def test_zero_groups_rows_and_matrices():
    w = np.random.default_rng(4).standard_normal((3, 192)).astype(np.float32)
    one_group, one_row = w.copy(), w.copy()
    one_group[1, 64:128] = 0
    one_row[2] = 0
    negative = np.full((2, 64), -0.0, np.float32)
    lone = np.zeros((2, 64), np.float32)
    lone[0, 17], lone[1, 40] = -0.25, 0.125
    cases = [one_group, one_row, np.zeros((4, 65), np.float32), negative, lone]
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for case in cases:
            packed = nf4.encode_nf4(case)
            decoded = nf4.decode_nf4(packed)
            zero = case == 0
            assert (decoded[zero].view(np.uint32) == 0).all()  # +0.0, never -0.0
            for row in range(case.shape[0]):
                for g in range(packed.scales.shape[1]):
                    if not case[row, g * 64 : (g + 1) * 64].any():
                        assert packed.scales[row, g] == 1.0
                        assert set(packed.codes[row, g * 32 : (g + 1) * 32].tolist()) == {0x77}
    np.testing.assert_array_equal(nf4.decode_nf4(nf4.encode_nf4(lone)), lone)


# ---- refusals ----


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.nan, "nan"),
        (np.inf, "inf"),
        (-np.inf, "inf"),
        (65520.0, "inf in float16"),
        (-1e30, "inf in float16"),
        (2.9802322e-08, "0.0 in float16"),  # half the smallest float16: ties to even, zero
        (1e-45, "0.0 in float16"),
    ],
)
def test_what_a_group_cannot_hold_is_refused_by_tensor_row_and_group(value, found):
    w = np.zeros((5000, 130), np.float32)
    w[4321, 70] = value
    with pytest.raises(CodecError) as caught, warnings.catch_warnings():
        warnings.simplefilter("error")
        nf4.encode_nf4(w, "model.layers.3.mlp.up_proj")
    message = str(caught.value)
    assert "\n" not in message
    for part in ("model.layers.3.mlp.up_proj", "row 4321", "group 1", found):
        assert part in message, message


def test_largest_and_smallest_scale_that_fit():
    w = np.zeros((2, 64), np.float32)
    w[0, 0], w[1, 0] = 65519.0, 2.9803e-08
    packed = nf4.encode_nf4(w)
    assert packed.scales.view(np.uint16).tolist() == [[0x7BFF], [0x0001]]
    assert nf4.decode_nf4(packed)[0, 0] == 65504.0


def test_float64_past_float32_is_refused_as_infinite():
    with pytest.raises(CodecError, match=r"row 0, group 0 .* holds inf"):
        nf4.encode_nf4(np.array([[1e300, 1.0]]))


@pytest.mark.parametrize(
    "w",
    [
        np.zeros(64, np.float32),
        np.zeros((0, 64), np.float32),
        np.zeros((2, 0), np.float32),
        np.zeros((2, 2, 64), np.float32),
        np.zeros((2, 64), np.int8),
        np.zeros((2, 64), complex),
    ],
    ids=["rank 1", "no rows", "no columns", "rank 3", "integers", "complex"],
)
def test_not_a_float_matrix(w):
    with pytest.raises(CodecError, match=r"q_proj: .* needs a float matrix"):
        nf4.encode_nf4(w, "q_proj")


def test_packed_parts_that_do_not_fit_are_refused():
    good = nf4.encode_nf4(np.ones((3, 65), np.float32))
    for codes, scales, shape in (
        (good.codes[:2], good.scales, (3, 65)),
        (good.codes, good.scales[:, :1], (3, 65)),
        (good.codes, good.scales.astype(np.float32), (3, 65)),
        (good.codes.astype(np.int16), good.scales, (3, 65)),
        (good.codes, good.scales, (3, 129)),
    ):
        with pytest.raises(CodecError, match="need "):
            nf4.Packed(codes, scales, shape)


# ---- decoding rows, multiplying ----


def test_decode_of_some_rows():
    packed = nf4.encode_nf4(np.random.default_rng(6).standard_normal((50, 96)).astype(np.float32))
    whole = nf4.decode_nf4(packed)
    for rows in (slice(None), slice(3, 9), slice(40, 400), slice(5, 5), slice(None, None, -7)):
        np.testing.assert_array_equal(nf4.decode_nf4(packed, rows), whole[rows])
    for ids in ([4], [49, 0, 0, 7], [-1], []):
        rows = np.array(ids, dtype=np.int64)
        np.testing.assert_array_equal(nf4.decode_nf4(packed, rows), whole[rows])
    with pytest.raises(IndexError):
        nf4.decode_nf4(packed, np.array([50]))


def test_rows_of_codes_and_scales_can_be_split_off():
    """Fused matrices are split by rows: any subset of rows is itself a packed matrix."""
    packed = nf4.encode_nf4(np.random.default_rng(7).standard_normal((12, 96)).astype(np.float32))
    half = nf4.Packed(packed.codes[1::2], packed.scales[1::2], (6, 96))
    np.testing.assert_array_equal(nf4.decode_nf4(half), nf4.decode_nf4(packed)[1::2])


@pytest.mark.parametrize(("m", "k", "n"), [(7, 65, 1), (64, 128, 5), (9000, 600, 2)])
def test_matmul(m, k, n):
    rng = np.random.default_rng(m)
    packed = nf4.encode_nf4(rng.standard_normal((m, k)).astype(np.float32))
    x = rng.standard_normal((k, n)).astype(np.float32)
    y = nf4.matmul_f32(packed, x)
    assert y.shape == (m, n) and y.dtype == np.float32
    want = reference_decode(packed).astype(np.float64) @ x
    np.testing.assert_allclose(y, want, rtol=0, atol=2e-6 * k)
    with pytest.raises(CodecError, match=rf"needs \[{k}, N\]"):
        nf4.matmul_f32(packed, x[1:])


# ---- bfloat16 ----


def test_bf16_of_every_pattern_round_trips():
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = nf4.bf16_to_f32(bits)
    back = nf4.bf16_bits(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert nan.sum() == 2 * 127 and np.isnan(nf4.bf16_to_f32(back[nan])).all()


def test_bf16_rounds_to_nearest_even():
    cases = {
        0x3F800000: 0x3F80,
        0x3F807FFF: 0x3F80,  # just under half
        0x3F808000: 0x3F80,  # tie, even below
        0x3F808001: 0x3F81,
        0x3F818000: 0x3F82,  # tie, even above
        0xBF818000: 0xBF82,
        0x3FFF8000: 0x4000,  # carries into the exponent
        0x00008000: 0x0000,  # subnormal tie
        0x00018000: 0x0002,
        0x80000000: 0x8000,  # negative zero
        0x7F7FFFFF: 0x7F80,  # past the largest bfloat16
        0x7F7F7FFF: 0x7F7F,
        0x7F800000: 0x7F80,
        0xFF800000: 0xFF80,
    }
    x = np.array(list(cases), np.uint32).view(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nf4.bf16_bits(x).tolist() == list(cases.values())
        assert nf4.bf16_bits(np.float32(-1.0)).shape == ()
    # NaNs whose payload lies only in the bits that are cut off, or would carry into the sign.
    nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = nf4.bf16_bits(nans.view(np.float32))
    assert np.isnan(nf4.bf16_to_f32(got)).all()
    assert (got >> 15).tolist() == [0, 1, 0, 1, 0]


def test_bf16_agrees_with_torch():
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(8).integers(0, 1 << 32, 600_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[~np.isnan(x)][None]
    want = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(nf4.bf16_bits(x), want)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
