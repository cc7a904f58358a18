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
SMALL = {"shapes": ["tiny-llama"], "cold_mb": 0, "runs": 2}


@pytest.fixture
def choosing(on_cpu, monkeypatch):  # noqa: F811
    """The first ring is the chosen kernel of every product; copies share their weights."""
    gemv = types.SimpleNamespace(asked=[])

    def chosen(cols: int) -> int:
        gemv.asked.append(cols)
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
    assert set(choosing.asked) == {spec.hidden, spec.q_dim, spec.intermediate}
    assert all(r["difference"] == 0 for r in rows)  # the same kernels stand for both
    assert len({r["mb"] for r in rows}) == 2  # a layer's or the head's
    assert down["us"] == pytest.approx(500 / cases.LAUNCHES)


def test_only_the_product_changes_its_kernel(choosing, monkeypatch):
    real, seen = experiment.ops, []

    def watched(name):
        def run(*given):
            seen.append((name, toggles.current.gemv))
            getattr(real, name)(*given)

        return run

    names = ("qkv", "project", "swiglu", "head")
    watching = types.SimpleNamespace(
        attention=real.attention, choose=real.choose, embed=real.embed,
        **{name: watched(name) for name in names},
    )  # fmt: skip
    monkeypatch.setattr(experiment, "ops", watching)
    params = defaults("gemv_choice", **SMALL)
    model = experiment._Model(plan.named_spec("tiny-llama"), params)
    model.take_around("down", "direct", 0)
    assert seen == [("qkv", "auto"), ("project", "auto"), ("swiglu", "auto"),
                    ("project", "direct")]  # fmt: skip
    seen.clear()
    model.take_around("head", "ring16x3", 1)
    assert seen == [("head", "ring16x3")]


@pytest.mark.parametrize("product", experiment.PRODUCTS)
def test_measure_sees_a_product_that_is_off(choosing, monkeypatch, product):
    """By three parts in a thousand of the product itself, whatever it is added to."""
    real = experiment._Model.take

    def off(model, what, kernel, i):
        left = model.left_by(what)
        before = left.clone() if what in ("o", "down") else torch.zeros_like(left)
        real(model, what, kernel, i)
        if (what, kernel) == (product, "direct"):
            left.add_(3e-3 * (left - before))

    monkeypatch.setattr(experiment._Model, "take", off)
    params = defaults("gemv_choice", **SMALL, products=[product], kernels=["direct"])
    with pytest.raises(DecodeError, match=rf"tiny-llama, {product}, direct is off by 3.00e-03"):
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
                "mb": 20.0, "alone_us": t / 8, "alone_floor_us": 0.4, "difference": 4e-4,
            }  # fmt: skip
            row |= dict.fromkeys(("us", "us_best", "us_worst"), t)
            cases.add_rates(row, 20e6, 4660.0)
            rows.append(row)
    return rows


def plate_of(rows: list[dict]) -> plate.Plate:
    text = experiment._verdict(rows)
    card = CARD | {"read_rate": {"gb_s": 4660.0, "method": "given"}}
    measured = plate.Measured(experiment.COLUMNS, rows, text, {"kind": "own"}, [], card)
    return made("gemv_choice", measured)


ALL = {
    (shape, product): (30.0, 25.0, 35.0, 45.0) if product != "down" else (23.0, 25.0, 26.0, 28.0)
    for shape in experiment.SHAPES
    for product in experiment.PRODUCTS
}


def test_verdict_and_claims():
    right = plate_of(rows_of(ALL))
    assert right.verdict.startswith(
        "24 of 30 products as predicted, not down of 0.5b, 26.00 us with ring16x4, 23.00 with "
        "direct; down of 1.5b, 25.00 us with ring8x2"
    )
    assert "the kernel that a step takes is the best, or at most 2 % of a layer or the head " in (
        right.verdict
    )
    assert "slower, on 30 of 30; direct takes up to 1.20 times as long (qkv of 0.5b)" in (
        right.verdict
    )
    assert [held for _, held in experiment.claims(right)] == [True, True, True]
    assert drawn(right)
    wrong = plate_of(rows_of(ALL, {("qwen2.5-3b", "down"): 2, ("qwen2.5-7b", "head"): 2}))
    assert "on 28 of 30 (down of 3b, 26.00 us with ring16x4, 23.00 with direct; head of 7b" in (
        wrong.verdict
    )
    assert [held for _, held in experiment.claims(wrong)] == [False, False, True]


def test_what_would_be_faster_alone_is_said():
    rows = rows_of(ALL)
    for row in rows:
        if (row["shape"], row["product"], row["kernel"]) == ("qwen2.5-7b", "o", "direct"):
            row["alone_us"] = 1.0
    assert "in a chain of its own another one is over a twentieth faster for o of 7b" in (
        plate_of(rows).verdict
    )


def test_one_kernel_for_all_is_said():
    same = plate_of(rows_of({key: (30.0, 25.0, 35.0, 45.0) for key in ALL}))
    assert [held for _, held in experiment.claims(same)] == [True, True, False]


def test_without_the_chosen_kernel():
    rows = [r for r in rows_of(ALL) if r["chosen"] == "no"]
    assert "a step takes" not in plate_of(rows).verdict
    assert experiment.claims(plate_of(rows)) == []
    assert plate_of(rows[:1]).verdict == "1 rows, of which no two can be compared."


@needs_cuda
def test_on_the_card():
    params = defaults("gemv_choice", shapes=["medium-llama"], cold_mb=100, runs=2)
    result = made("gemv_choice", experiment.measure(params, nothing))
    assert len(result.rows) == len(experiment.PRODUCTS) * len(experiment.KERNELS)
    assert sum(r["chosen"] == "yes" for r in result.rows) == len(experiment.PRODUCTS)
