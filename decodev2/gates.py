"""The correctness gates: what an executor must show before its speed means anything.

`decodev2 gates --device cuda` runs them all and records a plate stamped with the hash of the
kernels it ran (`runs/gates/`). Each gate compares with the float32 oracle or with a fresh state and
yields rows; a gate that cannot run here says why, it never passes in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from . import linear, ops, oracle, persistent, runner, step, synth, toggles
from .errors import BuildError
from .load import ModelWeights, load_weights
from .plan import MEDIUM_LLAMA, TINY_INTERNLM, TINY_LLAMA, ArchSpec
from .prefill import forward_prefill
from .state import DecodeState, allocate_state, load_token, reset

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]  # published ids; gates use the first 4 or all 8
CASES = ((TINY_LLAMA, 0), (TINY_INTERNLM, 1), (MEDIUM_LLAMA, 2))
# Shapes that one kernel a token can run, with room for several chunks of attention, and layers even
# and odd in number: the parity of its hand-offs.
LONG_LLAMA = replace(MEDIUM_LLAMA, name="long-llama", n_layers=3, max_seq=320)
LONG_QWEN = replace(
    LONG_LLAMA, name="long-qwen", n_layers=2, n_q=4, n_kv=1, head_dim=128, qkv_bias=True, tied=True,
    model_type="qwen2",
)  # fmt: skip
LONG_WIDE = replace(  # x of gate/up stays with the warps
    LONG_LLAMA, name="long-wide", n_layers=2, hidden=2048, n_q=4, head_dim=128, intermediate=512
)
LONG_ODD = replace(  # no width fills a tile
    TINY_LLAMA, name="long-odd", hidden=100, intermediate=77, vocab=131, max_seq=320
)
# no near tie among the first ids
LONG_CASES = ((LONG_LLAMA, 9), (LONG_QWEN, 14), (LONG_WIDE, 23))
PROMPT_CASES = (*LONG_CASES, (LONG_ODD, 5))
# Largest |logit - oracle logit|. On CUDA x is rounded to half before each product, K and V to bf16.
CAPS = {"cpu": 1e-3, "cuda": 0.05}
EDGES = (0, 63, 64, 127, 128, 255, 256, 257, 319)  # positions where attention is divided anew
NEW_IDS = 80
REPEATS = 30
# tokens of a prompt, columns of a chunk: both tiles of 64, 128 and 256, full ones and ragged
PROMPT_CHUNKS = ((33, 64), (64, 64), (100, 40), (257, 128), (300, 256))


@dataclass(frozen=True)
class Row:
    """One checked fact. `measured` is in the unit the gate's text names, or NaN when the gate broke
    off or could not run (then `ok` is None): `note` then says why."""

    gate: str
    model: str
    kernels: str
    measured: float
    limit: float
    ok: bool | None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """A model, and what the oracle says of it."""

    model: synth.SynthModel

    @functools.cached_property
    def reference(self) -> oracle.DenseModel:
        return oracle.decode_all(self.model)

    @property
    def context(self) -> list[int]:
        """As many ids as the cache has slots."""
        return [(7 * i + 3) % self.model.spec.vocab for i in range(self.model.spec.max_seq)]

    @functools.cached_property
    def context_logits(self) -> np.ndarray:
        """[max_seq, vocab], after each id of the context."""
        return oracle.step_logits(self.reference, self.context)


@dataclass(frozen=True)
class Bench:
    """A case on a device, and a way to take a step: kernel by kernel or in one, launched or
    replayed."""

    case: Case
    weights: ModelWeights
    state: DecodeState
    one: persistent.PersistentStep | None = None  # one kernel a token
    graph: object | None = None

    @property
    def spec(self) -> ArchSpec:
        return self.case.model.spec

    def step(self) -> None:
        """One greedy token."""
        if self.graph is None:
            self.launch()
        else:
            self.graph.replay()

    def launch(self) -> None:
        """One greedy token, launched."""
        if self.one:
            persistent.greedy_decode(self.one)
        else:
            step.greedy_decode(self.state, self.weights)

    def forward(self) -> None:
        """Logits and the next token, and nothing moves on."""
        if self.one:
            persistent.forward_decode(self.one)
            ops.choose(self.state, commit=False)
        else:
            step.forward_decode(self.state, self.weights)

    def fresh(self) -> Bench:
        """The same on another state, launched."""
        live = allocate_state(self.spec, str(self.state.logits.device))
        return Bench(
            self.case, self.weights, live, self.one and persistent.prepare(live, self.weights)
        )


@dataclass(frozen=True)
class Way:
    """How the steps of a run are taken. `linear` is the kernel of products of one column, or
    PERSISTENT for one kernel a token."""

    linear: str
    by_graph: bool
    cases: tuple[tuple[ArchSpec, int], ...]  # shapes and seeds

    def kernels(self, device: str) -> str:
        """Its name in the rows."""
        taken = "graph" if self.by_graph else "eager"
        return "cpu" if device == "cpu" else f"{self.linear}, {taken}"


PERSISTENT = "persistent"
PREFILLS = ("mma", "wgmma")  # kernels of a prompt's products


def run(device: str) -> Iterator[Row]:
    """Every gate on every case. On CUDA: products by MMA and by GEMV, and one kernel a token, steps
    launched and by graph; prompts by MMA and by WGMMA.

    A gate that breaks off is a row that failed; what this card cannot run is a row without a
    verdict. Raises BuildError.
    """
    for spec, seed in cases(device):
        case = Case(synth.build(spec, seed))
        weights = load_weights(case.model, device)
        for way in _ways(device):
            if (spec, seed) in way.cases:
                yield from _rows_of(case, weights, device, way)
        if device == "cuda" and (spec, seed) in PROMPT_CASES:
            for prefill in PREFILLS:
                yield from _prompt_rows(case, weights, prefill)


def cases(device: str) -> list[tuple[ArchSpec, int]]:
    """(shape, seed) of every model that `run(device)` builds."""
    by_way = [case for way in _ways(device) for case in way.cases]
    return [*dict.fromkeys([*by_way, *(PROMPT_CASES if device == "cuda" else ())])]


def gates_on(device: str, spec: ArchSpec) -> list[Callable]:
    """The gates that run on `device` for a shape. Memory on the CPU is left to the tests with
    torch's profiler."""
    found = [
        greedy_ids, teacher_forced_logits, replay_equals_eager, counts_after_steps,
        reset_equals_fresh, end_token, nothing_past_the_cache, dirty_tail,
    ]  # fmt: skip
    if device == "cuda":
        found.append(nothing_allocated)
    if spec.max_seq > max(EDGES):
        found += [many_ids, context_edges, same_bits]
    return found


