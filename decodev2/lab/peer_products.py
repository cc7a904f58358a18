"""One-column products by the 4-bit kernels of other libraries, on random weights of their own.

A library's product is timed only after it agreed with float32 on the weights that it was given.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..errors import DecodeError
from ..plan import GROUP
from . import cases

ERROR_LIMIT = 1e-2  # relative to the size of the terms: weights, x and y are bfloat16, of 8 bits
INNER_K_TILES = 8  # of torch's packed order: 8 x 16 columns stand together


@dataclass(frozen=True)
class Matrix:
    """`run` takes x bfloat16 [1, cols] to W x, bfloat16 [1, rows]; `dense()` is W in float32.
    `nbytes` are the packed bytes of W, scales included."""

    library: str
    rows: int
    cols: int
    nbytes: int
    run: Callable[[torch.Tensor], torch.Tensor]
    dense: Callable[[], torch.Tensor]


def torch_int4(rows: int, cols: int, seed: int) -> Matrix:
    """torch's int4 kernel, a scale and a zero point in bfloat16 for each 64 weights."""

    def codes() -> torch.Tensor:
        shape = (rows, cols // 2)
        return torch.randint(
            256, shape, generator=_chance(seed), dtype=torch.uint8, device=cases.DEVICE
        )

    packed = torch._convert_weight_to_int4pack(codes(), INNER_K_TILES)
    scales = torch.rand(
        cols // GROUP, rows, 2, generator=_chance(seed), dtype=torch.bfloat16, device=cases.DEVICE
    )
    scales /= cols**0.5 * 4

    def dense() -> torch.Tensor:
        both = codes()  # made again: kept, they would double the memory of a model
        nibbles = torch.stack([both >> 4, both & 15], dim=2).view(rows, -1, GROUP)
        scale, zero = (part.T.float()[:, :, None] for part in scales.unbind(2))
        return nibbles.float().sub_(8).mul_(scale).add_(zero).view(rows, cols)

    return Matrix(
        "torch int4",
        rows,
        cols,
        packed.nbytes + scales.nbytes,
        lambda x: torch._weight_int4pack_mm(x, packed, GROUP, scales),
        dense,
    )


def bitsandbytes_nf4(rows: int, cols: int, seed: int) -> Matrix:
    """bitsandbytes' NF4 product as its linear layer calls it, whose kernel it picks itself; a scale
    in float32 for each 64 weights."""
    import bitsandbytes
    import bitsandbytes.functional as bnb

    w = torch.randn(rows, cols, generator=_chance(seed), dtype=torch.bfloat16, device=cases.DEVICE)
    w /= cols**0.5
    codes, state = bnb.quantize_4bit(w, blocksize=GROUP, quant_type="nf4")
    return Matrix(
        "bitsandbytes NF4",
        rows,
        cols,
        codes.nbytes + state.absmax.nbytes,
        lambda x: bitsandbytes.matmul_4bit(x, codes, state),
        lambda: bnb.dequantize_4bit(codes, state).float(),
    )


LIBRARIES = {"torch int4": torch_int4, "bitsandbytes NF4": bitsandbytes_nf4}


def _chance(seed: int) -> torch.Generator:
    return torch.Generator(device=cases.DEVICE).manual_seed(seed)


def why_not(library: str, shapes: Iterable[tuple[int, int]]) -> str | None:
    """Why `library` cannot multiply by matrices of these (rows, columns); None if it can."""
    if library == "bitsandbytes NF4" and importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    row_step, col_step = (8, 16 * INNER_K_TILES) if library == "torch int4" else (1, GROUP)
    for rows, cols in shapes:
        if rows % row_step or cols % col_step:
            return f"needs rows by {row_step} and columns by {col_step}, not {rows} x {cols}"
    return None


def column(cols: int, chance: torch.Generator | None = None) -> torch.Tensor:
    """x bfloat16 [1, cols] on the device, standard normal."""
    return torch.randn(1, cols, generator=chance, dtype=torch.bfloat16, device=cases.DEVICE)


def check(matrix: Matrix, x: torch.Tensor) -> float:
    """Error of W x against float32, relative to the size of the terms. Raises DecodeError."""
    y, w, exact = matrix.run(x), matrix.dense(), x[0].float()
    expected = w @ exact
    sizes = (w.square_() @ exact.square()).sqrt()
    found = cases.relative_error(y, expected.double(), sizes.double())
    if not found < ERROR_LIMIT:
        raise DecodeError(
            f"{matrix.library}, {matrix.rows} x {matrix.cols}, is off by {found:.2e}, "
            f"needs less than {ERROR_LIMIT:.0e}"
        )
    return found
