"""A `.chr` file (or a synthetic model) as weights on a device, checked against the model folder
first."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from .chr0 import ChrFile
from .errors import ContainerError
from .linear import PackedLinear, from_packed
from .nf4 import Packed
from .plan import ArchSpec, layer_names, spec_from_folder, tensor_shapes, top_names
from .rope import split_internlm_wqkv


class Model(Protocol):
    """What the oracle and the loader read: a spec, and tensors by their CHR0 names."""

    spec: ArchSpec
    tensors: Mapping[str, Packed | np.ndarray]


@dataclass(frozen=True)
class ChrModel:
    """A `.chr` file seen with the spec of the HF folder beside it."""

    spec: ArchSpec
    tensors: ChrFile


@dataclass(frozen=True)
class LayerWeights:
    attn_norm: torch.Tensor  # [hidden] float32
    qkv: tuple[PackedLinear, PackedLinear, PackedLinear]
    qkv_bias: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    o: PackedLinear
    mlp_norm: torch.Tensor  # [hidden] float32
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return (*self.qkv, self.o, self.gate, self.up, self.down)


@dataclass(frozen=True)
class ModelWeights:
    spec: ArchSpec
    embed: PackedLinear | torch.Tensor  # packed rows; dense float32 only for synthetic models
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden] float32
    lm_head: PackedLinear  # the embedding itself when tied

    @property
    def bytes_per_token(self) -> int:
        """Packed bytes one decode step must read: every linear once, and the head."""
        return self.lm_head.nbytes + sum(w.nbytes for layer in self.layers for w in layer.linears)

    @property
    def nbytes(self) -> int:
        """Packed bytes held, the embedding counted once when tied."""
        untied = self.embed is not self.lm_head
        return self.bytes_per_token + (self.embed.nbytes if untied else 0)


def open_model(folder: str | Path, chr_path: str | Path, max_seq: int | None = None) -> ChrModel:
    """Open a packed model and check that it is the one the folder describes. Reads headers only.

    Raises ModelError for the folder, ContainerError for the file: a tensor missing, left over or of
    another shape, another architecture, or a side-car that names another config.
    """
    spec = spec_from_folder(folder, max_seq)
    file = ChrFile(chr_path)
    try:
        _check_fits(file, spec, Path(folder))
    except BaseException:
        file.close()
        raise
    return ChrModel(spec, file)


def _check_fits(file: ChrFile, spec: ArchSpec, folder: Path) -> None:
    found = {
        "arch": spec.model_type,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_layers": spec.n_layers,
        "vocab_size": spec.vocab,
    }
    for key, needed in found.items():
        if file.root[key] != needed:
            raise ContainerError(
                f"{file.path}: {key} is {file.root[key]!r}, {folder} needs {needed!r}"
            )
    shapes = tensor_shapes(spec)
    for name in sorted(shapes.keys() | file.entries.keys()):
        if name not in file.entries:
            raise ContainerError(f"{file.path}: tensor {name} is missing, {folder} needs it")
        if name not in shapes:
            raise ContainerError(f"{file.path}: tensor {name} has no place in {folder}")
        shape = tuple(file.entries[name].shape)
        if shape != shapes[name]:
            raise ContainerError(f"{file.path}: {name} is {shape}, {folder} needs {shapes[name]}")
    for name, recorded in file.source.items():  # hashes the packer took of the folder's files
        if not name.endswith("_sha256"):
            continue
        path = folder / name.removesuffix("_sha256")
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != recorded:
            raise ContainerError(f"{file.path}: was packed from another {path.name} than {path}")


def load_weights(model: Model, device: str = "cpu") -> ModelWeights:
    """Bring every tensor into the device's layout, one at a time (peak: the model plus one
    tensor)."""
    spec, tensors = model.spec, model.tensors

    def vector(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(tensors[name], dtype=np.float32)).to(device)

    def packed(name: str) -> PackedLinear:
        return from_packed(tensors[name])

    def layer(i: int) -> LayerWeights:
        names = layer_names(spec, i)
        if "wqkv" in names:  # one fused matrix, rows grouped by KV head
            fused = tensors[names["wqkv"]]
            parts = zip(
                *(split_internlm_wqkv(a, spec) for a in (fused.codes, fused.scales)), strict=True
            )
            qkv = tuple(from_packed(Packed(c, s, (len(c), fused.shape[1]))) for c, s in parts)
        else:
            qkv = tuple(packed(names[role]) for role in "qkv")
        bias = tuple(vector(names[f"{role}_bias"]) if spec.qkv_bias else None for role in "qkv")
        return LayerWeights(
            attn_norm=vector(names["attn_norm"]),
            qkv=qkv,
            qkv_bias=bias,
            o=packed(names["o"]),
            mlp_norm=vector(names["mlp_norm"]),
            gate=packed(names["gate"]),
            up=packed(names["up"]),
            down=packed(names["down"]),
        )

    names = top_names(spec)
    table = tensors[names["embed"]]
    embed = from_packed(table) if isinstance(table, Packed) else torch.from_numpy(table.copy())
    return ModelWeights(
        spec=spec,
        embed=embed,
        layers=tuple(layer(i) for i in range(spec.n_layers)),
        norm=vector(names["norm"]),
        lm_head=embed if spec.tied else packed(names["lm_head"]),
    )
