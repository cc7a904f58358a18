"""Every GEMV rung against the codec, over shapes, tails, alignments and epilogues."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodev2 import graph, ladder, oracle, runner, toggles
from decodev2.errors import DecodeError
from decodev2.ladder import RUNGS, TABLES, RowMajor
from decodev2.linear import set_linear_backend
from decodev2.load import load_weights
from decodev2.nf4 import Packed, decode_nf4
from decodev2.plan import MEDIUM_LLAMA, TINY_INTERNLM, TINY_LLAMA
from decodev2.state import allocate_state
from decodev2.synth import build, random_matrix

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
KS = [64, 128, 192, 320, 576, 896]
ODD_KS = [1, 70, 1100, 4159]  # the last group is partly padding; more than one round of a CTA
ROWS = [1, 2, 3, 17, 65]
EPS = 1e-5
# float32 sums of float32 levels, or of levels rounded to half (3.3e-4 each, one row may see it all)
ERROR = {
    "lut_constant": 3e-6, "lut_shared": 3e-6, "lut_shuffle": 3e-6,
    "lut_byte_permute": 1e-3, "lut_pair": 1e-3,
}  # fmt: skip
LAYOUTS = [
    dict(split_k=split, stage_x=staged, load_bytes=load)
    for split, staged in ((False, False), (True, False), (True, True))
    for load in (None, 4, 16)
]


class Case:
    """A random matrix and vector, their exact product, and what rounding is measured against."""

    def __init__(self, rows: int, k: int, seed: int = 0):
        rng = np.random.default_rng([rows, k, seed])
        self.packed = random_matrix(rows, k, rng)
        self.x = rng.standard_normal(k).astype(np.float32)
        self.norm = rng.uniform(0.5, 1.5, k).astype(np.float32)
        self.bias, self.residual = rng.standard_normal((2, rows)).astype(np.float32)
        self.w = ladder.from_packed(self.packed, "cuda")

    def exact(self, normed: bool = False) -> np.ndarray:
        return decode_nf4(self.packed).astype(np.float64) @ self._input(normed)

    def size(self, normed: bool = False, *added: np.ndarray) -> float:
        """Length of the vector of row sizes sqrt(sum of squared terms)."""
        squares = np.square(decode_nf4(self.packed) * self._input(normed)).sum(axis=1)
        return float(np.sqrt(squares.sum() + sum(np.square(a).sum() for a in added)))

    def _input(self, normed: bool) -> np.ndarray:
        x = self.x.astype(np.float64)
        return x / np.sqrt(np.mean(x**2) + EPS) * self.norm if normed else x


def cuda(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def poisoned(n: int) -> torch.Tensor:
    return torch.full((n,), torch.nan, device="cuda")


def relative(found: torch.Tensor, expected: np.ndarray, size: float) -> float:
    found = found.cpu().numpy().astype(np.float64)
    assert np.isfinite(found).all()
    difference = np.linalg.norm(found - expected)
    return difference / size if size else difference  # all terms zero: the sum must be, too


# ---- all tables, layouts and row counts ----------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("k", KS + ODD_KS)
def test_gemv(table, k):
    for rows in ROWS:
        case = Case(rows, k)
        x, bias, residual = cuda(case.x), cuda(case.bias), cuda(case.residual)
        y = poisoned(rows)
        exact, size = case.exact(), case.size()
        for layout in LAYOUTS:
            for nr in (1, 2, 4, 8):
                key = (rows, nr, layout)
                y.fill_(torch.nan)
                ladder.gemv(x, case.w, y, table, nr=nr, **layout)
                assert relative(y, exact, size) < ERROR[table], key
                first = y.clone()
                for _ in range(2):
                    y.fill_(torch.nan)
                    ladder.gemv(x, case.w, y, table, nr=nr, **layout)
                    assert torch.equal(y, first), (*key, "repeat differs")
            y.copy_(residual)
            ladder.gemv(x, case.w, y, table, bias=bias, residual=y, **layout)
            expected = exact + case.bias + case.residual
            whole = case.size(False, case.bias, case.residual)
            assert relative(y, expected, whole) < ERROR[table], (rows, layout, "bias, residual")
            y.fill_(torch.nan)
            ladder.gemv(x, case.w, y, table, norm=cuda(case.norm), eps=EPS, **layout)
            assert relative(y, case.exact(True), case.size(True)) < ERROR[table], (rows, layout)


@needs_cuda
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("k", KS)
def test_a_matrix_that_starts_one_row_in(table, k):
    """Rows 1.. of a larger matrix: scales start at an odd half, codes at a multiple of 32."""
    for rows in (2, 3, 18):
        case = Case(rows, k)
        part = RowMajor(case.w.codes[1:], case.w.scales[1:], rows - 1, k)
        tail = Packed(case.packed.codes[1:], case.packed.scales[1:], (rows - 1, k))
        expected = decode_nf4(tail).astype(np.float64) @ case.x.astype(np.float64)
        size = float(np.linalg.norm(decode_nf4(tail).astype(np.float64) * case.x))
        for layout in LAYOUTS:
            y = poisoned(rows - 1)
            ladder.gemv(cuda(case.x), part, y, table, nr=2, **layout)
            assert relative(y, expected, size) < ERROR[table], (rows, layout)


@needs_cuda
def test_alignment_of_codes_decides_the_load():
    """4 bytes off: narrow loads, wide ones are refused. One byte off: refused."""
    case = Case(65, 4160)
    buffer = torch.zeros(case.w.codes.numel() + 16, dtype=torch.uint8, device="cuda")

    def moved(offset: int) -> RowMajor:
        codes = buffer[offset : offset + case.w.codes.numel()].view(case.w.codes.shape)
        codes.copy_(case.w.codes)
        return RowMajor(codes, case.w.scales, 65, 4160)

    x, y = cuda(case.x), poisoned(65)
    for stage_x in (False, True):
        for offset in (4, 8, 12):
            y.fill_(torch.nan)
            ladder.gemv(x, moved(offset), y, stage_x=stage_x)
            assert relative(y, case.exact(), case.size()) < 3e-6
            with pytest.raises(ValueError, match="aligned to 4 bytes, loads of 16"):
                ladder.gemv(x, moved(offset), y, stage_x=stage_x, load_bytes=16)
        with pytest.raises(ValueError, match="aligned to 1 bytes, loads of 4"):
            ladder.gemv(x, moved(1), y, stage_x=stage_x)


@needs_cuda
def test_rows_beside_the_outputs_stay_as_they_are():
    """Row counts that no CTA divides write nothing before or behind y."""
    for nr in (1, 2, 4, 8):
        for split_k in (True, False):
            case = Case(17, 192)
            buffer = torch.full((17 + 64,), 7.0, device="cuda")
            ladder.gemv(cuda(case.x), case.w, buffer[33:50], nr=nr, split_k=split_k)
            assert relative(buffer[33:50], case.exact(), case.size()) < 3e-6
            assert (buffer[:33] == 7).all() and (buffer[50:] == 7).all()


@needs_cuda
@pytest.mark.parametrize("table", TABLES)
def test_many_rows(table):
    """More CTAs than fit the card; the pair table's CTAs walk over many rows each."""
    case = Case(20001, 896)
    y, exact, size = poisoned(20001), case.exact(), case.size()
    for options in (dict(), dict(stage_x=True), dict(split_k=False), dict(nr=1)):
        y.fill_(torch.nan)
        ladder.gemv(cuda(case.x), case.w, y, table, **options)
        assert relative(y, exact, size) < ERROR[table], options


