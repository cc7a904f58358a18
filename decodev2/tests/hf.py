"""Tiny HF folders for the tests: a config, random tensors, and safetensors files written by hand.

The writer is independent of the package (safetensors' own numpy writer has no bfloat16); a test
checks that the safetensors library reads what it writes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from decodev2.plan import ArchSpec, tensor_shapes


def hf_config(spec: ArchSpec, **changes) -> dict:
    """config.json of a spec, in the older top-level style; a change to `...` removes the key."""
    config = {
        "model_type": spec.model_type,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_q,
        "num_key_value_heads": spec.n_kv,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_seq,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tied,
        "hidden_act": "silu",
    }
    if spec.eos_ids:
        config["eos_token_id"] = list(spec.eos_ids)
    return {key: value for key, value in (config | changes).items() if value is not ...}


def hf_name(name: str) -> str:
    """CHR0 name -> name in the checkpoint."""
    return name if name.endswith(".bias") else f"{name}.weight"


def hf_tensors(spec: ArchSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors by checkpoint name: float32 arrays holding bfloat16 values."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        values = 1 + 0.1 * values if "norm" in name else values / np.sqrt(shape[-1], dtype="f4")
        tensors[hf_name(name)] = to_bf16(3 * values if name.endswith(".bias") else values)
    return tensors


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, ties to even, as float32 (finite values only)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def raw_bytes(values: np.ndarray, dtype: str) -> bytes:
    """Payload of a tensor as safetensors stores it."""
    if dtype == "BF16":  # the top half of each float32: exact for bfloat16 values
        return (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.ascontiguousarray(values).astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "BF16") -> None:
    """One safetensors file, tensors in dict order."""
    header, blobs, end = {"__metadata__": {"format": "pt"}}, [], 0
    for name, values in tensors.items():
        blob = raw_bytes(values, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [end, end + len(blob)],
        }
        blobs.append(blob)
        end += len(blob)
    write_raw(path, json.dumps(header).encode(), b"".join(blobs))


def write_raw(path: Path, header: bytes, payload: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def shard_name(i: int, n: int) -> str:
    return f"model-{i + 1:05d}-of-{n:05d}.safetensors"


def write_hf_folder(
    folder: Path,
    config: dict,
    tensors: dict[str, np.ndarray],
    shards: int = 1,
    dtype: str = "BF16",
    generation: dict | None = None,
) -> Path:
    """Write config.json and the tensors, over `shards` files with an index when more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        shard = shard_name(i, shards)
        write_safetensors(folder / shard, {name: tensors[name] for name in part}, dtype)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
