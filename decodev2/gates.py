"""The correctness gates: what an executor must show before its speed means anything.

`decodev2 gates --device cuda` runs them all and records a plate stamped with the hash of the
kernels it ran (`runs/gates/`). Each gate compares with the float32 oracle or with a fresh state and
yields rows; a gate that cannot run here says why, it never passes in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from . import oracle, runner, step, synth, toggles
from .errors import BuildError
from .load import ModelWeights, load_weights
from .plan import MEDIUM_LLAMA, TINY_INTERNLM, TINY_LLAMA, ArchSpec
from .prefill import forward_prefill
from .state import DecodeState, allocate_state, load_token, reset

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]  # published ids; gates use the first 4 or all 8
CASES = ((TINY_LLAMA, 0), (TINY_INTERNLM, 1), (MEDIUM_LLAMA, 2))
# Largest |logit - oracle logit|. On CUDA x is rounded to half before each product, K and V to bf16.
CAPS = {"cpu": 1e-3, "cuda": 0.05}


@dataclass(frozen=True)
class Row:
    """One checked fact. `measured` is in the unit the gate's text names, or NaN when the gate broke
    off: `note` then says why."""

    gate: str
    model: str
    kernels: str
    measured: float
    limit: float
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """A model on a device, and the two ways to take a step."""

    model: synth.SynthModel
    weights: ModelWeights
    state: DecodeState
    kernels: str
    graph: object | None

    @property
    def spec(self) -> ArchSpec:
        return self.model.spec

    def step(self) -> None:
        if self.graph is None:
            step.greedy_decode(self.state, self.weights)
        else:
            self.graph.replay()


def run(device: str) -> Iterator[Row]:
    """Every gate on every case. On CUDA: products by MMA and by GEMV, steps eager and by graph.

    A gate that breaks off is a row that failed. Raises BuildError.
    """
    for spec, seed in CASES:
        model = synth.build(spec, seed)
        weights = load_weights(model, device)
        for linear, by_graph in _ways(device):
            with toggles.using(linear=linear):
                yield from _gates_of(model, weights, device, linear, by_graph)


def gates_on(device: str) -> list[Callable]:
    """The gates that run on `device`. Memory on the CPU is left to the tests with torch's
    profiler."""
    everywhere = [
        greedy_ids, teacher_forced_logits, replay_equals_eager, counts_after_steps,
        reset_equals_fresh, end_token, nothing_past_the_cache, dirty_tail,
    ]  # fmt: skip
    return everywhere if device == "cpu" else [*everywhere, nothing_allocated]


def expected_rows(device: str) -> set[tuple[str, str, str]]:
    """(gate, model, kernels) of every row that `run(device)` yields."""
    return {
        (gate.__name__, spec.name, _kernels(device, *way))
        for gate in gates_on(device)
        for spec, _ in CASES
        for way in _ways(device)
    }


def _ways(device: str) -> list[tuple[str, bool]]:
    """(linear backend, steps by graph) of every run on `device`."""
    if device == "cpu":
        return [("gemv", False)]
    return [(linear, by_graph) for linear in ("mma", "gemv") for by_graph in (False, True)]


def _kernels(device: str, linear: str, by_graph: bool) -> str:
    return "cpu" if device == "cpu" else f"{linear}, {'graph' if by_graph else 'eager'}"


def _gates_of(
    model: synth.SynthModel, weights: ModelWeights, device: str, linear: str, by_graph: bool
) -> Iterator[Row]:
    kernels = _kernels(device, linear, by_graph)
    live = allocate_state(model.spec, device)
    bench = None
    for gate in gates_on(device):
        about = (gate.__name__, model.spec.name, kernels)
        try:
            if bench is None:
                graph = _captured(live, weights) if by_graph else None
                bench = Bench(model, weights, live, kernels, graph)
            for measured, limit, ok in gate(bench, device):
                yield Row(*about, float(measured), limit, bool(ok))
        except BuildError:
            raise
        except Exception as error:  # wrong kernels may end in any: an id of -1, a failed launch
            reason = str(error).split("\n", 1)[0]
            yield Row(*about, float("nan"), 0, False, f"{type(error).__name__}: {reason}")


def _captured(live: DecodeState, weights: ModelWeights):
    from .graph import capture

    return capture(live, weights)


def _decode(bench: Bench, prompt: list[int], count: int, eos: tuple[int, ...] = ()) -> list[int]:
    return runner.generate(
        bench.state, bench.weights, prompt, count, eos, step=bench.step, chunk=None
    ).ids


# ---- the gates: each yields (measured, limit, ok) ----


def greedy_ids(bench: Bench, device: str):
    """Prompt of 4, then 8 steps: ids that differ from the oracle's."""
    expected = oracle.greedy(bench.model, PROMPT[:4], 8)
    found = _decode(bench, PROMPT[:4], 8)
    wrong = sum(a != b for a, b in zip(found, expected, strict=True))
    yield wrong, 0, wrong == 0


