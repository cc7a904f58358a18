"""The prompt product of sm_90a on the card: columns, tails, odd rows, epilogues, ranges, and whole
prompts by it. What can be said without a GPU is in test_wgmma_emulated.py.

Errors are measured against the size of the terms, as in test_cuda_gemv.py: sums may cancel.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_cuda_gemm import assert_close, columns, gate_up, matrix, normed, on_device

from decodev2 import gates, linear, native, oracle, panels, step, toggles
from decodev2.load import load_weights
from decodev2.nf4 import Packed, decode_nf4
from decodev2.plan import MEDIUM_LLAMA, TINY_LLAMA, with_max_seq
from decodev2.prefill import consume_prompt, forward_prefill
from decodev2.state import allocate_state, reset
from decodev2.synth import build, random_matrix


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not linear.has_wgmma(torch.device("cuda", 0)):
        return "the card is not sm_90"
    return None


needs_wgmma = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
NS = (1, 17, 33, 64, 65, 100, 128, 129, 250, 256, 300)
PREFILLS = [{"prefill": "wgmma", "act": act} for act in ("half", "float")] + [{"prefill": "mma"}]
CAP = gates.CAPS["cuda"]


def gemm(
    w: panels.PanelLinear, x: np.ndarray, kind: int = 0, norm=None, eps: float = 0.0, bias=None,
    residual=None, pdl: bool = False, repeats: int = 2, x_columns=None, y_columns=None,
) -> np.ndarray:  # fmt: skip
    """y [n, rows] of one call; every repeat, on fresh scratch, must give the same bits."""
    run = native.cuda("nf4_wgmma")
    dx, dnorm, dbias, dresidual = on_device(x, norm, bias, residual)
    first = None
    for _ in range(repeats):
        y = torch.full((len(x), w.rows), torch.nan, device="cuda")
        if residual is not None:
            y.copy_(dresidual)
        scratch = torch.full((run.columns_bytes(w.cols, len(x)),), 255, dtype=torch.uint8).cuda()
        run.gemm(
            dx, w.panels, w.tiles, y, kind, dnorm, eps, dbias, residual is not None, scratch,
            w.level_exponent, x_columns, y_columns, pdl,
        )  # fmt: skip
        first = y if first is None else first
        assert torch.equal(y.view(torch.int32), first.view(torch.int32)), "repeat differs"
    return first.cpu().numpy().astype(np.float64)


# ---- plain products ----


@needs_wgmma
@pytest.mark.parametrize("rows, k", [(17, 64), (130, 77), (300, 1100), (1153, 896), (576, 1001)])
def test_every_number_of_columns(rows, k):
    w = matrix(rows, k, seed=7)
    x = columns(max(NS), k, seed=7)
    expected, size = w.product(x), w.size(x)
    for n in NS:
        assert_close(gemm(w.linear, x[:n]), expected[:n], size[:n], what=n)


@needs_wgmma
@pytest.mark.parametrize("rows, k", [(2560, 2048), (2048, 11008), (40001, 896)])
def test_large_matrices(rows, k):
    w = matrix(rows, k)
    x = columns(256, k)
    expected, size = w.product(x), w.size(x)
    for n in (40, 100, 256):
        assert_close(gemm(w.linear, x[:n], pdl=True), expected[:n], size[:n], what=n)


@needs_wgmma
@pytest.mark.parametrize("rows, k", [(65, 320), (2048, 2048), (130, 11008), (5000, 576)])
def test_a_column_does_not_depend_on_its_neighbours(rows, k):
    """The same bits whatever the chunk, in tiles of 64, 128 and 256 columns."""
    w = matrix(rows, k)
    x = columns(300, k)
    together = gemm(w.linear, x)
    for n in NS:
        np.testing.assert_array_equal(gemm(w.linear, x[-n:]), together[-n:])
    other = x.copy()
    other[::2] *= 1e4
    other[2] = 0.0
    np.testing.assert_array_equal(gemm(w.linear, other)[1::2], together[1::2])


@needs_wgmma
def test_every_weight_counts():
    """Unit vectors as x: the product is the matrix itself, element by element."""
    for rows, k in ((17, 192), (48, 1000), (5, 77)):
        w = matrix(rows, k)
        found = gemm(w.linear, np.eye(k, dtype=np.float32), repeats=1)
        np.testing.assert_allclose(found, w.exact.T, rtol=1e-3)  # two roundings to half


# ---- epilogues ----


@needs_wgmma
@pytest.mark.parametrize("n", [1, 40, 100, 250])
@pytest.mark.parametrize("rows, k", [(65, 576), (577, 1376), (2560, 2048), (33, 77)])
def test_bias_residual_and_norm(rows, k, n):
    w = matrix(rows, k)
    x, residual = columns(n, k), columns(n, rows, seed=2)
    bias = columns(1, rows, seed=3)[0]
    weight = np.random.default_rng(4).uniform(0.5, 1.5, k).astype(np.float32)
    expected, size = w.product(x), w.size(x)
    both = gemm(w.linear, x, bias=bias, residual=residual)
    assert_close(both, expected + bias + residual, size, what="bias, residual")
    for eps in (1e-5, 10.0):
        h = normed(x, weight, eps)
        found = gemm(w.linear, x, norm=weight, eps=eps, bias=bias)
        assert_close(found, w.product(h) + bias, w.size(h), what=("norm", eps))


def act_of(gate: Packed, up: Packed, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expected act, and per column the size of what one rounding of gate or up becomes."""
    g_weights, u_weights = (decode_nf4(p).astype(np.float64) for p in (gate, up))
    g, u = x @ g_weights.T, x @ u_weights.T
    sigmoid = 1 / (1 + np.exp(-g))
    size = np.square(sigmoid * (1 + g * (1 - sigmoid)) * u) * (
        np.square(x) @ np.square(g_weights).T
    ) + np.square(sigmoid * g) * (np.square(x) @ np.square(u_weights).T)
    return g * sigmoid * u, np.sqrt(size.sum(axis=1)) + 1e-12


