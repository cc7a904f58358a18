"""The state of one request: who is next, where, and every buffer the step touches.

Token, position, length and the finished flag are tensors. Python never holds the position that a
step uses, so the same step can be replayed for any position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import native
from .arena import Arena, allocate_arena, panel_size
from .errors import ModelError
from .kv import GraphSafeKV, allocate_kv
from .linear import cuda_scratch_bytes, shared_tiles, wgmma_bytes
from .panels import panel_shapes
from .plan import GROUP, ArchSpec, chunk_on
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
    history: torch.Tensor  # [max_seq + 1] int64, the id that entered at each position
    eos_ids: torch.Tensor  # [MAX_EOS_IDS] int64, unused slots UNUSED
    panel: torch.Tensor  # scratch of the products
    scores: torch.Tensor  # scratch of attention; on the CPU [n_q, max_seq + 16]
    counters: torch.Tensor | None = None  # [n_q] int32, CUDA attention; launches leave them zero
    act_half: torch.Tensor | None = None  # CUDA: [intermediate] of one column as half fragments
    attn_half: torch.Tensor | None = None  # CUDA: attention's column, [q_dim], the same
    act_columns: torch.Tensor | None = None  # CUDA: act of a chunk as half tiles, where wgmma runs
    shared: tuple[torch.Tensor, ...] = ()  # CUDA GEMV: `linear.shared_tiles`
    candidates: tuple[torch.Tensor, ...] = ()  # CUDA head: best logit and id of each CTA

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
        own = [self.cos, self.sin, self.logits, self.panel, self.scores, *self.candidates]
        own += [] if self.act_columns is None else [self.act_columns]
        return self.kv.nbytes + self.decode.nbytes + self.prompt.nbytes + sum(t.nbytes for t in own)


def allocate_state(spec: ArchSpec, device: str = "cpu", chunk: int | None = None) -> DecodeState:
    """Allocate everything a request of up to `spec.max_seq` positions needs; nothing is allocated
    later. `chunk`, the prompt columns per pass, is left to the device (`plan.chunk_on`) if it is
    None; it is never more than the cache holds."""
    cos, sin = (torch.from_numpy(t).to(device) for t in rope_tables(spec))
    kind = torch.device(device).type
    chunk = min(chunk_on(kind) if chunk is None else chunk, spec.max_seq)
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
        history=torch.zeros(spec.max_seq + 1, dtype=torch.int64, device=device),
        eos_ids=torch.full((MAX_EOS_IDS,), UNUSED, dtype=torch.int64, device=device),
        **(_cpu_scratch(spec, chunk) if kind == "cpu" else _cuda_scratch(spec, chunk, device)),
    )


def product_scratch(spec: ArchSpec, n: int, device) -> torch.Tensor:
    """Scratch for the products of one step over up to n columns."""
    if torch.device(device).type == "cpu":
        return torch.zeros(panel_size(spec, n))
    with torch.cuda.device(device):
        size = cuda_scratch_bytes(panel_shapes(spec, head=n == 1), n)
    size = max(size, 8 * spec.intermediate)  # gate and up apart (ladder.step_swiglu)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _cpu_scratch(spec: ArchSpec, chunk: int) -> dict:
    return {
        "panel": product_scratch(spec, chunk, "cpu"),
        "scores": torch.zeros(spec.n_q, spec.max_seq + 16),
    }


def _cuda_scratch(spec: ArchSpec, chunk: int, device: str) -> dict:
    with torch.cuda.device(device):
        properties = torch.cuda.get_device_properties(device)
        partials = native.cuda("attn").partial_floats(
            spec.n_q, spec.n_kv, spec.head_dim, spec.max_seq
        )
    slots = 2 * properties.multi_processor_count
    return {
        "panel": product_scratch(spec, chunk, device),
        "scores": torch.zeros(partials, device=device),
        "counters": torch.zeros(spec.n_q, dtype=torch.int32, device=device),
        "shared": shared_tiles(max(tiles for tiles, _ in panel_shapes(spec, head=False)), device),
        "act_half": _half_column(spec.intermediate, device),
        "attn_half": _half_column(spec.q_dim, device),
        "act_columns": _act_columns(spec, chunk, device),
        "candidates": (
            torch.zeros(slots, device=device),
            torch.full((slots,), -1, dtype=torch.int32, device=device),
        ),
    }


def _half_column(width: int, device: str) -> torch.Tensor:
    return torch.zeros(-(-width // GROUP) * 128, dtype=torch.uint8, device=device)


def _act_columns(spec: ArchSpec, chunk: int, device: str) -> torch.Tensor | None:
    with torch.cuda.device(device):
        size = wgmma_bytes(spec.intermediate, chunk)
    return torch.zeros(size, dtype=torch.uint8, device=device) if size else None


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


def snapshot(state: DecodeState) -> Callable[[], None]:
    """Remember token, position, length and flags; calling the result puts them back."""
    live = (state.token, state.position, state.valid_len, state.next_token, state.finished)
    saved = [tensor.clone() for tensor in live]

    def restore() -> None:
        for tensor, value in zip(live, saved, strict=True):
            tensor.copy_(value)

    return restore


def load_token(state: DecodeState, token_id: int) -> None:
    """Put an id in as the next input (teacher forcing)."""
    state.token.fill_(token_id)