def teacher_forced_logits(bench: Bench, device: str):
    """Eight given ids, one step each: max |logit - oracle|, and the argmax at every position."""
    expected = oracle.step_logits(bench.model, PROMPT)
    reset(bench.state)
    worst, agree = 0.0, True
    for i, token_id in enumerate(PROMPT):
        load_token(bench.state, token_id)
        bench.state.position.fill_(i)
        step.forward_decode(bench.state, bench.weights)
        logits = bench.state.logits[0].cpu().numpy()
        worst = max(worst, float(np.abs(logits - expected[i]).max()))
        agree &= int(bench.state.next_token) == int(expected[i].argmax())
    cap = CAPS["cpu" if device == "cpu" else "cuda"]
    yield worst, cap, agree and worst <= cap


def replay_equals_eager(bench: Bench, device: str):
    """next_token and token at every position 0 .. max_seq - 2: steps that differ from eager."""
    eager = allocate_state(bench.spec, device)
    reset(eager)
    reset(bench.state)
    for live in (eager, bench.state):
        load_token(live, PROMPT[0])
    wrong = 0
    for _ in range(bench.spec.max_seq - 1):
        step.greedy_decode(eager, bench.weights)
        bench.step()
        same = torch.equal(eager.token, bench.state.token)
        same &= torch.equal(eager.next_token, bench.state.next_token)
        wrong += not (same and torch.equal(eager.logits, bench.state.logits))
    yield wrong, 0, wrong == 0


def counts_after_steps(bench: Bench, device: str):
    """position and valid_len after n steps: distance from n."""
    reset(bench.state)
    load_token(bench.state, PROMPT[0])
    for _ in range(10):
        bench.step()
    off = abs(int(bench.state.position) - 10) + abs(int(bench.state.valid_len) - 10)
    yield off, 0, off == 0


def nothing_allocated(bench: Bench, device: str):
    """Bytes by which allocated memory grew over 32 further steps (CUDA's allocator)."""
    reset(bench.state)
    load_token(bench.state, PROMPT[0])
    bench.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for i in range(32):
        if i % (bench.spec.max_seq - 2) == 0:
            bench.state.position.zero_()
        bench.step()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    yield grown, 0, grown == 0


def reset_equals_fresh(bench: Bench, device: str):
    """A second request after a reset against a fresh state: ids that differ."""
    _decode(bench, PROMPT, 6)
    second = _decode(bench, PROMPT[2:6], 8)
    fresh = allocate_state(bench.spec, device)
    expected = runner.generate(fresh, bench.weights, PROMPT[2:6], 8).ids
    wrong = sum(a != b for a, b in zip(second, expected, strict=True))
    yield wrong, 0, wrong == 0


def end_token(bench: Bench, device: str):
    """The fourth greedy id as one of several end tokens: distance of the stop from its place."""
    ids = _decode(bench, PROMPT[:4], 8)
    never = next(i for i in range(bench.spec.vocab) if i not in ids)
    eos = (never, ids[3])
    expected = ids.index(ids[3]) + 1
    found = _decode(bench, PROMPT[:4], 8, eos)
    off = abs(len(found) - expected) + (int(bench.state.finished) != 1)
    position = int(bench.state.position)
    bench.step()  # a finished request stands still
    off += abs(int(bench.state.position) - position)
    yield off, 0, off == 0


def nothing_past_the_cache(bench: Bench, device: str):
    """Steps at and past the last slot: cache elements changed where none may."""
    reset(bench.state)
    load_token(bench.state, PROMPT[0])
    last = bench.spec.max_seq - 1
    bench.state.position.fill_(last)
    bench.step()  # writes the last slot
    k, v = bench.state.kv.k.clone(), bench.state.kv.v.clone()
    for _ in range(3):
        bench.step()
    changed = int((k != bench.state.kv.k).sum() + (v != bench.state.kv.v).sum())
    yield changed, 0, changed == 0


def dirty_tail(bench: Bench, device: str):
    """The cache full of NaN and of 1e30 beforehand: ids that differ from the clean run."""
    clean = _decode(bench, PROMPT[:4], 8)
    wrong = 0
    for poison in (float("nan"), 1e30):
        bench.state.kv.k.fill_(poison)
        bench.state.kv.v.fill_(poison)
        wrong += sum(a != b for a, b in zip(_decode(bench, PROMPT[:4], 8), clean, strict=True))
    bench.state.kv.k.zero_()
    bench.state.kv.v.zero_()
    yield wrong, 0, wrong == 0


