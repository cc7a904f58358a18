"""A GGUF of a shape: random weights in the types that llama.cpp's Q4_K_M gives each matrix.

Such a file is for timing only. Writing one needs the package gguf; its sizes are known without.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import DecodeError
from ..plan import ArchSpec

Q4_K_M = 15  # of llama.cpp's file types
# Weights of a block, its bytes, {place of a float16 factor: multiple of the first}, and the size
# (root mean square) of the integers that the first multiplies where they are random. The second
# factor of Q4_K takes away what the first adds on average, 7.5 being the mean of 4 bits.
_BLOCKS = {
    "Q4_K": (256, 144, {0: 1.0, 2: 7.5}, 280.0),
    "Q6_K": (256, 210, {208: 1.0}, 1370.0),
    "Q5_0": (32, 22, {0: 1.0}, 9.2),
    "Q8_0": (32, 34, {0: 1.0}, 74.0),
}
_NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # for rows that are no whole number of 256 weights


def matrices(spec: ArchSpec) -> dict[str, tuple[int, int, str]]:
    """{name: (rows, columns, type)} of every matrix. Raises DecodeError for a width that no type
    holds."""
    hidden, inner = spec.hidden, spec.intermediate
    wanted = {"token_embd": (spec.vocab, hidden, "Q6_K" if spec.tied else "Q4_K")}
    if not spec.tied:
        wanted["output"] = (spec.vocab, hidden, "Q6_K")
    for i in range(spec.n_layers):
        finer = "Q6_K" if _is_finer(i, spec.n_layers) else "Q4_K"
        layer = {
            "attn_q": (spec.q_dim, hidden, "Q4_K"),
            "attn_k": (spec.kv_dim, hidden, "Q4_K"),
            "attn_v": (spec.kv_dim, hidden, finer),
            "attn_output": (hidden, spec.q_dim, "Q4_K"),
            "ffn_gate": (inner, hidden, "Q4_K"),
            "ffn_up": (inner, hidden, "Q4_K"),
            "ffn_down": (hidden, inner, finer),
        }
        wanted |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {name: (rows, cols, _type(cols, kind)) for name, (rows, cols, kind) in wanted.items()}


def vectors(spec: ArchSpec) -> dict[str, int]:
    """{name: length} of every norm and bias, in float32."""
    lengths = {"output_norm.weight": spec.hidden}
    for i in range(spec.n_layers):
        lengths |= {f"blk.{i}.{name}.weight": spec.hidden for name in ("attn_norm", "ffn_norm")}
        if spec.qkv_bias:
            widths = {"q": spec.q_dim, "k": spec.kv_dim, "v": spec.kv_dim}
            lengths |= {f"blk.{i}.attn_{name}.bias": width for name, width in widths.items()}
    return lengths


def _is_finer(layer: int, count: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    eighth = count // 8
    return layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2


def _type(cols: int, kind: str) -> str:
    kind = kind if cols % 256 == 0 else _NARROW[kind]
    if cols % _BLOCKS[kind][0]:
        raise DecodeError(f"a GGUF needs widths in multiples of 32, {cols} is none")
    return kind


def matrix_bytes(rows: int, cols: int, kind: str) -> int:
    """Packed bytes of a matrix, scales included."""
    weights, size, _, _ = _BLOCKS[kind]
    return rows * cols // weights * size


def nbytes(spec: ArchSpec) -> int:
    """Bytes of all tensors: what the file takes, but for its header."""
    packed = sum(matrix_bytes(*shape) for shape in matrices(spec).values())
    return packed + 4 * sum(vectors(spec).values())


def bytes_per_token(spec: ArchSpec) -> int:
    """Bytes of matrices that a step reads: all but an embedding that is not the head too."""
    read = matrices(spec)
    if not spec.tied:
        del read["token_embd"]
    return sum(matrix_bytes(*shape) for shape in read.values())


def write(spec: ArchSpec, path: Path, seed: int) -> None:
    """Write the file, as "qwen2" with a bias on q, k, v and as "llama" without. Matrices of one
    shape and type share their bytes: only so many are kept in memory."""
    import gguf

    writer = gguf.GGUFWriter(path, "qwen2" if spec.qkv_bias else "llama")
    writer.add_name(spec.name)
    writer.add_file_type(Q4_K_M)
    writer.add_vocab_size(spec.vocab)
    writer.add_context_length(spec.max_seq)
    writer.add_block_count(spec.n_layers)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.n_q)
    writer.add_head_count_kv(spec.n_kv)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_tokenizer_model("none")
    chance, made = np.random.default_rng(seed), {}
    for name, shape in matrices(spec).items():
        if shape not in made:
            made[shape] = _random(*shape, chance)
        kind = gguf.GGMLQuantizationType[shape[2]]
        writer.add_tensor(f"{name}.weight", made[shape], raw_dtype=kind)
    for name, length in vectors(spec).items():
        value = np.zeros if name.endswith("bias") else np.ones
        writer.add_tensor(name, value(length, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random(rows: int, cols: int, kind: str, chance: np.random.Generator) -> np.ndarray:
    """Random blocks uint8 [rows, bytes], whose weights are near 1/sqrt(cols): float16 factors are
    set, for random ones would be NaN now and then."""
    weights, size, factors, integers = _BLOCKS[kind]
    blocks = chance.integers(256, size=(rows * cols // weights, size), dtype=np.uint8)
    for place, times in factors.items():
        factor = np.float16(times * cols**-0.5 / integers)
        blocks[:, place : place + 2] = factor.reshape(1).view(np.uint8)
    return blocks.reshape(rows, -1)
