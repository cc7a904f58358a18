"""q, k, v and gate, up: apart, in one launch, or in one over a second copy of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ... import ladder, panels, plan
from ...linear import PLAIN, SWIGLU
from .. import cases
from ..plate import Measured

TITLE = "Products that share x: apart, fused, or over a concatenated copy"
QUESTION = "What does one launch for q, k, v or gate, up save, and does it need a copy of weights?"
PREDICTION = (
    "A launch that waits for the one before costs 2 to 3 us in a graph. Fused q, k, v saves two of "
    "three: 4 to 6 us of about 10. Fused gate, up saves one and the launch of silu: 4 to 6 us of "
    "about 25. A concatenated copy reads the same bytes in the same launch: no faster than fused, "
    "and for gate, up one launch more. It costs 2,560 x 2,048 x 17/32 = 2.8 MB a layer for q, k, v "
    "and 24.0 MB for gate, up: over 36 layers 0.10 and 0.86 GB (old card: +0.8 GiB and slower)."
)
PARAMS = {
    "ops": ([], "qkv, gate_up; both if left out"),
    "how": ([], "separate, fused, concatenated, production; all if left out"),
    "model": ("qwen2.5-3b", "a named shape, see decodev2/plan.py"),
    **cases.COMMON_PARAMS,
}
DEPENDS = ("ladder_gemv.cu", *cases.GEMV_SOURCES)
DEVICE = "cuda"
OPS = ("qkv", "gate_up")
PRODUCTION = "production"  # one launch of the step's GEMV, over its one copy of the weights
WAYS = (*ladder.QKV_WAYS, PRODUCTION)
TOGGLES = {"op": ("ops", OPS), "how": ("how", WAYS)}
LAUNCHES = {
    ("qkv", "separate"): 3, ("qkv", "fused"): 1, ("qkv", "concatenated"): 1,
    ("gate_up", "separate"): 3, ("gate_up", "fused"): 1, ("gate_up", "concatenated"): 2,
    ("qkv", PRODUCTION): 1, ("gate_up", PRODUCTION): 1,
}  # fmt: skip
COLUMNS = [
    {"name": "op", "unit": ""},
    {"name": "how", "unit": ""},
    {"name": "launches", "unit": "launches"},
    {"name": "rows", "unit": "1"},
    {"name": "cols", "unit": "1"},
    *cases.TIME_COLUMNS,
    {"name": "extra_mb", "unit": "MB"},
    {"name": "model_extra_gb", "unit": "GB"},
]


@dataclass(frozen=True)
class Parts:
    """The matrices of one op: as packed, and in cold copies [copy][part] on the device."""

    op: str
    packed: list
    copies: list[tuple]
    bias: torch.Tensor | None  # float32 [rows of q, k, v]

    @property
    def outputs(self) -> int:
        rows = [p.shape[0] for p in self.packed]
        return sum(rows) if self.op == "qkv" else rows[0]

    @property
    def rows(self) -> int:
        return sum(p.shape[0] for p in self.packed)

    @property
    def cols(self) -> int:
        return self.packed[0].shape[1]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per op and way, on the shapes of one model."""
    ops = cases.chosen(params["ops"], OPS, "op")
    ways = cases.chosen(params["how"], WAYS, "how")
    spec = plan.named_spec(params["model"])
    read_rate = cases.begin("fusion")
    rng = cases.inputs(params["seed"])
    rows, noise = [], 0.0
    for index, op in enumerate(ops):
        parts = _parts(op, spec, params["seed"], params["cold_mb"])
        extra = {}

        def work_of(how, at=index, op=op, parts=parts, extra=extra):
            progress(at, len(ops), f"{op}, {how}")
            work, extra[how] = _work(parts, how)
            return work

        timed, band = cases.series(ways, work_of, rng, params["runs"])
        noise = max(noise, band)
        rows += [
            {"op": op, "how": how, "launches": LAUNCHES[op, how], "rows": parts.rows,
             "cols": parts.cols}
            | timed[how].row
            | {"extra_mb": extra[how] / 1e6, "model_extra_gb": extra[how] * spec.n_layers / 1e9}
            for how in ways
        ]  # fmt: skip
        del parts, work_of
        torch.cuda.empty_cache()
    progress(len(ops), len(ops), "done")
    notes = [
        cases.noise_note(noise, f"{ways[0]} of each op"),
        f"model_extra_gb is extra_mb over {spec.n_layers} layers of {spec.name}.",
    ]
    return cases.finish(read_rate, COLUMNS, rows, lambda: _verdict(rows, noise), notes)


