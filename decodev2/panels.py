"""NF4 matrices in the CUDA layout: fragment-ordered panels (drawn in `csrc/nf4.cuh`).

The same codes and scales as the `.chr` rows, in the order in which tensor-core fragments and bulk
copies want them; rows are padded to whole tiles of 16, nothing else is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .nf4 import ZERO_CODE, Packed
from .plan import GROUP, ArchSpec
from .upload import upload

TILE_ROWS = 16
PANEL_BLOCKS = 4  # blocks of 16 rows x 64 columns per panel
BLOCK_CODES = 512
BLOCK_BYTES = 544
ZERO_BYTE = ZERO_CODE | ZERO_CODE << 4


@dataclass(frozen=True)
class PanelLinear:
    """W [rows, cols] as uint8 panels [tiles, K_pad / 64 * 544].

    `rows` counts outputs: for a gate/up matrix the units, each of which has two rows.
    """

    panels: torch.Tensor
    rows: int
    cols: int
    largest_scale: float

    @property
    def tiles(self) -> int:
        return self.panels.shape[0]

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    @property
    def level_exponent(self) -> int:
        """Levels times its power of two times any scale fit half, with as many bits as they can
        have: small weights are no subnormal numbers there."""
        return min(15, 15 - math.frexp(self.largest_scale)[1])


def from_packed(packed: Packed | Sequence[Packed], device: torch.device | str) -> PanelLinear:
    """One matrix, or several of the same width stacked row on row (q, k, v), on `device`."""
    parts = [packed] if isinstance(packed, Packed) else list(packed)
    codes, scales = (
        torch.cat(list(p)) for p in zip(*(_upload(p, device) for p in parts), strict=True)
    )
    rows = codes.shape[0]
    panels = _pack(*_pad_rows(codes, scales, TILE_ROWS))
    return PanelLinear(panels, rows, parts[0].shape[1], float(scales.max()))


def gate_up_from_packed(gate: Packed, up: Packed, device: torch.device | str) -> PanelLinear:
    """Gate and up rows in tiles of 8 + 8, so that one tile finishes 8 units of silu(gate) * up."""
    halves = [_pad_rows(*_upload(p, device), TILE_ROWS // 2) for p in (gate, up)]
    codes, scales = (
        torch.cat([part.view(-1, TILE_ROWS // 2, part.shape[1]) for part in pair], dim=1).flatten(
            0, 1
        )
        for pair in zip(*halves, strict=True)
    )
    return PanelLinear(_pack(codes, scales), gate.shape[0], gate.shape[1], float(scales.max()))


def plain_rows(gate_up: PanelLinear) -> PanelLinear:
    """A gate/up matrix seen as its rows: per tile 8 gate rows, then the 8 up rows of the units."""
    return replace(gate_up, rows=gate_up.tiles * TILE_ROWS)


def panel_shapes(spec: ArchSpec, head: bool) -> list[tuple[int, int]]:
    """(tiles, groups) of every kind of matrix in a layer, and of the head if asked."""
    rows_cols = [
        *([(spec.vocab, spec.hidden)] if head else []),
        (spec.q_dim + 2 * spec.kv_dim, spec.hidden),
        (spec.hidden, spec.q_dim),
        (2 * -(-spec.intermediate // 8) * 8, spec.hidden),
        (spec.hidden, spec.intermediate),
    ]
    return [(-(-rows // TILE_ROWS), -(-cols // GROUP)) for rows, cols in rows_cols]


def _upload(packed: Packed, device) -> tuple[torch.Tensor, torch.Tensor]:
    return upload(packed.codes, device), upload(packed.scales, device)


def _pad_rows(codes: torch.Tensor, scales: torch.Tensor, multiple: int):
    """Missing rows: code 7 (level 0.0) and scale 0."""
    missing = -codes.shape[0] % multiple
    if not missing:
        return codes, scales
    return (
        torch.cat([codes, codes.new_full((missing, codes.shape[1]), ZERO_BYTE)]),
        torch.cat([scales, scales.new_zeros(missing, scales.shape[1])]),
    )


def _pack(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes uint8 [rows, K_pad / 2], scales half [rows, K_pad / 64], rows a multiple of 16."""
    groups = scales.shape[1]
    assert codes.shape[1] == groups * GROUP // 2
    tiles = codes.shape[0] // TILE_ROWS
    # byte j of a group's row holds k = 2 j, and k = 16 m + 8 h + 2 t: j = 8 m + 4 h + t
    blocks = codes.view(tiles, 2, 8, groups, 4, 2, 4).permute(0, 3, 2, 6, 1, 4, 5)
    blocks = blocks.reshape(tiles, groups, BLOCK_CODES)
    scale_bytes = scales.view(torch.uint8).view(tiles, TILE_ROWS, groups, 2)
    out = torch.empty(tiles, groups * BLOCK_BYTES, dtype=torch.uint8, device=codes.device)
    whole = groups // PANEL_BLOCKS
    for first, count in ((0, whole), (whole, 1 if groups % PANEL_BLOCKS else 0)):
        if not count:
            continue
        start = first * PANEL_BLOCKS
        width = min(PANEL_BLOCKS, groups - start)
        span = slice(start * BLOCK_BYTES, (start + count * width) * BLOCK_BYTES)
        panel = out[:, span].view(tiles, count, width * BLOCK_BYTES)
        taken = slice(start, start + count * width)
        panel[:, :, : width * BLOCK_CODES] = blocks[:, taken].reshape(tiles, count, -1)
        panel[:, :, width * BLOCK_CODES :] = (
            scale_bytes[:, :, taken]
            .reshape(tiles, TILE_ROWS, count, width * 2)
            .transpose(1, 2)
            .reshape(tiles, count, -1)
        )
    return out
