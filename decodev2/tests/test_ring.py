"""The ring and its ablations: on the emulator in any order of threads, on the card, and the
experiment on them."""

from __future__ import annotations

import ctypes
import itertools
import types

import emulation
import numpy as np
import pytest
import torch
from test_step_experiments import CARD, defaults, made, nothing

from decodev2 import native, panels
from decodev2.errors import DecodeError
from decodev2.lab import bench, cases, figure, plate
from decodev2.lab.experiments import ring_ablations as experiment
from decodev2.linear import shared_tiles
from decodev2.nf4 import decode_nf4
from decodev2.synth import random_matrix

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
    reason="no CUDA device of sm_90 or newer",
)


def random_case(rows: int, cols: int, seed: int = 0):
    """(packed, panels uint8 [tiles, bytes], x float32 [cols])."""
    rng = np.random.default_rng(seed)
    packed = random_matrix(rows, cols, rng)
    x = rng.standard_normal(cols, dtype=np.float32)
    return packed, panels.from_packed(packed, "cpu").panels, x


def needed(part: str, packed, matrix: torch.Tensor, x: np.ndarray):
    """(y, sizes) in float64."""
    if part != experiment.NO_TABLE:
        w = decode_nf4(packed).astype(np.float64)
        return w @ x.astype(np.float64), np.sqrt(np.square(w * x).sum(1))
    return tuple(v.numpy() for v in experiment.raw_product(matrix, torch.from_numpy(x).double()))


# ---- the references ------------------------------------------------------------------------------


def test_what_the_parts_must_find():
    """Counted one by one: words, pairs, and the halves that a word stands for."""
    _, matrix, x = random_case(32, 512)
    data = matrix.numpy().reshape(2, 2, 2176)  # tile, panel
    assert experiment.all_words(matrix) == int(np.bitwise_xor.reduce(data.view(np.int32).ravel()))
    levels = experiment.LEVELS.astype(np.float16).view(np.uint16).astype(np.uint32)
    found = np.uint32(0)
    for byte in data[:, :, :2048].ravel():
        found ^= levels[byte & 15] | levels[byte >> 4] << np.uint32(16)
    assert experiment.all_pairs(matrix) == int(found.view(np.int32))
    tame = experiment.without_large_halves(matrix)
    data = tame.numpy().reshape(2, 2, 2176)
    y, _ = experiment.raw_product(tame, torch.from_numpy(x).double())
    for row in (0, 7, 8, 31):
        tile, in_tile, total = row // 16, row % 16, 0.0
        for k in range(512):
            panel, block, m, h, t, e = (
                k // 256,
                k % 256 // 64,
                k % 64 // 16,
                k // 8 % 2,
                k // 2 % 4,
                k % 2,
            )
            assert k == 256 * panel + 64 * block + 16 * m + 8 * h + 2 * t + e
            here = block * 512 + (in_tile % 8 * 4 + t) * 16 + in_tile // 8 * 8 + m // 2 * 4 + 2 * e
            weight = data[tile, panel, here : here + 2].view(np.float16)[0]
            at = 2048 + (in_tile * 4 + block) * 2
            scale = data[tile, panel, at : at + 2].view(np.float16)[0]
            total += float(weight) * float(scale) * float(x[k])
        assert y[row] == pytest.approx(total, rel=1e-12)


def test_halves_that_are_tame_are_below_two():
    _, matrix, _ = random_case(64, 1024)
    codes, scales = experiment._codes_and_scales(experiment.without_large_halves(matrix))
    assert codes.contiguous().view(torch.float16).abs().max() < 2
    assert torch.equal(scales, experiment._codes_and_scales(matrix)[1])


# ---- on the emulator -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ring(tmp_path_factory):
    """`ring` of emulator/ring.cpp: csrc/ring_ablations.cu on the CPU, fiber by fiber."""
    function = emulation.build(tmp_path_factory, "ring").ring
    function.restype = ctypes.c_char_p
    return function


