"""The choice of the GEMV's kernel: its `measure` without a GPU, where the CPU's products stand in,
and what it makes of rows; with one, all kernels on small products."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from test_ring_experiments import drawn, on_cpu  # noqa: F401
from test_step_experiments import CARD, defaults, made, nothing

from decodev2 import native, plan, toggles
from decodev2.errors import DecodeError
from decodev2.lab import cases, plate
from decodev2.lab.experiments import gemv_choice as experiment

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SMALL = {"shapes": ["tiny-llama"], "cold_mb": 1, "runs": 2}


@pytest.fixture
def choosing(on_cpu, monkeypatch):  # noqa: F811
    """The first ring is the chosen kernel of every product; copies share their weights."""
    gemv = types.SimpleNamespace(asked=[])

    def chosen(cols: int, tiles: int) -> int:
        gemv.asked.append((cols, tiles))
        return 1

    real = native.cuda
    monkeypatch.setattr(
        native, "cuda",
        lambda name: types.SimpleNamespace(chosen=chosen) if name == "nf4_gemv" else real(name),
    )  # fmt: skip
    monkeypatch.setattr(cases, "panel_copies", lambda first, count: [first] * count)
    return gemv


def test_measure(choosing):
    result = made("gemv_choice", experiment.measure(defaults("gemv_choice", **SMALL), nothing))
    rows = result.rows
    taken = [(r["product"], r["kernel"]) for r in rows]
    assert taken == list(itertools.product(experiment.PRODUCTS, experiment.KERNELS))
    assert {r["kernel"] for r in rows if r["chosen"] == "yes"} == {"ring8x2"}
    spec = plan.TINY_LLAMA
    by_product = {r["product"]: r for r in rows}
    gate_up, down = by_product["gate and up"], by_product["down"]
    assert (gate_up["rows"], gate_up["cols"]) == (2 * spec.intermediate, spec.hidden)
    assert (down["rows"], down["cols"]) == (spec.hidden, spec.intermediate)
    assert (spec.hidden, -(-2 * spec.intermediate // 16)) in choosing.asked
    assert all(r["difference"] == 0 for r in rows)  # the same kernels stand for both
    copies = cases.copies_for(int(1e6 * down["mb"]), 1)
    links = copies * -(-cases.LAUNCHES // copies)
    assert down["us"] == pytest.approx(500 / links)


def test_measure_sees_a_product_that_is_off(choosing, monkeypatch):
    real, calls = experiment.ops.swiglu, itertools.count()

    def off(c, live, layer):
        real(c, live, layer)
        c.act.mul_(1 + 3e-3 * next(calls))

    monkeypatch.setattr(experiment.ops, "swiglu", off)
    params = defaults("gemv_choice", **SMALL, products=["gate and up"], kernels=["direct"])
    with pytest.raises(DecodeError, match=r"tiny-llama, gate and up, direct is off by .*e-"):
        experiment.measure(params, nothing)


def test_a_kernel_that_does_not_fit_is_said(choosing, monkeypatch):
    real = experiment.ops.project

    def refuses(x, w, c, live):
        if toggles.current.gemv == "ring16x4":
            raise ValueError("a product of 128 columns takes too much shared memory")
        real(x, w, c, live)

    monkeypatch.setattr(experiment.ops, "project", refuses)
    result = made("gemv_choice", experiment.measure(defaults("gemv_choice", **SMALL), nothing))
    missing = [r for r in result.rows if r["us"] is None]
    assert {(r["product"], r["kernel"]) for r in missing} == {
        ("o", "ring16x4"), ("down", "ring16x4")
    }  # fmt: skip
    assert {r["us_reason"] for r in missing} == {
        "a product of 128 columns takes too much shared memory"
    }
    assert drawn(result)


def test_refuses_what_does_not_exist():
    for name, words in (
        ("products", "product 'x' is unknown; there are qkv, o, gate and up, down, head"),
        ("kernels", "kernel 'x' is unknown; there are direct, ring8x2"),
        ("shapes", "shape 'x' is unknown"),
    ):
        with pytest.raises(DecodeError, match=words):
            experiment.measure(defaults("gemv_choice", **{name: ["x"]}), nothing)


def rows_of(times: dict[tuple[str, str], tuple[float, ...]], chosen: dict | None = None):
    """Rows of {(shape, product): us of each kernel}; the fastest is chosen if not said."""
    rows = []
    for (shape, product), us in times.items():
        best = (chosen or {}).get((shape, product), us.index(min(us)))
        for index, (kernel, t) in enumerate(zip(experiment.KERNELS, us, strict=True)):
            row = {
                "shape": shape, "product": product, "kernel": kernel, "rows": 2048, "cols": 2048,
                "chosen": "yes" if index == best else "no", "runs": 9, "over_best": t / min(us),
                "mb": 2.23, "difference": 4e-4,
            }  # fmt: skip
            row |= dict.fromkeys(("us", "us_best", "us_worst"), t)
            cases.add_rates(row, 2.23e6, 4660.0)
            rows.append(row)
    return rows


def plate_of(rows: list[dict]) -> plate.Plate:
    text = experiment._verdict(rows, 0.01)
    card = CARD | {"read_rate": {"gb_s": 4660.0, "method": "given"}}
    measured = plate.Measured(experiment.COLUMNS, rows, text, {"kind": "own"}, [], card)
    return made("gemv_choice", measured)


ALL = {
    (shape, product): (3.0, 2.5, 3.5, 4.5) if product != "down" else (6.3, 6.8, 7.5, 8.0)
    for shape in experiment.SHAPES
    for product in experiment.PRODUCTS
}


def test_verdict_and_claims():
    right = plate_of(rows_of(ALL))
    assert right.verdict.startswith(
        "The chosen kernel is the fastest, or within 5 % of it, on 30 of 30 products; direct alone"
    )
    assert "direct alone would take up to 1.20 times as long (qkv of 0.5b)" in right.verdict
    assert [held for _, held in experiment.claims(right)] == [True, True]
    assert drawn(right)
    wrong = plate_of(rows_of(ALL, {("qwen2.5-3b", "down"): 2}))
    assert "on 29 of 30 products; down of 3b takes 7.50 us by ring16x4, 6.30 by direct" in (
        wrong.verdict
    )
    assert [held for _, held in experiment.claims(wrong)] == [False, True]


def test_one_kernel_for_all_is_said():
    same = plate_of(rows_of({key: (3.0, 2.5, 3.5, 4.5) for key in ALL}))
    assert [held for _, held in experiment.claims(same)] == [True, False]


def test_without_the_chosen_kernel():
    rows = [r for r in rows_of(ALL) if r["chosen"] == "no"]
    assert plate_of(rows).verdict == "None of the chosen kernels was timed; 90 rows of others."
    assert experiment.claims(plate_of(rows)) == []


@needs_cuda
def test_on_the_card():
    params = defaults("gemv_choice", shapes=["medium-llama"], cold_mb=100, runs=2)
    result = made("gemv_choice", experiment.measure(params, nothing))
    assert len(result.rows) == len(experiment.PRODUCTS) * len(experiment.KERNELS)
    assert sum(r["chosen"] == "yes" for r in result.rows) == len(experiment.PRODUCTS)
