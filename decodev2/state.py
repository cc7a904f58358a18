"""The state of one request: who is next, where, and every buffer the step touches.

Token, position, length and the finished flag are tensors. Python never holds the position that a
step uses, so the same step can be replayed for any position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .arena import Arena, allocate_arena, panel_size
from .errors import ModelError
from .kv import GraphSafeKV, allocate_kv
from .plan import LIVE_MAX_N, ArchSpec
from .rope import rope_tables

MAX_EOS_IDS = 8
NO_TOKEN = -1  # `next_token` when no logit is finite
UNUSED = -2  # fills end-token slots: equals no id, and not NO_TOKEN


@dataclass(frozen=True)
class DecodeState:
    """One resident request. `decode` holds n = 1 buffers, `prompt` those of one prefill chunk."""

    spec: ArchSpec
    decode: Arena
    prompt: Arena
    kv: GraphSafeKV
    cos: torch.Tensor  # [max_seq, head_dim] float32
    sin: torch.Tensor  # [max_seq, head_dim] float32
    logits: torch.Tensor  # [1, vocab] float32
    next_token: torch.Tensor  # [1] int64, greedy id written by the step; -1 when no logit is finite
    finished: torch.Tensor  # [1] uint8, an end token was produced
    eos_ids: torch.Tensor  # [MAX_EOS_IDS] int64, unused slots UNUSED
    panel: torch.Tensor  # scratch of the products
    scores: torch.Tensor  # [n_q, max_seq + 16] scratch of attention

    @property
    def token(self) -> torch.Tensor:
        return self.decode.token

    @property
    def position(self) -> torch.Tensor:
        return self.decode.position

    @property
    def valid_len(self) -> torch.Tensor:
        return self.decode.valid_len

    @property
    def nbytes(self) -> int:
        """Bytes of KV cache, arenas, tables and scratch."""
        own = (self.cos, self.sin, self.logits, self.panel, self.scores)
        return self.kv.nbytes + self.decode.nbytes + self.prompt.nbytes + sum(t.nbytes for t in own)


def allocate_state(spec: ArchSpec, device: str = "cpu", chunk: int = LIVE_MAX_N) -> DecodeState:
    """Allocate everything a request of up to `spec.max_seq` positions needs; nothing is allocated
    later."""
    cos, sin = (torch.from_numpy(t).to(device) for t in rope_tables(spec))
    chunk = min(chunk, spec.max_seq)
    return DecodeState(
        spec=spec,
        decode=allocate_arena(spec, 1, device),
        prompt=allocate_arena(spec, chunk, device),
        kv=allocate_kv(spec, device),
        cos=cos,
        sin=sin,
        logits=torch.zeros(1, spec.vocab, device=device),
        next_token=torch.zeros(1, dtype=torch.int64, device=device),
        finished=torch.zeros(1, dtype=torch.uint8, device=device),
        eos_ids=torch.full((MAX_EOS_IDS,), UNUSED, dtype=torch.int64, device=device),
        panel=torch.zeros(panel_size(spec, chunk), device=device),
        scores=torch.zeros(spec.n_q, spec.max_seq + 16, device=device),
    )


def reset(state: DecodeState, eos_ids: tuple[int, ...] = ()) -> None:
    """Start a new request in place. The KV cache keeps its old contents: attention never reads
    them. Raises ModelError for more than MAX_EOS_IDS end tokens."""
    if len(eos_ids) > MAX_EOS_IDS:
        raise ModelError(f"{len(eos_ids)} end tokens, the state holds at most {MAX_EOS_IDS}")
    state.position.zero_()
    state.valid_len.zero_()
    state.finished.zero_()
    state.eos_ids.fill_(UNUSED)
    for slot, token_id in enumerate(eos_ids):
        state.eos_ids[slot] = token_id


def load_token(state: DecodeState, token_id: int) -> None:
    """Put an id in as the next input (teacher forcing)."""
    state.token.fill_(token_id)
