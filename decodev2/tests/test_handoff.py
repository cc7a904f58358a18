"""The hand-off kernel: on the emulator in any order of threads, on the card, and its experiment."""

from __future__ import annotations

import ctypes
import itertools
import types

import emulation
import numpy as np
import pytest
import torch
from test_step_experiments import CARD, defaults, made, nothing

from decodev2 import native
from decodev2.errors import DecodeError
from decodev2.lab import bench, cases, figure, plate
from decodev2.lab.experiments import handoff

APART = 32
WAYS = {way: value for way, value in handoff.WAYS.items() if way != handoff.NODE}
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
    reason="no CUDA device of sm_90 or newer",
)


# ---- on the emulator -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def hand_off(tmp_path_factory):
    """`hand_off` of emulator/handoff.cpp: csrc/handoff.cu on the CPU, fiber by fiber."""
    function = emulation.build(tmp_path_factory, "handoff").hand_off
    function.restype = ctypes.c_char_p
    return function


def run(hand_off, way: str, words: int = 256, rounds: int = 24, ctas: int = 5, seed: int = 1,
        patience: int = 1 << 60):  # fmt: skip
    """(first, vectors, control) of one run on the emulator."""
    first = np.random.default_rng(seed).integers(0, 2**31, words, dtype=np.uint32) * np.uint32(2)
    vectors = np.full((2, words), 0xFFFFFFFF, np.uint32)
    vectors[0] = first
    control, cycles = np.zeros(3 * APART, np.uint32), np.full(ctas, -1, np.int64)
    value = handoff.WAYS[way]
    stopped = hand_off(
        *(a.ctypes.data_as(ctypes.c_void_p) for a in (vectors, control, cycles)), words,
        -1 if isinstance(value, bool) else value, rounds, ctypes.c_int64(patience), ctas, seed,
    )  # fmt: skip
    assert not stopped, stopped.decode()
    return first, vectors, control, cycles


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("words, ctas", [(256, 5), (2048, 4)])
def test_every_word_arrives_in_any_order_of_threads(hand_off, way, words, ctas):
    """The last vector comes from every word of every round; a CTA that read one too early, or too
    late, has another sum."""
    for seed, rounds in ((1, 24), (2, 25), (3, 24)) if words < 2048 else ((4, 11),):
        first, vectors, control, cycles = run(hand_off, way, words, rounds, ctas, seed)
        last, total = handoff.expected(first, rounds, fresh=way != handoff.READING)
        left = vectors[1 if way == handoff.READING else rounds & 1]
        assert np.array_equal(left & ~np.uint32(1), last)
        assert control[2 * APART] == 0
        if way != handoff.EARLY_NODE:
            assert control[0] == total * ctas % 2**32
            assert (cycles >= 0).all()


def test_reading_without_waiting_is_not_a_hand_off(hand_off):
    """The reference must tell a stale vector from a fresh one."""
    first, vectors, control, _ = run(hand_off, handoff.READING)
    last, total = handoff.expected(first, 24)
    assert not np.array_equal(vectors[1] & ~np.uint32(1), last)
    assert control[0] != total * 5 % 2**32


@pytest.mark.parametrize("way", [handoff.COUNTER, handoff.ONE_LOOK, handoff.TWO_LOOKS])
def test_a_lost_hand_off_ends_the_launch(hand_off, way):
    """Without patience every hand-off is lost: the launch ends all the same, and says so."""
    *_, control, _ = run(hand_off, way, patience=-1)
    assert 0 < control[2 * APART] <= 24


def test_what_does_not_fit_is_refused(hand_off):
    for words, ctas, rounds in ((300, 5, 24), (4096, 8, 24), (2048, 3, 24), (256, 5, 8)):
        with pytest.raises(AssertionError, match="the launch was refused"):
            run(hand_off, handoff.COUNTER, words, rounds, ctas)


# ---- on the card ---------------------------------------------------------------------------------


@needs_hopper
@pytest.mark.parametrize("way", handoff.WAYS)
@pytest.mark.parametrize("kb", [8, 4, 1])
def test_every_word_arrives_on_the_card(way, kb):
    rounds = handoff.Rounds(way, kb, 200)
    for seed in range(5):
        chance = np.random.default_rng(seed)
        first = chance.integers(0, 2**31, rounds.words, dtype=np.uint32) * np.uint32(2)
        rounds.start_from(first)
        rounds.take()
        rounds.check(first)
    with pytest.raises(DecodeError, match="words of the last vector differ"):
        rounds.check(first ^ np.uint32(2))


@needs_hopper
@pytest.mark.parametrize("way", [handoff.COUNTER, handoff.ONE_LOOK, handoff.TWO_LOOKS])
def test_a_lost_hand_off_is_told_on_the_card(way):
    rounds = handoff.Rounds(way, 8, 50, patience=-1)
    first = np.zeros(rounds.words, np.uint32)
    rounds.start_from(first)
    rounds.take()
    with pytest.raises(DecodeError, match=f"{way}, 8 KB: the hand-off of round"):
        rounds.check(first)


@needs_hopper
def test_measure_on_the_card():
    result = made("handoff", handoff.measure(defaults("handoff", rounds=64, runs=2), nothing))
    assert len(result.rows) == len(handoff.WAYS) * 2


# ---- the experiment without a GPU ----------------------------------------------------------------


