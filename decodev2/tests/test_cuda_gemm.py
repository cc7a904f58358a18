"""The many-column CUDA product against the codec: columns, tails, odd rows, epilogues, sizes of x.

Errors are measured against the size of the terms, as in test_cuda_gemv.py: sums may cancel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from decodev2 import native, panels
from decodev2.nf4 import Packed, decode_nf4
from decodev2.synth import random_matrix

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NS = (1, 2, 7, 8, 9, 16, 31, 32, 33, 48, 64)
KS = (64, 128, 192, 320, 576, 896, 1000, 1376, 2048, 4864, 11008)  # 1000: inside a group
ODD_KS = (65, 77, 130, 1001)  # rows of x that start anywhere: no vector loads
ROWS = (1, 2, 3, 15, 17, 65, 576)
TOLERANCE = 1e-3  # x is rounded to half, levels to half


@dataclass(frozen=True)
class Matrix:
    """Weights in float64 and on the device."""

    exact: np.ndarray  # [rows, cols]
    linear: panels.PanelLinear

    def product(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64) @ self.exact.T

    def size(self, x: np.ndarray) -> np.ndarray:
        """[n] length of the vector of row sizes sqrt(sum of squared terms), for each column."""
        squares = np.square(x.astype(np.float64)) @ np.square(self.exact).T
        return np.sqrt(squares.sum(axis=1))


def matrix(rows: int, cols: int, seed: int = 0) -> Matrix:
    packed = random_matrix(rows, cols, np.random.default_rng([rows, cols, seed]))
    return Matrix(decode_nf4(packed).astype(np.float64), panels.from_packed(packed, "cuda"))


def columns(n: int, width: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([n, width, seed]).standard_normal((n, width), dtype=np.float32)


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + eps) * weight


def on_device(*arrays):
    return [None if a is None else torch.from_numpy(a).cuda() for a in arrays]


def workspace(w: panels.PanelLinear, n: int) -> torch.Tensor:
    """Scratch of exactly the size asked for, full of 0xFF (NaN as half and as float)."""
    groups = -(-w.cols // 64)
    nbytes = native.cuda("nf4_gemm").workspace_bytes(w.tiles, groups, n)
    assert nbytes > 0
    return torch.full((nbytes,), 255, dtype=torch.uint8, device="cuda")


def gemm(
    w: panels.PanelLinear, x: np.ndarray, kind: int = 0, norm=None, eps: float = 0.0, bias=None,
    residual=None, pdl: bool = False, repeats: int = 2,
) -> np.ndarray:  # fmt: skip
    """y [n, rows] of one call; every repeat, on fresh scratch, must give the same bits."""
    dx, dnorm, dbias, dresidual = on_device(x, norm, bias, residual)
    first = None
    for _ in range(repeats):
        y = torch.full((len(x), w.rows), torch.nan, device="cuda")
        if residual is not None:
            y.copy_(dresidual)
        scratch = workspace(w, len(x))
        native.cuda("nf4_gemm").gemm(
            dx, w.panels, w.tiles, y, kind, dnorm, eps, dbias, residual is not None, scratch, pdl
        )
        first = y if first is None else first
        assert torch.equal(y, first), "repeat differs"
    return first.cpu().numpy().astype(np.float64)


def assert_close(found, expected, size, tolerance=TOLERANCE, what="") -> None:
    """Each column: |found - expected| within `tolerance` of `size` [n]."""
    assert np.isfinite(found).all(), what
    error = np.linalg.norm(found - expected, axis=1) / size
    assert (error < tolerance).all(), (what, float(error.max()))


# ---- plain products ----


@needs_cuda
@pytest.mark.parametrize("k", KS + ODD_KS)
def test_every_number_of_columns(k):
    for rows in ROWS:
        w = matrix(rows, k)
        x = columns(64, k)
        expected, size = w.product(x), w.size(x)
        for n in NS:
            assert_close(gemm(w.linear, x[:n]), expected[:n], size[:n], what=(rows, n))


@needs_cuda
@pytest.mark.parametrize("rows, k", [(2560, 2048), (2048, 11008), (1153, 896), (40001, 896)])
def test_large_matrices(rows, k):
    w = matrix(rows, k)
    x = columns(64, k)
    expected, size = w.product(x), w.size(x)
    for n in NS:
        assert_close(gemm(w.linear, x[:n]), expected[:n], size[:n], what=n)


@needs_cuda
@pytest.mark.parametrize("rows, k", [(65, 320), (576, 1536), (2048, 2048), (130, 11008)])
def test_a_column_does_not_depend_on_its_neighbours(rows, k):
    """The same bits whatever the chunk: prefill may be cut anywhere."""
    w = matrix(rows, k)
    x = columns(64, k)
    together = gemm(w.linear, x)
    for n in NS:
        np.testing.assert_array_equal(gemm(w.linear, x[64 - n :]), together[64 - n :])
    other = x.copy()
    other[::2] *= 1e4  # neighbours of another size
    other[2] = 0.0
    np.testing.assert_array_equal(gemm(w.linear, other)[1::2], together[1::2])


@needs_cuda
def test_every_weight_counts():
    """Unit vectors as x: the product is the matrix itself, element by element."""
    for rows, k in ((17, 192), (48, 1000), (5, 77)):
        w = matrix(rows, k)
        for start in range(0, k, 64):
            x = np.eye(k, dtype=np.float32)[start : start + 64]
            found = gemm(w.linear, x, repeats=1)
            np.testing.assert_allclose(found, w.exact[:, start : start + 64].T, rtol=5e-4)


# ---- epilogues ----


@needs_cuda
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("rows, k", [(17, 64), (65, 576), (577, 1376), (2560, 2048), (33, 77)])
def test_bias_residual_and_norm(rows, k, n):
    w = matrix(rows, k)
    x, residual = columns(n, k), columns(n, rows, seed=2)
    bias = columns(1, rows, seed=3)[0]
    weight = np.random.default_rng(4).uniform(0.5, 1.5, k).astype(np.float32)
    expected, size = w.product(x), w.size(x)
    assert_close(gemm(w.linear, x, bias=bias), expected + bias, size, what="bias")
    assert_close(gemm(w.linear, x, residual=residual), expected + residual, size, what="residual")
    both = gemm(w.linear, x, bias=bias, residual=residual)
    assert_close(both, expected + bias + residual, size, what="bias, residual")
    for eps in (1e-5, 1e-2, 10.0):
        h = normed(x, weight, eps)
        found = gemm(w.linear, x, norm=weight, eps=eps, bias=bias)
        assert_close(found, w.product(h) + bias, w.size(h), what=("norm", eps))


@needs_cuda
@pytest.mark.parametrize("n", [1, 8, 33, 64])
def test_eps_decides_where_x_is_small(n):
    """A built-in constant would be off by a factor (A12)."""
    w = matrix(65, 576)
    x = columns(n, 576) * np.float32(1e-3)
    ones = np.ones(576, np.float32)
    for eps in (1e-6, 1e-2):
        h = normed(x, ones, eps)
        found = gemm(w.linear, x, norm=ones, eps=eps)
        assert_close(found, w.product(h), w.size(h), what=eps)


@functools.lru_cache(maxsize=1)
def gate_up(units: int, k: int) -> tuple[Packed, Packed, panels.PanelLinear]:
    rng = np.random.default_rng([units, k])
    gate, up = random_matrix(units, k, rng), random_matrix(units, k, rng)
    return gate, up, panels.gate_up_from_packed(gate, up, "cuda")


@needs_cuda
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize(
    "units, k", [(1, 64), (7, 64), (9, 320), (77, 100), (96, 576), (1376, 192), (4864, 896)]
)
def test_swiglu(units, k, n):
    gate, up, w = gate_up(units, k)
    x = columns(n, k)
    weight = np.random.default_rng(5).uniform(0.5, 1.5, k).astype(np.float32)
    g_weights, u_weights = (decode_nf4(p).astype(np.float64) for p in (gate, up))
    for norm, h in ((None, x.astype(np.float64)), (weight, normed(x, weight, 1e-6))):
        g, u = h @ g_weights.T, h @ u_weights.T
        sigmoid = 1 / (1 + np.exp(-g))
        # what an error of one rounding in g or u becomes
        size = np.sqrt(
            np.square(sigmoid * (1 + g * (1 - sigmoid)) * u)
            * (np.square(h) @ np.square(g_weights).T)
            + np.square(sigmoid * g) * (np.square(h) @ np.square(u_weights).T)
        )
        found = gemm(w, x, kind=1, norm=norm, eps=1e-6)
        assert_close(
            found, g * sigmoid * u, np.linalg.norm(size, axis=1) + 1e-12, 2e-3, norm is None
        )


@needs_cuda
def test_swiglu_far_from_zero():
    """silu(g) for g of +-1000: 0 and g, not NaN."""
    _, _, w = gate_up(96, 576)
    gate, up = (decode_nf4(p).astype(np.float64) for p in gate_up(96, 576)[:2])
    x = columns(9, 576) * np.float32(1e3)
    g, u = x @ gate.T, x @ up.T
    with np.errstate(over="ignore"):
        expected = g / (1 + np.exp(-g)) * u
    found = gemm(w, x, kind=1)
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


# ---- x beyond the range of half ----


@needs_cuda
@pytest.mark.parametrize("scale", [1e5, 1e-6, 1e20, 1e-20])
@pytest.mark.parametrize("rows, k", [(65, 576), (130, 2048)])
def test_large_and_small_x(rows, k, scale):
    w = matrix(rows, k)
    for n in (1, 7, 32, 64):
        x = columns(n, k) * np.float32(scale)
        assert_close(gemm(w.linear, x), w.product(x), w.size(x), what=n)


@needs_cuda
def test_one_large_value_among_small_ones():
    """One outlier of 1e5 sets the scale of its column: small values keep 2^-28 of it."""
    w = matrix(65, 576)
    x = columns(9, 576)
    x[3, 77] = 1e5
    x[4, :] = 0.0
    found = gemm(w.linear, x)
    size = w.size(x)
    size[4] = 1.0
    assert_close(found, w.product(x), size)
    assert not found[4].any()


@needs_cuda
def test_programmatic_launch_changes_nothing():
    w = matrix(577, 1376)
    for n in (1, 33):
        x = columns(n, 1376)
        np.testing.assert_array_equal(gemm(w.linear, x, pdl=True), gemm(w.linear, x))


@needs_cuda
def test_nothing_is_written_past_the_output():
    """Rows of an odd length and columns that do not fill a tile: the memory behind stays."""
    w = matrix(17, 192)
    x = torch.from_numpy(columns(9, 192)).cuda()
    block = torch.full((9 * 17 + 64,), 7.0, device="cuda")
    y = block[: 9 * 17].view(9, 17)
    scratch = torch.full(
        (len(workspace(w.linear, 9)) + 256,), 200, dtype=torch.uint8, device="cuda"
    )
    used = len(scratch) - 256
    native.cuda("nf4_gemm").gemm(
        x, w.linear.panels, w.linear.tiles, y, 0, None, 0.0, None, False, scratch, False
    )
    assert (block[9 * 17 :] == 7.0).all()
    assert (scratch[used:] == 200).all()
    assert torch.isfinite(y).all()


@needs_cuda
def test_arguments_that_do_not_fit_are_refused():
    run = native.cuda("nf4_gemm").gemm
    w = matrix(33, 320).linear
    good = {
        "x": torch.zeros(2, 320, device="cuda"), "panels": w.panels, "tiles": w.tiles,
        "y": torch.zeros(2, 33, device="cuda"), "kind": 0, "norm": None, "eps": 0.0, "bias": None,
        "add": False, "scratch": workspace(w, 2), "pdl": False,
    }  # fmt: skip
    run(*good.values())
    bad = {
        "x": torch.zeros(2, 640, device="cuda")[:, ::2], "tiles": w.tiles + 1, "kind": 2,
        "y": torch.zeros(3, 33, device="cuda"), "norm": torch.ones(64, device="cuda"),
        "bias": torch.ones(8, device="cuda"), "panels": w.panels[:-1],
        "scratch": good["scratch"][: len(good["scratch"]) // 2],
    }  # fmt: skip
    for name, value in bad.items():
        with pytest.raises(ValueError):
            run(*(good | {name: value}).values())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
