"""The float32 reference in NumPy: one function per op, and the whole model as their sequence.

It decides what the executors must compute, so it is written to be read, not to be fast. Each packed
matrix is decoded when it is used and dropped again; `decode_all` trades memory for time.

    step_logits   teacher-forced logits of n tokens in one pass
    greedy        prompt ids -> new ids
    trace, diff   every buffer by name, and the table that compares two such sets
    first_parting where chosen ids leave the oracle, and by what margin

A model is anything with `.spec` (ArchSpec) and `.tensors` (mapping by CHR0 name; see
`plan.tensor_shapes`). A matrix is Packed or a float32 array [M, K].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .errors import ModelError, PromptError
from .nf4 import Packed, decode_nf4, matmul_f32
from .plan import ArchSpec, layer_names, top_names, with_max_seq
from .rope import apply_rope, rope_tables, split_internlm_wqkv

Matrix = Packed | np.ndarray


# ---- state ----


@dataclass
class KVCache:
    """Keys (after RoPE) and values: k and v, each float32 [n_layers, max_seq, n_kv, head_dim].

    It keeps no length: the caller's position says which slots are live; the rest may hold anything.
    """

    k: np.ndarray
    v: np.ndarray

    @classmethod
    def empty(cls, spec: ArchSpec, fill: float = 0.0) -> KVCache:
        """A cache of `spec` with every slot set to `fill`; NaN or 1e4 shows an over-read."""
        shape = (spec.n_layers, spec.max_seq, spec.n_kv, spec.head_dim)
        return cls(np.full(shape, fill, np.float32), np.full(shape, fill, np.float32))


@dataclass(frozen=True)
class DenseModel:
    """A spec and its tensors, all float32 arrays."""

    spec: ArchSpec
    tensors: dict[str, np.ndarray]


def decode_all(model) -> DenseModel:
    """Every packed matrix of `model` decoded once: 4 bytes per weight, for many short calls."""
    tensors = {
        name: decode_nf4(value) if isinstance(value, Packed) else value
        for name, value in model.tensors.items()
    }
    return DenseModel(model.spec, tensors)


# ---- ops: activations are [n, width], one row per token ----


def embed(table: Matrix, token_ids: np.ndarray) -> np.ndarray:
    """Rows of the embedding [vocab, hidden] for ids [n] -> float32 [n, hidden]."""
    if isinstance(table, Packed):
        return decode_nf4(table, rows=token_ids)
    return table[token_ids].astype(np.float32)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    return x * (np.float32(1.0) / np.sqrt(mean_square + np.float32(eps))) * weight


def linear(w: Matrix, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [n, K] times w [M, K] transposed, plus bias [M] -> float32 [n, M]."""
    y = (matmul_f32(w, x.T) if isinstance(w, Packed) else w @ x.T).T
    return y if bias is None else y + bias


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate heads x [n, heads, head_dim] by the table rows of their positions [n, head_dim]."""
    return apply_rope(x, cos[:, None, :], sin[:, None, :])


def attention_weights(q: np.ndarray, k: np.ndarray, valid_len: np.ndarray) -> np.ndarray:
    """Softmax weights of q [n, n_q, head_dim] over k [T, n_kv, head_dim] -> [n_kv, group, n, T].

    Token i sees slots t < valid_len[i], 1 <= valid_len <= T. The others score -inf before the
    softmax, so their weight is exactly 0 whatever they hold. Query head h uses KV head h // group.
    """
    slots, n_kv, head_dim = k.shape
    group = q.shape[1] // n_kv
    grouped = q.reshape(-1, n_kv, group, head_dim).transpose(1, 2, 0, 3)  # [n_kv, group, n, hd]
    with np.errstate(invalid="ignore", over="ignore"):  # dead slots may hold NaN or huge numbers
        scores = grouped @ k.transpose(1, 2, 0)[:, None] * np.float32(head_dim**-0.5)
    live = np.arange(slots) < np.asarray(valid_len)[:, None]  # [n, T]
    scores = np.where(live, scores, np.float32(-np.inf))
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, valid_len: np.ndarray) -> np.ndarray:
    """Grouped-query attention -> float32 [n, n_q * head_dim]; arguments as `attention_weights`.

    v is [T, n_kv, head_dim] like k; KV heads are not repeated.
    """
    weights = attention_weights(q, k, valid_len)
    # A weight of 0 does not remove NaN from a sum, so slots that no token may see leave v too.
    dead = np.arange(v.shape[0]) >= np.max(valid_len)
    values = np.where(dead[:, None, None], np.float32(0.0), v).transpose(1, 0, 2)
    out = weights @ values[:, None]  # [n_kv, group, n, head_dim]
    return out.transpose(2, 0, 1, 3).reshape(q.shape[0], -1)


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, elementwise; silu(x) = x / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return gate / (np.float32(1.0) + np.exp(-gate)) * up


# ---- the model ----


def buffer_names(spec: ArchSpec) -> list[str]:
    """Names of the buffers that `trace` returns, in the order of computation."""
    per_layer = ("attn_in", "q", "k", "v", "attn", "resid_attn", "mlp_in", "act", "resid_mlp")
    names = [f"layer {layer} {part}" for layer in range(spec.n_layers) for part in per_layer]
    return ["embed", *names, "final", "logits"]


def step_logits(
    model, token_ids: Sequence[int], pos0: int = 0, kv: KVCache | None = None
) -> np.ndarray:
    """Teacher-forced logits: float32 [n, vocab], row i predicting what follows token_ids[i].

    The tokens take positions pos0 .. pos0 + n - 1; their keys and values are written to `kv`, whose
    slots below pos0 must be live. Without `kv`, pos0 must be 0. Raises PromptError for ids
    outside the vocabulary or positions outside max_seq.
    """
    return _last(_buffers(model, token_ids, pos0, kv))


def greedy(model, prompt_ids: Sequence[int], n_new: int, eos_ids: Sequence[int] = ()) -> list[int]:
    """Up to `n_new` ids of largest logit after the prompt; the lowest id wins a tie.

    Stops after an id in `eos_ids` (which is returned) and when the context is full: the last id
    comes from position max_seq - 1. Raises PromptError as `step_logits` does.
    """
    max_seq = model.spec.max_seq
    pending = _checked_ids(prompt_ids, model.spec, 0, None)
    kv = KVCache.empty(with_max_seq(model.spec, min(max_seq, len(pending) + max(n_new, 0))))
    ids: list[int] = []
    position = 0
    while len(ids) < n_new and position + len(pending) <= max_seq:
        logits = _last(_buffers(model, pending, position, kv, last_row_only=True))
        ids.append(argmax(logits[-1]))
        if ids[-1] in eos_ids:
            break
        position += len(pending)
        pending = ids[-1:]
    return ids


def trace(
    model,
    token_ids: Sequence[int],
    pos0: int = 0,
    kv: KVCache | None = None,
    until: str | None = None,
) -> dict[str, np.ndarray]:
    """Every buffer by name (see `buffer_names`), each float32 [n, width], in order of computation.

    `until="layer 1 attn"` stops after that buffer; nothing beyond it is computed. Other arguments
    and errors as `step_logits`.
    """
    names = buffer_names(model.spec)
    if until is not None and until not in names:
        raise ModelError(f"no buffer {until!r}; needs one of {', '.join(names)}")
    buffers: dict[str, np.ndarray] = {}
    for name, value in _buffers(model, token_ids, pos0, kv):
        buffers[name] = value
        if name == until:
            break
    return buffers


def _buffers(
    model,
    token_ids: Sequence[int],
    pos0: int,
    kv: KVCache | None,
    last_row_only: bool = False,
) -> Iterator[tuple[str, np.ndarray]]:
    """Compute the model layer by layer, giving out each buffer as soon as it exists."""
    spec, tensors = model.spec, model.tensors
    ids = _checked_ids(token_ids, spec, pos0, kv)
    n, end = len(ids), pos0 + len(ids)
    if kv is None:
        kv = KVCache.empty(with_max_seq(spec, end))
    valid_len = np.arange(pos0 + 1, end + 1)
    cos, sin = (table[pos0:end] for table in _tables(spec))
    top = top_names(spec)

    x = embed(tensors[top["embed"]], ids)
    yield "embed", x
    for layer in range(spec.n_layers):
        names = layer_names(spec, layer)

        h = rms_norm(x, tensors[names["attn_norm"]], spec.rms_eps)
        yield f"layer {layer} attn_in", h
        q_w, k_w, v_w = _qkv_matrices(tensors, names, spec)
        q_b, k_b, v_b = (tensors[names[f"{r}_bias"]] if spec.qkv_bias else None for r in "qkv")
        q = rope(linear(q_w, h, q_b).reshape(n, spec.n_q, spec.head_dim), cos, sin)
        k = rope(linear(k_w, h, k_b).reshape(n, spec.n_kv, spec.head_dim), cos, sin)
        v = linear(v_w, h, v_b).reshape(n, spec.n_kv, spec.head_dim)
        yield f"layer {layer} q", q.reshape(n, -1)
        yield f"layer {layer} k", k.reshape(n, -1)
        yield f"layer {layer} v", v.reshape(n, -1)
        kv.k[layer, pos0:end] = k
        kv.v[layer, pos0:end] = v
        h = attention(q, kv.k[layer, :end], kv.v[layer, :end], valid_len)
        yield f"layer {layer} attn", h
        x = x + linear(tensors[names["o"]], h)
        yield f"layer {layer} resid_attn", x

        h = rms_norm(x, tensors[names["mlp_norm"]], spec.rms_eps)
        yield f"layer {layer} mlp_in", h
        h = swiglu(linear(tensors[names["gate"]], h), linear(tensors[names["up"]], h))
        yield f"layer {layer} act", h
        x = x + linear(tensors[names["down"]], h)
        yield f"layer {layer} resid_mlp", x

    if last_row_only:
        x = x[-1:]
    x = rms_norm(x, tensors[top["norm"]], spec.rms_eps)
    yield "final", x
    yield "logits", linear(tensors[top["embed" if spec.tied else "lm_head"]], x)


_tables = lru_cache(maxsize=4)(rope_tables)  # greedy asks for the same tables at every step


def _qkv_matrices(tensors: Mapping, names: Mapping, spec: ArchSpec) -> tuple[Matrix, ...]:
    """q, k and v of one layer. InternLM2's are cut out of the fused matrix before the product, so
    that it has the very shapes, and thus the very rounding, of the separate ones."""
    if "wqkv" not in names:
        return tuple(tensors[names[role]] for role in "qkv")
    fused = tensors[names["wqkv"]]
    if not isinstance(fused, Packed):
        return split_internlm_wqkv(fused, spec)
    codes = split_internlm_wqkv(fused.codes, spec)
    scales = split_internlm_wqkv(fused.scales, spec)
    width = fused.shape[1]
    return tuple(
        Packed(codes=c, scales=s, shape=(c.shape[0], width))
        for c, s in zip(codes, scales, strict=True)
    )


def _checked_ids(
    token_ids: Sequence[int], spec: ArchSpec, pos0: int, kv: KVCache | None
) -> np.ndarray:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise PromptError(
            f"token ids are {ids.dtype} of shape {list(ids.shape)}, "
            "needs a list of at least one integer"
        )
    outside = ids[(ids < 0) | (ids >= spec.vocab)]
    if outside.size:
        raise PromptError(f"token id {outside[0]} is outside this vocabulary's 0..{spec.vocab - 1}")
    if pos0 < 0 or pos0 + ids.size > spec.max_seq:
        raise PromptError(
            f"positions {pos0}..{pos0 + ids.size - 1} do not fit the context of {spec.max_seq}"
        )
    if pos0 and kv is None:
        raise PromptError(
            f"pos0 is {pos0} without a KV cache, needs the cache of the tokens before"
        )
    return ids


def _last(buffers: Iterator[tuple[str, np.ndarray]]) -> np.ndarray:
    return deque(buffers, maxlen=1)[0][1]


def argmax(logits: np.ndarray) -> int:
    """Id of the largest of logits [vocab]; the lowest wins a tie. ModelError if any is not
    finite."""
    if not np.isfinite(logits).all():
        raise ModelError(
            f"{np.count_nonzero(~np.isfinite(logits))} of {logits.size} logits are not finite"
        )
    return int(np.argmax(logits))  # the first of equal maxima: the lowest id


# ---- comparing ----


@dataclass(frozen=True)
class DiffRow:
    """One buffer compared. `max_abs` is inf when any element is not finite or the shapes differ."""

    name: str
    max_abs: float
    mean_rel: float
    non_finite: int
    note: str = ""


def diff(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[DiffRow]:
    """Compare buffers by name, in the order of `a`; b is the reference.

    max_abs = max |a - b|; mean_rel = mean |a - b| / mean |b|; non_finite counts elements that are
    NaN or infinite on either side. Such an element, a shape that differs and a buffer that only one
    side has give max_abs = mean_rel = inf, so no tolerance passes them.
    """
    rows = []
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in b or name not in a:
            side = "a" if name in a else "b"
            rows.append(DiffRow(name, np.inf, np.inf, 0, f"only in {side}"))
            continue
        x, y = np.asarray(a[name], np.float64), np.asarray(b[name], np.float64)
        if x.shape != y.shape:
            note = f"shape {list(x.shape)} against {list(y.shape)}"
            rows.append(DiffRow(name, np.inf, np.inf, 0, note))
            continue
        bad = int(np.count_nonzero(~(np.isfinite(x) & np.isfinite(y))))
        if bad:
            rows.append(DiffRow(name, np.inf, np.inf, bad))
            continue
        gap = np.abs(x - y)
        total, size = float(gap.sum()), float(np.abs(y).sum())
        mean_rel = 0.0 if total == 0 else total / size if size else np.inf
        rows.append(DiffRow(name, float(gap.max(initial=0.0)), mean_rel, 0))
    return rows


def format_diff(rows: Sequence[DiffRow]) -> str:
    """The rows of `diff` as an aligned table of text, one line per buffer."""
    cells = [("buffer", "max abs", "mean rel", "non-finite", "")]
    cells += [
        (row.name, f"{row.max_abs:.3e}", f"{row.mean_rel:.3e}", str(row.non_finite), row.note)
        for row in rows
    ]
    width = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = []
    for name, *numbers, note in cells:
        right = [f"{number:>{w}}" for number, w in zip(numbers, width[1:], strict=True)]
        lines.append("  ".join([f"{name:<{width[0]}}", *right, note]).rstrip())
    return "\n".join(lines)


@dataclass(frozen=True)
class Parting:
    """Where chosen ids first leave the oracle's. `margin` is the oracle's logit of its own id minus
    that of the chosen one (0 for an exact tie); `max_abs` is the largest logit difference there."""

    position: int
    oracle_id: int
    chosen_id: int
    margin: float
    max_abs: float | None = None

    def near_tie(self, cap: float) -> bool:
        """True if rounding explains the swap: logits within `cap`, and margin <= 2 max_abs.

        Without the cap a wholly wrong executor would excuse itself. Non-finite logits (max_abs is
        inf) and logits that were not given (None) never pass.
        """
        if self.max_abs is None or not np.isfinite(self.max_abs):
            return False
        return self.max_abs <= cap and self.margin <= 2 * self.max_abs

    def __str__(self) -> str:
        text = (
            f"position {self.position}: id {self.chosen_id} chosen, oracle has {self.oracle_id} "
            f"by a margin of {self.margin:.3e}"
        )
        return text if self.max_abs is None else f"{text}; logits differ by {self.max_abs:.3e}"


def first_parting(
    oracle_logits: np.ndarray,
    ids: Sequence[int],
    executor_logits: np.ndarray | None = None,
) -> Parting | None:
    """First position where `ids` [n] are not the argmax of `oracle_logits` [n, vocab], or None.

    The lowest id wins a tie. The logits must be teacher-forced with those same ids: row i is what
    the oracle says where ids[i] was chosen. With `executor_logits` [n, vocab] the largest logit
    difference there is reported too. Raises ModelError if the shapes do not fit, an id is outside
    the vocabulary or the oracle's row is not finite.
    """
    if len(ids) != len(oracle_logits):
        raise ModelError(
            f"{len(ids)} ids against {len(oracle_logits)} rows of logits, needs as many"
        )
    if executor_logits is not None and executor_logits.shape != oracle_logits.shape:
        raise ModelError(
            f"executor logits {list(executor_logits.shape)}, needs {list(oracle_logits.shape)}"
        )
    for position, chosen in enumerate(int(i) for i in ids):
        if not 0 <= chosen < oracle_logits.shape[1]:
            raise ModelError(
                f"id {chosen} at position {position} is outside 0..{oracle_logits.shape[1] - 1}"
            )
        row = oracle_logits[position]
        best = argmax(row)
        if best == chosen:
            continue
        max_abs = None
        if executor_logits is not None:
            (compared,) = diff({"logits": executor_logits[position]}, {"logits": row})
            max_abs = compared.max_abs
        return Parting(position, best, chosen, float(row[best] - row[chosen]), max_abs)
    return None