def all_gates(device: str) -> list[Callable]:
    """Every gate that `run(device)` runs on some case."""
    specs = dict.fromkeys(spec for way in _ways(device) for spec, _ in way.cases)
    found = dict.fromkeys(gate for spec in specs for gate in gates_on(device, spec))
    return [*found, *([prompt_logits] if device == "cuda" else [])]


def expected_rows(device: str) -> set[tuple[str, str, str]]:
    """(gate, model, kernels) of every row that `run(device)` yields."""
    rows = {
        (gate.__name__, spec.name, way.kernels(device))
        for way in _ways(device)
        for spec, _ in way.cases
        for gate in gates_on(device, spec)
    }
    if device == "cuda":
        rows |= {
            (prompt_logits.__name__, spec.name, _prompts_by(prefill))
            for spec, _ in PROMPT_CASES
            for prefill in PREFILLS
        }
    return rows


def _ways(device: str) -> list[Way]:
    if device == "cpu":
        return [Way("gemv", False, CASES)]
    by_kernels = [Way(linear, by_graph, CASES)
                  for linear in ("mma", "gemv") for by_graph in (False, True)]  # fmt: skip
    return by_kernels + [Way(PERSISTENT, by_graph, LONG_CASES) for by_graph in (False, True)]


def _prompts_by(prefill: str) -> str:
    return f"prompt by {prefill}"


def _rows_of(case: Case, weights: ModelWeights, device: str, way: Way) -> Iterator[Row]:
    spec = case.model.spec
    gates, kernels = gates_on(device, spec), way.kernels(device)
    in_one = way.linear == PERSISTENT
    if in_one and (reason := persistent.why_not(spec, device)):
        for gate in gates:
            yield _not_run(gate, spec, kernels, reason)
        return
    with toggles.using(linear="gemv" if in_one else way.linear):
        make = functools.cache(lambda: _bench(case, weights, device, way))
        for gate in gates:
            yield from _checked(
                gate, spec, kernels, functools.partial(_of_gate, gate, make, device)
            )


def _bench(case: Case, weights: ModelWeights, device: str, way: Way) -> Bench:
    live = allocate_state(case.model.spec, device)
    one = persistent.prepare(live, weights) if way.linear == PERSISTENT else None
    bench = Bench(case, weights, live, one)
    return replace(bench, graph=_captured(bench)) if way.by_graph else bench


