"""The roofline of steps: its `measure` with the CPU's kernels, and what it makes of rows."""

from __future__ import annotations

import functools
import itertools
import types

import pytest
import torch
from test_step_experiments import CARD, defaults, made, nothing

from decodev2 import graph, load, native, persistent, plan, step, synth
from decodev2.errors import DecodeError
from decodev2.lab import bench, card, figure, plate
from decodev2.lab.experiments import step_roofline as experiment
from decodev2.lab.plate import Missing

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def on_cpu(monkeypatch):
    """`measure` runs its own code on the CPU: its checks are real, its times are given. The
    persistent step is the CPU's step, plus `drift` on its logits."""
    stand = types.SimpleNamespace(drift=0.0, reason=None, faults=0, seconds=2e-3)
    monkeypatch.setattr(experiment, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(native, "build_cuda", lambda: None)
    monkeypatch.setattr(card, "measure_read_rate", lambda *a: CARD["read_rate"])
    monkeypatch.setattr(card, "card", lambda device, read_rate: CARD | {"read_rate": read_rate})

    def fill(*lives):
        for live in lives:
            chance = torch.Generator().manual_seed(5)
            for cache in (live.kv.k, live.kv.v):
                cache.copy_(torch.rand(cache.shape, generator=chance) * 4 - 2)

    def replayed(take):
        return graph.DecodeGraph(types.SimpleNamespace(replay=take))

    def greedy_decode(one):
        step.greedy_decode(one.state, one.weights)
        one.state.logits.mul_(1 + stand.drift)

    def check(one):
        stand.faults += 1

    monkeypatch.setattr(experiment, "fill", fill)
    monkeypatch.setattr(
        graph, "capture",
        lambda live, weights: replayed(functools.partial(step.greedy_decode, live, weights)),
    )  # fmt: skip
    monkeypatch.setattr(graph, "capture_step", lambda live, take: replayed(take))
    monkeypatch.setattr(persistent, "why_not", lambda spec: stand.reason)
    monkeypatch.setattr(
        persistent, "prepare",
        lambda live, weights: types.SimpleNamespace(state=live, weights=weights),
    )  # fmt: skip
    monkeypatch.setattr(persistent, "greedy_decode", greedy_decode)
    monkeypatch.setattr(persistent, "check", check)

    def event_times(run, runs=9, warmup=2):
        run()
        return [stand.seconds] * runs

    monkeypatch.setattr(bench, "event_times", event_times)
    return stand


def test_measure(on_cpu):
    params = defaults("step_roofline", shapes=["tiny-llama"], max_seq=128, runs=2)
    result = made("step_roofline", experiment.measure(params, nothing))
    assert [r["way"] for r in result.rows] == list(experiment.WAYS)
    spec = plan.TINY_LLAMA
    weights = load.load_weights(synth.random_packed(spec, 0), "cpu")
    row = result.rows[0]
    assert row["packed_mb"] == pytest.approx(weights.bytes_per_token / 1e6)
    cached = spec.n_layers * 2 * 2 * spec.kv_dim * 101 / 1e6
    assert row["kv_mb"] == pytest.approx(cached)
    assert row["floor_ms"] == pytest.approx((row["packed_mb"] + cached) / 4500)
    assert row["tok_s"] == pytest.approx(500) and row["llama_cpp_tok_s"] is None
    assert all(r["difference"] < 1e-5 for r in result.rows) and on_cpu.faults == 1


def test_a_shape_without_a_persistent_step_says_why(on_cpu):
    on_cpu.reason = "head_dim is neither 64 nor 128"
    params = defaults("step_roofline", shapes=["tiny-llama"], max_seq=128, runs=2)
    result = made("step_roofline", experiment.measure(params, nothing))
    row = result.rows[1]
    assert row["ms"] is None and row["share_reason"] == (
        "no persistent step: head_dim is neither 64 nor 128"
    )
    assert figure.png_bytes(result, plate.content_hash(result))


def test_a_wrong_step_is_seen(on_cpu, monkeypatch):
    params = defaults("step_roofline", shapes=["tiny-llama"], max_seq=128, runs=2)
    on_cpu.drift = 0.05
    with pytest.raises(DecodeError, match="the persistent step is off by"):
        experiment.measure(params, nothing)
    on_cpu.drift = 0.0
    real = graph.capture

    def other(live, weights):
        return real(live, load.load_weights(synth.random_packed(weights.spec, 1), "cpu"))

    monkeypatch.setattr(graph, "capture", other)
    with pytest.raises(DecodeError, match="the step at 100 is off"):
        experiment.measure(params, nothing)


def test_what_cannot_be_measured_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for changed, words in (
        ({"ways": ["eager"]}, "way 'eager' is unknown; there are graph, persistent"),
        ({"position": 2048}, "position 2048 is outside the cache of 2048 slots"),
        ({"shapes": ["qwen9"]}, "shape 'qwen9' is unknown"),
        ({}, "step_roofline needs a CUDA device"),
    ):
        with pytest.raises(DecodeError, match=words):
            experiment.measure(defaults("step_roofline", **changed), nothing)


MB = (262.4, 820.0, 1639.3, 3756.1, 7432.5, 16991.6)
LAYERS = (24, 28, 36, 28, 48, 64)


def rows(graph_us=20.0, one_us=6.0, scale=1.0) -> list[dict]:
    out = []
    for (shape, mb, layers), way in itertools.product(
        zip(experiment.SHAPES, MB, LAYERS, strict=True), experiment.WAYS
    ):
        per_layer, rate = (graph_us, 3600) if way == experiment.GRAPH else (one_us, 4300)
        ms = (layers * per_layer * 1e-3 + mb / rate) * scale
        row = {"shape": shape, "way": way, "layers": layers, "packed_mb": mb, "kv_mb": 3.0,
               "runs": 11, "tok_s": 1e3 / ms, "floor_ms": (mb + 3) / 4660, "difference": 2e-3,
               "llama_cpp_tok_s": experiment.LLAMA_CPP_TOK_S[shape]}  # fmt: skip
        row |= dict.fromkeys(("ms", "ms_best", "ms_worst"), ms)
        out.append(row | {"share": 100 * row["floor_ms"] / ms})
    return out


def plate_of(found: list[dict]) -> plate.Plate:
    text = experiment._verdict(found, 0.01)
    given = CARD | {"read_rate": {"gb_s": 4660.0, "method": "given"}}
    return made(
        "step_roofline",
        plate.Measured(experiment.COLUMNS, found, text, {"kind": "own"}, [], given),
    )


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_figure_claims_and_verdict(scale):
    result = plate_of(rows(scale=scale))
    assert len(figure.png_bytes(result, plate.content_hash(result))) > 10_000
    held = [holds for _, holds in experiment.claims(result)]
    assert held == [True, True, True, scale == 1]
    assert ("20.0 us a layer and 3,600 GB/s fit all shapes (as predicted" in result.verdict) == (
        scale == 1
    )
    assert "one kernel is 1.38x (qwen2.5-32b) to 2.70x (qwen2.5-0.5b)" in result.verdict


def test_the_fit_finds_cost_and_rate():
    assert experiment.fit(rows(17.0), experiment.GRAPH) == pytest.approx((17.0, 3600))
    assert experiment.fit(rows()[:4], experiment.GRAPH) is None


def test_a_slower_kernel_and_a_missing_one_are_said():
    found = rows(one_us=40.0)
    assert "so slower on qwen2.5-0.5b" in plate_of(found).verdict
    for row in found[1::2]:
        names = ("ms", "ms_best", "ms_worst", "tok_s", "share", "difference")
        row |= dict.fromkeys(names, Missing("no persistent step: too wide")) | {"runs": 0}
    result = plate_of(found)
    assert "persistent" not in result.verdict
    assert figure.png_bytes(result, plate.content_hash(result))


@needs_cuda
def test_measure_on_the_card():
    params = defaults("step_roofline", shapes=["qwen2.5-0.5b"], runs=2)
    result = made("step_roofline", experiment.measure(params, nothing))
    assert [r["way"] for r in result.rows] == list(experiment.WAYS)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
