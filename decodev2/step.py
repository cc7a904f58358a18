"""One token through the model. Decoding and prefill run the same `forward`, over 1 or n columns.

    greedy_decode = forward (embed, layers), head, choose and commit

No position, length or token is read by Python on the way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from . import ops
from .arena import Arena
from .load import ModelWeights
from .state import DecodeState

Watch = Callable[[str, torch.Tensor], None]


def forward(
    columns: Arena, state: DecodeState, weights: ModelWeights, watch: Watch | None = None
) -> None:
    """Run `columns.token` at `columns.position` through all layers; the residual ends in
    `columns.x`.

    Keys and values are written to the cache at those positions. `watch(name, buffer)` sees every
    buffer as it is written, under the oracle's names.
    """
    c = columns
    watch = watch or _unwatched
    ops.embed(c, weights)
    watch("embed", c.x)
    for i, layer in enumerate(weights.layers):
        ops.qkv(c, state, layer)
        watch(f"layer {i} attn_in", c.h)
        ops.attention(c, state, i, in_step=True)
        watch(f"layer {i} q", c.q)
        watch(f"layer {i} k", c.k)
        watch(f"layer {i} v", c.v)
        watch(f"layer {i} attn", c.attn)
        ops.project(c.attn, layer.o, c, state)
        watch(f"layer {i} resid_attn", c.x)
        ops.swiglu(c, state, layer)
        watch(f"layer {i} mlp_in", c.h)
        watch(f"layer {i} act", c.act)
        ops.project(c.act, layer.down, c, state)
        watch(f"layer {i} resid_mlp", c.x)


def forward_decode(state: DecodeState, weights: ModelWeights, watch: Watch | None = None) -> None:
    """One column: reads `token` and `position`, writes `logits` and `next_token`, moves neither."""
    forward(state.decode, state, weights, watch)
    ops.head(state.decode, state, weights)
    ops.choose(state, commit=False)
    if watch:
        watch("final", state.decode.h)
        watch("logits", state.logits)


def greedy_decode(state: DecodeState, weights: ModelWeights) -> None:
    """One greedy token; needs nothing from the host."""
    forward(state.decode, state, weights)
    ops.head(state.decode, state, weights)
    ops.choose(state, commit=True)


def commit_step(state: DecodeState) -> None:
    """The chosen id becomes the next input, one slot further."""
    ops.choose(state, commit=True)


def trace(state: DecodeState, weights: ModelWeights) -> dict[str, np.ndarray]:
    """Every buffer of one `forward_decode`, by the oracle's names, for `oracle.diff`."""
    seen: dict[str, np.ndarray] = {}

    def keep(name: str, buffer: torch.Tensor) -> None:
        seen[name] = buffer.detach().cpu().numpy().copy()

    forward_decode(state, weights, keep)
    return seen


def _unwatched(name: str, buffer: torch.Tensor) -> None:
    pass
