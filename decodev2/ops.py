"""One function per operation of the step. Each writes its last tensor argument(s); none allocates.

The names follow the contract's kernels: rms, qkv, rope_kv, attn, linear, swiglu, head, commit.
"""

from __future__ import annotations

import torch

from . import native
from .embed import embed_rows as embed
from .linear import PackedLinear
from .linear import nf4_linear as linear
from .state import DecodeState

__all__ = ["attn", "commit", "embed", "head", "linear", "qkv", "rms", "rope_kv", "swiglu"]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x * rsqrt(mean(x^2) + eps) * weight, row by row. x, out [n, hidden], weight
    [hidden]."""
    native.cpu().rms(x, weight, eps, out)


def qkv(
    x: torch.Tensor,
    weights: tuple[PackedLinear, PackedLinear, PackedLinear],
    biases: tuple[torch.Tensor | None, ...],
    panel: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """q, k, v = W x + b in one pass that shares x. The bias belongs here: Qwen2.5 without it speaks
    noise."""
    wq, wk, wv = weights
    native.cpu().qkv(
        x, wq.codes, wq.scales, wk.codes, wk.scales, wv.codes, wv.scales, *biases, q, k, v, panel
    )


def rope_kv(
    state: DecodeState,
    layer: int,
    position: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Rotate q and k in place by each row's position and write k, v into the cache there."""
    kv = state.kv
    native.cpu().rope_kv(q, k, v, state.cos, state.sin, position, kv.k[layer], kv.v[layer])


def attn(
    state: DecodeState, layer: int, valid_len: torch.Tensor, q: torch.Tensor, out: torch.Tensor
) -> None:
    """Grouped-query attention of every row over its own live prefix. q, out [n, n_q * head_dim]."""
    kv = state.kv
    native.cpu().attn(q, kv.k[layer], kv.v[layer], valid_len, state.scores, out)


def swiglu(
    x: torch.Tensor, gate: PackedLinear, up: PackedLinear, panel: torch.Tensor, out: torch.Tensor
) -> None:
    """out = silu(G x) * (U x), silu after the whole of G x. out [n, intermediate]."""
    native.cpu().swiglu(x, gate.codes, gate.scales, up.codes, up.scales, out, panel)


def head(
    x: torch.Tensor,
    w: PackedLinear,
    panel: torch.Tensor,
    logits: torch.Tensor,
    next_token: torch.Tensor,
) -> None:
    """logits = W x and next_token = argmax: lowest id wins a tie, NaN never wins. x [1, hidden]."""
    native.cpu().head(x, w.codes, w.scales, logits, next_token, panel)


def commit(state: DecodeState) -> None:
    """token = next_token, position += 1, finished |= token is an end token."""
    native.cpu().commit(
        state.token, state.position, state.next_token, state.finished, state.eos_ids
    )