# ---- a real model: the CUDA graph against the CPU executor ----

SHORT = "Explain in three sentences why the sky is blue at noon and red in the evening."
LONG = " ".join(
    f"In the year {1900 + 7 * i} a traveller noted the river {i + 3} feet above its old mark."
    for i in range(12)
)
PROMPTS = {"short": SHORT, "long": f"{LONG} In which of these years did it stand highest, and why?"}
NEW_TOKENS = 64
NEAR_TIE_CAP = 0.5  # bf16 keys and values, half activations: largest logit difference that counts
REPLAYS = 10_000


def run_model(folder: str, chr_path: str | None = None, replays: int = REPLAYS) -> Iterator[Row]:
    """Greedy ids of the CUDA graph against the CPU executor's, on a packed model.

    Where the two part, the CPU's margin between the two ids must be smaller than the largest logit
    difference measured there, and that under NEAR_TIE_CAP (a near tie). Then one prompt again and
    again: ids must repeat and no memory may grow.
    """
    from .session import open_session

    others = torch.cuda.memory_allocated()  # whatever this process held before
    cpu = open_session(folder, chr_path, device="cpu", max_seq=1024)
    cuda = open_session(folder, chr_path, device="cuda", max_seq=1024)
    if cuda.graph is None:
        raise RuntimeError("the step could not be captured")

    def row(gate: str, measured: float, limit: float, ok: bool) -> Row:
        return Row(gate, cpu.spec.name, "gemv, graph", float(measured), float(limit), bool(ok))

    for name, text in PROMPTS.items():
        prompt = cpu.encode(text)
        for ignore_eos in (False, True):
            found = cuda.generate(prompt, NEW_TOKENS, ignore_eos).ids
            expected = cpu.generate(prompt, NEW_TOKENS, ignore_eos).ids
            gate = f"ids, {name} prompt of {len(prompt)}{', past the end' if ignore_eos else ''}"
            yield row(gate, *_parting(cpu, cuda, prompt, expected, found))
    prompt = cpu.encode(SHORT)
    expected = cuda.generate(prompt, NEW_TOKENS, ignore_eos=True).ids
    torch.cuda.synchronize()
    before, wrong = torch.cuda.memory_allocated(), 0
    rounds = -(-replays // (NEW_TOKENS - 1))
    for _ in range(rounds):
        wrong += cuda.generate(prompt, NEW_TOKENS, ignore_eos=True).ids != expected
    yield row(f"{rounds * (NEW_TOKENS - 1)} replays, rounds that differ", wrong, 0, wrong == 0)
    grown = torch.cuda.memory_allocated() - before
    yield row("bytes grown over the replays", grown, 0, grown == 0)
    held = cuda.weights.nbytes + cuda.state.nbytes
    excess = (torch.cuda.memory_allocated() - others) / held - 1
    yield row("allocated beyond weights and state", excess, 0.05, abs(excess) <= 0.05)
    cpu.close()
    cuda.close()


def _parting(cpu, cuda, prompt: list[int], expected: list[int], found: list[int]):
    """(margin, logit difference, ok) where the ids first differ; zeros when they never do."""
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if at is None:
        same = len(expected) == len(found)
        return 0.0, 0.0, same
    logits = []
    for session in (cpu, cuda):
        reset(session.state)
        forward_prefill(session.state, session.weights, prompt + expected[:at])
        logits.append(session.state.logits[0].cpu().numpy())
    margin = float(logits[0][expected[at]] - logits[0][found[at]])
    difference = float(np.abs(logits[0] - logits[1]).max())
    return margin, difference, margin < difference <= NEAR_TIE_CAP


def prefill_chunks(model: synth.SynthModel, device: str, chunks=(1, 7, 16, 32)) -> list[float]:
    """Max |logit| difference of each prefill chunk size from the first, over a prompt of 40."""
    model = synth.SynthModel(replace(model.spec, max_seq=64), model.tensors)
    weights = load_weights(model, device)
    prompt = [(7 * i + 3) % model.spec.vocab for i in range(40)]
    logits = []
    for chunk in chunks:
        live = allocate_state(model.spec, device, max(chunks))
        forward_prefill(live, weights, prompt, chunk)
        logits.append(live.logits.clone())
    return [float((one - logits[0]).abs().max()) for one in logits]