def emulated(ring, matrix, x, part, size, multiprocessors=2, seed=1, shared=True):
    """(y, seen) of one launch on the emulator."""
    tiles, cols = len(matrix), len(x)
    y = np.full(16 * tiles, np.nan, np.float32)
    seen = np.zeros(1, np.int32)
    sums = np.full((tiles, 2, 16), np.nan, np.float32)
    counters = np.zeros(tiles, np.uint32)
    stopped = ring(
        *(a.ctypes.data_as(ctypes.c_void_p) for a in (matrix.numpy(), x, y, seen)),
        *(a.ctypes.data_as(ctypes.c_void_p) if shared else None for a in (sums, counters)),
        tiles, cols, experiment.PARTS[part], experiment.RINGS[size][0], multiprocessors, seed,
    )  # fmt: skip
    assert not stopped, stopped.decode()
    assert not counters.any()
    return y, int(seen[0])


@pytest.mark.parametrize("part", experiment.PARTS)
@pytest.mark.parametrize("size", experiment.RINGS)
@pytest.mark.parametrize("shared", [False, True])
def test_the_parts_in_any_order_of_threads(ring, part, size, shared):
    """By whole tiles, and by panels with tiles between two CTAs; the same bits for every seed."""
    packed, matrix, x = random_case(16 * 7, 768)
    if part == experiment.NO_TABLE:
        matrix = experiment.without_large_halves(matrix)
    found = [emulated(ring, matrix, x, part, size, 2, seed, shared) for seed in (1, 2, 3)]
    y, seen = found[0]
    assert all(other == seen for _, other in found)
    if part not in (experiment.NO_MMA, experiment.LOADS):
        expected, sizes = needed(part, packed, matrix, x)
        error = np.linalg.norm(y - expected) / np.linalg.norm(sizes)
        assert error < 1e-3 and seen == 0
        assert all(np.array_equal(other, y) for other, _ in found)
    else:
        of_words = part == experiment.LOADS
        assert seen == (experiment.all_words if of_words else experiment.all_pairs)(matrix)
        assert np.isnan(y).all() == of_words  # loads make no sum at all


def test_no_other_part_would_pass(ring):
    """The checks tell the parts apart."""
    packed, matrix, x = random_case(64, 512, 3)
    whole, _ = emulated(ring, matrix, x, experiment.WHOLE, "8x2")
    expected, sizes = needed(
        experiment.NO_TABLE, packed, experiment.without_large_halves(matrix), x
    )
    assert not np.linalg.norm(whole - expected) < 0.1 * np.linalg.norm(sizes)
    assert experiment.all_words(matrix) != experiment.all_pairs(matrix)
    broken = matrix.clone()
    broken[2, 5] ^= 1
    assert emulated(ring, broken, x, experiment.LOADS, "8x2")[1] != experiment.all_words(matrix)


# ---- on the card ---------------------------------------------------------------------------------

ON_CARD = [(2560, 2048), (4176, 5120), (2128, 11008)]


@needs_hopper
@pytest.mark.parametrize("part", experiment.PARTS)
@pytest.mark.parametrize("size", experiment.RINGS)
@pytest.mark.parametrize("rows, cols", ON_CARD)
def test_the_parts_on_the_card(part, size, rows, cols):
    module = native.cuda("ring_ablations")
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    if module.shared_bytes(experiment.RINGS[size][0], cols) > limit:
        pytest.skip("the ring does not fit beside x")
    packed, matrix, x = random_case(rows, cols, cols)
    if part == experiment.NO_TABLE:
        matrix = experiment.without_large_halves(matrix)
    on_card, y = matrix.cuda(), torch.full((1, rows), torch.nan, device="cuda")
    for shared in ((None, None), shared_tiles(len(matrix), "cuda")):
        for pdl in (False, True):
            seen = torch.zeros(1, dtype=torch.int32, device="cuda")
            module.product(
                torch.from_numpy(x)[None].cuda(), on_card, len(matrix), y, seen,
                experiment.PARTS[part], experiment.RINGS[size][0], pdl, *shared,
            )  # fmt: skip
            if part not in (experiment.NO_MMA, experiment.LOADS):
                expected, sizes = needed(part, packed, matrix, x)
                error = np.linalg.norm(y[0].cpu().numpy() - expected) / np.linalg.norm(sizes)
                assert error < 1e-3
            elif part == experiment.LOADS:
                assert int(seen) == experiment.all_words(matrix) == experiment.all_words(on_card)
            else:
                assert int(seen) == experiment.all_pairs(matrix) == experiment.all_pairs(on_card)


