"""The persistent step without a GPU: the same source, thread by thread on the CPU (tests/emulator).

What it computes, for shapes, lengths and requests, against the oracle; and that it does so in any
order in which threads may run. Nothing here says how fast it is.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import emulation
import numpy as np
import pytest
import torch

from decodev2 import gates, oracle, panels
from decodev2.lab.experiments import sanitizer
from decodev2.load import load_weights
from decodev2.nf4 import Packed
from decodev2.plan import MEDIUM_LLAMA, TINY_LLAMA, ArchSpec, layer_names, top_names
from decodev2.prefill import forward_prefill
from decodev2.rope import rope_tables
from decodev2.state import allocate_state, load_token
from decodev2.step import forward_decode
from decodev2.synth import SynthModel, build

CAP = 0.05
PATIENCE = 1 << 60

emulation.skip_without_it(allow_module_level=True)


def shape(name: str, **changes) -> ArchSpec:
    return replace(MEDIUM_LLAMA, name=name, **({"max_seq": 384, "n_layers": 2} | changes))


SPECS = {
    "medium": shape("medium"),
    "three layers": shape("three layers", n_layers=3),  # an odd count: the parity of launches
    "one layer": shape("one layer", n_layers=1),
    "seven queries": shape("seven queries", hidden=896, n_q=14, n_kv=2, intermediate=1216),
    "three KV heads": shape("three KV heads", hidden=576, n_q=9, n_kv=3, intermediate=1536),
    "head 128, eight queries": shape("head 128", hidden=1024, n_q=8, n_kv=1, head_dim=128,
                                     intermediate=2816, n_layers=1),
    "head 128, one query": shape("one query", hidden=512, n_q=4, n_kv=4, head_dim=128),
    "biases": shape("biases", qkv_bias=True, model_type="qwen2"),
    "tied": shape("tied", tied=True, vocab=4001),
    "down in parts": shape("down in parts", hidden=256, n_q=4, n_kv=2, intermediate=4096),
    "narrow parts": shape("narrow parts", hidden=192, n_q=3, n_kv=1, intermediate=4032),
    "x stays": shape("x stays", hidden=2048, n_q=4, n_kv=2, intermediate=512),
}  # fmt: skip
# CTAs: few, so that each has several tiles, and more than some products have panels
MULTIPROCESSORS = {"tied": 4, "medium": 33, "seven queries": 30, "three KV heads": 17,
                   "one layer": 6, "down in parts": 7, "narrow parts": 5,
                   "x stays": 9}  # fmt: skip


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> ctypes.CDLL:
    """csrc/persistent.cu and the emulator as a shared library."""
    return compiled(tmp_path_factory)


@pytest.fixture(scope="session")
def watched(tmp_path_factory) -> ctypes.CDLL:
    """The same as racecheck gets it."""
    return compiled(tmp_path_factory, *sanitizer.FLAGS["racecheck"].split())


def compiled(tmp_path_factory, *flags: str) -> ctypes.CDLL:
    found = emulation.build(tmp_path_factory, "step", *flags)
    found.plan.restype = found.step.restype = ctypes.c_char_p
    found.clock_now.restype = ctypes.c_longlong
    return found


def dims_of(spec: ArchSpec):
    return (ctypes.c_int64 * 8)(
        spec.n_layers, spec.max_seq, spec.n_kv, spec.head_dim, spec.q_dim, spec.hidden,
        spec.intermediate, spec.vocab,
    )  # fmt: skip


def plan(library, spec: ArchSpec, multiprocessors: int = 132) -> tuple[str | None, list[int]]:
    """Why a shape does not fit, and its hand-off words, table bytes and CTAs."""
    out = (ctypes.c_int64 * 3)()
    reason = library.plan(dims_of(spec), multiprocessors, out)
    return reason and reason.decode(), list(out)


@dataclass
class Emulated:
    """A model in panels and everything one launch reads or writes, as arrays."""

    library: ctypes.CDLL
    spec: ArchSpec
    multiprocessors: int
    arrays: list[np.ndarray]  # in the order of `step` in emulator/step.cpp; None: left out
    keep: list[np.ndarray]  # what arrays point to
    launches: int = 0

    def __getattr__(self, name: str):
        names = ("token", "position", "valid_len", "cos", "sin", "k", "v", "logits", "values",
                 "ids", "words", "next_token", "finished", "eos_ids", "history")  # fmt: skip
        if name not in names:
            raise AttributeError(name)
        return self.arrays[6 + names.index(name)]

    def step(self, token: int, position: int, patience: int = PATIENCE, seed: int | None = None):
        """One launch; its logits."""
        self.token[0], self.position[0] = token, position
        self.logits.fill(np.nan)
        pointers = (ctypes.c_void_p * len(self.arrays))(
            *(None if a is None else a.ctypes.data for a in self.arrays)
        )
        self.launches += 1
        stopped = self.library.step(
            dims_of(self.spec), pointers, len(self.ids), ctypes.c_double(self.spec.rms_eps),
            ctypes.c_int64(patience), self.multiprocessors,
            ctypes.c_uint(self.launches if seed is None else seed),
        )  # fmt: skip
        assert not stopped, stopped.decode()
        return self.logits.copy()

    @property
    def chosen(self) -> int:
        """The best candidate, as csrc/step.cu chooses it."""
        there = self.ids >= 0
        best = self.values[there].max()
        return int(self.ids[there & (self.values == best)].min())


def emulate(library, model: SynthModel, multiprocessors: int = 10) -> Emulated:
    spec, tensors, keep = model.spec, model.tensors, []

    def array(value, dtype) -> np.ndarray:
        keep.append(np.ascontiguousarray(value, dtype))
        return keep[-1]

    def packed(*names: str) -> np.ndarray:
        return array(panels.from_packed([tensors[n] for n in names], "cpu").panels, np.uint8)

    rows = []
    for i in range(spec.n_layers):
        n = layer_names(spec, i)
        gate_up = panels.gate_up_from_packed(tensors[n["gate"]], tensors[n["up"]], "cpu").panels
        bias = [np.asarray(tensors[n[f"{r}_bias"]], np.float32) for r in "qkv" if spec.qkv_bias]
        parts = [
            packed(n["q"], n["k"], n["v"]), packed(n["o"]), array(gate_up, np.uint8),
            packed(n["down"]), array(np.concatenate(bias), np.float32) if bias else None,
            array(tensors[n["attn_norm"]], np.float32), array(tensors[n["mlp_norm"]], np.float32),
        ]  # fmt: skip
        rows.append([0 if part is None else part.ctypes.data for part in parts])
    top = top_names(spec)
    table = tensors[top["embed"]]
    reason, (words, table_bytes, _) = plan(library, spec, multiprocessors)
    assert reason is None, reason
    tables = np.zeros(table_bytes, np.uint8)
    library.tables(dims_of(spec), multiprocessors, tables.ctypes.data_as(ctypes.c_void_p))
    hand_offs = np.full(words, 0xFFFFFFFF, np.uint32)
    hand_offs[:64] = 0
    cos, sin = rope_tables(spec)
    cache = (spec.n_layers, spec.max_seq, spec.n_kv, spec.head_dim)
    is_packed = isinstance(table, Packed)
    arrays = [
        array(rows, np.int64), tables,
        packed(top["embed"] if spec.tied else top["lm_head"]),
        array(tensors[top["norm"]], np.float32),
        packed(top["embed"]) if is_packed else None,
        None if is_packed else array(table, np.float32),
        np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32),
        array(cos, np.float32), array(sin, np.float32),
        np.full(cache, 0x7FC0, np.uint16), np.full(cache, 0x7FC0, np.uint16),  # bf16 nan
        np.zeros(spec.vocab, np.float32), np.zeros(2 * multiprocessors, np.float32),
        np.full(2 * multiprocessors, -1, np.int32), hand_offs, None, None, None, None,
    ]  # fmt: skip
    return Emulated(library, spec, multiprocessors, arrays, keep)


@pytest.fixture(params=SPECS)
def emulated(request, library):
    model = build(SPECS[request.param], 7)
    return emulate(library, model, MULTIPROCESSORS.get(request.param, 10)), model


def ids_of(spec: ArchSpec, n: int) -> list[int]:
    return [(7 * i + 3) % spec.vocab for i in range(n)]


def test_logits_along_a_context(emulated):
    """Teacher-forced from the first token on, what lies past it poisoned."""
    one, model = emulated
    ids = ids_of(model.spec, 4)
    expected = oracle.step_logits(model, ids)
    for i, token in enumerate(ids):
        logits = one.step(token, i)
        assert np.abs(logits - expected[i]).max() < CAP, f"position {i}"
        assert one.valid_len[0] == i + 1 and one.chosen == logits.argmax()


@pytest.mark.parametrize("name", ["three layers", "head 128, one query"])
def test_as_many_multiprocessors_as_a_card_has(library, name):
    """Small products leave some CTAs a single stage of weights a layer, or none."""
    model = build(SPECS[name], 7)
    logits = emulate(library, model, 132).step(3, 0)
    assert np.abs(logits - oracle.step_logits(model, [3])[0]).max() < CAP


def filled(model: SynthModel, n: int):
    """The CPU executor after n tokens."""
    weights, live = load_weights(model), allocate_state(model.spec)
    forward_prefill(live, weights, ids_of(model.spec, n))
    return weights, live


def bf16(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.bfloat16).view(torch.uint16).numpy()


@pytest.mark.parametrize(
    ("head_dim", "position"),
    [(64, 63), (64, 64), (64, 127), (64, 128), (64, 300), (128, 127), (128, 128), (128, 300)],
)
def test_long_contexts(library, head_dim, position):
    """Up to 128 positions one CTA takes all; from there on chunks are merged."""
    model = build(shape("long", n_layers=1, n_kv=2, n_q=4, head_dim=head_dim), 9)
    weights, live = filled(model, position)
    one = emulate(library, model, 20)
    one.k[:, :position], one.v[:, :position] = (
        bf16(t[:, :position]) for t in (live.kv.k, live.kv.v)
    )
    load_token(live, 5)
    live.position.fill_(position)
    forward_decode(live, weights)
    logits = one.step(5, position)
    assert np.abs(logits - live.logits[0].numpy()).max() < CAP
    # to a short context and back: no chunk's old word counts
    row = one.k[:, 3].copy(), one.v[:, 3].copy()
    assert np.isfinite(one.step(5, 3)).all()
    one.k[:, 3], one.v[:, 3] = row
    assert np.array_equal(one.step(5, position), logits)


def test_chunks_longer_than_a_cta_takes_at_once(library):
    """With three multiprocessors and two KV heads one CTA attends to all of it, piece by piece."""
    model = build(shape("pieces", n_layers=1, n_kv=2, n_q=4), 9)
    weights, live = filled(model, 300)
    one = emulate(library, model, 3)
    one.k[:, :300], one.v[:, :300] = (bf16(t[:, :300]) for t in (live.kv.k, live.kv.v))
    load_token(live, 5)
    live.position.fill_(300)
    forward_decode(live, weights)
    assert np.abs(one.step(5, 300) - live.logits[0].numpy()).max() < CAP


def test_any_order_of_threads_gives_the_same_bits(library):
    """Ten launches, each with its warps in another order."""
    model = build(shape("order", hidden=1024, n_q=8, n_kv=1, head_dim=128, n_layers=1), 5)
    one = emulate(library, model, 20)
    first = one.step(3, 0)
    assert all(np.array_equal(one.step(3, 0), first) for _ in range(9))


def test_the_last_cta_chooses_and_commits(library):
    """Greedy ids of the oracle, launch after launch, until an end token; then nothing moves."""
    model = build(shape("greedy", n_layers=1), 7)
    one = emulate(library, model)
    expected = oracle.greedy(model, [3], 4)
    one.arrays[17:] = [
        np.full(1, -5, np.int64), np.zeros(1, np.uint8), np.full(8, -2, np.int64),
        np.full(model.spec.max_seq + 1, -7, np.int64),
    ]  # fmt: skip
    one.eos_ids[5] = expected[3]
    one.step(3, 0)
    for at, token in enumerate(expected[1:], 1):
        assert (one.token[0], one.position[0]) == (expected[at - 1], at) and not one.finished[0]
        one.step(int(one.token[0]), at)
        assert one.next_token[0] == token == one.chosen
    assert one.finished[0] and list(one.history[1:5]) == expected
    assert one.position[0] == 4 and one.history[0] == -7 and one.history[5] == -7
    one.step(int(one.token[0]), 4)  # past the end: the id is chosen, token and position stay
    assert (one.token[0], one.position[0]) == (expected[3], 4) and one.history[5] == -7
    assert one.next_token[0] == one.chosen


def test_a_lost_hand_off_ends_the_launch(library):
    """A watchdog without patience: the launch ends, says where, and a clean one follows."""
    model = build(shape("lost", n_layers=1), 7)
    one = emulate(library, model)
    clean = one.step(3, 0)
    one.step(3, 0, patience=-1)
    assert one.words[32] > 0
    one.words.fill(0xFFFFFFFF)
    one.words[:64] = 0
    assert np.array_equal(one.step(3, 0), clean)


def timed(library, one, patience: int = PATIENCE) -> tuple[np.ndarray, int]:
    """The logits of one launch, and what clock64 says it took."""
    started = library.clock_now()
    logits = one.step(3, 0, patience=patience)
    return logits, library.clock_now() - started


def test_one_lost_hand_off_ends_all_waiting(library):
    """Every tile of qkv is said to have a writer more than it has. Two layers of four never get
    their queries: together they take little more than the patience for one."""
    spec = shape("stuck", n_layers=4)
    one = emulate(library, build(spec, 7))
    clean, taken = timed(library, one)
    tables, before = one.arrays[1], one.arrays[1].copy()
    tiles = (spec.q_dim + 2 * spec.kv_dim) // 16
    writers = slice(len(tables) - 2 * tiles, len(tables) - tiles)
    assert set(tables[writers]) <= {1, 2}
    one.words.fill(0xFFFFFFFF)
    one.words[:64] = 0
    tables[writers] += 1
    patience = 6_000_000
    _, first = timed(library, one, patience)
    assert one.words[32] > 0 and patience < first < patience + taken
    _, second = timed(library, one, patience)  # the launch behind it knows
    assert one.words[32] > 0 and second < taken
    tables[:] = before
    one.words.fill(0xFFFFFFFF)
    one.words[:64] = 0
    assert np.array_equal(one.step(3, 0), clean)


def test_what_racecheck_watches_gives_the_same_bits(library, watched):
    """Its build has every lane arrive, and asks for a slot's next stage behind a barrier more."""
    spec = shape("watched", hidden=896, n_q=14, n_kv=2, intermediate=1216)
    plain, other = (emulate(each, build(spec, 3), 12) for each in (library, watched))
    for position in range(2):
        assert np.array_equal(plain.step(5, position), other.step(5, position))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TINY_LLAMA, "head_dim is neither 64 nor 128"),
        (shape("many", hidden=640, n_q=10, n_kv=1), "more than 8 query heads"),
        (shape("odd", intermediate=1000), "no multiple of 64"),
        (shape("wide", hidden=20480, n_q=320, n_kv=40), "hidden is more"),
    ],
    ids=lambda value: value.name if isinstance(value, ArchSpec) else None,
)
def test_shapes_that_do_not_fit_are_named(library, spec, words):
    assert words in plan(library, spec)[0]


@pytest.mark.parametrize("spec", [spec for spec, _ in gates.LONG_CASES], ids=lambda s: s.name)
def test_the_shapes_of_the_gates_fit(library, spec):
    """With all chunks that their cache can have."""
    reason, (_, _, ctas) = plan(library, spec)
    assert reason is None and ctas >= 8 * spec.n_kv


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-32b"])
def test_real_shapes_fit(library, name):
    from decodev2.plan import named_spec, with_max_seq

    reason, (_, _, ctas) = plan(library, with_max_seq(named_spec(name), 2048))
    assert reason is None and ctas == 132


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
