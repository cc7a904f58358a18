"""Embedding rows. A real model keeps them packed (the head's matrix, when tied); no dense table
exists."""

from __future__ import annotations

import torch

from . import native
from .linear import Linear, PackedLinear
from .panels import PanelLinear


def embed_rows(table: Linear | torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = row ids[i]. ids int64 [n], out float32 [n, hidden].

    `table` is packed NF4, or a dense float32 [vocab, hidden] for the small synthetic models.
    """
    if out.is_cuda:
        packed = isinstance(table, PanelLinear)
        rows, vocab = (table.panels, table.rows) if packed else (table, len(table))
        native.cuda("step").embed(ids, None, None, rows, vocab, out, False)
    elif isinstance(table, PackedLinear):
        native.cpu().embed(ids, table.codes, table.scales, table.rows, out)
    else:
        torch.index_select(table, 0, ids, out=out)
