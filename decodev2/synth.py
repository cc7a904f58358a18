"""Synthetic models: seeded for correctness, and random packed weights at real shapes for timing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .errors import ModelError
from .nf4 import ZERO_CODE, Packed, bf16_bits, bf16_to_f32, encode_nf4, padded
from .plan import GROUP, ArchSpec, layer_names, tensor_shapes, top_names
from .rope import fuse_internlm_wqkv

TILE_GROUPS = 32749  # a prime (a block of 1 MB), so repeats do not line up with the rows
EMBED_STD = 0.25
BIAS_STD = 0.5
# The projections that write to the residual stream get more than 1/sqrt(K): otherwise the embedding
# of the last token decides the next one alone and attention could be wrong unseen.
RESIDUAL_GAIN = 2.0


@dataclass(frozen=True)
class SynthModel:
    """A spec and its tensors by CHR0 name: Packed matrices, float32 arrays of bf16 values."""

    spec: ArchSpec
    tensors: dict[str, Packed | np.ndarray]


def build(
    spec: ArchSpec, seed: int, *, embed_std: float | None = None, bias_std: float = BIAS_STD
) -> SynthModel:
    """Seeded model of `spec`: every linear through `encode_nf4`, norms and biases in bf16.

    The embedding is float32 [vocab, hidden] holding bf16 values, or Packed when the spec ties it to
    the head (one matrix then serves both). `embed_std` and `bias_std` are standard deviations.
    """
    rng = np.random.default_rng(seed)
    embed_std = _embed_std(spec) if embed_std is None else embed_std
    roles = _roles(spec)
    tensors: dict[str, Packed | np.ndarray] = {}
    for name, shape in tensor_shapes(spec).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        role = roles[name]
        if role.endswith("norm"):
            tensors[name] = _bf16(1.0 + np.float32(0.1) * noise)
        elif role.endswith("_bias"):
            tensors[name] = _bf16(np.float32(bias_std) * noise)
        elif role == "embed" and not spec.tied:
            tensors[name] = _bf16(np.float32(embed_std) * noise)
        else:
            tensors[name] = encode_nf4(_matrix_std(role, shape[1], embed_std) * noise, name)
    return SynthModel(spec, tensors)


def random_packed(spec: ArchSpec, seed: int) -> SynthModel:
    """Random packed matrices at the shapes of `spec`, for timing: codes and scales of a Gaussian.

    One small block is encoded and repeated, from another offset for each matrix, so that even a
    model of many GB is made at the speed of memory. Weights are near 1/sqrt(K): activations stay
    finite and of ordinary size. The embedding is Packed, as in a loaded `.chr`.
    """
    rng = np.random.default_rng(seed)
    roles = _roles(spec)
    embed_std = _embed_std(spec)
    block = encode_nf4(rng.standard_normal((TILE_GROUPS, GROUP), dtype=np.float32), "tile")
    codes, scales = block.codes.reshape(-1), block.scales.reshape(-1).astype(np.float32)
    tensors: dict[str, Packed | np.ndarray] = {}
    for name, shape in tensor_shapes(spec).items():
        role = roles[name]
        if role.endswith("norm"):
            tensors[name] = _bf16(1.0 + np.float32(0.1) * rng.standard_normal(shape, np.float32))
        elif role.endswith("_bias"):
            tensors[name] = _bf16(np.float32(0.1) * rng.standard_normal(shape, np.float32))
        elif shape[1] % GROUP:  # padding columns hold zero codes: left to the codec
            std = _matrix_std(role, shape[1], embed_std)
            tensors[name] = encode_nf4(std * rng.standard_normal(shape, np.float32), name)
        else:
            (rows, width), std = shape, _matrix_std(role, shape[1], embed_std)
            tensors[name] = Packed(
                codes=_tiled(codes, rows * width // 2, rng).reshape(rows, -1),
                scales=_tiled(
                    (std * scales).astype(np.float16), rows * width // GROUP, rng
                ).reshape(rows, -1),
                shape=shape,
            )
    return SynthModel(spec, tensors)


def random_matrix(rows: int, cols: int, rng: np.random.Generator) -> Packed:
    """Uniform random codes and scales near 1/sqrt(cols): a fresh NF4 matrix for kernel checks."""
    width = padded(cols)
    codes = rng.integers(0, 256, (rows, width // 2), dtype=np.uint8)
    nibbles = codes[:, cols // 2 :]  # the first of these bytes may hold the last column
    if cols % 2:
        nibbles[:, 0] = nibbles[:, 0] & 15 | ZERO_CODE << 4
        nibbles = nibbles[:, 1:]
    nibbles[:] = ZERO_CODE | ZERO_CODE << 4
    scales = rng.uniform(0.5, 1.5, (rows, width // GROUP)) / np.sqrt(cols)
    return Packed(codes, scales.astype(np.float16), (rows, cols))


def internlm_twin(model: SynthModel) -> SynthModel:
    """The InternLM2 model that computes the same: packed rows of q, k, v regrouped, names changed.

    Takes a `llama_swiglu` model without bias and untied; raises ModelError for any other.
    """
    spec = model.spec
    if spec.family != "llama_swiglu" or spec.qkv_bias or spec.tied:
        raise ModelError(
            f"{spec.name}: an InternLM2 twin needs llama_swiglu, no bias, untied; found "
            f"{spec.family}, qkv_bias={spec.qkv_bias}, tied={spec.tied}"
        )
    twin = replace(spec, name=f"{spec.name}-twin", family="internlm_gqa", model_type="internlm2")
    old, new = top_names(spec), top_names(twin)
    tensors = {new[role]: model.tensors[old[role]] for role in new}
    for layer in range(spec.n_layers):
        old, new = layer_names(spec, layer), layer_names(twin, layer)
        q, k, v = (model.tensors[old[role]] for role in "qkv")
        for role, name in new.items():
            if role == "wqkv":
                tensors[name] = Packed(
                    codes=fuse_internlm_wqkv(q.codes, k.codes, v.codes, spec),
                    scales=fuse_internlm_wqkv(q.scales, k.scales, v.scales, spec),
                    shape=(spec.q_dim + 2 * spec.kv_dim, spec.hidden),
                )
            else:
                tensors[name] = model.tensors[old[role]]
    return SynthModel(twin, tensors)


def _roles(spec: ArchSpec) -> dict[str, str]:
    """Tensor name -> role, the inverse of the two tables in plan."""
    roles = {name: role for role, name in top_names(spec).items()}
    for layer in range(spec.n_layers):
        roles |= {name: role for role, name in layer_names(spec, layer).items()}
    return roles


def _embed_std(spec: ArchSpec) -> float:
    # A tied head scores each embedding against the residual stream that holds the last one: with
    # larger rows every token would just predict itself.
    return 1 / np.sqrt(spec.hidden) if spec.tied else EMBED_STD


def _matrix_std(role: str, width: int, embed_std: float) -> np.float32:
    if role == "embed":
        return np.float32(embed_std)
    return np.float32((RESIDUAL_GAIN if role in ("o", "down") else 1.0) / np.sqrt(width))


def _bf16(x: np.ndarray) -> np.ndarray:
    return bf16_to_f32(bf16_bits(x.astype(np.float32)))


def _tiled(tile: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` elements that repeat `tile` [n] endlessly, from a random start."""
    tile = np.roll(tile, int(rng.integers(tile.size)))
    out = np.empty(count, tile.dtype)
    for at in range(0, count, tile.size):
        out[at : at + tile.size] = tile[: count - at]
    return out
