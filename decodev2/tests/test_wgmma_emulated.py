"""The prompt product of sm_90a without a GPU: csrc/nf4_wgmma.cu, thread by thread on the CPU
(tests/emulator), against float64. Ragged rows, columns and K, every epilogue, splits of K, and any
order in which threads may run. Nothing here says how fast it is.
"""

from __future__ import annotations

import ctypes

import emulation
import numpy as np
import pytest

from decodev2 import panels
from decodev2.lab.experiments import sanitizer
from decodev2.nf4 import Packed, decode_nf4
from decodev2.synth import random_matrix

TOLERANCE = 1e-3  # x, and level times scale, are rounded to half
PLAIN, SWIGLU = 0, 1
CHOSEN = 0  # the kernel's own choice of columns or splits
ACT_SCALE = 1 / 16  # kActScale of csrc/launch.h

emulation.skip_without_it(allow_module_level=True)


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> ctypes.CDLL:
    """csrc/nf4_wgmma.cu and the emulator as a shared library."""
    return compiled(tmp_path_factory)


def compiled(tmp_path_factory, *flags: str) -> ctypes.CDLL:
    found = emulation.build(tmp_path_factory, "wgmma", *flags)
    found.columns_bytes.restype = ctypes.c_int64
    return found


def matrix(rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, panels.PanelLinear]:
    """Weights as float64, and in panels."""
    packed = random_matrix(rows, cols, np.random.default_rng([rows, cols, seed]))
    return decode_nf4(packed).astype(np.float64), panels.from_packed(packed, "cpu")


def gate_up(units: int, cols: int) -> tuple[np.ndarray, np.ndarray, panels.PanelLinear]:
    rng = np.random.default_rng([units, cols])
    gate, up = random_matrix(units, cols, rng), random_matrix(units, cols, rng)
    both = panels.gate_up_from_packed(gate, up, "cpu")
    return *(decode_nf4(p).astype(np.float64) for p in (gate, up)), both


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape, dtype=np.float32)


