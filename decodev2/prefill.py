"""The prompt, in chunks of columns: each chunk is one pass over the weights."""

from __future__ import annotations

import torch

from . import ops
from .graph import ChunkGraph
from .load import ModelWeights
from .state import DecodeState
from .step import commit_step, forward


def forward_prefill(
    state: DecodeState,
    weights: ModelWeights,
    prompt_ids: list[int],
    chunk: int | None = None,
    full: ChunkGraph | None = None,
) -> None:
    """Run the whole prompt from position 0 and choose the first new token.

    Afterwards `position` is the prompt's last slot, `valid_len` its length, and `logits` /
    `next_token` belong to what follows it: the state one `forward_decode` of the last id would have
    left. `chunk` (columns per pass) is at most the state's; on the CPU every size gives the same
    bits. `full` takes the chunks that have as many columns as it has; the bits are the same.
    """
    capacity = len(state.prompt.token)
    chunk = min(chunk or capacity, capacity)
    # once for the whole prompt: a copy per chunk from host memory would make every chunk wait
    ids = torch.tensor(prompt_ids, dtype=torch.int64).to(state.logits.device)
    positions = torch.arange(len(prompt_ids), device=ids.device)
    for start in range(0, len(prompt_ids), chunk):
        columns = state.prompt.first(min(chunk, len(prompt_ids) - start))
        n = len(columns.token)
        columns.token.copy_(ids[start : start + n])
        columns.position.copy_(positions[start : start + n])
        if full and len(full.columns.token) == n:
            full.take()
        else:
            forward(columns, state, weights)
    ops.head(columns, state, weights)
    ops.choose(state, commit=False)
    state.position.fill_(len(prompt_ids) - 1)
    state.valid_len.fill_(len(prompt_ids))


def consume_prompt(
    state: DecodeState,
    weights: ModelWeights,
    prompt_ids: list[int],
    chunk: int | None = None,
    full: ChunkGraph | None = None,
) -> None:
    """Prefill, then commit: the first new token is in `state.token`, ready for `greedy_decode`."""
    forward_prefill(state, weights, prompt_ids, chunk, full)
    commit_step(state)