@needs_wgmma
@pytest.mark.parametrize("n", [1, 40, 100, 250])
@pytest.mark.parametrize("units, k", [(7, 64), (77, 100), (1376, 192), (4864, 896)])
def test_swiglu_and_what_it_hands_on(units, k, n):
    """act as floats, and as half into the product of a down matrix."""
    gate, up, w = gate_up(units, k)
    x = columns(n, k)
    expected, size = act_of(gate, up, x.astype(np.float64))
    act = gemm(w, x, kind=1)
    assert_close(act, expected, size, 2e-3)
    down = matrix(130, units)
    held = torch.full((native.cuda("nf4_wgmma").columns_bytes(units, n),), 255, dtype=torch.uint8)
    held = held.cuda()
    untouched = gemm(w, x, kind=1, y_columns=held)
    assert np.isnan(untouched).all()
    found = gemm(down.linear, np.zeros((n, units), np.float32), x_columns=held)
    assert_close(found, down.product(act), down.size(act))


# ---- ranges ----


@needs_wgmma
@pytest.mark.parametrize("scale", [1e5, 1e-6, 1e20, 1e-20])
def test_large_and_small_x(scale):
    w = matrix(130, 2048)
    for n in (1, 64, 256):
        x = columns(n, 2048) * np.float32(scale)
        assert_close(gemm(w.linear, x), w.product(x), w.size(x), what=n)


@needs_wgmma
@pytest.mark.parametrize("scale", [6e-8, 1e-6, 1.0, 300.0, 65504.0])
def test_large_and_small_weights(scale):
    """Any scale that float16 holds: level times scale is no infinity and loses no bits."""
    packed = random_matrix(33, 576, np.random.default_rng(6))
    packed = Packed(packed.codes, np.full_like(packed.scales, scale), packed.shape)
    exact = decode_nf4(packed).astype(np.float64)
    x = columns(20, 576)
    size = np.sqrt((np.square(x.astype(np.float64)) @ np.square(exact).T).sum(axis=1))
    assert_close(gemm(panels.from_packed(packed, "cuda"), x), x @ exact.T, size)