def _captured(bench: Bench):
    from .graph import capture_step

    return capture_step(bench.state, bench.launch)


def _of_gate(gate: Callable, make: Callable[[], Bench], device: str) -> list[tuple]:
    bench = make()
    found = list(gate(bench, device))
    if bench.one:
        persistent.check(bench.one)
    return found


def _prompt_rows(case: Case, weights: ModelWeights, prefill: str) -> Iterator[Row]:
    about = (prompt_logits, case.model.spec, _prompts_by(prefill))
    if prefill == "wgmma" and not linear.has_wgmma(weights.norm.device):
        yield _not_run(*about, "the device has no warpgroup products, needs sm_90")
        return
    with toggles.using(linear="gemv", prefill=prefill):
        yield from _checked(*about, lambda: prompt_logits(case, weights, "cuda"))


def _checked(gate: Callable, spec: ArchSpec, kernels: str, run: Callable) -> Iterator[Row]:
    """The rows of a gate, or one that says how it broke off."""
    about = (gate.__name__, spec.name, kernels)
    try:
        for measured, limit, ok in run():
            yield Row(*about, float(measured), limit, bool(ok))
    except BuildError:
        raise
    except Exception as error:  # wrong kernels may end in any: an id of -1, a failed launch
        reason = str(error).split("\n", 1)[0]
        yield Row(*about, float("nan"), 0, False, f"{type(error).__name__}: {reason}")


def _not_run(gate: Callable, spec: ArchSpec, kernels: str, reason: str) -> Row:
    return Row(gate.__name__, spec.name, kernels, float("nan"), 0, None, f"did not run: {reason}")


def _decode(bench: Bench, prompt: list[int], count: int, eos: tuple[int, ...] = ()) -> list[int]:
    return runner.generate(
        bench.state, bench.weights, prompt, count, eos, step=bench.step, chunk=None
    ).ids


# ---- the gates: each yields (measured, limit, ok) ----


def greedy_ids(bench: Bench, device: str):
    """Prompt of 4, then 8 steps: ids that differ from the oracle's."""
    expected = oracle.greedy(bench.case.reference, PROMPT[:4], 8)
    found = _decode(bench, PROMPT[:4], 8)
    wrong = sum(a != b for a, b in zip(found, expected, strict=True))
    yield wrong, 0, wrong == 0


def teacher_forced_logits(bench: Bench, device: str):
    """Eight given ids, one step each: max |logit - oracle|, and the argmax at every position."""
    expected = oracle.step_logits(bench.case.reference, PROMPT)
    reset(bench.state)
    worst, agree = 0.0, True
    for i, token_id in enumerate(PROMPT):
        load_token(bench.state, token_id)
        bench.state.position.fill_(i)
        bench.forward()
        logits = bench.state.logits[0].cpu().numpy()
        worst = max(worst, float(np.abs(logits - expected[i]).max()))
        agree &= int(bench.state.next_token) == int(expected[i].argmax())
    yield worst, CAPS[device], agree and worst <= CAPS[device]


def replay_equals_eager(bench: Bench, device: str):
    """next_token and token at every position 0 .. max_seq - 2: steps that differ from eager."""
    eager = bench.fresh()
    lives = (eager.state, bench.state)
    for live in lives:
        reset(live)
        load_token(live, PROMPT[0])
    wrong = 0
    for _ in range(bench.spec.max_seq - 1):
        eager.step()
        bench.step()
        pairs = [(getattr(lives[0], n), getattr(lives[1], n))
                 for n in ("token", "next_token", "logits")]  # fmt: skip
        wrong += not all(torch.equal(*pair) for pair in pairs)
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
    expected = _decode(bench.fresh(), PROMPT[2:6], 8)
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


# ---- and those of longer contexts ----


def many_ids(bench: Bench, device: str):
    """Prompt of 8, then 80 ids: by how much the oracle likes another one better, at most."""
    found = _decode(bench, PROMPT, NEW_IDS)
    logits = oracle.step_logits(bench.case.reference, PROMPT + found[:-1])[len(PROMPT) - 1 :]
    margins = logits.max(1) - logits[np.arange(len(found)), found]
    worst = float(margins.max())
    yield worst, CAPS[device], len(found) == NEW_IDS and worst <= CAPS[device]


