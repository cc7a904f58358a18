"""One function per operation of the step, CPU and CUDA. Each writes into the arena; none
allocates.

A layer is five operations: `qkv` (norm, product, bias), `attention` (RoPE, cache write, softmax
over the live prefix), `project` (product added to the residual), `swiglu` (norm, gate and up, silu)
and `project` again. On CUDA each is one kernel; on the CPU a norm or a cache write is a call of its
own.
"""

from __future__ import annotations

import torch

from . import ladder, native, toggles
from .arena import Arena
from .embed import embed_rows
from .linear import (
    SWIGLU,
    Linear,
    by_wgmma,
    check_layout,
    cuda_head,
    cuda_product,
    nf4_linear,
)
from .load import LayerWeights, ModelWeights
from .panels import PanelLinear
from .state import DecodeState

__all__ = ["attention", "choose", "embed", "head", "project", "qkv", "rms", "rope_kv", "swiglu"]


def embed(c: Arena, weights: ModelWeights) -> None:
    """x = embedding row of every token; valid_len = position + 1, the prefix each attends to."""
    if c.x.is_cuda:
        table = weights.embed
        rows = table.panels if isinstance(table, PanelLinear) else table
        native.cuda("step").embed(
            c.token, c.position, c.valid_len, rows, weights.spec.vocab, c.x, toggles.current.pdl
        )
        return
    embed_rows(weights.embed, c.token, c.x)
    c.valid_len.copy_(c.position).add_(c.one)


def qkv(c: Arena, state: DecodeState, layer: LayerWeights) -> None:
    """q, k, v = W rms(x) + b for every column. The bias belongs here: Qwen2.5 without it speaks
    noise."""
    if c.x.is_cuda:
        x, norm = _normed(c, state, layer.attn_norm)
        tensors = {"norm": norm, "eps": state.spec.rms_eps, "bias": layer.qkv_bias}
        if isinstance(layer.qkv, tuple):
            check_layout(layer.qkv[0], len(x))
            ladder.step_qkv(x, layer.qkv, c.qkv[0], **tensors)
        else:
            cuda_product(x, layer.qkv, c.qkv, state.panel, **tensors)
        return
    rms(c.x, layer.attn_norm, state.spec.rms_eps, c.h)
    wq, wk, wv = layer.qkv
    native.cpu().qkv(
        c.h, wq.codes, wq.scales, wk.codes, wk.scales, wv.codes, wv.scales, *layer.qkv_bias,
        c.q, c.k, c.v, state.panel,
    )  # fmt: skip


def attention(c: Arena, state: DecodeState, layer: int, in_step: bool = False) -> None:
    """attn = grouped-query attention of every column over its own live prefix, after RoPE and after
    its key and value are in the cache. `in_step`: position and cache were there before `embed`, so
    a kernel that starts early may read them."""
    if c.x.is_cuda:
        _cuda_attention(c, state, layer, in_step)
        return
    rope_kv(state, layer, c.position, c.q, c.k, c.v)
    kv = state.kv
    native.cpu().attn(c.q, kv.k[layer], kv.v[layer], c.valid_len, state.scores, c.attn)


def project(x: torch.Tensor, w: Linear, c: Arena, state: DecodeState) -> None:
    """The residual stream += W x."""
    if x.is_cuda:
        x_half = _half_act(c, state) if x is c.act else _half_attended(c, state)
        cuda_product(x, w, c.x, state.panel, add=True, x_half=x_half, shared=state.shared)
    else:
        nf4_linear(x, w, c.x, state.panel, add=True)


def swiglu(c: Arena, state: DecodeState, layer: LayerWeights) -> None:
    """act = silu(G rms(x)) * (U rms(x)), silu after the whole product. A chunk by wgmma leaves it
    as half for `project` only."""
    if c.x.is_cuda:
        x, norm = _normed(c, state, layer.mlp_norm)
        tensors = {"norm": norm, "eps": state.spec.rms_eps}
        if isinstance(layer.gate_up, tuple):
            check_layout(layer.gate_up[0], len(x))
            ladder.step_swiglu(x, layer.gate_up, c.act[0], state.panel, **tensors)
        else:
            y_half = _half_act(c, state)
            cuda_product(x, layer.gate_up, c.act, state.panel, SWIGLU, y_half=y_half, **tensors)
        return
    rms(c.x, layer.mlp_norm, state.spec.rms_eps, c.h)
    gate, up = layer.gate_up
    native.cpu().swiglu(c.h, gate.codes, gate.scales, up.codes, up.scales, c.act, state.panel)