@needs_wgmma
def test_arguments_that_do_not_fit_are_refused():
    run = native.cuda("nf4_wgmma")
    w = matrix(33, 320).linear
    good = {
        "x": torch.zeros(40, 320, device="cuda"), "panels": w.panels, "tiles": w.tiles,
        "y": torch.zeros(40, 33, device="cuda"), "kind": 0, "norm": None, "eps": 0.0,
        "bias": None, "add": False,
        "scratch": torch.zeros(run.columns_bytes(320, 40), dtype=torch.uint8, device="cuda"),
        "level_exponent": 15, "x_columns": None, "y_columns": None, "pdl": False,
    }  # fmt: skip
    run.gemm(*good.values())
    bad = {
        "x": torch.zeros(40, 640, device="cuda")[:, ::2], "tiles": w.tiles + 1, "kind": 2,
        "y": torch.zeros(41, 33, device="cuda"), "norm": torch.ones(64, device="cuda"),
        "bias": torch.ones(8, device="cuda"), "panels": w.panels[:-1],
        "scratch": good["scratch"][:-16], "level_exponent": 16,
        "x_columns": good["scratch"][:-16], "y_columns": good["scratch"][:16],
    }  # fmt: skip
    for name, value in bad.items():
        with pytest.raises(ValueError):
            run.gemm(*(good | {name: value}).values())


# ---- whole prompts ----


def model_of(name: str):
    """Shapes whose widths fill tiles, and that do not."""
    spec = {
        "medium": MEDIUM_LLAMA,
        "odd": replace(TINY_LLAMA, name="odd", hidden=100, intermediate=77, vocab=131),
        "biases": replace(MEDIUM_LLAMA, name="biases", qkv_bias=True, model_type="qwen2"),
    }[name]
    return build(with_max_seq(spec, 320), 21)


@needs_wgmma
@pytest.mark.parametrize("chosen", PREFILLS, ids=lambda c: ",".join(c.values()))
@pytest.mark.parametrize("name", ["medium", "odd", "biases"])
def test_the_prompt_ladder(name, chosen):
    """Logits after prompts in chunks: column by column, the oracle, and decoding goes on."""
    model = model_of(name)
    weights, state = load_weights(model, "cuda"), allocate_state(model.spec, "cuda", chunk=256)
    for length in (17, 33, 64, 100, 257, 300):
        prompt = np.random.default_rng(length).integers(0, model.spec.vocab, length).tolist()
        want = oracle.step_logits(model, prompt)[-1]
        with toggles.using(linear="gemv"):
            reset(state)
            forward_prefill(state, weights, prompt, 1)
            single = state.logits[0].cpu().numpy()
        for chunk in (40, 64, 128, 256):
            with toggles.using(linear="gemv", **chosen):
                reset(state)
                state.kv.k.fill_(torch.nan)
                state.kv.v.fill_(torch.nan)
                consume_prompt(state, weights, prompt, chunk)
                logits = state.logits[0].cpu().numpy()
                step.greedy_decode(state, weights)
            assert np.isfinite(logits).all()
            assert np.abs(logits - single).max() < CAP, (length, chunk)
            assert np.abs(logits - want).max() < CAP, (length, chunk)


@needs_wgmma
def test_a_prompt_allocates_nothing():
    model = model_of("medium")
    weights, state = load_weights(model, "cuda"), allocate_state(model.spec, "cuda", chunk=256)
    chunk = state.prompt.first(256)
    chunk.token.copy_(torch.arange(256) % model.spec.vocab)
    chunk.position.copy_(torch.arange(256))
    with toggles.using(linear="gemv", prefill="wgmma"):
        step.forward(chunk, state, weights)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        step.forward(chunk, state, weights)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# ---- the choice, without a card ----


def test_who_takes_a_chunk(monkeypatch):
    """Warpgroups, unless told otherwise, where the card has them and the chunk is wide; mma is what
    every other chunk falls back to."""
    wide, narrow = torch.zeros(linear.WGMMA_FROM, 4), torch.zeros(linear.WGMMA_FROM - 1, 4)
    assert toggles.Toggles().prefill == "wgmma"
    with toggles.using(prefill="wgmma"):
        assert not linear.by_wgmma(wide), "on the CPU"
        monkeypatch.setattr(linear, "has_wgmma", lambda device: True)
        assert linear.by_wgmma(wide) and not linear.by_wgmma(narrow)
    with toggles.using(prefill="mma"):
        assert not linear.by_wgmma(wide)


def test_a_cpu_has_no_warpgroups():
    assert not linear.has_wgmma(torch.device("cpu"))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
