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

from . import ladder, panels
from .chr0 import ChrFile
from .errors import ContainerError, ModelError
from .ladder import RowMajor
from .linear import Linear, PackedLinear, from_packed
from .nf4 import Packed
from .panels import PanelLinear
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
    """One layer. On the CPU fused parts are tuples, on CUDA one panel matrix and one vector; in
    the layout "rows" tuples of row-major matrices, one matrix if they were concatenated."""

    attn_norm: torch.Tensor  # [hidden] float32
    qkv: tuple[PackedLinear, PackedLinear, PackedLinear] | tuple[RowMajor, ...] | PanelLinear
    qkv_bias: tuple[torch.Tensor | None, ...] | torch.Tensor | None  # [rows of q, k, v] float32
    o: Linear
    mlp_norm: torch.Tensor  # [hidden] float32
    gate_up: tuple[PackedLinear, PackedLinear] | tuple[RowMajor, ...] | PanelLinear
    down: Linear

    @property
    def nbytes(self) -> int:
        """Packed bytes of the layer's matrices."""
        parts = (self.qkv, self.o, self.gate_up, self.down)
        return sum(
            w.nbytes for part in parts for w in (part if isinstance(part, tuple) else (part,))
        )


@dataclass(frozen=True)
class ModelWeights:
    spec: ArchSpec
    embed: Linear | torch.Tensor  # packed rows; dense float32 only for synthetic models
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden] float32
    lm_head: Linear  # the embedding itself when tied

    @property
    def bytes_per_token(self) -> int:
        """Packed bytes one decode step must read: every linear once, and the head."""
        return self.lm_head.nbytes + sum(layer.nbytes for layer in self.layers)

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


LAYOUTS = ("panels", "rows")


def load_weights(
    model: Model, device: str = "cpu", layout: str = "panels", concatenated: bool = False
) -> ModelWeights:
    """Bring every tensor into the device's layout, one at a time: peak is the model plus one.

    On CUDA `layout` is "panels" (what the products of the step read) or "rows" (as the file has
    them, for the backend `rows`); with `concatenated` rows hold q, k, v and gate, up as one matrix
    each. The CPU has a layout of its own. The embedding is gathered from panels in either layout.
    """
    if layout not in LAYOUTS:
        raise ModelError(f"layout is {layout!r}, needs one of {', '.join(LAYOUTS)}")
    spec, tensors = model.spec, model.tensors
    on_cpu = torch.device(device).type == "cpu"
    by_rows = not on_cpu and layout == "rows"

    def vector(*names: str) -> torch.Tensor:
        parts = [np.asarray(tensors[name], np.float32) for name in names]
        return torch.from_numpy(np.concatenate(parts)).to(device)

    def matrix(packed: Packed) -> Linear:
        if by_rows:
            return ladder.from_packed(packed, device)
        return from_packed(packed) if on_cpu else panels.from_packed(packed, device)

    def rows(*parts: Packed) -> tuple[RowMajor, ...]:
        matrices = tuple(ladder.from_packed(part, device) for part in parts)
        return (ladder.concatenate(matrices),) if concatenated else matrices

    def fused_qkv(parts: tuple[Packed, Packed, Packed]):
        if by_rows:
            return rows(*parts)
        return tuple(map(from_packed, parts)) if on_cpu else panels.from_packed(parts, device)

    def fused_gate_up(gate: Packed, up: Packed):
        if by_rows:
            return rows(gate, up)
        if on_cpu:
            return from_packed(gate), from_packed(up)
        return panels.gate_up_from_packed(gate, up, device)

    def bias(names: dict[str, str]):
        if not spec.qkv_bias:
            return (None, None, None) if on_cpu else None
        parts = [names[f"{role}_bias"] for role in "qkv"]
        return tuple(map(vector, parts)) if on_cpu else vector(*parts)

    def layer(i: int) -> LayerWeights:
        names = layer_names(spec, i)
        return LayerWeights(
            attn_norm=vector(names["attn_norm"]),
            qkv=fused_qkv(_qkv(tensors, names, spec)),
            qkv_bias=bias(names),
            o=matrix(tensors[names["o"]]),
            mlp_norm=vector(names["mlp_norm"]),
            gate_up=fused_gate_up(tensors[names["gate"]], tensors[names["up"]]),
            down=matrix(tensors[names["down"]]),
        )

    def head() -> Linear:
        if not spec.tied:
            return matrix(tensors[names["lm_head"]])
        return matrix(table) if by_rows else embed

    names = top_names(spec)
    table = tensors[names["embed"]]
    if not isinstance(table, Packed):
        embed = torch.tensor(table, device=device)
    else:
        embed = from_packed(table) if on_cpu else panels.from_packed(table, device)
    return ModelWeights(
        spec=spec,
        embed=embed,
        layers=tuple(layer(i) for i in range(spec.n_layers)),
        norm=vector(names["norm"]),
        lm_head=head(),
    )


def _qkv(tensors: Mapping, names: dict[str, str], spec: ArchSpec) -> tuple[Packed, Packed, Packed]:
    """The three matrices of a layer; InternLM2 keeps them in one, rows grouped by KV head."""
    if "wqkv" not in names:
        return tuple(tensors[names[role]] for role in "qkv")
    fused = tensors[names["wqkv"]]
    codes, scales = (split_internlm_wqkv(part, spec) for part in (fused.codes, fused.scales))
    return tuple(Packed(c, s, (len(c), fused.shape[1])) for c, s in zip(codes, scales, strict=True))
