"""The key/value cache: one static block, indexed by a position that lives in a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .plan import ArchSpec


@dataclass(frozen=True)
class GraphSafeKV:
    """k and v: [n_layers, max_seq, n_kv, head_dim]. Slots past the live length are never read, so a
    new request starts without clearing them."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


def allocate_kv(spec: ArchSpec, device: str = "cpu") -> GraphSafeKV:
    """Cache for `spec.max_seq` positions: float32 on the CPU, bf16 on CUDA."""
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    shape = (spec.n_layers, spec.max_seq, spec.n_kv, spec.head_dim)
    k = torch.zeros(shape, dtype=dtype, device=device)
    return GraphSafeKV(k, torch.zeros_like(k))