def _parts(op: str, spec: plan.ArchSpec, seed: int, cold_mb: int) -> Parts:
    heights = (spec.q_dim, spec.kv_dim, spec.kv_dim) if op == "qkv" else (spec.intermediate,) * 2
    packed = [
        cases.random_weights((height, spec.hidden), seed, part)
        for part, height in enumerate(heights)
    ]
    count = cases.copies_for(sum(p.nbytes for p in packed), cold_mb)
    copies = list(zip(*(cases.row_major(p, count) for p in packed), strict=True))
    bias = cases.vector(cases.inputs(seed + 1), sum(heights))[0] if op == "qkv" else None
    return Parts(op, packed, copies, bias)


def _work(parts: Parts, how: str) -> tuple[cases.Work, int]:
    """The work of one way, and the bytes of weights that it keeps beside the one copy."""
    make = _qkv_run if parts.op == "qkv" else _gate_up_run
    run, extra = make(parts, how)

    def expected(x):
        if parts.op == "gate_up":
            return cases.exact_swiglu(*parts.copies[0], x)
        y, sizes = map(torch.cat, zip(*(cases.exact(w, x) for w in parts.copies[0]), strict=True))
        return y + parts.bias.double(), torch.hypot(sizes, parts.bias.double())

    limit = cases.ERROR_LIMIT if how == PRODUCTION else cases.EXACT_LIMIT
    work = cases.Work(
        name=f"{parts.op}, {how}", cols=parts.cols, outputs=parts.outputs,
        copies=len(parts.copies), run=run, expected=expected, limit=limit,
    )  # fmt: skip
    return work, extra


def _qkv_run(parts: Parts, how: str):
    if how == PRODUCTION:
        w = cases.panel_copies(panels.from_packed(parts.packed, cases.DEVICE), len(parts.copies))
        return lambda i, x, y: cases.production(x, w[i], y, PLAIN, bias=parts.bias), 0
    w, extra = _row_major(parts, how)
    return lambda i, x, y: ladder.qkv(x[0], w[i], y[0], how, bias=parts.bias), extra


def _gate_up_run(parts: Parts, how: str):
    if how == PRODUCTION:
        first = panels.gate_up_from_packed(*parts.packed, cases.DEVICE)
        w = cases.panel_copies(first, len(parts.copies))
        return lambda i, x, y: cases.production(x, w[i], y, SWIGLU), 0
    w, extra = _row_major(parts, how)
    scratch = torch.empty(parts.rows, device=cases.DEVICE)
    return lambda i, x, y: ladder.gate_up(x[0], w[i], y[0], how, scratch), extra


def _row_major(parts: Parts, how: str) -> tuple[list, int]:
    if how != "concatenated":
        return parts.copies, 0
    w = [(ladder.concatenate(copy),) for copy in parts.copies]
    return w, w[0][0].nbytes


def _ratios(rows: list[dict], slow: str, fast: str) -> dict[str, float]:
    """Time of `slow` over time of `fast` by op, where both are there."""
    us = {(r["op"], r["how"]): r["us"] for r in rows}
    return {op: us[op, slow] / us[op, fast] for op in OPS if (op, slow) in us and (op, fast) in us}


