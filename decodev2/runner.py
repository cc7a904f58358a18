"""The loop around a step: prompt in, ids out, and why it stopped. Text is not its business."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

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
    check: Callable[[], None] | None = None,
) -> Result:
    """Greedy tokens after `prompt_ids`. Pass no `eos_ids` to run through end tokens.

    `chunk` and `full` are those of `forward_prefill`. `step()` takes one greedy step (a graph's
    `replay`; left out, the eager step). The host reads ids once in `steps_per_read` steps: no step
    waits for that, and past an end token the state stands still. `check()` may raise before ids
    that were read count. `on_token(id)` is called once per new id. Raises PromptError before the
    state is touched.
    """
    spec = weights.spec
    check_prompt(spec, prompt_ids, max_new_tokens)
    reset(state, eos_ids)
    step = step or functools.partial(greedy_decode, state, weights)
    taken = len(prompt_ids)  # position of the newest id
    unread: list[int] = []

    def first() -> int:
        consume_prompt(state, weights, prompt_ids, chunk, full)
        return int(state.token)

    def following() -> int:
        nonlocal taken
        if not unread:
            wanted = max_new_tokens - (taken - len(prompt_ids) + 1)
            steps = min(steps_per_read, wanted, spec.max_seq - taken)
            for _ in range(steps):
                step()
            unread.extend(reversed(state.history[taken + 1 : taken + steps + 1].tolist()))
            if check:
                check()
        taken += 1
        return unread.pop()

    return run_loop(first, following, spec, len(prompt_ids), max_new_tokens, eos_ids, on_token)
