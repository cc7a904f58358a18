"""Every buffer a step writes, allocated once at load. Ops hand each other these tensors, nothing
else."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .plan import GROUP, ArchSpec


@dataclass(frozen=True)
class Arena:
    """Buffers for a step over n columns (tokens): n = 1 in decoding, a chunk of the prompt in
    prefill.

    All [n, width] float32 unless said. `x` is the residual stream, `h` a normed copy of it.
    """

    token: torch.Tensor  # [n] int64, ids that enter
    position: torch.Tensor  # [n] int64, cache slot of each column
    valid_len: torch.Tensor  # [n] int32, live prefix each column attends to
    one: torch.Tensor  # [n] int32, all 1: torch would allocate a tensor for a Python 1, every step
    x: torch.Tensor  # [n, hidden]
    h: torch.Tensor  # [n, hidden]
    qkv: torch.Tensor  # [n, (n_q + 2 n_kv) * head_dim], of which q, k and v are columns
    q: torch.Tensor  # [n, n_q * head_dim]
    k: torch.Tensor  # [n, n_kv * head_dim]
    v: torch.Tensor  # [n, n_kv * head_dim]
    attn: torch.Tensor  # [n, n_q * head_dim]
    act: torch.Tensor  # [n, intermediate], silu(gate) * up

    def first(self, n: int) -> Arena:
        """Views of the first n columns, for the last, shorter chunk of a prompt."""
        if n == len(self.token):
            return self
        return Arena(*(getattr(self, field.name)[:n] for field in fields(self)))

    @property
    def nbytes(self) -> int:
        views = ("q", "k", "v")
        return sum(getattr(self, f.name).nbytes for f in fields(self) if f.name not in views)


def allocate_arena(spec: ArchSpec, n: int, device: str = "cpu") -> Arena:
    def buffer(*shape: int, dtype=torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    qkv = buffer(n, spec.q_dim + 2 * spec.kv_dim)
    q, k, v = qkv.split([spec.q_dim, spec.kv_dim, spec.kv_dim], dim=1)
    return Arena(
        token=buffer(n, dtype=torch.int64),
        position=buffer(n, dtype=torch.int64),
        valid_len=buffer(n, dtype=torch.int32),
        one=buffer(n, dtype=torch.int32).fill_(1),
        x=buffer(n, spec.hidden),
        h=buffer(n, spec.hidden),
        qkv=qkv,
        q=q,
        k=k,
        v=v,
        attn=buffer(n, spec.q_dim),
        act=buffer(n, spec.intermediate),
    )


def panel_size(spec: ArchSpec, n: int) -> int:
    """Floats of scratch a product over n columns needs: the widest input, padded to whole
    groups."""
    widest = max(spec.hidden, spec.q_dim, spec.intermediate)
    return -(-widest // GROUP) * GROUP * n
