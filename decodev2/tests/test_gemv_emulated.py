"""The GEMV without a GPU: csrc/nf4_gemv.cu thread by thread on the CPU (tests/emulator).

What each variant computes, for whole tiles and for tiles between two CTAs, in any order in which
threads may run. Nothing here says how fast it is.
"""

from __future__ import annotations

import ctypes
import itertools

import emulation
import numpy as np
import pytest

from decodev2 import linear, nf4, panels, plan

PLAIN, SWIGLU, HEAD = 0, 1, 2
RINGS = [name for name in linear.GEMV_VARIANTS if name.startswith("ring")]

emulation.skip_without_it(allow_module_level=True)


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> ctypes.CDLL:
    """csrc/nf4_gemv.cu and the emulator as a shared library."""
    found = emulation.build(tmp_path_factory, "gemv")
    found.gemv.restype = ctypes.c_char_p
    return found


def run(library, matrix, x, y, kind, variant, multiprocessors, seed, eps=1e-6, **arrays):
    """One launch; arrays by the names in emulator/gemv.cpp."""
    names = ("x_half", "y_half", "norm_weight", "bias", "residual", "values", "ids", "sums",
             "counters")  # fmt: skip
    given = {name: arrays.pop(name, None) for name in names}
    assert not arrays, arrays
    ordered = [matrix.panels.numpy(), x, given["x_half"], y, *(given[n] for n in names[1:])]
    pointers = (ctypes.c_void_p * 12)(*(None if a is None else a.ctypes.data for a in ordered))
    candidates = 0 if given["ids"] is None else len(given["ids"])
    numbers = (ctypes.c_int64 * 7)(
        len(y), len(x), matrix.tiles, candidates, kind, linear.GEMV_VARIANTS[variant],
        multiprocessors,
    )  # fmt: skip
    stopped = library.gemv(pointers, numbers, ctypes.c_double(eps), ctypes.c_uint(seed))
    assert not stopped, stopped.decode()
    return y


def close(y, expected):
    assert np.linalg.norm(y - expected) < 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("variant", ["direct", *RINGS])
@pytest.mark.parametrize(
    ("rows", "cols", "multiprocessors"),
    [(160, 512, 3), (40, 200, 2), (96, 1100, 1), (16, 64, 4), (330, 2048, 2)],
)
def test_plain_products(library, variant, rows, cols, multiprocessors):
    rng = np.random.default_rng(rows)
    packed = nf4.encode_nf4(rng.normal(size=(rows, cols)).astype(np.float32))
    matrix = panels.from_packed([packed], "cpu")
    x, norm, bias, residual = (
        rng.normal(size=n).astype(np.float32) for n in (cols, cols, rows, rows)
    )
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-6) * norm
    expected = nf4.decode_nf4(packed).astype(np.float64) @ normed + bias + residual
    first = None
    for seed in range(3):
        y = run(library, matrix, x, np.full(rows, np.nan, np.float32), PLAIN, variant,
                multiprocessors, seed, norm_weight=norm, bias=bias, residual=residual)  # fmt: skip
        close(y, expected)
        first = y if first is None else first
        assert np.array_equal(y, first)  # whatever the order


@pytest.mark.parametrize("variant", RINGS)
def test_tiles_between_two_ctas(library, variant):
    rows, cols = 112, 1000  # 7 tiles of 4 panels, the last one narrow, for 2 or 4 CTAs
    rng = np.random.default_rng(1)
    packed = nf4.encode_nf4(rng.normal(size=(rows, cols)).astype(np.float32))
    matrix = panels.from_packed([packed], "cpu")
    x = rng.normal(size=cols).astype(np.float32)
    sums = np.full((matrix.tiles, 2, 16), np.nan, np.float32)
    counters = np.zeros(matrix.tiles, np.uint32)
    expected = nf4.decode_nf4(packed).astype(np.float64) @ x
    results = [
        run(library, matrix, x, np.full(rows, np.nan, np.float32), PLAIN, variant, 2, seed,
            sums=sums, counters=counters)
        for seed in range(3)
    ]  # fmt: skip
    for y in results:
        close(y, expected)
        assert np.array_equal(y, results[0])
    assert not counters.any()  # ready for the next launch


@pytest.mark.parametrize("variant", ["direct", *RINGS])
def test_swiglu_hands_on_halves(library, variant):
    units, cols, out = 72, 300, 48
    rng = np.random.default_rng(2)
    gate, up, down = (
        nf4.encode_nf4(rng.normal(size=shape).astype(np.float32))
        for shape in ((units, cols), (units, cols), (out, units))
    )
    x = rng.normal(size=cols).astype(np.float32)
    g, u, d = (nf4.decode_nf4(m).astype(np.float64) for m in (gate, up, down))
    act = (g @ x) / (1 + np.exp(-(g @ x))) * (u @ x)
    half = np.zeros((units + 63) // 64 * 64, np.float16)
    y = run(library, panels.gate_up_from_packed(gate, up, "cpu"), x,
            np.full(units, np.nan, np.float32), SWIGLU, variant, 2, 0, y_half=half)  # fmt: skip
    close(y, act)
    unread = np.full(units, np.nan, np.float32)
    z = run(library, panels.from_packed([down], "cpu"), unread, np.zeros(out, np.float32), PLAIN,
            variant, 2, 0, x_half=half)  # fmt: skip
    close(z, d @ act)


@pytest.mark.parametrize("variant", ["direct", *RINGS])
def test_head_names_the_best(library, variant):
    rows, cols, slots = 200, 256, 12
    rng = np.random.default_rng(3)
    packed = nf4.encode_nf4(rng.normal(size=(rows, cols)).astype(np.float32))
    x = rng.normal(size=cols).astype(np.float32)
    values, ids = np.zeros(slots, np.float32), np.full(slots, 7, np.int32)
    y = run(library, panels.from_packed([packed], "cpu"), x, np.zeros(rows, np.float32), HEAD,
            variant, 4, 0, values=values, ids=ids)  # fmt: skip
    close(y, nf4.decode_nf4(packed).astype(np.float64) @ x)
    there = ids >= 0
    assert ids[there][values[there].argmax()] == y.argmax()
    assert np.array_equal(values[there], y[ids[there]])


H200 = (90, 228 * 1024)
MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")


def chosen(library, cols: int, card=H200) -> str:
    index = library.chosen(-(-cols // 64), *card)
    return next(name for name, i in linear.GEMV_VARIANTS.items() if i == index)


def test_the_choice_is_that_of_the_table(library):
    for name, down in zip(MODELS, 3 * ["ring8x2"] + 3 * ["ring16x3"], strict=True):
        spec = plan.named_spec(name)
        assert chosen(library, spec.intermediate) == down, name
        assert chosen(library, spec.hidden) == "ring8x2", name


def test_what_is_chosen_fits(library):
    old = (80, 164 * 1024)
    small = (120, 100 * 1024)  # Hopper's instructions with less than half of its shared memory
    for cols, card in itertools.product((64, 896, 5120, 27648, 40_000), (old, small)):
        assert chosen(library, cols, card) == "direct"
    assert chosen(library, 40_000) == "direct"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