def head(c: Arena, state: DecodeState, weights: ModelWeights) -> None:
    """Logits of the last column, and the candidates of their argmax."""
    x, h, w = c.x[-1:], c.h[-1:], weights.lm_head
    norm, eps = weights.norm, weights.spec.rms_eps
    if x.is_cuda:
        if isinstance(w, ladder.RowMajor) and toggles.current.norm == "alone":
            rms(x, norm, eps, h)
            x, norm = h, None
        cuda_head(x, w, state.logits, norm, eps, *state.candidates)
        return
    rms(x, norm, eps, h)
    native.cpu().head(h, w.codes, w.scales, state.logits, state.next_token, state.panel)


def choose(state: DecodeState, commit: bool) -> None:
    """next_token = argmax: lowest id wins a tie, NaN never wins, -1 when nothing is finite.

    With `commit` also token = next_token, position += 1, history[position] = token and finished |=
    token is an end token. Once finished, token and position stay where they are.
    """
    if state.logits.is_cuda:
        native.cuda("step").choose(
            *state.candidates, state.next_token, state.token, state.position, state.finished,
            state.eos_ids, state.history, commit, toggles.current.pdl,
        )  # fmt: skip
    elif commit:
        native.cpu().commit(
            state.token, state.position, state.next_token, state.finished, state.eos_ids,
            state.history,
        )  # fmt: skip


# ---- parts of the above that also stand alone ----


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x * rsqrt(mean(x^2) + eps) * weight per row. x, out [n, hidden], weight [hidden]."""
    if x.is_cuda:
        native.cuda("step").rms(x, weight, eps, out, toggles.current.pdl)
    else:
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


# ---- CUDA ----


def _half_attended(c: Arena, state: DecodeState) -> torch.Tensor | None:
    """Where one launch of attention leaves its output as half for a GEMV, if it does."""
    t = toggles.current
    if len(c.x) > 1 or (t.linear, t.attention, t.attended) != ("gemv", "one_launch", "half"):
        return None
    return state.attn_half


def _half_act(c: Arena, state: DecodeState) -> torch.Tensor | None:
    """Where act is handed on as half, if it is: by the GEMV of one column, or by wgmma."""
    t = toggles.current
    if t.act != "half":
        return None
    if len(c.x) == 1 and t.linear == "gemv":
        return state.act_half
    return state.act_columns if by_wgmma(c.x) else None


def _normed(c: Arena, state: DecodeState, weight: torch.Tensor):
    """What a product reads: x and the norm to apply inside, or h already normed and no norm."""
    if toggles.current.norm == "inside":
        return c.x, weight
    rms(c.x, weight, state.spec.rms_eps, c.h)
    return c.h, None


def _cuda_attention(c: Arena, state: DecodeState, layer: int, in_step: bool) -> None:
    kv, t = state.kv, toggles.current
    buffers = (
        c.q, c.k, c.v, state.cos, state.sin, c.position, c.valid_len, kv.k[layer], kv.v[layer],
        state.scores, state.counters, c.attn,
    )  # fmt: skip
    attn = native.cuda("attn")
    if len(c.x) > 1 or t.attention in ("one_warp", "sdpa", "rope_apart"):
        native.cuda("attn_prefill").rope_kv(*buffers, False, 0, t.pdl)
        if t.attention == "sdpa" and len(c.x) == 1:
            ladder.sdpa(c.q, kv.k[layer], kv.v[layer], c.valid_len, c.attn)
        elif t.attention == "one_warp":
            native.cuda("ladder_attn").one_warp(*buffers, False, 0, t.pdl)
        elif len(c.x) > 1:
            native.cuda("attn_prefill").prefill(*buffers, False, 0, t.pdl)
        else:
            attn.decode(*buffers, False, 0, t.pdl)
    elif t.attention == "two_launch":
        native.cuda("ladder_attn").flash_two_launch(*buffers, True, 0, t.pdl)
    else:
        start = 0 if not t.pdl else 2 if in_step and t.ahead == "weights" else 1
        if _half_attended(c, state) is None:
            attn.decode(*buffers, True, 0, start)
        else:
            attn.decode_to_half(*buffers, state.attn_half, 0, start)