@needs_hopper
@pytest.mark.parametrize("size", [size for size, (_, v) in experiment.RINGS.items() if v])
def test_the_whole_has_the_bits_of_the_step(size):
    _, matrix, x = random_case(2560, 2048)
    on_card, at = matrix.cuda(), torch.from_numpy(x)[None].cuda()
    number, variant = experiment.RINGS[size]
    found = [torch.full((1, 2560), torch.nan, device="cuda") for _ in range(2)]
    seen = torch.zeros(1, dtype=torch.int32, device="cuda")
    native.cuda("ring_ablations").product(
        at, on_card, 160, found[0], seen, 0, number, True, None, None
    )
    native.cuda("nf4_gemv").gemv(
        at, on_card, 160, found[1], 0, None, 0.0, None, None, None, None,
        experiment.GEMV_VARIANTS[variant], 1, None, None, None, None,
    )  # fmt: skip
    assert torch.equal(*found)


@needs_hopper
def test_what_does_not_fit_is_refused():
    product = native.cuda("ring_ablations").product
    x, y = torch.zeros(1, 2048, device="cuda"), torch.zeros(1, 2560, device="cuda")
    matrix = torch.zeros(160, 32 * 544, dtype=torch.uint8, device="cuda")
    seen = torch.zeros(1, dtype=torch.int32, device="cuda")
    for changed, words in (
        ({"parts": 5}, "parts is 5, needs 0 to 4"),
        ({"size": 5}, "size is 5, needs 0 to 4"),
        ({"x": x[:, :1984]}, "x has 1984 columns, needs whole panels of 256"),
        ({"y": y[:, :2550]}, "y has 2550 rows, needs the 16 rows of 160 tiles"),
        ({"tiles": 161, "y": torch.zeros(1, 2576, device="cuda")}, "panels is Byte"),
    ):
        given = {
            "x": x,
            "panels": matrix,
            "tiles": 160,
            "y": y,
            "seen": seen,
            "parts": 0,
            "size": 0,
        }
        with pytest.raises(ValueError, match=words):
            product(*(given | changed).values(), True, None, None)


@needs_hopper
def test_measure_on_the_card():
    params = defaults("ring_ablations", shapes=["down_proj"], cold_mb=100, runs=2)
    result = made("ring_ablations", experiment.measure(params, nothing))
    assert len(result.rows) == 5 + 1 + 4  # rings, direct loads, parts of the chosen ring


# ---- the experiment without a GPU ----------------------------------------------------------------


class Stand:
    """In the place of both extensions, on CPU tensors."""

    def __init__(self):
        self.packed, self.launches, self.harm, self.launched = {}, 0, None, []

    def chosen(self, cols):
        return 1 if cols < 512 else 2  # ring8x2, ring16x4

    def shared_bytes(self, size, cols):
        return 300_000 if (size, cols) == (4, 768) else 100_000

    def product(self, x, matrix, tiles, y, seen, parts, size, pdl, sums, counters):
        part = list(experiment.PARTS)[parts]
        self.launched.append((part, size))
        assert y.shape == (1, 16 * tiles) and pdl and len(sums) == tiles
        if self.harm == (part, "silent"):
            return
        if part == experiment.LOADS:
            seen[0] ^= experiment.all_words(matrix)
        elif part == experiment.NO_MMA:
            seen[0] ^= experiment.all_pairs(matrix)
        elif part == experiment.NO_TABLE:
            y[0] = experiment.raw_product(matrix, x[0].double())[0]
        else:
            y[0] = self.exact(matrix, x[0])
        if self.harm == (part, "wrong"):
            seen[0] ^= 4
            y += 0.5

    def exact(self, matrix, x):
        packed = self.packed.get(matrix.data_ptr())
        return (
            x.new_zeros(16 * len(matrix))
            if packed is None
            else torch.from_numpy(decode_nf4(packed)) @ x
        )