def _verdict(rows: list[dict], noise: float) -> str:
    fused = _ratios(rows, "separate", "fused")
    copied, apart = (
        _ratios(rows, "concatenated", "fused"),
        _ratios(rows, "concatenated", "separate"),
    )
    ahead = _ratios(rows, "fused", PRODUCTION)
    parts, ok, old = [], [], []
    if fused:
        ok.append(min(fused.values()) > 1 + noise)
        parts.append(f"fused is {cases.ratio_text(fused)} as fast as separate")
        old.append(f"fusing gains: {'the same here' if ok[0] else 'not here'}")
    if copied:
        ok.append(min(copied.values()) >= 1 - noise)
        parts.append(f"a concatenated copy takes {cases.ratio_text(copied)} the time of fused")
    if apart:
        slower = min(apart.values()) > 1 + noise
        old.append(f"the copy is slower than separate: {'the same here' if slower else 'not here'}")
        extra = sum(r["model_extra_gb"] for r in rows)
        parts.append(f"the copies cost {extra:.2f} GB over the model")
    if ahead:
        parts.append(f"production is {cases.ratio_text(ahead)} as fast as fused")
    if not ok:
        only = ", ".join(f"{r['op']} {r['how']} {r['us']:.1f} us" for r in rows)
        return f"Nothing to compare: {only}. Noise {100 * noise:.1f} %."
    agreed = f" Old card: {'; '.join(old)}." if old else ""
    return f"{cases.held(all(ok))}: {'; '.join(parts)}.{agreed} Noise {100 * noise:.1f} %."


def claims(plate) -> list[tuple[str, bool]]:
    """What must not change between runs."""
    rows = plate.rows
    found = [("every way agrees with float64 before and after", cases.accurate(rows))]
    for op, ratio in _ratios(rows, "separate", "fused").items():
        found.append((f"fused {op} is faster than separate", ratio > 1))
    for op, ratio in _ratios(rows, "fused", PRODUCTION).items():
        found.append((f"production {op} is faster than fused", ratio > 1))
    copies = [r for r in rows if r["extra_mb"]]
    if copies:
        only = all(r["how"] == "concatenated" for r in copies)
        found.append(("only the concatenated way keeps a second copy of weights", only))
    return found


def draw(plate, fig) -> None:
    """Bars of time per way, one panel per op; the copy's bytes stand in the text."""
    from .. import figure

    ops = list(dict.fromkeys(r["op"] for r in plate.rows))
    ways = [how for how in WAYS if how in {r["how"] for r in plate.rows}]
    colours = dict(zip(WAYS, ("#E69F00", "#0072B2", "#CC79A7", "#D55E00"), strict=True))
    axes = cases.axes_grid(fig, 1, len(ops))
    for ax, op in zip(axes, ops, strict=True):
        own = [r for r in plate.rows if r["op"] == op]
        for r in own:
            y = ways.index(r["how"])
            ax.barh(y, r["us"], 0.6, color=colours[r["how"]])
            plural = "es" * (r["launches"] > 1)
            text = f"{figure.number(r['us'])} us, {r['launches']} launch{plural}"
            if r["extra_mb"]:
                text += (
                    f"\n+ {figure.number(r['extra_mb'])} MB a layer,"
                    f"\n{figure.number(r['model_extra_gb'])} GB a model"
                )
            ax.annotate(
                text, (r["us"], y), (6, 0), textcoords="offset points", va="center", fontsize=12,
            )  # fmt: skip
        floor = own[0]["floor_us"]
        ax.axvline(floor, color=figure.DARK, linewidth=1.5)
        ax.annotate(
            "bytes at the read rate", (floor, -0.62), (5, 0), textcoords="offset points",
            va="center", fontsize=11.5, color=figure.GREY,
        )  # fmt: skip
        ax.set_xlim(0, 1.7 * max(r["us"] for r in own))
        ax.set_title(f"{op}: {own[0]['rows']:,} x {own[0]['cols']:,}", loc="left")
        ax.set_xlabel("one op on cold weights [us]", loc="left")
    axes[0].set_yticks(range(len(ways)), ways)
    axes[0].set_ylim(len(ways) - 0.5, -0.85)
