"""One packed NF4 matrix on a device, and the products the step takes with it.

CUDA layouts: `panels.py`, and row-major for the rungs of `ladder.py`.

CPU layout (drawn in `csrc/cpu/kernels.inl`): rows in blocks of 16, so that one vector register
holds the same 8 columns of 16 rows. It is a transposition of 32-bit words of the `.chr` rows: same
codes, same scales, no bytes added but the padding to 16 rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from . import ladder, native, toggles
from .errors import DecodeError
from .nf4 import Packed
from .panels import PanelLinear
from .plan import GROUP

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


Linear = PackedLinear | PanelLinear | ladder.RowMajor


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
    """y = W x, or y += W x with `add`. x float32 [n, cols], y float32 [n, rows].

    CPU: n <= 64, `panel` is scratch of at least n * K_pad floats, and every n gives the same bits
    per row of x. CUDA: `panel` is the scratch of `cuda_scratch_bytes`.
    """
    if x.is_cuda:
        return cuda_product(x, w, y, panel, add=add)
    native.cpu().linear(x, w.codes, w.scales, w.rows, y, add, panel)


# ---- CUDA ----

PLAIN, SWIGLU, HEAD = 0, 1, 2  # epilogues, GemvKind of csrc/launch.h
# Columns from which a chunk goes to csrc/nf4_wgmma.cu when `prefill` is wgmma. Its narrowest tile
# has 64 and takes the same time however many of them are padding; nf4_gemm.cu has tiles of 8, 16
# and 32 as well. Where that one needs 32, from 17 on, it is already slower: 2.9 ms against 2.3 for
# all products of a pass of Qwen2.5-3B on an H200, 15.6 against 15.2 for 32B; what it takes with 16
# was not measured beside. From 65 on csrc/nf4_wgmma.cu has tiles of 128, or of 128 and 256.
WGMMA_FROM = 17
GEMV_VARIANTS = {"auto": -1, "direct": 0, "ring8x2": 1, "ring16x4": 2, "ring16x3": 3}


def set_linear_backend(name: str) -> None:
    """`gemv`, `mma` or `rows`: the kernel behind products of one column on CUDA. More columns are
    `mma`; `rows` needs weights loaded with the layout "rows", and takes one column only."""
    toggles.current.set("linear", name)


def cuda_product(
    x: torch.Tensor,
    w: PanelLinear | ladder.RowMajor,
    y: torch.Tensor,
    scratch: torch.Tensor,
    kind: int = PLAIN,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    add: bool = False,
    x_half: torch.Tensor | None = None,
    y_half: torch.Tensor | None = None,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """y = W x with an epilogue: + bias, + y (`add`), or silu(gate) * up (SWIGLU).

    x [n, cols], y [n, rows]. With `norm` [cols] x is RMS-normed on the way in. One column by the
    GEMV may leave y as half, too (`y_half`, SWIGLU), and take x from there (`x_half`); many by
    wgmma leave it there only. With `shared` (`shared_tiles`) the GEMV may let two CTAs share a
    tile, where whole tiles are uneven.
    """
    t = toggles.current
    check_layout(w, len(x))
    if isinstance(w, ladder.RowMajor):
        if kind != PLAIN:
            raise DecodeError("a row-major matrix has the plain epilogue only")
        ladder.step_product(x, w, y, norm=norm, eps=eps, bias=bias, residual=y if add else None)
    elif len(x) == 1 and t.linear == "gemv":
        native.cuda("nf4_gemv").gemv(
            x, w.panels, w.tiles, y, kind, norm, eps, bias, y if add else None, None, None,
            GEMV_VARIANTS[t.gemv], _start(), x_half, y_half, *(shared or (None, None)),
        )  # fmt: skip
    elif by_wgmma(x):
        native.cuda("nf4_wgmma").gemm(
            x, w.panels, w.tiles, y, kind, norm, eps, bias, add, scratch, w.level_exponent,
            x_half, y_half, t.pdl,
        )  # fmt: skip
    else:
        native.cuda("nf4_gemm").gemm(
            x, w.panels, w.tiles, y, kind, norm, eps, bias, add, scratch, t.pdl
        )


def by_wgmma(x: torch.Tensor) -> bool:
    """Do products of this chunk go to csrc/nf4_wgmma.cu? Where not, csrc/nf4_gemm.cu takes them."""
    chosen = toggles.current.prefill == "wgmma" and len(x) >= WGMMA_FROM
    return chosen and has_wgmma(x.device)


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Does the card have the warpgroup products of sm_90a?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _start() -> int:
    """How a GEMV starts: 0 plain, 1 programmatic launch, 2 that with nothing done ahead of it."""
    t = toggles.current
    return 0 if not t.pdl else 1 if t.ahead == "weights" else 2


def check_layout(w, columns: int) -> None:
    """The backend `rows` and row-major weights go together, one column at a time. Raises
    DecodeError."""
    by_rows = isinstance(w, ladder.RowMajor)
    if by_rows != (toggles.current.linear == "rows"):
        found = "row-major" if by_rows else "panels"
        raise DecodeError(
            f"the backend is {toggles.current.linear}, but the weights are {found}; load them with "
            f"layout {'panels' if by_rows else 'rows'}"
        )
    if by_rows and columns > 1:
        raise DecodeError(f"row-major products take 1 column, found {columns}; use chunks of 1")


def cuda_head(
    x: torch.Tensor,
    w: PanelLinear | ladder.RowMajor,
    logits: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    values: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """logits [1, rows] = W rms(x), and each CTA's best logit and id into `values` and `ids`."""
    t = toggles.current
    check_layout(w, len(x))
    if isinstance(w, ladder.RowMajor):
        ladder.step_product(x, w, logits, norm=norm, eps=eps)
        native.cuda("step").candidates(logits, values, ids, t.pdl)
        return
    native.cuda("nf4_gemv").gemv(
        x, w.panels, w.tiles, logits, HEAD, norm, eps, None, None, values, ids,
        GEMV_VARIANTS[t.gemv], _start(), None, None, None, None,
    )  # fmt: skip


def shared_tiles(tiles: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the GEMV needs where two CTAs share a tile: sums float32 [tiles, 2, 16] and counters
    int32 [tiles], which every launch leaves at zero."""
    sums = torch.zeros(tiles, 2, 16, device=device)
    return sums, torch.zeros(tiles, dtype=torch.int32, device=device)


def cuda_scratch_bytes(shapes: list[tuple[int, int]], n: int) -> int:
    """Scratch for products of up to n columns with matrices of (tiles, groups), by any kernel."""
    need = native.cuda("nf4_gemm").workspace_bytes
    size = max(need(tiles, groups, columns) for tiles, groups in shapes for columns in {1, n})
    return max(size, *(wgmma_bytes(groups * GROUP, n) for _, groups in shapes))


def wgmma_bytes(cols: int, n: int) -> int:
    """Bytes of n columns of `cols` values as csrc/nf4_wgmma.cu reads them; 0 where it never runs.
    Grows with n."""
    if n < WGMMA_FROM or not has_wgmma(torch.device("cuda", torch.cuda.current_device())):
        return 0
    return native.cuda("nf4_wgmma").columns_bytes(cols, n)