def product(
    library, w: panels.PanelLinear, x: np.ndarray | None, n: int | None = None, kind: int = PLAIN,
    norm=None, eps: float = 0.0, bias=None, residual=None, x_columns=None, y_columns=None,
    columns: int = CHOSEN, splits: int = CHOSEN, seed: int = 1, multiprocessors: int = 8,
    keep_y: bool = True,
) -> np.ndarray:  # fmt: skip
    """y [n, rows]; what the call may not touch is checked, what it must write is poisoned."""
    n = len(x) if n is None else n
    groups = -(-w.cols // 64)
    guard = 64
    size = 0 if x_columns is not None else library.columns_bytes(groups, n)
    workspace = np.full(size + guard, 0xFF, np.uint8)
    block = np.full(n * w.rows + guard, np.nan, np.float32)
    y = block[: n * w.rows].reshape(n, w.rows)
    if residual is not None:
        y[:] = residual
    sizes = (ctypes.c_int64 * 9)(
        n, w.rows, w.cols, w.tiles, kind, w.level_exponent, multiprocessors, columns, splits
    )
    arrays = [
        w.panels.numpy(), x, y if keep_y else None, norm, bias,
        y if residual is not None else None, workspace, x_columns, y_columns,
    ]  # fmt: skip
    pointers = (ctypes.c_void_p * 9)(*(None if a is None else a.ctypes.data for a in arrays))
    error = library.product(
        sizes, pointers, ctypes.c_int64(size), ctypes.c_double(eps), ctypes.c_uint(seed)
    )
    assert error == 0, f"error {error}"
    assert np.isnan(block[n * w.rows :]).all() and (workspace[size:] == 0xFF).all()
    return y


def assert_close(found, expected, size, tolerance=TOLERANCE) -> None:
    """Each column: |found - expected| within `tolerance` of `size` [n], the length of its terms."""
    assert np.isfinite(found).all()
    error = np.linalg.norm(found - expected, axis=1) / size
    assert (error < tolerance).all(), float(error.max())


def size_of(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.sqrt((np.square(x.astype(np.float64)) @ np.square(w).T).sum(axis=1))


# ---- plain products ----


@pytest.mark.parametrize("n", [1, 17, 64, 100, 128, 250, 256, 300])
@pytest.mark.parametrize("rows, cols", [(300, 320), (17, 64)])
def test_columns_and_ragged_rows(library, rows, cols, n):
    exact, w = matrix(rows, cols)
    x = normal(n, cols)
    assert_close(product(library, w, x, seed=n), x @ exact.T, size_of(exact, x))


@pytest.mark.parametrize("cols", [1, 65, 77, 130, 200, 576, 1001, 1088])
def test_ragged_k(library, cols):
    """Inside a group, inside a panel, more panels than stages; rows of x that start anywhere."""
    exact, w = matrix(130, cols)
    x = normal(70, cols)
    assert_close(product(library, w, x), x @ exact.T, size_of(exact, x))


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_splits_and_columns_of_a_cta(library, columns, splits):
    """Every kernel: an odd number of CTA rows (300 of 128), several items for each cluster."""
    exact, w = matrix(300, 1100)
    x = normal(250, 1100)
    found = product(library, w, x, columns=columns, splits=splits)
    assert_close(found, x @ exact.T, size_of(exact, x))


def test_what_racecheck_watches_gives_the_same_bits(library, tmp_path_factory):
    """Its build has every lane arrive."""
    watched = compiled(tmp_path_factory, *sanitizer.FLAGS["racecheck"].split())
    _, w = matrix(300, 576)
    x = normal(100, 576)
    for columns, splits in ((64, 1), (128, 2)):
        chosen = {"columns": columns, "splits": splits}
        found = (product(each, w, x, **chosen) for each in (library, watched))
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_column_depends_on_nothing_else(library, splits):
    """The same bits alone, among others, whatever those hold, in every kernel."""
    _, w = matrix(140, 576)
    x = normal(256, 576)
    together = product(library, w, x, splits=splits)
    for n in (1, 17, 100, 250):
        np.testing.assert_array_equal(product(library, w, x[-n:], splits=splits), together[-n:])
    other = x.copy()
    other[::2] *= 1e4
    other[2] = 0.0
    found = product(library, w, other, columns=128, splits=splits)
    np.testing.assert_array_equal(found[1::2], together[1::2])


@pytest.mark.parametrize("splits", [1, 4])
def test_any_order_of_threads_gives_the_same_bits(library, splits):
    """Products as early and as late as they may run, warps in another order each time."""
    _, w = matrix(270, 1100)
    x = normal(100, 1100)
    first = product(library, w, x, splits=splits, multiprocessors=2 * splits, seed=0)
    for seed in range(1, 7):
        again = product(library, w, x, splits=splits, multiprocessors=2 * splits, seed=seed)
        np.testing.assert_array_equal(again, first)


def test_every_weight_counts(library):
    """Unit vectors as x: the product is the matrix itself, element by element."""
    exact, w = matrix(37, 200)
    found = product(library, w, np.eye(200, dtype=np.float32))
    np.testing.assert_allclose(found, exact.T, rtol=1e-3)  # two roundings to half


# ---- epilogues ----


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("n", [1, 100, 250])
def test_bias_residual_and_norm(library, n, splits):
    rows, cols = 145, 576
    exact, w = matrix(rows, cols)
    x, residual, bias = normal(n, cols), normal(n, rows, seed=2), normal(rows, seed=3)
    weight = np.random.default_rng(4).uniform(0.5, 1.5, cols).astype(np.float32)
    expected, size = x @ exact.T, size_of(exact, x)
    found = product(library, w, x, bias=bias, splits=splits)
    assert_close(found, expected + bias, size)
    found = product(library, w, x, residual=residual, splits=splits)
    assert_close(found, expected + residual, size)
    for eps in (1e-5, 10.0):
        h = x.astype(np.float64)
        h = h / np.sqrt(np.mean(np.square(h), axis=1, keepdims=True) + eps) * weight
        found = product(library, w, x, norm=weight, eps=eps, bias=bias, residual=residual)
        assert_close(found, h @ exact.T + bias + residual, size_of(exact, h))


def swiglu(gate, up, x) -> tuple[np.ndarray, np.ndarray]:
    """Expected act, and per column the size of what one rounding of gate or up becomes."""
    g, u = x @ gate.T, x @ up.T
    sigmoid = 1 / (1 + np.exp(-g))
    terms = np.square(sigmoid * (1 + g * (1 - sigmoid)) * u) * (np.square(x) @ np.square(gate).T)
    terms += np.square(sigmoid * g) * (np.square(x) @ np.square(up).T)
    return g * sigmoid * u, np.sqrt(terms.sum(axis=1)) + 1e-12


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("units, cols, n", [(77, 300, 17), (1, 64, 1), (150, 576, 100)])
def test_swiglu(library, units, cols, n, splits):
    gate, up, w = gate_up(units, cols)
    x = normal(n, cols).astype(np.float64)
    expected, size = swiglu(gate, up, x)
    found = product(
        library, w, x.astype(np.float32), kind=SWIGLU, splits=min(splits, -(-cols // 256))
    )
    assert_close(found, expected, size, 2e-3)


def unpack(half_tiles: np.ndarray, groups: int, n: int) -> np.ndarray:
    """[n, groups * 64] of what lies in half tiles, their scales applied."""
    padded = 64 if n <= 64 else 128 if n <= 128 else -(-n // 256) * 256
    tiles = half_tiles[: groups * padded * 128].view(np.float16).reshape(groups, padded, 8, 8)
    scale = half_tiles[groups * padded * 128 :].view(np.float32)
    assert len(scale) == padded
    pieces = np.arange(8)[None] ^ (np.arange(padded) % 8)[:, None]
    plain = np.take_along_axis(tiles, pieces[None, :, :, None], axis=2)
    out = plain.transpose(1, 0, 2, 3).reshape(padded, groups * 64).astype(np.float64)
    return out * scale[:, None].astype(np.float64)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("units, n", [(150, 17), (64, 64), (300, 100), (77, 250)])
def test_act_goes_to_the_next_product_as_half(library, units, n, splits):
    """y_columns: every byte written, act in it, and the product that takes it from there."""
    cols, rows, groups = 576, 140, -(-units // 64)
    gate, up, w = gate_up(units, cols)
    x = normal(n, cols)
    half_tiles = np.full(library.columns_bytes(groups, n), 0xFF, np.uint8)
    act = product(library, w, x, kind=SWIGLU, y_columns=half_tiles, splits=splits)
    assert_close(act, *swiglu(gate, up, x.astype(np.float64)), 2e-3)
    held = unpack(half_tiles, groups, n)
    np.testing.assert_allclose(held[:n, :units], act, rtol=5e-4, atol=2.0**-21)
    assert not held[n:].any() and not held[:, units:].any()
    without = np.full_like(half_tiles, 0xFF)
    product(library, w, x, kind=SWIGLU, y_columns=without, splits=splits, keep_y=False)
    np.testing.assert_array_equal(without, half_tiles)

    exact, down = matrix(rows, units)
    residual = normal(n, rows, seed=5)
    found = product(library, down, None, n, x_columns=half_tiles, residual=residual)
    expected = held[:n, :units] @ exact.T
    assert_close(found, expected + residual, size_of(exact, held[:n, :units]))


# ---- ranges ----


@pytest.mark.parametrize("scale", [1e5, 1e-6, 1e20, 1e-20])
def test_large_and_small_x(library, scale):
    exact, w = matrix(65, 576)
    x = normal(70, 576) * np.float32(scale)
    x[4] = 0.0
    size = size_of(exact, x)
    size[4] = 1.0
    assert_close(product(library, w, x), x @ exact.T, size)


@pytest.mark.parametrize("scale", [6e-8, 1e-6, 1.0, 300.0, 65504.0])
def test_large_and_small_weights(library, scale):
    """Any scale that float16 holds: level times scale is no infinity and loses no bits."""
    packed = random_matrix(33, 576, np.random.default_rng(6))
    scales = np.full_like(packed.scales, scale)
    packed = Packed(packed.codes, scales, packed.shape)
    exact = decode_nf4(packed).astype(np.float64)
    x = normal(20, 576)
    found = product(library, panels.from_packed(packed, "cpu"), x)
    assert_close(found, x @ exact.T, size_of(exact, x))


# ---- the choice ----


def chosen(library, rows: int, cols: int, n: int) -> tuple[int, int]:
    """(splits, columns of a CTA) on a card of 132 multiprocessors."""
    out = (ctypes.c_int * 2)()
    library.choose(-(-rows // 16), -(-cols // 64), n, 132, out)
    return out[0], out[1]


def test_the_division(library):
    """Narrow matrices are split, wide ones are not; n has no say in the splits."""
    for rows, cols in ((2560, 2048), (2048, 11008), (22016, 2048), (5120, 27648), (100, 64)):
        found = {n: chosen(library, rows, cols, n) for n in (1, 64, 65, 128, 129, 256, 512)}
        assert len({splits for splits, _ in found.values()}) == 1
        assert [found[n][1] for n in (1, 64, 65, 128)] == [64, 64, 128, 128]
        assert all(found[n][1] in (128, 256) for n in (129, 256, 512))


# The fastest splits of each product of Qwen2.5-3B, 7B and 32B on an H200, 64 to 256 columns
# together, and the columns of a CTA that are then the fastest for 256 (gate and up of 7B: 4 % off).
MEASURED = {
    (2560, 2048): (4, 256), (2048, 2048): (4, 256), (22016, 2048): (1, 128),
    (2048, 11008): (4, 256), (4608, 3584): (2, 256), (3584, 3584): (4, 256),
    (37888, 3584): (1, 256), (3584, 18944): (4, 256), (7168, 5120): (2, 256),
    (5120, 5120): (2, 256), (55296, 5120): (1, 256), (5120, 27648): (2, 256),
}  # fmt: skip


@pytest.mark.parametrize("rows, cols", MEASURED)
def test_the_division_is_the_one_that_was_fastest(library, rows, cols):
    assert chosen(library, rows, cols, 256) == MEASURED[rows, cols]


@pytest.mark.parametrize(
    "change",
    [{"columns": 100}, {"columns": 256}, {"splits": 3}, {"splits": 4}, {"kind": 2}, {"n": 0}],
    ids=str,
)
def test_what_does_not_fit_is_refused(library, change):
    _, w = matrix(20, 320)
    product(library, w, normal(100, 320))
    with pytest.raises(AssertionError, match="error"):
        product(library, w, normal(100, 320), **change)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
