"""The CPU products with packed matrices, against `decode_nf4` and float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from decodev2 import linear, native, toggles
from decodev2.linear import PackedLinear, from_packed, nf4_linear
from decodev2.nf4 import GROUP, LEVELS, Packed, decode_nf4, encode_nf4, padded

WIDTHS = (2, 16, 64, 65, 96, 128, 192, 320, 576, 896, 1376)
ROWS = (1, 2, 3, 15, 16, 17, 33, 65, 100)
COLUMNS = (1, 2, 3, 5, 12, 13, 32, 64)
GUARD = 64  # floats on either side of an output
CANARY = np.float32(-7.25e31)


def random_matrix(rows, width, seed=0):
    rng = np.random.default_rng([seed, rows, width])
    return encode_nf4(rng.standard_normal((rows, width), dtype=np.float32))


def random_rows(n, width, seed=1):
    rng = np.random.default_rng([seed, n, width])
    return torch.from_numpy(rng.standard_normal((n, width), dtype=np.float32))


class Guarded:
    """A tensor [n, width] in the middle of a larger one, full of NaN; `check` finds writes
    outside it."""

    def __init__(self, n, width, fill=np.nan):
        self.memory = torch.full((n * width + 2 * GUARD,), float(CANARY))
        self.tensor = self.memory[GUARD : GUARD + n * width].view(n, width)
        self.tensor.fill_(fill)

    def check(self):
        outside = torch.cat([self.memory[:GUARD], self.memory[-GUARD:]])
        assert (outside == float(CANARY)).all(), "written outside the output"
        return self.tensor.numpy()


def product(x, w: PackedLinear, start=None):
    """W x through `nf4_linear`, output poisoned and guarded; `start` is what it adds to."""
    n = len(x)
    y = Guarded(n, w.rows)
    if start is not None:
        y.tensor.copy_(start)
    panel = Guarded(n, padded(w.cols))
    nf4_linear(x, w, y.tensor, panel.memory[GUARD:-GUARD], add=start is not None)
    panel.check()
    return y.check().copy()


def assert_close(got, want, magnitude):
    """|got - want| within 2e-6 of sum |w x|: float32 rounding passes, a lost or doubled term does
    not (each is about 1 / K of that sum, K < 1400)."""
    assert np.isfinite(got).all()
    worst = np.max(np.abs(got - want) / np.maximum(magnitude, 1e-30))
    assert worst < 2e-6, f"off by {worst:.1e} of the sum of magnitudes"


@pytest.mark.parametrize("width", WIDTHS)
def test_products_match_float64(width, isa):
    x = random_rows(64, width)
    x64 = x.numpy().astype(np.float64)
    for rows in ROWS:
        packed = random_matrix(rows, width)
        w = from_packed(packed)
        dense = decode_nf4(packed).astype(np.float64)
        want, magnitude = x64 @ dense.T, np.abs(x64) @ np.abs(dense.T)
        start = random_rows(64, rows, seed=2)
        plain, added = product(x, w), product(x, w, start)
        assert_close(plain, want, magnitude)
        assert_close(added, want + start.numpy(), magnitude + np.abs(start.numpy()))
        # Every number of columns gives the same bits, wherever the columns stand.
        for n in COLUMNS:
            first, last = slice(n), slice(64 - n, 64)
            np.testing.assert_array_equal(product(x[first], w), plain[first])
            np.testing.assert_array_equal(product(x[last], w, start[last]), added[last])


@pytest.mark.parametrize("width", WIDTHS)
def test_instruction_sets_agree(width):
    kernels = native.cpu()
    before = kernels.isa()
    x, found = random_rows(13, width), {}
    w = from_packed(random_matrix(100, width))
    try:
        for name in ("portable", "avx2", "avx512"):
            try:
                kernels.set_isa(name)
            except ValueError:  # not on this CPU
                continue
            assert kernels.isa() == name
            found[name] = product(x, w), product(x[:1], w), swiglu(x, w, w), swiglu(x[:1], w, w)
    finally:
        kernels.set_isa(before)
    assert "portable" in found
    if len(found) == 1:
        pytest.skip("this CPU has the portable kernels only")
    if "avx512" in found:
        for a, b in zip(found["avx2"], found["avx512"], strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(found["portable"], found["avx2"], strict=True):
        assert np.abs(a - b).max() < 1e-5 * np.abs(b).max()


def test_level_table_is_the_codecs(isa):
    """One-hot columns through scale 1 read the table in the kernels back, bit for bit."""
    codes = np.arange(16, dtype=np.uint8)
    row = np.tile(codes[0::2] | codes[1::2] << 4, GROUP // 16)  # columns 0..15 have codes 0..15
    packed = Packed(np.stack([row] * 3), np.ones((3, 1), np.float16), (3, GROUP))
    w = from_packed(packed)
    one_hot = torch.eye(GROUP)
    for got in (product(one_hot, w), np.concatenate([product(x[None], w) for x in one_hot])):
        np.testing.assert_array_equal(got, np.tile(LEVELS, GROUP // 16)[:, None].repeat(3, 1))
    out = torch.empty(3, GROUP)
    native.cpu().embed(torch.arange(3), w.codes, w.scales, w.rows, out)
    np.testing.assert_array_equal(out.numpy(), np.tile(LEVELS, (3, GROUP // 16)))


def test_scales_are_any_float16(isa):
    """Subnormal, negative, largest and zero scales: what the bits say, in every kernel."""
    scales = np.array([6e-8, 5.9e-5, 6.1e-5, -1.5, 65504.0, 0.0, -0.0, 1.0], np.float16)
    codes = np.full((len(scales), GROUP // 2), 0xFF, np.uint8)  # every level 1.0
    packed = Packed(codes, scales[:, None], (len(scales), GROUP))
    w = from_packed(packed)
    x = torch.zeros(2, GROUP)
    x[:, 0] = torch.tensor([1.0, 2.0])
    want = scales.astype(np.float32) * np.array([[1], [2]], np.float32)
    np.testing.assert_array_equal(product(x, w), want)
    np.testing.assert_array_equal(product(x[:1], w), want[:1])
    out = torch.empty(len(scales), 1)
    native.cpu().embed(torch.arange(len(scales)), w.codes, w.scales, w.rows, out)
    np.testing.assert_array_equal(out[:, 0].numpy(), want[0])


@pytest.mark.parametrize("width", (64, 128, 192, 320, 576, 896))
@pytest.mark.parametrize("rows", (1, 2, 3, 17, 65))
def test_rows_cut_out_of_a_larger_matrix(rows, width):
    whole = random_matrix(rows + 1, width)
    want = product(random_rows(5, width), from_packed(whole))[:, 1:]
    cut = Packed(whole.codes[1:], whole.scales[1:], (rows, width))
    np.testing.assert_array_equal(product(random_rows(5, width), from_packed(cut)), want)
    # The same bytes at an odd address, as a file that is read in pieces may give them.
    shifted = np.empty(cut.codes.size + 1, np.uint8)[1:].reshape(cut.codes.shape)
    shifted[:] = cut.codes
    odd = Packed(shifted, cut.scales, cut.shape)
    np.testing.assert_array_equal(product(random_rows(5, width), from_packed(odd)), want)


def test_layout_adds_no_byte_but_padding_rows():
    for rows, width in ((16, 64), (17, 65), (100, 1376)):
        packed, w = random_matrix(rows, width), from_packed(random_matrix(rows, width))
        assert w.nbytes == packed.nbytes // rows * (-(-rows // 16) * 16)


# ---- qkv, swiglu, head ----


def qkv(x, matrices, biases):
    weights = [from_packed(m) for m in matrices]
    outs = [Guarded(len(x), w.rows) for w in weights]
    panel = torch.full((len(x) * padded(x.shape[1]),), np.nan)
    parts = [part for w in weights for part in (w.codes, w.scales)]
    native.cpu().qkv(x, *parts, *biases, *(o.tensor for o in outs), panel)
    return [o.check().copy() for o in outs]


@pytest.mark.parametrize("width", (64, 96, 576))
@pytest.mark.parametrize("n", (1, 7))
def test_qkv_is_three_products_with_bias(width, n, isa):
    rows = (100, 33, 16)
    x = random_rows(n, width)
    matrices = [random_matrix(r, width, seed=r) for r in rows]
    biases = [random_rows(1, r, seed=3)[0] * 50 for r in rows]
    without = qkv(x, matrices, [None] * 3)
    for got, packed in zip(without, matrices, strict=True):
        np.testing.assert_array_equal(got, product(x, from_packed(packed)))
    for got, plain, bias in zip(qkv(x, matrices, biases), without, biases, strict=True):
        np.testing.assert_array_equal(got, plain + bias.numpy())
    only_k = qkv(x, matrices, [None, biases[1], None])
    np.testing.assert_array_equal(only_k[1], without[1] + biases[1].numpy())
    np.testing.assert_array_equal(only_k[2], without[2])


def swiglu(x, gate: PackedLinear, up: PackedLinear):
    out = Guarded(len(x), gate.rows)
    panel = torch.full((len(x) * padded(x.shape[1]),), np.nan)
    native.cpu().swiglu(x, gate.codes, gate.scales, up.codes, up.scales, out.tensor, panel)
    return out.check().copy()


@pytest.mark.parametrize("width", (64, 96, 576))
@pytest.mark.parametrize("rows", (1, 16, 33, 100))
def test_swiglu_matches_float64(rows, width, isa):
    x = random_rows(13, width)
    gate, up = random_matrix(rows, width, 5), random_matrix(rows, width, 6)
    g, u = (x.numpy().astype(np.float64) @ decode_nf4(m).T.astype(np.float64) for m in (gate, up))
    want = g / (1 + np.exp(-g)) * u
    got = swiglu(x, from_packed(gate), from_packed(up))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * width)
    for n in (1, 2, 12):
        np.testing.assert_array_equal(swiglu(x[:n], from_packed(gate), from_packed(up)), got[:n])


@pytest.mark.parametrize("n", (1, 2))
def test_silu_far_out_is_zero_or_the_identity(n, isa):
    """Gates of +-1 to +-1e4: exp must neither overflow to NaN nor lose the sign."""
    gates = np.array([-1e4, -200.0, -88.5, -1.0, 0.0, 1.0, 88.5, 200.0, 1e4], np.float32)
    ones = Packed(
        np.full((9, GROUP // 2), 0xFF, np.uint8), gates.astype(np.float16)[:, None], (9, GROUP)
    )
    up = Packed(ones.codes, np.ones((9, 1), np.float16), (9, GROUP))
    x = torch.zeros(n, GROUP)
    x[:, 3] = 1.0
    got = swiglu(x, from_packed(ones), from_packed(up))[-1]
    exact = gates.astype(np.float16).astype(np.float64)
    with np.errstate(over="ignore"):
        want = exact / (1 + np.exp(-exact))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-30)


def head(x, packed):
    w = from_packed(packed)
    logits, next_token = Guarded(1, w.rows), torch.tensor([123456])
    panel = torch.full((padded(x.shape[1]),), np.nan)
    native.cpu().head(x, w.codes, w.scales, logits.tensor, next_token, panel)
    return logits.check()[0].copy(), int(next_token)


VOCAB = 40001


@pytest.fixture(scope="module")
def big_head():
    return random_matrix(VOCAB, 64)


def winners(packed, x, *rows):
    """A head in which `rows` tie for the largest logit: levels +-1 with the signs of x."""
    codes, scales = packed.codes.copy(), packed.scales.copy()
    high = np.where(x[0].numpy() > 0, 15, 0).astype(np.uint8)
    codes[list(rows)] = high[0::2] | high[1::2] << 4
    scales[list(rows)] = 4.0
    return Packed(codes, scales, packed.shape)


def test_head_is_product_and_argmax(big_head, isa):
    for seed in range(5):
        x = random_rows(1, 64, seed)
        logits, best = head(x, big_head)
        np.testing.assert_array_equal(logits, product(x, from_packed(big_head))[0])
        assert best == int(np.argmax(logits))


@pytest.mark.parametrize("ties", [(5, 900), (900, 20000, VOCAB - 1), (16, 17), (0, VOCAB - 1)])
def test_lowest_id_wins_a_tie_over_blocks_and_threads(ties, big_head, set_threads, isa):
    x = random_rows(1, 64)
    packed = winners(big_head, x, *ties)
    for threads in (1, 2, 3):
        set_threads(threads)
        logits, best = head(x, packed)
        assert (logits[list(ties)] == logits.max()).all() and best == ties[0]


def test_nan_never_wins(big_head, set_threads, isa):
    x = random_rows(1, 64)
    for bad in ([0], [4999], list(range(0, VOCAB, 7)), [VOCAB - 1]):
        packed = winners(big_head, x, 5001)
        packed.scales[bad] = np.nan
        for threads in (1, 2, 3):
            set_threads(threads)
            logits, best = head(x, packed)
            assert np.isnan(logits[bad]).all() and best == 5001


@pytest.mark.parametrize("rows", (3, VOCAB))
def test_no_finite_logit_gives_minus_one(rows, isa):
    packed = random_matrix(rows, 64)
    logits, best = head(torch.full((1, 64), np.nan), packed)
    assert np.isnan(logits).all() and best == -1


def test_thread_count_changes_no_bit(set_threads, isa):
    x = random_rows(13, 320)
    a, b = random_matrix(777, 320, 1), random_matrix(777, 320, 2)
    small = random_matrix(33, 320, 3)
    one_row = random_rows(1, 320)
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        found.append(
            [
                product(x, from_packed(a)),
                product(one_row, from_packed(a), start=random_rows(1, 777)),
                swiglu(x, from_packed(a), from_packed(b)),
                swiglu(one_row, from_packed(a), from_packed(b)),
                *qkv(one_row, [a, small, small], [None] * 3),
                *qkv(x, [a, small, small], [None] * 3),
                *head(one_row, a),
            ]
        )
    for other in found[1:]:
        for want, got in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(want, got)


# ---- what the binding refuses ----


def refused(call, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    return str(caught.value)


W = from_packed(random_matrix(20, 100))
PANEL = torch.zeros(64 * 128)
Y = torch.zeros(1, 20)

BAD_PRODUCTS = {
    "x too wide": (dict(x=torch.zeros(1, 129)), r"x is \[1, 129\]"),
    "x too narrow": (dict(x=torch.zeros(1, 64)), r"x is \[1, 64\]"),
    "x 1-D": (dict(x=torch.zeros(100)), r"x is \[100\]"),
    "x empty": (dict(x=torch.zeros(0, 100), y=torch.zeros(0, 20)), r"x is \[0, 100\]"),
    "x too many rows": (dict(x=torch.zeros(65, 100), y=torch.zeros(65, 20)), r"x is \[65, 100\]"),
    "x float64": (dict(x=torch.zeros(1, 100, dtype=torch.float64)), "x is Double"),
    "x transposed": (dict(x=torch.zeros(100, 2).T, y=torch.zeros(2, 20)), "contiguous"),
    "y another n": (dict(y=torch.zeros(2, 20)), r"y is .*\[2, 20\], needs .*\[1, 20\]"),
    "y another width": (dict(y=torch.zeros(1, 21)), r"y is .*\[1, 21\], needs .*\[1, 20\]"),
    "y 1-D": (dict(y=torch.zeros(20)), r"y is .*\[20\]"),
    "y float16": (dict(y=torch.zeros(1, 20).half()), "y is Half"),
    "y strided": (dict(y=torch.zeros(1, 40)[:, ::2]), r"y is Float \[1, 20\]"),
    "panel short": (dict(panel=torch.zeros(127)), r"panel is Float \[127\]"),
    "codes float": (dict(codes=W.codes.float()), "codes is Float"),
    "codes flat": (dict(codes=W.codes.reshape(-1)), "packed matrix"),
    "scales float32": (dict(scales=W.scales.float()), "scales is Float"),
    "scales short": (dict(scales=W.scales[:1].contiguous()), "packed matrix"),
    "rows past the blocks": (dict(rows=33, y=torch.zeros(1, 33)), "do not fit 33 rows"),
    "rows fewer than the blocks": (dict(rows=16, y=torch.zeros(1, 16)), "do not fit 16 rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PRODUCTS)
def test_linear_refuses(case):
    change, said = BAD_PRODUCTS[case]
    good = dict(x=torch.zeros(1, 100), codes=W.codes, scales=W.scales, rows=20, y=Y, panel=PANEL)

    def call(a):
        native.cpu().linear(a["x"], a["codes"], a["scales"], a["rows"], a["y"], False, a["panel"])

    call(good)
    assert re.search(said, refused(lambda: call(good | change)))


def test_fused_products_refuse_matrices_of_another_width():
    wide = from_packed(random_matrix(20, 300))
    x, y = torch.zeros(1, 100), torch.zeros(1, 20)
    cpu = native.cpu()
    said = refused(lambda: cpu.swiglu(x, W.codes, W.scales, wide.codes, wide.scales, y, PANEL))
    assert "128 and 320 columns" in said
    matrices = (W.codes, W.scales) * 2 + (wide.codes, wide.scales)
    refused(lambda: cpu.qkv(x, *matrices, None, None, None, y, y, y, PANEL))
    matrices = (W.codes, W.scales, wide.codes, wide.scales, W.codes, W.scales)
    refused(lambda: cpu.qkv(x, *matrices, None, None, None, y, y, y, PANEL))
    short = torch.zeros(19)
    matrices = (W.codes, W.scales) * 3
    refused(lambda: cpu.qkv(x, *matrices, short, None, None, y, y, y, PANEL))


def test_head_refuses_more_than_one_row():
    token = torch.zeros(1, dtype=torch.int64)
    said = refused(
        lambda: native.cpu().head(torch.zeros(2, 100), W.codes, W.scales, Y, token, PANEL)
    )
    assert "x is [2, 100]" in said
    refused(lambda: native.cpu().head(torch.zeros(1, 100), W.codes, W.scales, Y, Y, PANEL))


def test_switches_say_how_a_gemv_starts():
    for switches, start in (
        ({"pdl": False}, 0), ({"pdl": True}, 1), ({"pdl": True, "ahead": "nothing"}, 2),
        ({"pdl": False, "ahead": "nothing"}, 0),
    ):  # fmt: skip
        with toggles.using(**switches):
            assert linear._start() == start


def test_unknown_instruction_set_is_refused():
    assert "sse9" in refused(lambda: native.cpu().set_isa("sse9"))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