# ---- the named rungs -----------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
@pytest.mark.parametrize("k", KS)
def test_rungs(rung, k):
    limit = ERROR[rung.options.get("table", "lut_shared")]
    for rows in ROWS:
        counts = {"gemv": (rows,), "qkv": (rows, 2, max(rows // 2, 1)), "gate_up": (rows, rows)}
        parts = [Case(n, k, seed) for seed, n in enumerate(counts[rung.op])]
        for part in parts[1:]:
            part.x, part.norm = parts[0].x, parts[0].norm
        w = [part.w for part in parts]
        if rung.options.get("how") == "concatenated":
            w = [ladder.concatenate(w)]
        tensors = {}
        products = [part.exact(rung.norm) for part in parts]
        sizes = [part.size(rung.norm) for part in parts]
        bias = np.concatenate([part.bias for part in parts])
        if rung.norm:
            tensors = {"norm": cuda(parts[0].norm), "eps": EPS}
        if rung.op == "gate_up":
            g, u = products
            expected = g / (1 + np.exp(-g)) * u
            # each factor's error times the other factor (silu' is at most 1.1), and rounding y
            size = 1.1 * np.abs(u).max() * sizes[0] + np.abs(g).max() * sizes[1]
            size += np.linalg.norm(expected)
            tensors["scratch"] = poisoned(2 * rows)
            if rung.options["how"] == "fused":
                del tensors["scratch"]
        else:
            expected, size = np.concatenate(products), float(np.linalg.norm(sizes))
            if rung.bias:
                tensors["bias"] = cuda(bias)
                expected, size = expected + bias, float(np.hypot(size, np.linalg.norm(bias)))
        y = poisoned(len(expected))
        ladder.run_rung(rung, cuda(parts[0].x), w, y, **tensors)
        assert relative(y, expected, size) < limit, rows
        first = y.clone()
        y.fill_(torch.nan)
        ladder.run_rung(rung, cuda(parts[0].x), w, y, **tensors)
        assert torch.equal(y, first), (rows, "repeat differs")
        if rung.name == "qkv_without_bias":  # what was forgotten shows
            assert relative(y, expected + bias, size) > 0.1


@needs_cuda
def test_three_ways_of_qkv_and_gate_up_agree_bit_for_bit():
    parts = [Case(n, 896, seed) for seed, n in enumerate((896, 128, 128))]
    x, bias = cuda(parts[0].x), cuda(np.concatenate([p.bias for p in parts]))
    w = [p.w for p in parts]
    ways = {"separate": w, "fused": w, "concatenated": [ladder.concatenate(w)]}
    found = []
    for how, matrices in ways.items():
        found.append(poisoned(1152))
        ladder.qkv(x, matrices, found[-1], how, bias=bias, nr=4)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])

    w = [Case(897, 896, seed).w for seed in (7, 8)]
    ways = {"separate": w, "fused": w, "concatenated": [ladder.concatenate(w)]}
    found = []
    for how, matrices in ways.items():
        found.append(poisoned(897))
        ladder.gate_up(x, matrices, found[-1], how, scratch=poisoned(2 * 897), nr=2)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# ---- choices and errors; these need no GPU -------------------------------------------------------


def matrix(rows: int, cols: int) -> RowMajor:
    return ladder.from_packed(random_matrix(rows, cols, np.random.default_rng(0)), "cpu")


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_row_major_is_the_file():
    packed = random_matrix(5, 70, np.random.default_rng(0))
    w = ladder.from_packed(packed, "cpu")
    assert (w.rows, w.cols, w.nbytes) == (5, 70, packed.nbytes)
    assert (w.codes.numpy() == packed.codes).all() and (w.scales.numpy() == packed.scales).all()
    both = ladder.concatenate([w, w])
    assert both.rows == 10 and both.nbytes == 2 * w.nbytes
    assert torch.equal(both.codes[5:], w.codes) and torch.equal(both.scales[:5], w.scales)


def test_rows_that_share_x(monkeypatch):
    monkeypatch.delenv("CHR_NF4_GEMV_NR", raising=False)
    assert [ladder.pick_nr(m) for m in (1, 2048, 4095, 4096, 151936)] == [1, 1, 1, 4, 4]
    monkeypatch.setenv("CHR_NF4_GEMV_NR", "8")
    assert ladder.pick_nr(1) == ladder.pick_nr(4096) == 8
    for wrong in ("3", "0", "eight", "-1", "1.0", " "):
        monkeypatch.setenv("CHR_NF4_GEMV_NR", wrong)
        with pytest.raises(DecodeError) as error:
            ladder.pick_nr(4096)
        assert one_line(error) == f"CHR_NF4_GEMV_NR is {wrong!r}, needs 1, 2, 4 or 8"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(table="lut_v2"), "table is 'lut_v2', needs one of lut_constant"),
        (dict(nr=3), "nr is 3, needs 1, 2, 4 or 8"),
        (dict(load_bytes=8), "load_bytes is 8"),
        (dict(stage_x=True, split_k=False), "stage_x needs split_k"),
        (dict(), "x is on cpu, the GEMV rungs need a CUDA device"),
    ],
)
def test_gemv_errors(options, words):
    with pytest.raises(DecodeError) as error:
        ladder.gemv(torch.zeros(64), matrix(8, 64), torch.zeros(8), **options)
    assert words in one_line(error)


