"""The experiments on the ring, programmatic launch, hand-offs and the roofline of steps: their
`measure` without a GPU, where the CPU can stand in; with one, on the smallest parameters."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from test_step_experiments import CARD, defaults, figure_of, made, nothing

from decodev2 import graph, plan, state, toggles
from decodev2.errors import DecodeError
from decodev2.lab import bench, cases, figure, plate
from decodev2.lab.experiments import pdl

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def on_cpu(monkeypatch):
    """`measure` runs its own code on the CPU: its checks are real, its times are given."""
    stand = types.SimpleNamespace(seconds=5e-4, seen=[])
    monkeypatch.setattr(pdl, "DEVICE", "cpu")
    monkeypatch.setattr(cases, "begin", lambda name: CARD["read_rate"])
    monkeypatch.setattr(cases, "end", lambda rate: CARD | {"read_rate": rate})

    def capture_step(live, take):
        restore = state.snapshot(live)
        take()
        restore()
        stand.seen.append((toggles.current.pdl, toggles.current.ahead, toggles.current.gemv))
        return graph.DecodeGraph(types.SimpleNamespace(replay=take))

    def event_times(run, runs=9, warmup=2):
        run()
        return [stand.seconds] * runs

    monkeypatch.setattr(graph, "capture_step", capture_step)
    monkeypatch.setattr(bench, "event_times", event_times)
    return stand


def drawn(result: plate.Plate) -> bool:
    return len(figure.png_bytes(result, plate.content_hash(result))) > 10_000


# ---- pdl -----------------------------------------------------------------------------------------


def test_pdl_measure(on_cpu):
    params = defaults("pdl", shape="tiny-llama", runs=2)
    result = made("pdl", pdl.measure(params, nothing))
    chosen = [(r["chain"], r["launch"]) for r in result.rows]
    assert chosen == list(itertools.product(pdl.CHAINS, pdl.LAUNCHES))
    assert on_cpu.seen[:3] == [
        (False, "weights", "auto"), (True, "nothing", "auto"), (True, "weights", "auto"),
    ]  # fmt: skip
    by_chain = {r["chain"]: r for r in result.rows}
    layers = plan.TINY_LLAMA.n_layers
    assert by_chain["qkv"]["us"] == pytest.approx(500 / layers)
    assert (by_chain["layer"]["kernels"], by_chain["step"]["kernels"]) == (5, 5 * layers + 3)
    assert by_chain["step"]["us"] == pytest.approx(500)
    assert by_chain["step"]["kernel_us"] == pytest.approx(500 / (5 * layers + 3))
    products = sum(by_chain[name]["mb"] for name in pdl.PRODUCTS)
    cached = 2 * 2 * plan.TINY_LLAMA.kv_dim * 101 / 1e6
    assert by_chain["layer"]["mb"] == pytest.approx(products + cached)


def test_pdl_sees_other_bits(on_cpu, monkeypatch):
    real = graph.capture_step

    def wrong(live, take):
        def spoiled():
            take()
            live.decode.x[0, 3] += 1e-6

        return real(live, spoiled)

    monkeypatch.setattr(graph, "capture_step", wrong)
    params = defaults("pdl", shape="tiny-llama", chains=["o"], launches=[pdl.AHEAD], runs=2)
    with pytest.raises(DecodeError, match="o, weights ahead, auto: its bits are not those"):
        pdl.measure(params, nothing)


def test_pdl_names_a_variant_that_does_not_fit(on_cpu, monkeypatch):
    real = graph.capture_step

    def refuses(live, take):
        if toggles.current.gemv == "ring16x4":
            raise ValueError("a product of 128 columns takes too much shared memory")
        return real(live, take)

    monkeypatch.setattr(graph, "capture_step", refuses)
    params = defaults("pdl", shape="tiny-llama", chains=["down"], runs=2,
                      variants=["auto", "ring16x4"])  # fmt: skip
    result = made("pdl", pdl.measure(params, nothing))
    assert {r["us_reason"] for r in result.rows if r["variant"] == "ring16x4"} == {
        "a product of 128 columns takes too much shared memory"
    }
    assert drawn(result)


def test_pdl_refuses_what_does_not_exist():
    for name, value, words in (
        ("chains", ["up"], "chain 'up' is unknown; there are qkv, o, gate and up"),
        ("launches", ["late"], "launch 'late' is unknown; there are plain, early but idle"),
        ("variants", ["ring"], "variant 'ring' is unknown; there are auto, direct"),
        ("position", 2048, "position is 2048, needs 0 to 2047"),
    ):
        with pytest.raises(DecodeError, match=words):
            pdl.measure(defaults("pdl", **{name: value}), nothing)


PDL_US = {  # of the three launches
    "qkv": (4.9, 4.4, 3.5), "o": (4.6, 4.1, 3.2), "gate and up": (12.7, 12.2, 11.5),
    "down": (9.2, 8.7, 8.0), "layer": (36.2, 33.4, 29.0), "step": (1361.0, 1263.0, 1134.0),
}  # fmt: skip


def pdl_rows(scale: float = 1.0, variants=("auto",)) -> list[dict]:
    mb = dict(zip(pdl.CHAINS, (2.79, 2.23, 23.95, 11.98, 41.05, 1643.0), strict=True))
    kernels = dict.fromkeys(pdl.PRODUCTS, 1) | {"layer": 5, "step": 183}
    rows = []
    for chain, variant in itertools.product(pdl.CHAINS, variants):
        for launch, us in zip(pdl.LAUNCHES, PDL_US[chain], strict=True):
            us *= scale * (1 if variant == "auto" else 0.9)
            row = {"chain": chain, "launch": launch, "variant": variant, "runs": 11}
            row |= dict.fromkeys(("us", "us_best", "us_worst"), us)
            row |= {"kernels": kernels[chain], "mb": mb[chain]}
            cases.add_rates(row, mb[chain] * 1e6, 4660.0 / scale)
            rows.append(row | {"kernel_us": us / kernels[chain]})
    return rows


def pdl_plate(rows: list[dict], noise: float = 0.01) -> plate.Plate:
    text = pdl._verdict(rows, noise)
    card = CARD | {"read_rate": {"gb_s": 4660.0, "method": "given"}}
    return made("pdl", plate.Measured(pdl.COLUMNS, rows, text, {"kind": "own"}, [], card))


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_pdl_figure_claims_and_verdict(scale):
    result = pdl_plate(pdl_rows(scale))
    assert drawn(result)
    assert [held for _, held in pdl.claims(result)] == [True, True]
    assert result.verdict.startswith("As predicted for the step: starting early takes")
    assert "The old card had no programmatic launch." in result.verdict


def test_pdl_says_when_the_early_start_is_what_counts():
    rows = pdl_rows()
    (row,) = (r for r in rows if (r["chain"], r["launch"]) == ("step", pdl.IDLE))
    row |= dict.fromkeys(("us", "us_best", "us_worst"), 1150.0)
    result = pdl_plate(rows)
    assert result.verdict.startswith("Not as predicted for the step")
    (row,) = (r for r in rows if (r["chain"], r["launch"]) == ("o", pdl.AHEAD))
    row |= dict.fromkeys(("us", "us_best", "us_worst"), 4.5)
    assert [held for _, held in pdl.claims(pdl_plate(rows))] == [True, False]


def test_pdl_names_the_best_variant():
    result = pdl_plate(pdl_rows(variants=("auto", "direct")))
    assert "down is best with direct (7.20 us, faster)" in result.verdict and drawn(result)


@needs_cuda
def test_pdl_on_the_card():
    params = defaults("pdl", shape="medium-llama", runs=2, variants=["auto", "direct"])
    result = made("pdl", pdl.measure(params, nothing))
    assert len(result.rows) == 2 * len(pdl.CHAINS) * len(pdl.LAUNCHES)


def test_every_panel_has_one_row_per_choice():
    pdl.draw(pdl_plate(pdl_rows()), figure_of())
    combinations = {tuple(r[c] for c in pdl.TOGGLES) for r in pdl_rows()}
    assert len(combinations) == len(pdl_rows())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
