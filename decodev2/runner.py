"""The loop around a step: prompt in, ids out, and why it stopped. Text is not its business."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .errors import ModelError, PromptError
from .graph import ChunkGraph
from .load import ModelWeights
from .plan import ArchSpec
from .prefill import consume_prompt
from .state import DecodeState, reset
from .step import greedy_decode

OnToken = Callable[[int], None]


@dataclass(frozen=True)
class Result:
    """New ids (an end token, if one came, is the last), why the loop stopped, and where time
    went."""

    ids: list[int]
    stop_reason: str  # "end token <id>", "max_new_tokens" or "context full"
    prompt_len: int
    prefill_s: float  # prompt to first token
    decode_s: float  # the tokens after the first

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first over their time; None when there were none."""
        steps = len(self.ids) - 1
        return steps / self.decode_s if steps > 0 and self.decode_s > 0 else None


def check_prompt(spec: ArchSpec, prompt_ids: list[int], max_new_tokens: int) -> None:
    """Refuse what no executor could run, before any buffer is touched. Raises PromptError."""
    if not prompt_ids:
        raise PromptError("the prompt has 0 tokens, needs at least 1")
    if len(prompt_ids) > spec.max_seq:
        raise PromptError(f"the prompt has {len(prompt_ids)} tokens, max_seq is {spec.max_seq}")
    if max_new_tokens < 1:
        raise PromptError(f"max_new_tokens is {max_new_tokens}, needs at least 1")
    for token_id in prompt_ids:
        if not 0 <= token_id < spec.vocab:
            raise PromptError(f"prompt id {token_id} is outside the vocabulary of {spec.vocab}")


def run_loop(
    first_token: Callable[[], int],
    next_token: Callable[[], int],
    spec: ArchSpec,
    prompt_len: int,
    max_new_tokens: int,
    eos_ids: tuple[int, ...],
    on_token: OnToken | None = None,
) -> Result:
    """Drive any executor: `first_token()` consumes the prompt, `next_token()` takes one more step.

    Stops on an end token, after `max_new_tokens`, or when the cache has no slot left to feed the
    last id into. Raises ModelError when a step finds no finite logit (id -1).
    """
    started = time.perf_counter()
    ids: list[int] = []
    prefill_s = None
    reason = "max_new_tokens"
    while len(ids) < max_new_tokens:
        if ids and prompt_len + len(ids) > spec.max_seq:
            reason = "context full"
            break
        token_id = next_token() if ids else first_token()
        if prefill_s is None:
            prefill_s = time.perf_counter() - started
        if token_id < 0:
            raise ModelError(
                f"no finite logit after {prompt_len + len(ids)} tokens: weights are damaged"
            )
        ids.append(token_id)
        if on_token:
            on_token(token_id)
        if token_id in eos_ids:
            reason = f"end token {token_id}"
            break
    return Result(ids, reason, prompt_len, prefill_s, time.perf_counter() - started - prefill_s)


def generate(
    state: DecodeState,
    weights: ModelWeights,
    prompt_ids: list[int],
    max_new_tokens: int,
    eos_ids: tuple[int, ...] = (),
    on_token: OnToken | None = None,
    chunk: int | None = None,
    step: Callable[[], None] | None = None,
    steps_per_read: int = 1,
    full: ChunkGraph | None = None,
    watch: tuple[torch.Tensor, Callable[[], None]] | None = None,
    ahead: int | None = None,
) -> Result:
    """Greedy tokens after `prompt_ids`. Pass no `eos_ids` to run through end tokens.

    `chunk` and `full` are those of `forward_prefill`. `step()` takes one greedy step (a graph's
    `replay`; left out, the eager step). The host reads ids once in `steps_per_read` steps, while
    `ahead` batches of as many run behind those that it waits for (None: 1 on CUDA, 0 on the CPU).
    Past an end token the state stands still, and no step is taken that would be too many without
    one. `watch` is a fault word, [1] int32 beside the state, which is read with every batch, and
    what is called where it is not 0: it may raise before the batch's ids count. `on_token(id)` is
    called once per new id. After an end token, and after what either of them raised, steps may
    still be on their way; later work on their stream comes behind them. Raises PromptError before
    the state is touched.
    """
    spec = weights.spec
    check_prompt(spec, prompt_ids, max_new_tokens)
    reset(state, eos_ids)
    step = step or functools.partial(greedy_decode, state, weights)
    on_cuda = state.history.is_cuda
    if ahead is None:
        ahead = 1 if on_cuda else 0  # on the CPU a step is over when it returns
    fault, on_fault = watch or (None, None)
    newest = len(prompt_ids)  # position of the newest id enqueued
    last = min(newest + max_new_tokens - 1, spec.max_seq)  # of the last id that can be wanted
    # pinned before the first step: pinning may wait for all that runs on the card
    on_host = functools.partial(torch.empty_like, state.history, device="cpu", pin_memory=on_cuda)
    history, faults = on_host(), on_host(dtype=torch.int32)  # a batch's fault lies at its first id
    batches: deque[tuple[slice, torch.cuda.Event | None]] = deque()  # unread, oldest first
    arrived: list[int] = []  # newest first

    def first() -> int:
        consume_prompt(state, weights, prompt_ids, chunk, full)
        return int(state.token)

    def enqueue() -> None:
        nonlocal newest
        steps = min(steps_per_read, last - newest)
        for _ in range(steps):
            step()
        batch = slice(newest + 1, newest + steps + 1)
        history[batch].copy_(state.history[batch], non_blocking=True)
        if fault is not None:
            faults[batch][:1].copy_(fault, non_blocking=True)
        batches.append((batch, _event_behind(state.history.device)))
        newest += steps

    def following() -> int:
        if not arrived:
            while newest < last and len(batches) <= ahead:
                enqueue()
            batch, copied = batches.popleft()
            if copied:
                copied.synchronize()
            if fault is not None and faults[batch][0] != 0:
                on_fault()
            arrived.extend(reversed(history[batch].tolist()))
        return arrived.pop()

    return run_loop(first, following, spec, len(prompt_ids), max_new_tokens, eos_ids, on_token)


def _event_behind(device: torch.device) -> torch.cuda.Event | None:
    """What is over once all that was enqueued so far is; None on the CPU, where it is by now."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