def test_errors_of_shapes_and_ways():
    w, wide = matrix(8, 64), matrix(8, 128)
    x, y = torch.zeros(64), torch.zeros(8)
    calls = {
        "x has 63 elements, the matrix needs 64": lambda: ladder.gemv(x[:63], w, y),
        "matrices have [64, 128] columns": lambda: ladder.qkv(x, [w, w, wide], torch.zeros(24)),
        "how is 'both'": lambda: ladder.qkv(x, [w, w, w], torch.zeros(24), "both"),
        "fused needs 3 matrices, found 1": lambda: ladder.qkv(x, [w], y),
        "concatenated needs 1 matrices, found 2": lambda: ladder.gate_up(
            x, [w, w], y, "concatenated"
        ),
        "gate_up separate needs scratch of 16": lambda: ladder.gate_up(x, [w, w], y, "separate"),
        "gate_up has no bias": lambda: ladder.gate_up(x, [w, w], y, bias=y),
        "fused gate_up has only table lut_shared": lambda: ladder.gate_up(
            x, [w, w], y, table="lut_pair"
        ),
        "8 x 63: codes are [7, 32], need [8, 32]": lambda: RowMajor(w.codes[1:], w.scales, 8, 63),
    }
    for words, call in calls.items():
        with pytest.raises(DecodeError) as error:
            call()
        assert words in one_line(error), words


