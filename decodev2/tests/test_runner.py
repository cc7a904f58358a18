"""The loop around a step: when it stops, what it refuses, and that it is usable afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import chain, run_of

from decodev2 import oracle, runner, session, tokenloop
from decodev2.errors import DecodeError, ModelError, PromptError, StepError
from decodev2.load import load_weights
from decodev2.plan import TINY_INTERNLM, TINY_LLAMA
from decodev2.state import allocate_state
from decodev2.step import greedy_decode
from decodev2.synth import SynthModel, build


def executors(model):
    """Name -> generate(prompt_ids, max_new_tokens, eos_ids=(), on_token=None) of each executor."""
    weights, state = load_weights(model), allocate_state(model.spec)
    return {
        "decodev2": lambda *a, **k: runner.generate(state, weights, *a, **k),
        "tokenloop": lambda *a, **k: tokenloop.generate(weights, *a, **k),
        "oracle": lambda prompt, n, eos_ids=(), on_token=None: session._oracle_generate(
            model, prompt, n, eos_ids, on_token
        ),
    }


MODEL = build(TINY_LLAMA, 0)
PROMPT = [0, 1, 2, 3]


@pytest.fixture(params=["decodev2", "tokenloop", "oracle"])
def executor(request):
    return request.param


@pytest.fixture(scope="module")
def tiny():
    return executors(MODEL)


@pytest.fixture(scope="module")
def chained():
    """After id 3 come 10, 11, 12, 7, 13, 14, ... 20, then 0."""
    return executors(chain(TINY_LLAMA, run_of(3, 10, 11, 12, 7, *range(13, 21))))


# ---- end tokens ----


def test_any_end_token_stops_and_is_the_last_id(executor, chained):
    generate = chained[executor]
    seen = []
    result = generate(PROMPT, 10, (3, 7), on_token=seen.append)
    assert result.ids == seen == [10, 11, 12, 7]
    assert result.stop_reason == "end token 7"
    assert result.prompt_len == 4
    # The prompt's own 3 is no reason to stop, and without end tokens it runs on.
    assert generate(PROMPT, 10).ids == [10, 11, 12, 7, 13, 14, 15, 16, 17, 18]
    assert generate(PROMPT, 10).stop_reason == "max_new_tokens"
    assert generate(PROMPT, 10, (10,)).ids == [10]  # the first token may be the end
    at_the_limit = generate(PROMPT, 4, (7,))
    assert (at_the_limit.ids, at_the_limit.stop_reason) == ([10, 11, 12, 7], "end token 7")
    just_before = generate(PROMPT, 3, (7,))
    assert (just_before.ids, just_before.stop_reason) == ([10, 11, 12], "max_new_tokens")


# ---- the end of the context ----


@pytest.mark.parametrize("max_new", (1, 2, 100))
@pytest.mark.parametrize("length", (1, 14, 15, 16))
def test_the_end_of_the_context(executor, tiny, length, max_new):
    generate = tiny[executor]
    prompt = np.random.default_rng(length).integers(0, 32, length).tolist()
    room = 16 - length + 1  # the last id comes from the last slot and needs none itself
    result = generate(prompt, max_new)
    assert result.ids == oracle.greedy(MODEL, prompt, max_new)
    assert len(result.ids) == min(max_new, room)
    assert result.stop_reason == ("max_new_tokens" if max_new <= room else "context full")
    # usable afterwards
    assert generate([1, 2], 8).ids == oracle.greedy(MODEL, [1, 2], 8)


@pytest.mark.parametrize("max_new", (1, 2, 100))
def test_a_prompt_over_the_limit_is_refused_before_any_work(executor, tiny, max_new):
    generate, seen = tiny[executor], []
    with pytest.raises(PromptError) as caught:
        generate(list(range(17)), max_new, on_token=seen.append)
    assert str(caught.value) == "the prompt has 17 tokens, max_seq is 16" and not seen
    assert generate([1, 2], 8).ids == oracle.greedy(MODEL, [1, 2], 8)


def test_a_refused_request_leaves_the_state_alone():
    weights, state = load_weights(MODEL), allocate_state(TINY_LLAMA)
    runner.generate(state, weights, PROMPT, 5, (31,))
    before = [t.clone() for t in (state.token, state.position, state.eos_ids, state.kv.k)]
    for prompt, n in ((list(range(17)), 1), ([], 1), ([32], 1), ([1], 0)):
        with pytest.raises(PromptError):
            runner.generate(state, weights, prompt, n)
    after = (state.token, state.position, state.eos_ids, state.kv.k)
    assert all(a.equal(b) for a, b in zip(after, before, strict=True))


def test_a_cache_of_one_slot():
    spec = replace(TINY_LLAMA, max_seq=1)
    for name, generate in executors(SynthModel(spec, MODEL.tensors)).items():
        result = generate([5], 9)
        assert len(result.ids) == 1 and result.stop_reason == "context full", name


# ---- ids read in batches ----


class Stop(Exception):
    pass


class Recorded:
    """Eager steps of one state, and in `events` what happens in which order: "step" for a step, a
    number for an id. The fault word is 1 from step `fails_at` (the first is 1) of a request on."""

    def __init__(self, model, fails_at: int | None = None):
        self.weights, self.state = load_weights(model), allocate_state(model.spec)
        self.fault, self.fails_at = torch.zeros(1, dtype=torch.int32), fails_at
        self.events = []

    def step(self) -> None:
        greedy_decode(self.state, self.weights)
        self.events.append("step")
        if self.steps == self.fails_at:
            self.fault.fill_(1)

    def check(self) -> None:
        self.fault.zero_()
        raise StepError("a step failed")

    def generate(self, prompt, max_new, eos_ids=(), on_token=None, **options):
        self.events = []
        return runner.generate(
            self.state, self.weights, prompt, max_new, eos_ids, on_token or self.events.append,
            step=self.step, watch=(self.fault, self.check), **options,
        )  # fmt: skip

    @property
    def steps(self) -> int:
        return self.events.count("step")

    @property
    def ids(self) -> list[int]:
        return [event for event in self.events if event != "step"]


CHAIN = chain(TINY_LLAMA, run_of(3, 10, 11, 12, 7, *range(13, 21)))


@pytest.mark.parametrize("ahead", (None, 0, 1, 3))
@pytest.mark.parametrize("steps_per_read", (1, 2, 3, 8, 100))
def test_reading_several_steps_at_once_changes_nothing(steps_per_read, ahead):
    """The host reads ids every few steps, others on their way: the same ids, reasons, callbacks."""
    recorded = Recorded(CHAIN)

    def generate(prompt, max_new, eos_ids=()):
        result = recorded.generate(
            prompt, max_new, eos_ids, steps_per_read=steps_per_read, ahead=ahead
        )
        assert recorded.ids == result.ids
        reads = -(-(len(result.ids) - 1) // steps_per_read)
        enqueued = (reads + (ahead or 0)) * steps_per_read if reads else 0
        assert recorded.steps == min(enqueued, max_new - 1, 16 - len(prompt))
        return result.ids, result.stop_reason

    for _ in range(2):  # ids of the request before must not show
        assert generate(PROMPT, 10, (3, 7)) == ([10, 11, 12, 7], "end token 7")
        assert generate(PROMPT, 4, (7,)) == ([10, 11, 12, 7], "end token 7")
        assert generate(PROMPT, 9, (10,)) == ([10], "end token 10")
        assert generate(PROMPT, 3) == ([10, 11, 12], "max_new_tokens")
        assert generate(PROMPT, 1) == ([10], "max_new_tokens")
        full = [10, 11, 12, 7, *range(13, 21), 0]
        assert generate(PROMPT, 100) == (full, "context full")
        assert generate(PROMPT * 4, 100) == ([10], "context full")
        assert generate(PROMPT, 100, (20,)) == (full[:-1], "end token 20")


STEP = "step"


@pytest.mark.parametrize(
    ("ahead", "max_new", "eos_ids", "events"),
    [
        (0, 8, (), [10, *[STEP] * 3, 11, 12, 7, *[STEP] * 3, 13, 14, 15, STEP, 16]),
        (None, 8, (), [10, *[STEP] * 3, 11, 12, 7, *[STEP] * 3, 13, 14, 15, STEP, 16]),
        (1, 8, (), [10, *[STEP] * 6, 11, 12, 7, STEP, 13, 14, 15, 16]),
        (2, 8, (), [10, *[STEP] * 7, 11, 12, 7, 13, 14, 15, 16]),
        (1, 100, (), [10, *[STEP] * 6, 11, 12, 7, *[STEP] * 3, 13, 14, 15, *[STEP] * 3, 16, 17, 18,
                      19, 20, 0]),
        (1, 8, (12,), [10, *[STEP] * 6, 11, 12]),
        (1, 100, (14,), [10, *[STEP] * 6, 11, 12, 7, *[STEP] * 3, 13, 14]),
        (1, 100, (10,), [10]),
    ],
)  # fmt: skip
def test_the_next_batch_is_on_its_way_before_a_read(ahead, max_new, eos_ids, events):
    recorded = Recorded(CHAIN)
    recorded.generate(PROMPT, max_new, eos_ids, steps_per_read=3, ahead=ahead)
    assert recorded.events == events


def test_a_check_stands_between_a_read_and_its_ids():
    weights, state, events = load_weights(MODEL), allocate_state(TINY_LLAMA), []
    runner.generate(
        state, weights, PROMPT, 8, on_token=lambda _: events.append("id"), steps_per_read=3,
        watch=(torch.ones(1, dtype=torch.int32), lambda: events.append("check")),
    )  # fmt: skip
    assert events == ["id", *["check", "id", "id", "id"] * 2, "check", "id"]


@pytest.mark.parametrize("ahead", (0, 1, 2))
@pytest.mark.parametrize("fails_at", range(1, 12))
def test_ids_of_a_batch_with_a_fault_are_not_handed_out(fails_at, ahead):
    """Those of the batches before it are, though the word is set before they are read."""
    recorded = Recorded(CHAIN, fails_at)
    with pytest.raises(StepError):
        recorded.generate(PROMPT, 100, steps_per_read=4, ahead=ahead)
    before = (fails_at - 1) // 4 * 4
    full = [10, 11, 12, 7, *range(13, 21), 0]
    assert recorded.ids == full[: 1 + before]
    assert recorded.steps == min(before + 4 * (1 + ahead), 12)
    recorded.fails_at = None
    assert recorded.generate(PROMPT, 100, steps_per_read=4, ahead=ahead).ids == full


@pytest.mark.parametrize("error", (Stop, KeyboardInterrupt))
@pytest.mark.parametrize("place", range(13))
def test_a_request_broken_off_with_steps_on_their_way(place, error):
    recorded, full = Recorded(CHAIN), [10, 11, 12, 7, *range(13, 21), 0]

    def stop(token_id):
        recorded.events.append(token_id)
        if token_id == full[place]:
            raise error

    with pytest.raises(error):
        recorded.generate(PROMPT, 100, on_token=stop, steps_per_read=4, ahead=1)
    assert recorded.ids == full[: place + 1]
    other = oracle.greedy(CHAIN, [7, 1], 9)
    assert recorded.generate([7, 1], 9, steps_per_read=4, ahead=1).ids == other


# ---- what is refused ----


@pytest.mark.parametrize(
    ("prompt", "max_new", "said"),
    [
        ([], 4, "the prompt has 0 tokens, needs at least 1"),
        ([1, 2], 0, "max_new_tokens is 0, needs at least 1"),
        ([1, 2], -3, "max_new_tokens is -3, needs at least 1"),
        ([1, 32], 4, "prompt id 32 is outside the vocabulary of 32"),
        ([-1], 4, "prompt id -1 is outside the vocabulary of 32"),
        ([0, 2**40], 4, "prompt id 1099511627776 is outside the vocabulary of 32"),
    ],
)
def test_refusals_are_one_line(executor, tiny, prompt, max_new, said):
    with pytest.raises(PromptError) as caught:
        tiny[executor](prompt, max_new)
    assert str(caught.value) == said


@pytest.mark.parametrize("where", ("norm", "head"))
def test_no_finite_logit_is_an_error(executor, where):
    """Damaged weights give NaN logits: an error, not id 0 or garbage for ever."""
    tensors = dict(MODEL.tensors)
    if where == "norm":
        tensors["model.norm"] = np.full(64, np.nan, np.float32)
    else:
        packed = tensors["lm_head"]
        tensors["lm_head"] = replace(packed, scales=np.full_like(packed.scales, np.nan))
    seen = []
    with pytest.raises(ModelError) as caught:
        executors(SynthModel(TINY_LLAMA, tensors))[executor](PROMPT, 4, on_token=seen.append)
    assert "finite" in str(caught.value) and "\n" not in str(caught.value) and not seen
    assert isinstance(caught.value, DecodeError)  # the command line prints it in one line


@pytest.mark.parametrize("executor", ("decodev2", "tokenloop"))
def test_one_nan_logit_changes_no_choice(executor):
    packed = MODEL.tensors["lm_head"]
    want = oracle.greedy(MODEL, PROMPT, 8)
    unused = next(i for i in range(32) if i not in want)
    scales = packed.scales.copy()
    scales[unused] = np.nan
    tensors = dict(MODEL.tensors) | {"lm_head": replace(packed, scales=scales)}
    assert executors(SynthModel(TINY_LLAMA, tensors))[executor](PROMPT, 8).ids == want


# ---- what is reported ----


def test_times_and_rate_fit_the_ids(executor, tiny):
    result = tiny[executor](PROMPT, 8)
    assert result.prefill_s > 0 and result.decode_s > 0
    assert result.decode_tok_s == pytest.approx(7 / result.decode_s)
    assert tiny[executor](PROMPT, 1).decode_tok_s is None  # no step after the first token


def test_an_exception_in_the_callback_leaves_the_executor_usable(executor, tiny):
    def raise_stop(token_id):
        raise Stop

    with pytest.raises(Stop):
        tiny[executor](PROMPT, 8, on_token=raise_stop)
    assert tiny[executor](PROMPT, 8).ids == oracle.greedy(MODEL, PROMPT, 8)


@pytest.mark.parametrize(("spec", "seed"), [(TINY_LLAMA, 0), (TINY_INTERNLM, 1)])
@pytest.mark.parametrize("chunk", (None, 1, 3, 16))
def test_ids_equal_the_oracles(spec, seed, chunk):
    model = build(spec, seed)
    weights, state = load_weights(model), allocate_state(spec)
    for length in (1, 4, 8, 16):
        prompt = np.random.default_rng(length).integers(0, 32, length).tolist()
        result = runner.generate(state, weights, prompt, 8, chunk=chunk)
        assert result.ids == oracle.greedy(model, prompt, 8)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
