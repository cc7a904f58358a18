"""One function per operation of the step, CPU and CUDA. Each writes into the arena; none
allocates.

A layer is five operations: `qkv` (norm, product, bias), `attention` (RoPE, cache write, softmax
over the live prefix), `project` (product added to the residual), `swiglu` (norm, gate and up, silu)
and `project` again. On CUDA each is one kernel; on the CPU a norm or a cache write is a call of its
own.
"""

from __future__ import annotations

import torch

from . import native
from .arena import Arena
from .embed import embed_rows
from .linear import Linear
from .load import LayerWeights, ModelWeights
from .state import DecodeState

__all__ = ["attention", "choose", "embed", "head", "project", "qkv", "rms", "rope_kv", "swiglu"]


def embed(c: Arena, weights: ModelWeights) -> None:
    """x = embedding row of every token; valid_len = position + 1, the prefix each attends to."""
    embed_rows(weights.embed, c.token, c.x)
    c.valid_len.copy_(c.position).add_(1)


def qkv(c: Arena, state: DecodeState, layer: LayerWeights) -> None:
    """q, k, v = W rms(x) + b for every column. The bias belongs here: Qwen2.5 without it speaks
    noise."""
    rms(c.x, layer.attn_norm, state.spec.rms_eps, c.h)
    wq, wk, wv = layer.qkv
    native.cpu().qkv(
        c.h, wq.codes, wq.scales, wk.codes, wk.scales, wv.codes, wv.scales, *layer.qkv_bias,
        c.q, c.k, c.v, state.panel,
    )  # fmt: skip


def attention(c: Arena, state: DecodeState, layer: int) -> None:
    """attn = grouped-query attention of every column over its own live prefix, after RoPE and after
    its key and value are in the cache."""
    rope_kv(state, layer, c.position, c.q, c.k, c.v)
    kv = state.kv
    native.cpu().attn(c.q, kv.k[layer], kv.v[layer], c.valid_len, state.scores, c.attn)


def project(x: torch.Tensor, w: Linear, c: Arena, state: DecodeState) -> None:
    """The residual stream += W x."""
    native.cpu().linear(x, w.codes, w.scales, w.rows, c.x, True, state.panel)


def swiglu(c: Arena, state: DecodeState, layer: LayerWeights) -> None:
    """act = silu(G rms(x)) * (U rms(x)), silu after the whole product."""
    rms(c.x, layer.mlp_norm, state.spec.rms_eps, c.h)
    gate, up = layer.gate_up
    native.cpu().swiglu(c.h, gate.codes, gate.scales, up.codes, up.scales, c.act, state.panel)


def head(c: Arena, state: DecodeState, weights: ModelWeights) -> None:
    """Logits of the last column, and the candidates of their argmax."""
    x, h, w = c.x[-1:], c.h[-1:], weights.lm_head
    rms(x, weights.norm, weights.spec.rms_eps, h)
    native.cpu().head(h, w.codes, w.scales, state.logits, state.next_token, state.panel)


def choose(state: DecodeState, commit: bool) -> None:
    """next_token = argmax: lowest id wins a tie, NaN never wins, -1 when nothing is finite.

    With `commit` also token = next_token, position += 1, finished |= token is an end token.
    """
    if commit:
        native.cpu().commit(
            state.token, state.position, state.next_token, state.finished, state.eos_ids
        )


# ---- parts of the above that also stand alone ----


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x * rsqrt(mean(x^2) + eps) * weight per row. x, out [n, hidden], weight [hidden]."""
    native.cpu().rms(x, weight, eps, out)


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