# ---- a whole step on row-major weights -----------------------------------------------------------

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
STEPS = {
    **{table: {"table": table} for table in TABLES},
    **{f"{n} rows": {"nr": n} for n in ladder.ROWS_SHARING_X},
    "x staged": {"stage_x": True},
    "separate": {"parts": "separate"},
    "separate pair table": {"parts": "separate", "table": "lut_pair"},
    "norm alone": {"norm": "alone"},
    "norm alone, sdpa": {"norm": "alone", "attention": "sdpa"},
    "sdpa": {"attention": "sdpa"},
    "concatenated": {},
}


@needs_cuda
@pytest.mark.parametrize("spec, seed", [(TINY_LLAMA, 0), (TINY_INTERNLM, 1), (MEDIUM_LLAMA, 2)])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_row_major_products(name, spec, seed):
    model = build(spec, seed)
    weights = load_weights(model, "cuda", "rows", concatenated=name == "concatenated")
    state = allocate_state(spec, "cuda", 1)
    with toggles.using(linear="rows", **STEPS[name]):
        eager = runner.generate(state, weights, PROMPT[:4], 8, chunk=1).ids
        replay = graph.capture(state, weights).replay
        captured = runner.generate(state, weights, PROMPT[:4], 8, chunk=1, step=replay).ids
    assert eager == captured == oracle.greedy(model, PROMPT[:4], 8)


@needs_cuda
def test_the_environment_picks_the_rows_of_a_step(monkeypatch):
    weights = load_weights(build(TINY_LLAMA, 0), "cuda", "rows")
    state, seen = allocate_state(TINY_LLAMA, "cuda", 1), []
    launch = ladder.gemv
    monkeypatch.setattr(ladder, "gemv", lambda *a, **o: (seen.append(o["nr"]), launch(*a, **o)))
    monkeypatch.setenv("CHR_NF4_GEMV_NR", "3")
    with toggles.using(linear="rows"), pytest.raises(DecodeError, match="CHR_NF4_GEMV_NR is '3'"):
        runner.generate(state, weights, PROMPT[:4], 2, chunk=1)
    monkeypatch.setenv("CHR_NF4_GEMV_NR", "8")
    with toggles.using(linear="rows"):
        runner.generate(state, weights, PROMPT[:4], 2, chunk=1)
    assert set(seen) == {None}  # `gemv` asks `pick_nr`
    assert ladder.pick_nr(64) == 8


@needs_cuda
def test_backend_and_layout_go_together():
    model, state = build(TINY_LLAMA, 0), allocate_state(TINY_LLAMA, "cuda", 4)
    before = toggles.current.linear
    for layout, backend, words in (
        ("panels", "rows", "the backend is rows, but the weights are panels"),
        ("rows", "gemv", "the backend is gemv, but the weights are row-major"),
    ):
        weights = load_weights(model, "cuda", layout)
        set_linear_backend(backend)
        try:
            with pytest.raises(DecodeError, match=words):
                runner.generate(state, weights, PROMPT[:4], 2, chunk=1)
        finally:
            set_linear_backend(before)
    weights = load_weights(model, "cuda", "rows")
    with toggles.using(linear="rows"), pytest.raises(DecodeError, match="take 1 column, found 4"):
        runner.generate(state, weights, PROMPT[:4], 2)


def test_rungs_are_named_once_and_cover_every_idea():
    names = [rung.name for rung in RUNGS]
    assert len(set(names)) == len(names)
    tables = {rung.options.get("table", "lut_shared") for rung in RUNGS}
    assert tables == set(TABLES)
    assert {rung.log for rung in RUNGS} == {"2", "3", "3b", "4", "5", "5b", "10", "11", "12", ""}
    logged = [rung.log for rung in RUNGS if rung.log]
    assert logged == sorted(logged, key=lambda log: (int(log.rstrip("b")), log))
    assert names[len(logged) :] == [rung.name for rung in RUNGS if not rung.log]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
