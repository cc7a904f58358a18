"""One packed NF4 matrix on a device, and the products the step takes with it.

CPU layout (drawn in `csrc/cpu/kernels.inl`): rows in blocks of 16, so that one vector register
holds the same 8 columns of 16 rows. It is a transposition of 32-bit words of the `.chr` rows: same
codes, same scales, no bytes added but the padding to 16 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from . import native
from .nf4 import Packed
from .panels import PanelLinear

ROW_BLOCK = 16


@dataclass(frozen=True)
class PackedLinear:
    """W [rows, cols] as NF4: codes int32 [row blocks, K_pad/8, 16], scales float16 [row blocks,
    K_pad/64, 16]."""

    codes: torch.Tensor
    scales: torch.Tensor
    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


Linear = PackedLinear | PanelLinear


def from_packed(packed: Packed) -> PackedLinear:
    """Bring one matrix of a `.chr` file (rows of codes, rows of scales) into the CPU layout."""
    rows, cols = packed.shape
    words = np.ascontiguousarray(packed.codes).view(np.int32)  # [rows, K_pad / 8]
    return PackedLinear(_block_rows(words), _block_rows(packed.scales), rows, cols)


def _block_rows(matrix: np.ndarray) -> torch.Tensor:
    """[rows, n] -> [ceil(rows / 16), n, 16]; missing rows of the last block are zero (scale 0)."""
    rows, n = matrix.shape
    blocks = -(-rows // ROW_BLOCK)
    out = np.zeros((blocks, n, ROW_BLOCK), matrix.dtype)
    full = rows // ROW_BLOCK
    whole = matrix[: full * ROW_BLOCK].reshape(full, ROW_BLOCK, n)
    np.copyto(out[:full], whole.transpose(0, 2, 1))
    if full < blocks:
        out[full, :, : rows - full * ROW_BLOCK] = matrix[full * ROW_BLOCK :].T
    return torch.from_numpy(out)


def nf4_linear(
    x: torch.Tensor, w: PackedLinear, y: torch.Tensor, panel: torch.Tensor, add: bool = False
) -> None:
    """y = W x, or y += W x with `add`. x float32 [n, cols], y float32 [n, rows], n <= 64.

    `panel` is scratch of at least n * K_pad floats. Every n gives the same bits per row of x.
    """
    native.cpu().linear(x, w.codes, w.scales, w.rows, y, add, panel)