def context_edges(bench: Bench, device: str):
    """One step at each position where attention is divided anew, NaN behind it: max |logit -
    oracle|."""
    worst = 0.0
    for position in EDGES:
        reset(bench.state)
        bench.state.kv.k.fill_(torch.nan)
        bench.state.kv.v.fill_(torch.nan)
        _go_to(bench, position)
        bench.step()
        logits = bench.state.logits[0].cpu().numpy()
        worst = np.maximum(worst, np.abs(logits - bench.case.context_logits[position]).max())
    bench.state.kv.k.zero_()
    bench.state.kv.v.zero_()
    yield worst, CAPS[device], worst <= CAPS[device]


def same_bits(bench: Bench, device: str):
    """The step at 100 and at 300, 30 times each on one state: times that logits or cache differ."""
    wrong = 0
    for position in (100, 300):
        reset(bench.state)
        _go_to(bench, position)
        first = None
        for _ in range(REPEATS):
            load_token(bench.state, bench.case.context[position])
            bench.state.position.fill_(position)
            bench.step()
            kv = bench.state.kv
            made = [t.clone() for t in (bench.state.logits, kv.k[:, position], kv.v[:, position])]
            first = first or made
            wrong += not all(torch.equal(a, b) for a, b in zip(first, made, strict=True))
    yield wrong, 0, wrong == 0


def _go_to(bench: Bench, position: int) -> None:
    """The ids of the context before `position` are in the cache, that one is next."""
    if position:
        forward_prefill(bench.state, bench.weights, bench.case.context[:position])
    load_token(bench.state, bench.case.context[position])
    bench.state.position.fill_(position)


def prompt_logits(case: Case, weights: ModelWeights, device: str):
    """Prompts of 33 to 300 in chunks of 40 to 256, the cache full of NaN: max |logit - oracle|, and
    the argmax."""
    live = allocate_state(case.model.spec, device, max(chunk for _, chunk in PROMPT_CHUNKS))
    worst, agree = 0.0, True
    for length, chunk in PROMPT_CHUNKS:
        expected = case.context_logits[length - 1]
        reset(live)
        live.kv.k.fill_(torch.nan)
        live.kv.v.fill_(torch.nan)
        forward_prefill(live, weights, case.context[:length], chunk)
        logits = live.logits[0].cpu().numpy()
        worst = np.maximum(worst, np.abs(logits - expected).max())
        agree &= expected.max() - expected[int(live.next_token)] <= CAPS[device]
    yield worst, CAPS[device], agree and worst <= CAPS[device]


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


def run_model(
    folder: str, chr_path: str | None = None, replays: int = REPLAYS, step: str = "graph"
) -> Iterator[Row]:
    """Greedy ids of the CUDA step against the CPU executor's, on a packed model.

    Where the two part, the CPU's margin between the two ids must be smaller than the largest logit
    difference measured there, and that under NEAR_TIE_CAP (a near tie). Then one prompt again and
    again: ids must repeat (those of the graph, whatever the step) and no memory may grow.
    """
    from .session import open_session

    by_graph = None if step == "graph" else _ids_by_graph(folder, chr_path)
    others = torch.cuda.memory_allocated()  # whatever this process held before
    cpu = open_session(folder, chr_path, device="cpu", max_seq=1024)
    cuda = open_session(folder, chr_path, device="cuda", max_seq=1024, step=step)
    if cuda.graph is None or (step == "persistent" and cuda.persistent is None):
        raise RuntimeError(f"the step ({step}) could not be captured")

    def row(gate: str, measured: float, limit: float, ok: bool) -> Row:
        return Row(gate, cpu.spec.name, f"gemv, {step}", float(measured), float(limit), bool(ok))

    for name, text in PROMPTS.items():
        prompt = cpu.encode(text)
        for ignore_eos in (False, True):
            found = cuda.generate(prompt, NEW_TOKENS, ignore_eos).ids
            expected = cpu.generate(prompt, NEW_TOKENS, ignore_eos).ids
            gate = f"ids, {name} prompt of {len(prompt)}{', past the end' if ignore_eos else ''}"
            yield row(gate, *_parting(cpu, cuda, prompt, expected, found))
    prompt = cpu.encode(SHORT)
    expected = cuda.generate(prompt, NEW_TOKENS, ignore_eos=True).ids
    if by_graph:
        parting = _parting(cpu, cuda, prompt, by_graph, expected)
        yield row(f"{NEW_TOKENS} ids beside the graph's", *parting)
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


def _ids_by_graph(folder: str, chr_path: str | None) -> list[int]:
    from .session import open_session

    opened = open_session(folder, chr_path, device="cuda", max_seq=1024)
    ids = opened.generate(opened.encode(SHORT), NEW_TOKENS, ignore_eos=True).ids
    opened.close()
    del opened
    torch.cuda.empty_cache()
    return ids


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