@pytest.fixture
def stand(monkeypatch):
    stand = Stand()
    monkeypatch.setattr(native, "cuda", lambda name: stand)
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(cases, "begin", lambda name: CARD["read_rate"])
    monkeypatch.setattr(cases, "end", lambda rate: CARD | {"read_rate": rate})
    monkeypatch.setattr(experiment, "SHAPES", {"lm_head": (320, 256), "down_proj": (48, 768)})
    properties = types.SimpleNamespace(shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: properties)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def direct(x, w, y, scratch):
        assert experiment.toggles.current.gemv == "direct"
        y[0] = stand.exact(w.panels, x[0])

    monkeypatch.setattr(experiment, "cuda_product", direct)
    from_packed = panels.from_packed

    def remembered(packed, device):
        result = from_packed(packed, device)
        stand.packed[result.panels.data_ptr()] = packed
        stand.keep = [*getattr(stand, "keep", []), result]
        return result

    monkeypatch.setattr(panels, "from_packed", remembered)

    def graph_times(run, launches, runs=9, warmup=2):
        for i in range(min(launches, 4)):
            run(i)
        return [1e-5] * runs

    monkeypatch.setattr(bench, "graph_times", graph_times)
    return stand


def test_measure(stand):
    params = defaults("ring_ablations", cold_mb=0, runs=2)
    result = made("ring_ablations", experiment.measure(params, nothing))
    for shape, own in (("lm_head", "8x2"), ("down_proj", "16x4")):
        rows = [r for r in result.rows if r["shape"] == shape]
        chosen = {(r["ring"], r["part"]) for r in rows}
        assert chosen == {(ring, experiment.WHOLE) for ring in (*experiment.RINGS, "direct")} | {
            (own, part) for part in experiment.PARTS
        }
        assert {r["in_step"] for r in rows if r["ring"] == own} == {"yes"}
    missing = [r for r in result.rows if r["us"] is None]
    assert {(r["shape"], r["ring"]) for r in missing} == {("down_proj", "16x4")}
    assert missing[0]["us_reason"] == "takes 300,000 bytes of shared memory, a CTA has 232,448"
    row = next(r for r in result.rows if (r["ring"], r["part"]) == ("8x2", experiment.LOADS))
    assert row["error_before"] is None and row["stage_kb"] == 17 and row["ring_kb"] == 34
    row = next(r for r in result.rows if (r["ring"], r["part"]) == ("8x2", experiment.NO_TABLE))
    assert 0 < row["error_before"] < 1e-5


@pytest.mark.parametrize("part", experiment.PARTS)
@pytest.mark.parametrize("how", ["wrong", "silent"])
def test_what_is_wrong_is_seen(stand, part, how):
    stand.harm = part, how
    params = defaults("ring_ablations", shapes=["lm_head"], parts=[part], rings=["8x2"], runs=2,
                      cold_mb=0)  # fmt: skip
    with pytest.raises(DecodeError, match=rf"^lm_head, 8x2, {part}"):
        experiment.measure(params, nothing)


def test_every_choice_of_the_panel_gives_its_row(stand):
    for choice in itertools.product(*(choices for _, choices in experiment.TOGGLES.values())):
        if choice[0] not in experiment.SHAPES:
            continue
        picked = zip(experiment.TOGGLES.values(), choice, strict=True)
        given = {param: [value] for (param, _), value in picked}
        params = defaults("ring_ablations", cold_mb=0, runs=2, **given)
        (row,) = made("ring_ablations", experiment.measure(params, nothing)).rows
        assert tuple(row[column] for column in experiment.TOGGLES) == choice


def test_what_does_not_exist_is_named():
    for name, value, words in (
        ("shapes", ["k_proj"], "shape 'k_proj' is unknown; there are lm_head, 32b_gate"),
        ("parts", ["no x"], "part 'no x' is unknown; there are whole, no table"),
        ("rings", ["8x3"], "ring '8x3' is unknown; there are 8x2, 8x4"),
    ):
        with pytest.raises(DecodeError, match=words):
            experiment.measure(defaults("ring_ablations", **{name: value}), nothing)


