"""Rotary position embedding: frequency table, cos/sin tables, rotation, and the fused-QKV splits.

Rotate-half convention (HF Llama): dimension i pairs with i + head_dim/2, and both halves of a table
row hold the same values. One table serves the oracle, CPU and CUDA kernels, decode and prefill.
"""

from __future__ import annotations

import numpy as np

from .errors import ModelError
from .plan import ArchSpec, RopeScaling


def inverse_frequencies(spec: ArchSpec) -> np.ndarray:
    """Angle per position for each dimension pair, after scaling: float32 [head_dim / 2].

    theta ** (-2 i / head_dim), then `linear` or `llama3` scaling. Raises ModelError for a scaling
    kind that is not implemented or whose numbers make no sense.
    """
    exponent = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    # Rounded to float32 where transformers rounds: one unit in the last place of a frequency is
    # 2e-4 rad at position 4000, so a "better" table would be a different model far out.
    power = np.power(spec.rope_theta, exponent.astype(np.float64)).astype(np.float32)
    inv_freq = np.float32(1.0) / power
    if spec.rope_scaling is None:
        return inv_freq
    return _scaled(inv_freq, spec.rope_scaling)


def _scaled(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if not 0 < scaling.factor < np.inf:
        raise ModelError(f"rope scaling factor {scaling.factor!r}, needs a finite number above 0")
    factor = np.float32(scaling.factor)
    if scaling.kind == "linear":
        return inv_freq / factor
    if scaling.kind != "llama3":
        raise ModelError(
            f"rope scaling {scaling.kind!r} is not implemented; needs 'linear' or 'llama3'"
        )
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not 0 < low < high:
        raise ModelError(
            f"rope scaling 'llama3': low_freq_factor {low!r} and high_freq_factor {high!r}, "
            "needs 0 < low < high"
        )
    # Three bands by wavelength in positions: short ones keep their frequency, long ones are divided
    # by the factor, and those between move linearly from one to the other (Llama 3.1).
    # Reciprocal times number is how torch divides a number by a tensor; it rounds once more.
    one = np.float32(1.0)
    wavelength = (one / inv_freq) * np.float32(2 * np.pi)
    turns = (one / wavelength) * np.float32(scaling.original_max_seq)
    keep = (turns - np.float32(low)) / np.float32(high - low)
    slow = inv_freq / factor
    between = (one - keep) * inv_freq / factor + keep * inv_freq
    long_band = wavelength > scaling.original_max_seq / low
    short_band = wavelength < scaling.original_max_seq / high
    return np.where(long_band, slow, np.where(short_band, inv_freq, between)).astype(np.float32)


def rope_tables(spec: ArchSpec) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each float32 [max_seq, head_dim], both halves filled.

    The angle is a float32 product as in transformers; cos and sin of it are taken in float64.
    """
    positions = np.arange(spec.max_seq, dtype=np.float32)
    half = (positions[:, None] * inverse_frequencies(spec)[None, :]).astype(np.float64)
    angle = np.concatenate([half, half], axis=1)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate_half(x: np.ndarray) -> np.ndarray:
    """[a, b] -> [-b, a] along the last axis, a and b being its two halves."""
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def apply_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate x [..., head_dim] by tables that broadcast against it, e.g. [n, 1, head_dim]."""
    return x * cos + rotate_half(x) * sin


# ---- fused QKV: which rows are q, k and v ----


def split_internlm_wqkv(w: np.ndarray, spec: ArchSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of InternLM2's fused matrix -> (q, k, v): per KV head its q heads, then k, then v.

    Works on anything whose first axis is rows [q_dim + 2 kv_dim, ...]: weights, codes, scales.
    """
    _check_qkv_rows(w, spec)
    group = spec.n_q // spec.n_kv
    rest = w.shape[1:]
    heads = w.reshape(spec.n_kv, group + 2, spec.head_dim, *rest)
    q = heads[:, :group].reshape(spec.q_dim, *rest)
    k = heads[:, group].reshape(spec.kv_dim, *rest)
    v = heads[:, group + 1].reshape(spec.kv_dim, *rest)
    return q, k, v


def fuse_internlm_wqkv(q: np.ndarray, k: np.ndarray, v: np.ndarray, spec: ArchSpec) -> np.ndarray:
    """Inverse of `split_internlm_wqkv`: q [q_dim, ...], k and v [kv_dim, ...] -> fused rows."""
    group = spec.n_q // spec.n_kv
    rest = q.shape[1:]
    heads = np.concatenate(
        [
            q.reshape(spec.n_kv, group, spec.head_dim, *rest),
            k.reshape(spec.n_kv, 1, spec.head_dim, *rest),
            v.reshape(spec.n_kv, 1, spec.head_dim, *rest),
        ],
        axis=1,
    )
    return heads.reshape(spec.q_dim + 2 * spec.kv_dim, *rest)


def split_concat_qkv(w: np.ndarray, spec: ArchSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of a plainly concatenated matrix -> (q, k, v): all q rows, then all k, then all v."""
    _check_qkv_rows(w, spec)
    q, k, v = np.split(w, [spec.q_dim, spec.q_dim + spec.kv_dim], axis=0)
    return q, k, v


def _check_qkv_rows(w: np.ndarray, spec: ArchSpec) -> None:
    rows = spec.q_dim + 2 * spec.kv_dim
    if w.shape[0] != rows:
        raise ModelError(
            f"fused QKV has {w.shape[0]} rows; {spec.n_q} query and {spec.n_kv} KV heads of "
            f"{spec.head_dim} need {rows}"
        )
