"""The one-column experiments without a GPU: every `measure` on small shapes with kernels that stand
in for ours, and what they make of rows; with one, the real kernels on the smallest parameters."""

from __future__ import annotations

import itertools
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from hf import hf_tensors
from tiny import BYTES, write_model

from decodev2 import ladder, native, nf4, ops, panels, plan
from decodev2.errors import DecodeError
from decodev2.lab import bench, cases, figure, plate
from decodev2.lab.experiments import (
    fusion,
    gemv_shapes,
    missing_bias,
    nr_sweep,
    rms_placement,
    split_k,
    table_placement,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_CUDA = {
    "gemv_shapes": gemv_shapes, "table_placement": table_placement, "split_k": split_k,
    "nr_sweep": nr_sweep, "fusion": fusion, "rms_placement": rms_placement,
}  # fmt: skip
READ_RATE = {"gb_s": 4500.0, "method": "given"}
CARD = {
    "device": "cuda", "slug": "toy-card", "cpu": {}, "os": "", "versions": {},
    "gpu": {"name": "Toy", "driver": None}, "read_rate": READ_RATE,
}  # fmt: skip


def defaults(module, **changed) -> dict:
    return {key: value for key, (value, _) in module.PARAMS.items()} | changed


def nothing(done: int, total: int, text: str) -> None:
    assert 0 <= done <= total and text


# ---- kernels that stand in for ours on the CPU ---------------------------------------------------


def rows_of(w: ladder.RowMajor) -> torch.Tensor:
    return torch.from_numpy(
        nf4.decode_nf4(nf4.Packed(w.codes.numpy(), w.scales.numpy(), (w.rows, w.cols)))
    )


def normed(x: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if norm is None else x * torch.rsqrt(x.square().mean() + eps) * norm


class Stand:
    """What the stand-ins saw, and an error that they add on request."""

    def __init__(self):
        self.launches, self.panels, self.options = 0, {}, set()
        self.error = self.jitter = 0.0
        self.times = itertools.cycle([1e-5])

    def launch(
        self, x, w, y, table="lut_shared", split_k=True, stage_x=False, nr=None, norm=None,
        eps=0.0, bias=None, residual=None, load_bytes=None, swiglu=False,
    ):  # fmt: skip
        w = [w] if isinstance(w, ladder.RowMajor) else w
        assert residual is None and load_bytes is None
        assert x.dim() == 1 and y.dim() == 1 and x.is_contiguous() and y.is_contiguous()
        assert table in ladder.TABLES and nr in (None, 1, 2, 4, 8)
        assert split_k or not stage_x, "no such kernel"
        assert not swiglu or (table == "lut_shared" and split_k and not stage_x), "no such kernel"
        self.options.add((table, nr, split_k, stage_x, norm is not None, len(w)))
        parts = [rows_of(m).to(x.dtype) @ normed(x, norm, eps) for m in w]
        found = torch.nn.functional.silu(parts[0]) * parts[1] if swiglu else torch.cat(parts)
        self.write(found if bias is None else found + bias, y)

    def product(
        self, x, w, y, scratch, kind=0, norm=None, eps=0.0, bias=None, add=False, shared=None
    ):
        assert x.shape == (1, w.cols) and y.shape == (1, w.rows) and not add
        first = self.panels.get(w.panels.data_ptr())
        if first is None:  # a rolled copy: nobody looks at its result
            return
        parts = [torch.from_numpy(nf4.decode_nf4(p)) @ normed(x[0], norm, eps) for p in first]
        found = torch.nn.functional.silu(parts[0]) * parts[1] if kind == 1 else torch.cat(parts)
        self.write(found if bias is None else found + bias, y[0])

    def write(self, found, y):
        self.launches += 1
        assert y.shape == found.shape
        y.copy_(found + self.error + self.jitter * self.launches)

    def remember(self, make):
        def made(*arguments):
            result = make(*arguments)
            packed = [a for a in arguments[:-1] for a in (a if isinstance(a, list) else [a])]
            self.panels[result.panels.data_ptr()] = packed
            self.keep = [*getattr(self, "keep", []), result]  # no address comes twice
            return result

        return made

    def graph_times(self, run, launches, runs=9, warmup=2):
        assert launches >= cases.LAUNCHES
        for i in range(launches):
            run(i)
        return [next(self.times) for _ in range(runs)]


@pytest.fixture
def stand(monkeypatch):
    """The machinery of `measure` with stand-ins: CPU tensors, exact products, given times."""
    stand = Stand()

    def silu_multiply(both, y):
        gate, up = both.chunk(2)
        stand.write(torch.nn.functional.silu(gate) * up, y)

    def rms(x, weight, eps, out):
        out.copy_(normed(x[0], weight, eps)[None])

    extension = types.SimpleNamespace(
        silu_multiply=silu_multiply, workspace_bytes=lambda tiles, groups, n: 64
    )
    monkeypatch.setattr(native, "cuda", lambda name: extension)
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(cases, "begin", lambda name: READ_RATE)
    monkeypatch.setattr(cases, "end", lambda rate: CARD)
    monkeypatch.setattr(cases, "cuda_product", stand.product)
    monkeypatch.setattr(gemv_shapes, "cuda_product", stand.product)
    monkeypatch.setattr(ladder, "gemv", stand.launch)
    monkeypatch.setattr(ops, "rms", rms)
    monkeypatch.setattr(bench, "graph_times", stand.graph_times)
    for name in ("from_packed", "gate_up_from_packed"):
        monkeypatch.setattr(panels, name, stand.remember(getattr(panels, name)))
    small = {"q_proj": (64, 128), "lm_head": (200, 128), "down_proj": (48, 320)}
    for module in (gemv_shapes, nr_sweep, cases):
        monkeypatch.setattr(module, "SHAPES", small)
    for module in (table_placement, split_k, rms_placement):
        shapes = {name: (32 + 16 * i, 128) for i, name in enumerate(module.SHAPES)}
        monkeypatch.setattr(module, "SHAPES", shapes)
    tiny = types.SimpleNamespace(
        name="toy", hidden=128, q_dim=64, kv_dim=32, intermediate=48, n_layers=3
    )
    monkeypatch.setattr(plan, "named_spec", lambda name: tiny)
    return stand


def small_params(module) -> dict:
    changed = {"cold_mb": 0, "runs": 3}
    if module is gemv_shapes:  # peers make weights on the device
        changed["kernels"] = [
            k for k in gemv_shapes.KERNELS if k not in ("bitsandbytes NF4", "torch int4")
        ]
    return defaults(module, **changed)


def whole_plate(module, measured: plate.Measured, params: dict) -> plate.Plate:
    name = module.__name__.rsplit(".", 1)[1]
    code = {
        "commit": "0" * 40,
        "dirty": False,
        "csrc": "0",
        "package": "0",
        "depends": {"hash": "0"},
    }
    made = plate.Plate(
        name, module.TITLE, module.QUESTION, module.PREDICTION, measured.verdict, measured.card,
        params, measured.columns, measured.rows, code, measured.figure, measured.notes,
    )  # fmt: skip
    return plate._plate(plate.clean(made), name)


@pytest.mark.parametrize("name", ON_CUDA)
def test_measure_with_stand_ins(stand, name):
    module = ON_CUDA[name]
    params = small_params(module)
    made = whole_plate(module, module.measure(params, nothing), params)
    assert plate.problems(plate.clean(made)) == []
    combinations = {tuple(r[c] for c in module.TOGGLES) for r in made.rows}
    assert len(combinations) == len(made.rows), "the toggles' choices name one row"
    for column, (param, choices) in module.TOGGLES.items():
        assert isinstance(module.PARAMS[param][0], list)
        assert {r[column] for r in made.rows} <= set(choices)
    assert all(isinstance(text, str) and isinstance(ok, bool) for text, ok in module.claims(made))
    assert module.claims(made)[0][1] is True, "every product agrees"


@pytest.mark.parametrize("name", ON_CUDA)
def test_every_choice_of_the_toggles_alone(stand, name):
    """What a panel asks for: one choice of each; one row comes back, or one line says why not."""
    module = ON_CUDA[name]
    seen = 0
    whole = small_params(module)
    known = {r[c] for r in module.measure(whole, nothing).rows for c in module.TOGGLES}
    for choice in itertools.product(*(choices for _, choices in module.TOGGLES.values())):
        if not set(choice) <= known:  # shapes and peers that the stand-ins leave out
            continue
        params = whole | {
            param: [value]
            for (param, _), value in zip(module.TOGGLES.values(), choice, strict=True)
        }
        if name == "split_k" and choice[:2] == ("off", "on"):
            with pytest.raises(DecodeError, match="stage_x on with split_k off has no kernel"):
                module.measure(params, nothing)
            continue
        made = whole_plate(module, module.measure(params, nothing), params)
        (row,) = made.rows
        assert tuple(row[column] for column in module.TOGGLES) == choice
        assert all(ok in (True, False) for _, ok in module.claims(made))
        seen += 1
    assert seen > 3


@pytest.mark.parametrize("name", ON_CUDA)
def test_a_wrong_kernel_stops_the_run_and_is_named(stand, name):
    module = ON_CUDA[name]
    stand.error = 0.05
    with pytest.raises(DecodeError, match=r"is off by .*, needs less than 1e-0[35]"):
        module.measure(small_params(module), nothing)
    stand.error = torch.nan
    with pytest.raises(DecodeError, match="is off by nan"):
        module.measure(small_params(module), nothing)


@pytest.mark.parametrize("name", ON_CUDA)
def test_a_kernel_that_goes_wrong_while_it_is_timed_stops_the_run(stand, name, monkeypatch):
    """NaN in the second check only: max(first, NaN) would be the first."""

    def broken(*arguments):
        stand.error = torch.nan
        return [1e-5]

    monkeypatch.setattr(bench, "graph_times", broken)
    with pytest.raises(DecodeError, match="is off by nan"):
        ON_CUDA[name].measure(small_params(ON_CUDA[name]), nothing)


def test_a_kernel_that_does_not_repeat_itself_stops_the_run(stand):
    stand.jitter = 1e-7
    with pytest.raises(DecodeError, match=r"o_proj.*: two runs on one input differ"):
        split_k.measure(small_params(split_k) | {"shapes": ["o_proj"]}, nothing)


def test_what_is_launched(stand):
    """The options of each row's kernel: (table, NR, split K, x staged, norm inside, matrices)."""
    split_k.measure(small_params(split_k), nothing)
    assert stand.options == {
        ("lut_shared", 1, False, False, False, 1),
        ("lut_shared", 1, True, False, False, 1),
        ("lut_shared", 1, True, True, False, 1),
    }
    stand.options.clear()
    nr_sweep.measure(small_params(nr_sweep) | {"nr": ["2", "8"]}, nothing)
    assert {o[1] for o in stand.options} == {2, 8}
    stand.options.clear()
    table_placement.measure(small_params(table_placement), nothing)
    assert {(o[0], o[3]) for o in stand.options} == {(t, t == "lut_pair") for t in ladder.TABLES}
    stand.options.clear()
    rms_placement.measure(small_params(rms_placement) | {"placements": ["inside"]}, nothing)
    assert {o[4] for o in stand.options} == {False, True}  # the bare product, and the norm inside
    stand.options.clear()
    fusion.measure(small_params(fusion) | {"ops": ["qkv"], "how": ["fused"]}, nothing)
    assert {o[5] for o in stand.options} == {3}


@pytest.mark.parametrize("name", ON_CUDA)
def test_the_noise_band_is_that_of_one_variant_timed_twice(stand, name):
    """Its second timing, the last one of a shape, is 20 % slower: that is the band."""
    module = ON_CUDA[name]
    if name == "fusion":
        params = {"ops": ["qkv"], "how": ["fused"]}
    else:
        params = {param: [choices[0]] for param, choices in module.TOGGLES.values()}
        if "shape" in module.TOGGLES:
            params["shapes"] = [next(iter(module.SHAPES))]
        if name == "split_k":
            params |= {"split_k": ["on"], "stage_x": ["off"]}
    stand.times = itertools.chain([1e-5] * 3, [1.2e-5] * 3, itertools.repeat(1e-5))
    made = module.measure(small_params(module) | params, nothing)
    assert any(note.startswith("Noise band 20.0 %") for note in made.notes)
    assert "Noise 20.0 %" in made.verdict


@pytest.mark.parametrize("name", ON_CUDA)
def test_unknown_choices_are_one_line(name):
    module = ON_CUDA[name]
    for param, _ in module.TOGGLES.values():
        with pytest.raises(DecodeError, match="'zzz' is unknown; there are "):
            module.measure(defaults(module, **{param: ["zzz"]}), nothing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ON_CUDA)
def test_no_device_is_one_line(name):
    with pytest.raises(DecodeError, match=f"{name} needs a CUDA device"):
        ON_CUDA[name].measure(defaults(ON_CUDA[name]), nothing)


# ---- the protocol's parts ------------------------------------------------------------------------


def random_case(rows: int, cols: int) -> tuple[nf4.Packed, np.ndarray]:
    packed = cases.random_weights((rows, cols), 3)
    return packed, np.random.default_rng(4).standard_normal(cols)


@pytest.mark.parametrize("cols", [64, 70, 320])
def test_the_reference_is_the_codec(monkeypatch, cols):
    monkeypatch.setattr(cases, "BLOCK_WEIGHTS", 7 * cols)  # 21 rows are 3 blocks
    packed, x = random_case(21, cols)
    w = ladder.from_packed(packed, "cpu")
    y, sizes = cases.exact(w, torch.from_numpy(x))
    dense = nf4.decode_nf4(packed).astype(np.float64)
    # decode_nf4 rounds level times scale to float32, the reference does not
    assert np.allclose(y.numpy(), dense @ x, rtol=0, atol=1e-6 * np.abs(dense @ x).max())
    assert np.allclose(sizes.numpy(), np.linalg.norm(dense * x, axis=1), rtol=1e-6)
    assert cases.relative_error(y[None].float(), y, sizes) < 1e-6
    wrong = y.clone()
    wrong[3] += 0.01 * float(torch.linalg.vector_norm(sizes))
    assert cases.relative_error(wrong, y, sizes) == pytest.approx(0.01)
    wrong[3] = torch.nan
    assert not cases.relative_error(wrong, y, sizes) < 1e30


def test_the_reference_of_swiglu_and_its_size():
    """Errors of the size of float32 rounding in either product stay within it."""
    gate, up = (ladder.from_packed(cases.random_weights((50, 128), s), "cpu") for s in (1, 2))
    x = torch.from_numpy(np.random.default_rng(5).standard_normal(128))
    y, sizes = cases.exact_swiglu(gate, up, x)
    (g, g_size), (u, u_size) = cases.exact(gate, x), cases.exact(up, x)
    assert torch.allclose(y, torch.nn.functional.silu(g) * u)
    for off_g, off_u in ((1e-4, 0), (0, 1e-4), (1e-4, 1e-4)):
        found = torch.nn.functional.silu(g + off_g * g_size) * (u + off_u * u_size)
        assert 0 < cases.relative_error(found, y, sizes) < 2e-4


def test_the_norm_of_the_reference():
    x = torch.tensor([3.0, -4.0], dtype=torch.float64)
    found = cases.exact_norm(x, torch.tensor([1.0, 2.0]), 0.5)
    assert torch.allclose(found, torch.tensor([3.0, -8.0]).double() / 13.0**0.5)


def test_copies_are_cold(monkeypatch):
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    assert cases.copies_for(100, 0) == 2 and cases.copies_for(3 * 10**6, 10) == 4
    packed, _ = random_case(32, 128)
    rows, panel = cases.row_major(packed, 5), cases.panel_matrix(packed, 5)
    assert (rows[0].codes.numpy() == packed.codes).all()
    for copies, where in ((rows, lambda w: w.codes), (panel, lambda w: w.panels)):
        assert len({where(w).data_ptr() for w in copies}) == 5
    for w in rows[1:]:  # the same rows in another order: codes and scales go together
        own = sorted(zip(w.codes.tolist(), w.scales.tolist(), strict=True))
        assert own == sorted(zip(packed.codes.tolist(), packed.scales.tolist(), strict=True))


# ---- verdicts and claims from rows ---------------------------------------------------------------

SIZES = {"qkv": (2560, 2048), "gate_up": (22016, 2048)}


def row_times(us: float, rows: int, cols: int, error: float = 1e-7) -> dict:
    row = {"us": us, "us_best": 0.99 * us, "us_worst": 1.02 * us, "runs": 9}
    row |= {"error_before": error, "error_after": error}
    cases.add_rates(row, cases.weight_bytes(rows, cols), READ_RATE["gb_s"])
    return row


def fabricated(module, us) -> plate.Plate:
    """A plate of every choice at the real shapes; `us(floor, **columns)` is its time."""
    rows = []
    names = list(module.TOGGLES)
    for choice in itertools.product(*(choices for _, choices in module.TOGGLES.values())):
        key = dict(zip(names, choice, strict=True))
        if (key.get("split_k"), key.get("stage_x")) == ("off", "on"):
            continue
        if key.get("table", "lut_shared") != "lut_shared" and module is nr_sweep:
            continue
        m, k = SIZES[key["op"]] if module is fusion else module.SHAPES[key["shape"]]
        floor = cases.weight_bytes(m, k) / READ_RATE["gb_s"] * 1e-3
        row = key | {"rows": m, "cols": k} | row_times(us(floor, **key), m, k)
        if module is table_placement:
            row["layout"] = table_placement._layout(key["table"], m)
        elif module is split_k:
            row["x_kb"] = 4 * k / 1024 if key["stage_x"] == "on" else 0.0
        elif module is nr_sweep:
            row |= {"picked": int(key["nr"]) == ladder.pick_nr(m), "production_error": 1e-4}
            row["production_us"] = us(floor, **key | {"nr": "16"})
        elif module is fusion:
            extra = cases.weight_bytes(m, k) if key["how"] == "concatenated" else 0.0
            row |= {"extra_mb": extra / 1e6, "model_extra_gb": 36 * extra / 1e9}
            row["launches"] = fusion.LAUNCHES[key["op"], key["how"]]
        elif module is rms_placement:
            row["launches"] = 1 + (key["placement"] == "alone")
            row["product_us"] = us(floor, **key | {"placement": "none"})
        rows.append(row)
    measured = plate.Measured(
        module.COLUMNS, rows, module._verdict(rows, 0.01), {"kind": "own"}, ["n"], CARD
    )
    return whole_plate(module, measured, defaults(module))


TABLE_FACTORS = dict(zip(table_placement.TABLES, (25, 2.6, 2.7, 3.1, 1.9, 1.3), strict=True))
KERNEL_FACTORS = dict(zip(gemv_shapes.KERNELS, (1.2, 1.25, 1.4, 2.0, 4.0, 2.2), strict=True))
AS_PREDICTED = {
    "gemv_shapes": lambda floor, shape, kernel: KERNEL_FACTORS[kernel] * (floor + 2),
    "table_placement": lambda floor, shape, table: TABLE_FACTORS[table] * floor + 2,
    "split_k": lambda floor, shape, split_k, stage_x: (
        floor * (1 if split_k == "on" else 9 if shape == "down_proj" else 1.5)
        + 2 + 6 * (stage_x == "on")
    ),
    "nr_sweep": lambda floor, shape, nr, table: (
        (floor + 2) * {"1": 1.6, "2": 1.9 if "down" in shape else 1.3, "4": 1.2, "8": 1.2,
                       "16": 1.0}[nr]
    ),
    "fusion": lambda floor, op, how: (
        floor + {"separate": 9, "fused": 4, "concatenated": 6, "production": 2}[how]
    ),
    "rms_placement": lambda floor, kernel, shape, placement: (
        floor * (3 if placement == "inside" and kernel == "row-major" else 1.2)
        + {"none": 2, "alone": 4, "inside": 2.2}[placement]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_CUDA)
def test_a_verdict_that_holds_and_one_that_does_not(name):
    module = ON_CUDA[name]
    good = fabricated(module, AS_PREDICTED[name])
    assert plate.problems(plate.clean(good)) == []
    assert good.verdict.startswith("As predicted: "), good.verdict
    assert "ld card" in good.verdict and "Noise 1.0 %" in good.verdict
    assert all(ok for _, ok in module.claims(good)), module.claims(good)
    flat = fabricated(module, lambda floor, **key: 3 * floor + 5)  # nothing makes a difference
    assert flat.verdict.startswith("Not as predicted: "), flat.verdict
    assert [text for text, _ in module.claims(flat)] == [text for text, _ in module.claims(good)]
    assert not all(ok for _, ok in module.claims(flat))


@pytest.mark.parametrize("name", ON_CUDA)
def test_a_gain_inside_the_noise_is_none(name):
    """Everything as predicted but ten times smaller than the noise."""
    module = ON_CUDA[name]
    good = AS_PREDICTED[name]
    tiny = fabricated(module, lambda floor, **key: 3 * floor + 5 + 1e-3 * good(floor, **key))
    assert tiny.verdict.startswith("Not as predicted: "), tiny.verdict


@pytest.mark.parametrize("name", ON_CUDA)
def test_claims_hold_no_times(name):
    for text, _ in ON_CUDA[name].claims(fabricated(ON_CUDA[name], AS_PREDICTED[name])):
        assert not any(unit in text for unit in (" us", " ms", "GB/s", "tok/s", " %")), text


@pytest.mark.parametrize("name", ON_CUDA)
def test_claims_notice_a_wrong_product(name):
    made = fabricated(ON_CUDA[name], AS_PREDICTED[name])
    made.rows[-1]["error_after"] = 0.1
    assert ON_CUDA[name].claims(made)[0][1] is False


# ---- figures -------------------------------------------------------------------------------------


def texts_that_collide(fig) -> list[str]:
    """Pairs of texts of a drawn figure that overlap, and texts that leave it."""
    from matplotlib.text import Text

    renderer = fig.canvas.get_renderer()
    unseen = set()  # labels of ticks outside the view are there and not drawn
    for axis in (axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                unseen |= {tick.label1, tick.label2}
    placed = []
    for text in fig.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in unseen:
            if text.axes is not None and not text.axes.axison and text not in text.axes.texts:
                continue  # ticks of axes that are switched off
            placed.append((text.get_text(), text.get_window_extent(renderer)))
    width, height = figure.SIZE_PX
    found = [f"{t!r} leaves the figure" for t, b in placed
             if b.x0 < 0 or b.y0 < 0 or b.x1 > width or b.y1 > height]  # fmt: skip
    for (one, a), (other, b) in itertools.combinations(placed, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        if across > 1 and down > 3:
            found.append(f"{one!r} over {other!r}")
    return found


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("scale", [1.0, 1.7, 40.0])
def test_texts_of_a_figure_do_not_collide(name, scale):
    good = AS_PREDICTED[name]
    made = fabricated(ON_CUDA[name], lambda floor, **key: scale * good(floor, **key))
    assert texts_that_collide(figure.figure(made)) == []


@pytest.mark.parametrize("name", ON_CUDA)
def test_a_plate_of_one_row_can_be_drawn(name):
    module = ON_CUDA[name]
    made = fabricated(module, AS_PREDICTED[name])
    first = [r for r in made.rows if "lm_head" in r.values() or "op" in r or module is split_k]
    rows = first[:1]
    made = replace(made, rows=rows, verdict=module._verdict(rows, 0.01))
    assert texts_that_collide(figure.figure(made)) == []


# ---- the forgotten bias --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A folder with one packed model whose random bias matters."""
    spec = replace(
        BYTES, name="tiny-qwen", max_seq=128, eos_ids=(), qkv_bias=True, model_type="qwen2"
    )
    root = tmp_path_factory.mktemp("biased")
    tensors = hf_tensors(spec)
    for name in tensors:
        if name.endswith(".bias"):
            tensors[name] *= 8
    write_model(root / "tiny", spec, tensors)
    return root


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(missing_bias, "MAX_SEQ", 128)


def bias_params(folder, **changed) -> dict:
    return defaults(missing_bias, models=str(folder), only=[], new_tokens=12, **changed)


def test_missing_bias_measures_and_draws(biased, short):
    params = bias_params(biased)
    made = missing_bias.measure(params, nothing)
    made = whole_plate(missing_bias, made, params | {"models": "models"})
    assert plate.problems(plate.clean(made)) == []
    assert [(r["bias"], r["prompt"]) for r in made.rows] == list(
        itertools.product(missing_bias.DROPPED, missing_bias.PROMPTS)
    )
    for row in made.rows:
        assert row["new"] == 12 and 1 <= row["distinct"] <= 12
    same = {way: [r["same"] for r in made.rows if r["bias"] == way] for way in missing_bias.DROPPED}
    assert same["kept"] == [12, 12]
    for way in ("without v", "without all"):  # a random v always counts, a random q or k may not
        assert min(same[way]) < 12, same
    assert dict(missing_bias.claims(made))["kept twice, the ids are the same"] is True
    assert texts_that_collide(figure.figure(made)) == []


def test_missing_bias_one_choice_still_compares_with_the_whole_model(biased, short):
    whole = missing_bias.measure(bias_params(biased), nothing)
    one = missing_bias.measure(bias_params(biased, bias=["without v"], prompts=["code"]), nothing)
    (row,) = one.rows
    assert row in whole.rows


def test_missing_bias_refuses_a_model_without_bias(random_model):
    params = bias_params(random_model.parent) | {"new_tokens": 2}
    missing_bias_max = missing_bias.MAX_SEQ
    with pytest.raises(DecodeError, match="tiny has no q, k, v bias"):
        missing_bias.MAX_SEQ = 64
        try:
            missing_bias.measure(params, nothing)
        finally:
            missing_bias.MAX_SEQ = missing_bias_max


@pytest.mark.parametrize("layout", ["cpu", "cuda"])
def test_parts_of_the_bias_are_dropped(layout):
    """CPU: three vectors, CUDA: one. The loaded weights stay as they are."""
    spec = types.SimpleNamespace(q_dim=4, kv_dim=2)
    parts = [torch.full((n,), float(n)) for n in (4, 2, 2)]
    bias = tuple(parts) if layout == "cpu" else torch.cat(parts)
    layer = missing_bias.LayerWeights(None, None, bias, None, None, None, None)
    whole = missing_bias.ModelWeights(spec, None, (layer,), None, None)

    def flat(weights):
        found = weights.layers[0].qkv_bias
        return torch.cat(found).tolist() if isinstance(found, tuple) else found.tolist()

    assert missing_bias._without(whole, "") is whole
    assert flat(missing_bias._without(whole, "v")) == [4, 4, 4, 4, 2, 2, 0, 0]
    assert flat(missing_bias._without(whole, "q")) == [0, 0, 0, 0, 2, 2, 2, 2]
    assert flat(missing_bias._without(whole, "qkv")) == [0] * 8
    assert flat(whole) == [4, 4, 4, 4, 2, 2, 2, 2]


def bias_row(way: str, same: int, distinct: int, id_220: int = 0) -> dict:
    return {
        "model": "m", "prompt": "question", "bias": way, "new": 32, "same": same,
        "distinct": distinct, "id_220": id_220, "stop": "", "first_ids": "", "text": "Paris",
    }  # fmt: skip


def test_missing_bias_verdicts():
    kept = bias_row("kept", 32, 20)
    as_old = [kept, bias_row("without v", 9, 20), bias_row("without all", 0, 1, 32)]
    text = missing_bias._verdict(as_old)
    assert text.startswith("As predicted: ") and "for ever: the same here, 32 of 32" in text
    noise = [kept, bias_row("without v", 0, 31), bias_row("without all", 0, 31, 1)]
    text = missing_bias._verdict(noise)
    assert text.startswith("Not as predicted: ") and "for ever: not here, 1 of 32" in text
    assert "wrong ids from the start: the same here" in text
    assert "nothing to compare" in missing_bias._verdict([kept])


def test_missing_bias_on_the_real_model(real_models):
    name = "qwen2.5-coder-0.5b"
    if not (real_models / f"{name}.chr").exists():
        pytest.skip(f"{name}.chr is not in {real_models}: run `make models`")
    params = defaults(
        missing_bias, models=str(real_models), bias=["kept", "without all"],
        prompts=["question"], new_tokens=8,
    )  # fmt: skip
    kept, dropped = missing_bias.measure(params, nothing).rows
    assert kept["text"] == "The capital of France is Paris."
    assert dropped["same"] == 0 and "Paris" not in dropped["text"]


# ---- the real kernels ----------------------------------------------------------------------------

SMALLEST = {
    "gemv_shapes": {"shapes": ["k_proj"], "kernels": ["gemv", "mma", "torch int4"]},
    "table_placement": {"shapes": ["down_proj"]},
    "split_k": {"shapes": ["o_proj"]},
    "nr_sweep": {"shapes": ["32b_k"]},
    "fusion": {},
    "rms_placement": {"shapes": ["qkv_proj"]},
}


@needs_cuda
@pytest.mark.parametrize("name", ON_CUDA)
def test_measure_on_the_device(name):
    module = ON_CUDA[name]
    params = defaults(module, cold_mb=150, runs=3, **SMALLEST[name])
    made = whole_plate(module, module.measure(params, nothing), params)
    assert plate.problems(plate.clean(made)) == []
    assert len(made.rows) > 1 and module.claims(made)[0][1] is True
    assert figure.figure(made)


@needs_cuda
def test_missing_bias_on_the_device_agrees_with_the_cpu(biased, short):
    one = {"bias": ["kept", "without all"], "prompts": ["question"]}
    found = [
        [
            r["first_ids"]
            for r in missing_bias.measure(bias_params(biased, **one, device=d), nothing).rows
        ]
        for d in ("cpu", "cuda")
    ]
    assert found[0] == found[1]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
