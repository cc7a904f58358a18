"""The one-column CUDA kernels against the codec, over shapes, tails and epilogues."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodev2 import native, panels
from decodev2.linear import shared_tiles
from decodev2.nf4 import decode_nf4, encode_nf4
from decodev2.synth import random_matrix

ALONE = (None,) * 4  # no half fragments in or out, no tiles between CTAs
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
VARIANTS = {"direct": 0, "ring 8x2": 1, "ring 16x4": 2, "ring 16x3": 3}
KS = [64, 128, 192, 320, 576, 896, 1376, 2048, 4864, 11008, 27648]
ROWS = [1, 2, 3, 16, 17, 65, 576, 2560]


def exact(packed, x: np.ndarray) -> np.ndarray:
    return decode_nf4(packed).astype(np.float64) @ x.astype(np.float64)


def relative(found: torch.Tensor, expected: np.ndarray, size: float | None = None) -> float:
    """|found - expected| over `size`, which is |expected| unless the terms may cancel."""
    found = found.cpu().numpy().astype(np.float64).ravel()
    assert np.isfinite(found).all()
    return np.linalg.norm(found - expected) / (size or np.linalg.norm(expected))


def size_of(packed, x: np.ndarray) -> float:
    """Length of the vector of row sizes sqrt(sum of squared terms): what rounding scales with."""
    return float(np.linalg.norm(decode_nf4(packed).astype(np.float64) * x))


@pytest.mark.parametrize("groups", [1, 3, 4, 5, 9])
def test_panels_hold_the_same_codes_and_scales(groups):
    """Every weight is found where nf4.cuh says it lies. Needs no GPU."""
    rng = np.random.default_rng(groups)
    packed = encode_nf4(rng.standard_normal((35, 64 * groups)).astype(np.float32))
    linear = panels.from_packed(packed, "cpu")
    assert linear.nbytes == 48 * groups * 34
    data = linear.panels.numpy()
    for _ in range(300):
        row, k = rng.integers(35), rng.integers(64 * groups)
        block, panel = k // 64, k // 256
        width = min(4, groups - panel * 4)
        start = panel * 2176
        m, h, t = k % 64 // 16, k % 16 // 8, k % 8 // 2
        lane, half = row % 8 * 4 + t, row % 16 // 8
        at = start + block % 4 * 512 + lane * 16 + half * 8 + 2 * m + h
        byte = data[row // 16, at]
        assert (byte >> 4 * (k % 2)) & 15 == (packed.codes[row, k // 2] >> 4 * (k % 2)) & 15
        at = start + width * 512 + (row % 16 * width + block % 4) * 2
        scale = data[row // 16, at : at + 2].view(np.float16)[0]
        assert scale == packed.scales[row, block]


@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", KS)
def test_gemv(variant, k):
    if variant == "ring 8x2" and k > 8192:
        pytest.skip("x does not fit beside a second CTA")
    if variant == "ring 16x4" and k > 16384:
        pytest.skip("x does not fit beside four stages")
    rng = np.random.default_rng(k)
    kernel = native.cuda("nf4_gemv").gemv
    for rows in ROWS:
        packed = random_matrix(rows, k, rng)
        w = panels.from_packed(packed, "cuda")
        x = rng.standard_normal(k).astype(np.float32)
        bias, residual = rng.standard_normal((2, rows)).astype(np.float32)
        norm = rng.uniform(0.5, 1.5, k).astype(np.float32)
        cuda = {n: torch.from_numpy(v).cuda()[None] for n, v in
                dict(x=x, bias=bias, residual=residual).items()}  # fmt: skip
        y = torch.full((1, rows), torch.nan, device="cuda")

        def run(x=cuda["x"], y=y, norm_weight=None, eps=0.0, bias=None, residual=None, w=w):
            kernel(x, w.panels, w.tiles, y, 0, norm_weight, eps, bias, residual, None, None,
                   VARIANTS[variant], False, *ALONE)  # fmt: skip

        size = size_of(packed, x)
        run()
        assert relative(y, exact(packed, x), size) < 1e-3, (rows, "plain")
        first = y.clone()
        for _ in range(3):
            y.fill_(torch.nan)
            run()
            assert torch.equal(y, first), (rows, "repeat differs")
        y.copy_(cuda["residual"])
        run(bias=cuda["bias"], residual=y)
        assert relative(y, exact(packed, x) + bias + residual, size) < 1e-3, (
            rows,
            "bias, residual",
        )
        for scale in (1e6, 1e-6):  # beyond the range of half, and near its smallest
            run(x=cuda["x"] * scale)
            assert relative(y, exact(packed, x) * scale, size * scale) < 1e-3, (rows, scale)
        run(norm_weight=torch.from_numpy(norm).cuda(), eps=1e-5)
        normed = x / np.sqrt(np.mean(np.square(x, dtype=np.float64)) + 1e-5) * norm
        assert relative(y, exact(packed, normed), size_of(packed, normed)) < 1e-3, (rows, "norm")


@needs_cuda
@pytest.mark.parametrize("variant", ["direct", "ring 8x2", "ring 16x4"])
@pytest.mark.parametrize("units, k", [(8, 64), (96, 576), (1376, 192), (4864, 896), (11008, 2048)])
def test_swiglu(variant, units, k):
    rng = np.random.default_rng(units)
    gate, up = random_matrix(units, k, rng), random_matrix(units, k, rng)
    w = panels.gate_up_from_packed(gate, up, "cuda")
    x = rng.standard_normal(k).astype(np.float32)
    y = torch.full((1, units), torch.nan, device="cuda")
    native.cuda("nf4_gemv").gemv(
        torch.from_numpy(x).cuda()[None], w.panels, w.tiles, y, 1, None, 0.0, None, None,
        None, None, VARIANTS[variant], False, *ALONE,
    )  # fmt: skip
    g, u = exact(gate, x), exact(up, x)
    assert relative(y, g / (1 + np.exp(-g)) * u) < 2e-3


@needs_cuda
@pytest.mark.parametrize("variant", ["direct", "ring 8x2", "ring 16x4"])
def test_head_candidates(variant):
    """The best candidate is the argmax, the lowest id of equal rows."""
    rng = np.random.default_rng(5)
    packed = random_matrix(40001, 896, rng)
    x = rng.standard_normal(896).astype(np.float32)
    best = int(np.argmax(exact(packed, x)))
    for twin in (900, 39000, best):
        packed.codes[twin], packed.scales[twin] = packed.codes[best], packed.scales[best]
    w = panels.from_packed(packed, "cuda")
    logits = torch.full((1, 40001), torch.nan, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    values = torch.full((2 * sms,), -torch.inf, device="cuda")
    ids = torch.full((2 * sms,), -1, dtype=torch.int32, device="cuda")
    native.cuda("nf4_gemv").gemv(
        torch.from_numpy(x).cuda()[None], w.panels, w.tiles, logits, 2, None, 0.0, None, None,
        values, ids, VARIANTS[variant], False, *ALONE,
    )  # fmt: skip
    assert relative(logits, exact(packed, x)) < 1e-3
    top = values.max()
    found = int(ids[(values == top) & (ids >= 0)].min())
    assert found == min(900, best) == int(logits.argmax())


@needs_cuda
@pytest.mark.parametrize("variant", ["direct", "ring 8x2", "ring 16x3"])
@pytest.mark.parametrize("units", [64, 200, 1376, 4864, 11008])
def test_act_is_handed_on_as_half(variant, units):
    """swiglu leaves act twice; down with the half fragments agrees with down of the floats."""
    if variant == "ring 8x2" and units > 8192:
        pytest.skip("x does not fit beside a second CTA")
    rng = np.random.default_rng(units)
    gate, up, down = (
        random_matrix(r, c, rng) for r, c in ((units, 128), (units, 128), (96, units))
    )
    gate_up = panels.gate_up_from_packed(gate, up, "cuda")
    w = panels.from_packed(down, "cuda")
    x = rng.standard_normal(128).astype(np.float32)
    for scale in (1.0, 300.0):  # act in the tens of thousands: half alone would be at its end
        act = torch.full((1, units), torch.nan, device="cuda")
        half = torch.zeros(-(-units // 64) * 128, dtype=torch.uint8, device="cuda")
        kernel = native.cuda("nf4_gemv").gemv
        kernel(
            torch.from_numpy(x * np.float32(scale)).cuda()[None], gate_up.panels, gate_up.tiles,
            act, 1, None, 0.0, None, None, None, None, VARIANTS[variant], False, None, half, None,
            None,
        )  # fmt: skip
        expected = exact(down, act[0].cpu().numpy())
        size = size_of(down, act[0].cpu().numpy())
        y = torch.zeros(1, 96, device="cuda")
        seen = []
        for _ in range(3):
            kernel(
                torch.full_like(act, torch.nan), w.panels, w.tiles, y, 0, None, 0.0, None, None,
                None, None, VARIANTS[variant], False, half, None, None, None,
            )  # fmt: skip
            seen.append(y.clone())
        assert relative(y, expected, size) < 1e-3
        assert all(torch.equal(one, seen[0]) for one in seen)


@needs_cuda
@pytest.mark.parametrize("k", [2304, 4864, 9984])
def test_a_tile_between_two_ctas(k):
    """Where whole tiles would leave most CTAs idle, panels are shared out; the same bits twice."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    rng = np.random.default_rng(k)
    variant = "ring 8x2" if k < 8192 else "ring 16x4"
    rows = (2 * sms + 1 if variant == "ring 8x2" else sms + 5) * 16 - 3
    packed = random_matrix(rows, k, rng)
    w = panels.from_packed(packed, "cuda")
    x, residual = rng.standard_normal(k), rng.standard_normal(rows)
    x, residual = x.astype(np.float32), torch.from_numpy(residual.astype(np.float32)).cuda()[None]
    sums, counters = shared_tiles(w.tiles, "cuda")
    sums.fill_(torch.nan)
    seen = []
    for given in ((sums, counters), (sums, counters), (None, None)):
        y = residual.clone()
        native.cuda("nf4_gemv").gemv(
            torch.from_numpy(x).cuda()[None], w.panels, w.tiles, y, 0, None, 0.0, None, y, None,
            None, VARIANTS[variant], False, None, None, *given,
        )  # fmt: skip
        assert relative(y - residual, exact(packed, x), size_of(packed, x)) < 1e-3
        seen.append(y)
    assert torch.equal(seen[0], seen[1]) and not counters.any()
    if torch.cuda.get_device_capability()[0] >= 9:
        assert not torch.isnan(sums).all(), "no tile was shared"