US = {  # 8x2, 8x4, 16x2, 16x3, 16x4, direct; then the parts in the step's own ring
    "lm_head": ((47.4, 47.0, 60.7, 46.1, 44.9, 62.0), (41.9, 41.0, 40.0, 46.2)),
    "32b_gate": ((23.8, 24.5, 30.0, 23.9, 23.0, 31.0), (22.0, 21.0, 18.7, 23.9)),
    "32b_down": ((None, 27.0, 33.0, 23.0, None, 29.0), (22.0, 21.4, 19.5, 23.3)),
    "gate_up": ((9.9, 10.6, 12.6, 10.9, 11.2, 12.6), (9.7, 9.6, 9.3, 9.9)),
    "down_proj": ((8.0, 8.2, 9.5, 7.7, 7.5, 6.9), (7.4, 7.3, 7.2, 7.6)),
}
OWN = {"lm_head": "16x4", "32b_gate": "8x2", "32b_down": "16x3", "gate_up": "8x2",
       "down_proj": "16x4"}  # fmt: skip


def fabricated(scale: float = 1.0) -> list[dict]:
    rows = []
    for shape, (by_ring, by_part) in US.items():
        m, k = experiment.SHAPES[shape]
        pairs = [(ring, experiment.WHOLE, t) for ring, t in
                 zip((*experiment.RINGS, "direct"), by_ring, strict=True)]  # fmt: skip
        pairs += [(OWN[shape], part, t) for part, t in
                  zip(list(experiment.PARTS)[1:], by_part, strict=True)]  # fmt: skip
        for ring, part, us in pairs:
            row = {"shape": shape, "rows": m, "cols": k, "ring": ring, "part": part}
            row |= {"in_step": "yes" if ring == OWN[shape] else "no"}
            no_ring = plate.Missing("no ring")
            row |= {"stage_kb": no_ring if ring == "direct" else 34.0,
                    "ring_kb": no_ring if ring == "direct" else 136.0}  # fmt: skip
            if us is None:
                row |= experiment._missing("takes too much")
                row |= dict.fromkeys(("floor_us", "gb_s", "share"), row["us"])
            else:
                row |= dict.fromkeys(("us", "us_best", "us_worst"), us * scale) | {"runs": 9}
                none = plate.Missing("checked otherwise")
                error = none if part in (experiment.NO_MMA, experiment.LOADS) else 1.5e-4
                row |= {"error_before": error, "error_after": error}
                cases.add_rates(row, cases.weight_bytes(m, k), 4660.0)
            rows.append(row)
    return rows


def plate_of(rows: list[dict]) -> plate.Plate:
    text = experiment._verdict(rows, 0.01)
    card = CARD | {"read_rate": {"gb_s": 4660.0, "method": "given"}}
    return made(
        "ring_ablations",
        plate.Measured(experiment.COLUMNS, rows, text, {"kind": "own"}, [], card),
    )


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_figure_claims_and_verdict(scale):
    result = plate_of(fabricated(scale))
    assert len(figure.png_bytes(result, plate.content_hash(result))) > 10_000
    assert [held for _, held in experiment.claims(result)] == [True] * 3
    assert "without both 10.9 %" in result.verdict
    assert result.verdict.startswith("Not as predicted for lm_head")
    assert "down_proj is faster with direct than with the step's 16x4" in result.verdict
    assert "gate_up has its best ring, 8x2" in result.verdict


def test_claims_fail_when_they_should():
    rows = fabricated()
    for row in rows:
        if (row["shape"], row["part"]) == ("gate_up", experiment.LOADS):
            row |= dict.fromkeys(("us", "us_best", "us_worst"), 11.0)
        if (row["shape"], row["ring"]) == ("lm_head", "direct"):
            row |= dict.fromkeys(("us", "us_best", "us_worst"), 44.0)
        if row["shape"] == "lm_head" and row["error_before"] is not None:
            row["error_before"] = 2e-3 if row["part"] == experiment.WHOLE else 1e-4
    assert [held for _, held in experiment.claims(plate_of(rows))] == [False] * 3


def test_a_verdict_of_few_rows():
    rows = [r for r in fabricated() if r["shape"] == "gate_up" and r["part"] == experiment.LOADS]
    result = plate_of(rows)
    assert result.verdict.startswith("gate_up 8x2 loads only: 9.3 us")
    assert figure.png_bytes(result, plate.content_hash(result))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
