"""One token through the model. Decoding and prefill run the same `forward`, over 1 or n columns.

    greedy_decode = forward_decode (embed, layers, head, argmax), then commit_step

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
    c, eps, panel = columns, weights.spec.rms_eps, state.panel
    watch = watch or _unwatched
    ops.embed(weights.embed, c.token, c.x)
    watch("embed", c.x)
    c.valid_len.copy_(c.position).add_(c.one)
    for i, layer in enumerate(weights.layers):
        ops.rms(c.x, layer.attn_norm, eps, c.h)
        watch(f"layer {i} attn_in", c.h)
        ops.qkv(c.h, layer.qkv, layer.qkv_bias, panel, c.q, c.k, c.v)
        ops.rope_kv(state, i, c.position, c.q, c.k, c.v)
        watch(f"layer {i} q", c.q)
        watch(f"layer {i} k", c.k)
        watch(f"layer {i} v", c.v)
        ops.attn(state, i, c.valid_len, c.q, c.attn)
        watch(f"layer {i} attn", c.attn)
        ops.linear(c.attn, layer.o, c.x, panel, add=True)
        watch(f"layer {i} resid_attn", c.x)
        ops.rms(c.x, layer.mlp_norm, eps, c.h)
        watch(f"layer {i} mlp_in", c.h)
        ops.swiglu(c.h, layer.gate, layer.up, panel, c.act)
        watch(f"layer {i} act", c.act)
        ops.linear(c.act, layer.down, c.x, panel, add=True)
        watch(f"layer {i} resid_mlp", c.x)


def choose(
    columns: Arena, state: DecodeState, weights: ModelWeights, watch: Watch | None = None
) -> None:
    """Logits and greedy id of the last column, into `state.logits` and `state.next_token`."""
    watch = watch or _unwatched
    last = columns.x[-1:], columns.h[-1:]
    ops.rms(last[0], weights.norm, weights.spec.rms_eps, last[1])
    watch("final", last[1])
    ops.head(last[1], weights.lm_head, state.panel, state.logits, state.next_token)
    watch("logits", state.logits)


def forward_decode(state: DecodeState, weights: ModelWeights, watch: Watch | None = None) -> None:
    """One column: reads `token` and `position`, writes `logits` and `next_token`, moves neither."""
    forward(state.decode, state, weights, watch)
    choose(state.decode, state, weights, watch)


def commit_step(state: DecodeState) -> None:
    """The chosen id becomes the next input, one slot further."""
    ops.commit(state)


def greedy_decode(state: DecodeState, weights: ModelWeights) -> None:
    """One greedy token; needs nothing from the host."""
    forward_decode(state, weights)
    commit_step(state)


def trace(state: DecodeState, weights: ModelWeights) -> dict[str, np.ndarray]:
    """Every buffer of one `forward_decode`, by the oracle's names, for `oracle.diff`."""
    seen: dict[str, np.ndarray] = {}

    def keep(name: str, buffer: torch.Tensor) -> None:
        seen[name] = buffer.detach().cpu().numpy().copy()

    forward_decode(state, weights, keep)
    return seen


def _unwatched(name: str, buffer: torch.Tensor) -> None:
    pass