class Stand:
    """In the place of the extension, on CPU tensors; `loses` leaves the last word of a round."""

    warm_up, apart, loses, fault = 8, APART, False, 0

    def node(self, vectors, control, r, pdl):
        assert isinstance(pdl, bool)
        read = vectors[r & 1].numpy().view(np.uint32) & ~np.uint32(1)
        words = len(read)
        here = np.arange(words, dtype=np.uint32)
        with np.errstate(over="ignore"):
            made = read[(5 * here + r) % words] * np.uint32(handoff.FACTOR) + here
        vectors[(r + 1) & 1, : words - self.loses] = torch.from_numpy(made.view(np.int32))[
            : words - self.loses
        ]

    def rounds(self, vectors, control, cycles, way, rounds, patience):
        assert way in range(5) and patience > 0
        total = 0
        first = vectors[0].clone()
        for r in range(rounds):
            if way == 0:
                vectors[r & 1] = first
            read = vectors[r & 1].numpy().view(np.uint32) & ~np.uint32(1)
            total += int(read.sum(dtype=np.uint64)) * len(cycles)
            self.node(vectors, control, r, False)
        if way == 0:
            vectors[1] = vectors[rounds & 1].clone()
        control[0] = np.uint32(total % 2**32).view(np.int32).item()
        control[2 * APART] = self.fault
        cycles[:] = torch.arange(len(cycles)) + 1500 * (rounds - self.warm_up)


@pytest.fixture
def stand(monkeypatch):
    stand = Stand()
    properties = types.SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(native, "cuda", lambda name: stand)
    monkeypatch.setattr(handoff, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: properties)
    monkeypatch.setattr(cases, "begin", lambda name: CARD["read_rate"])
    monkeypatch.setattr(cases, "end", lambda rate: CARD | {"read_rate": rate})

    def replayed(rounds):
        return types.SimpleNamespace(replay=rounds._nodes)

    monkeypatch.setattr(handoff.Rounds, "_captured", replayed)

    def event_times(run, runs=9, warmup=2):
        run()
        return [5e-4] * runs

    monkeypatch.setattr(bench, "event_times", event_times)
    return stand


def test_measure(stand):
    params = defaults("handoff", rounds=20, runs=2)
    result = made("handoff", handoff.measure(params, nothing))
    chosen = [(r["kb"], r["way"]) for r in result.rows]
    assert chosen == list(itertools.product(handoff.SIZES_KB, handoff.WAYS))
    row = result.rows[-1]
    assert row["us"] == pytest.approx(500 / 20) and row["cycles_most"] == pytest.approx(
        1500 + 1 / 6
    )
    assert result.rows[0]["cycles"] is None and result.rows[0]["cycles_reason"]


def test_what_goes_wrong_is_told(stand):
    params = defaults("handoff", ways=[handoff.COUNTER], kb=["4"], rounds=20, runs=2)
    stand.fault = 7
    with pytest.raises(DecodeError, match="counter, 4 KB: the hand-off of round 6 did not come"):
        handoff.measure(params, nothing)
    stand.fault, stand.loses = 0, True
    with pytest.raises(DecodeError, match=r"counter, 4 KB: \d+ of 1024 words of the last"):
        handoff.measure(params, nothing)
    stand.loses = False
    real = stand.rounds

    def other_sum(*arguments):
        real(*arguments)
        arguments[1][0] += 2

    stand.rounds = other_sum
    with pytest.raises(DecodeError, match="the sum of all that was read differs"):
        handoff.measure(params, nothing)


def test_what_does_not_exist_is_named():
    for name, value, words in (
        ("ways", ["pigeon"], "way 'pigeon' is unknown; there are graph node, programmatic node"),
        ("kb", [16], "size '16' is unknown; there are 8, 4"),
        ("rounds", 3, "rounds is 3, needs at least 16"),
    ):
        with pytest.raises(DecodeError, match=words):
            handoff.measure(defaults("handoff", **{name: value}), nothing)


def rows(scale: float = 1.0) -> list[dict]:
    us = (1.9, 1.4, 1.38, 1.28, 0.95, 0.87, 0.4)
    out = []
    for kb in handoff.SIZES_KB:
        for way, t in zip(handoff.WAYS, us, strict=True):
            t *= scale * (1 if kb == 8 else 0.97)
            cycles = plate.Missing("no clock") if "node" in way else 1753 * t
            row = {"way": way, "kb": kb, "rounds": 512, "runs": 11}
            row |= dict.fromkeys(("us", "us_best", "us_worst"), t)
            out.append(row | dict.fromkeys(("cycles", "cycles_least", "cycles_most"), cycles))
    return out


def plate_of(found: list[dict]) -> plate.Plate:
    text = handoff._verdict(found, 0.01)
    return made("handoff", plate.Measured(handoff.COLUMNS, found, text, {"kind": "own"}, [], CARD))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_figure_claims_and_verdict(scale):
    result = plate_of(rows(scale))
    assert len(figure.png_bytes(result, plate.content_hash(result))) > 10_000
    assert [held for _, held in handoff.claims(result)] == [True] * 5
    assert result.verdict.startswith("As predicted" if scale == 1 else "Not as predicted")
    if scale == 1:
        assert "two looks in flight against one: faster" in result.verdict
        assert "flag in data and two looks 0.87 us, flag in data 0.95 us, counter" in result.verdict


def test_claims_and_verdicts_of_parts():
    found = [r for r in rows() if r["way"] in (handoff.COUNTER, handoff.TWO_LOOKS)]
    for r in found:
        if r["way"] == handoff.COUNTER:
            r |= dict.fromkeys(("us", "us_best", "us_worst"), 0.5)
    assert handoff.claims(plate_of(found)) == [("flags in the data beat a counter", False)]
    alone = [r for r in rows() if r["way"] == handoff.READING]
    assert plate_of(alone).verdict.startswith("reading alone takes 0.40 us")
    assert handoff.claims(plate_of(alone)) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