@needs_cuda
@pytest.mark.parametrize("variant", ["direct", "ring 8x2", "ring 16x4"])
def test_every_start_gives_the_same_bits(variant):
    """Plain, programmatic, and programmatic that waits first; each link needs the one before."""
    rng = np.random.default_rng(11)
    packed = random_matrix(2048, 2048, rng)
    w = panels.from_packed(packed, "cuda")
    x = torch.from_numpy(rng.standard_normal((1, 2048), dtype=np.float32)).cuda()
    norm = torch.ones(2048, device="cuda")
    left = []
    for start in (0, 1, 2):
        y, z = x.clone(), torch.empty_like(x)
        for _ in range(40):
            native.cuda("nf4_gemv").gemv(
                y, w.panels, w.tiles, z, 0, norm, 1e-6, None, y, None, None, VARIANTS[variant],
                start, *ALONE,
            )  # fmt: skip
            y, z = z, y
        left.append(y)
    assert torch.isfinite(left[0]).all()
    assert torch.equal(left[0], left[1]) and torch.equal(left[0], left[2])
    with pytest.raises(ValueError, match="start is 3, needs 0 plain, 1 programmatic or 2"):
        native.cuda("nf4_gemv").gemv(
            x, w.panels, w.tiles, torch.empty_like(x), 0, None, 0.0, None, None, None, None,
            VARIANTS[variant], 3, *ALONE,
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
