"""RMSNorm as a kernel of its own before the product, or inside every CTA of the product."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import ladder, ops, toggles
from .. import bench, cases
from ..plate import Measured

TITLE = "RMSNorm alone, or inside every CTA of the product"
QUESTION = "Is it cheaper to norm x once and launch twice, or to norm it in every CTA?"
PREDICTION = (
    "Alone, the norm costs a launch, 1 to 2 us. Inside, every CTA reads x and the norm's weight, "
    "16 KB at 2,048 columns, before its first product. Row-major lm_head at four rows a CTA has "
    "38,000 CTAs: 0.6 GB through the L2 beside 165 MB of weights, so inside loses by a third or "
    "more (old card, one row a CTA: 195 to 111 tok/s). qkv with 2,560 CTAs reads 42 MB: about a "
    "launch, near a tie. The production GEMV has at most two CTAs per multiprocessor, each reads "
    "x anyway: 4 MB, so inside wins by the launch on every shape."
)
PARAMS = {
    "kernels": ([], "row-major, production; both if left out"),
    "shapes": ([], "names of shapes, separated by commas; all if left out"),
    "placements": ([], "alone, inside; both if left out"),
    **cases.COMMON_PARAMS,
}
DEPENDS = (
    "ladder_gemv.cu",
    "nf4_gemv.cu",
    "gemv.cuh",
    "step.cu",
    "choose.cuh",
    "ptx.cuh",
    "device.cuh",
    "nf4.cuh",
    "launch.h",
)
DEVICE = "cuda"
ROW_MAJOR, PRODUCTION = KERNELS = ("row-major", "production")
ALONE, INSIDE = PLACEMENTS = ("alone", "inside")
NONE = "none"  # the product of x as it is: what the norm adds is measured against it
SHAPES = {
    "lm_head": cases.SHAPES["lm_head"],
    "qkv_proj": cases.STACKED["qkv_proj"],
    "gate_proj": cases.SHAPES["gate_proj"],
}
TOGGLES = {
    "kernel": ("kernels", KERNELS),
    "shape": ("shapes", tuple(SHAPES)),
    "placement": ("placements", PLACEMENTS),
}
EPS = 1e-6
COLUMNS = [
    {"name": "kernel", "unit": ""},
    {"name": "shape", "unit": ""},
    {"name": "rows", "unit": "1"},
    {"name": "cols", "unit": "1"},
    {"name": "placement", "unit": ""},
    {"name": "launches", "unit": "launches"},
    *cases.TIME_COLUMNS,
    {"name": "product_us", "unit": "us"},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per kernel, shape and placement of the norm."""
    kernels = cases.chosen(params["kernels"], KERNELS, "kernel")
    shapes = cases.chosen(params["shapes"], SHAPES, "shape")
    placements = cases.chosen(params["placements"], PLACEMENTS, "placement")
    read_rate = cases.begin("rms_placement")
    rng = cases.inputs(params["seed"])
    rows, noise = [], 0.0
    for index, shape in enumerate(shapes):
        m, k = SHAPES[shape]
        packed = cases.random_weights((m, k), params["seed"])
        count = cases.copies_for(packed.nbytes, params["cold_mb"])
        exact = cases.row_major(packed, 1)[0]
        norm = 1 + 0.25 * cases.vector(rng, k)[0]
        for kernel in kernels:
            make = cases.row_major if kernel == ROW_MAJOR else cases.panel_matrix
            w = make(packed, count)
            plain = [_work(kernel, shape, NONE, w, norm, exact)] * 2
            bare, again = (cases.checked_times(work, rng, params["runs"]) for work in plain)
            noise = max(noise, bench.noise_band(bare.seconds, again.seconds))
            for placement in placements:
                progress(index, len(shapes), f"{shape}, {kernel}, {placement}")
                work = _work(kernel, shape, placement, w, norm, exact)
                timed = cases.checked_times(work, rng, params["runs"])
                rows.append(
                    {"kernel": kernel, "shape": shape, "rows": m, "cols": k,
                     "placement": placement, "launches": 1 + (placement == ALONE)}
                    | timed.row
                    | {"product_us": bare.row["us"]}
                )  # fmt: skip
            del w, work, plain
            torch.cuda.empty_cache()
    progress(len(shapes), len(shapes), "done")
    notes = [
        cases.noise_note(noise, "the product alone, by kernel and shape,"),
        "product_us is the product of x as it is, without a norm.",
    ]
    return cases.finish(read_rate, COLUMNS, rows, lambda: _verdict(rows, noise), notes)


def _work(
    kernel: str,
    shape: str,
    placement: str,
    w: list,
    norm: torch.Tensor,
    exact: ladder.RowMajor,
) -> cases.Work:
    m, k = SHAPES[shape]
    inside = {"norm": norm, "eps": EPS} if placement == INSIDE else {}
    h = torch.empty(1, k, device=cases.DEVICE)
    pdl = toggles.current.pdl

    def product(i, x, y):
        if kernel == PRODUCTION:
            cases.production(x, w[i], y, **inside)
        else:
            ladder.gemv(x[0], w[i], y[0], **inside)

    def run(i, x, y):
        if placement == ALONE:
            ops.rms(x, norm, EPS, h)
            x = h
        product(i, x, y)

    def expected(x):
        return cases.exact(exact, x if placement == NONE else cases.exact_norm(x, norm, EPS))

    return cases.Work(
        name=f"{shape}, {kernel}, norm {placement}{'' if pdl else ', plain launches'}", cols=k,
        outputs=m, copies=len(w), run=run, expected=expected,
        limit=cases.ERROR_LIMIT if kernel == PRODUCTION else cases.EXACT_LIMIT,
    )  # fmt: skip


def _ratios(rows: list[dict], kernel: str) -> dict[str, float]:
    """Time with the norm inside over time with it alone, by shape."""
    us = {(r["shape"], r["placement"]): r["us"] for r in rows if r["kernel"] == kernel}
    shapes = dict.fromkeys(shape for shape, _ in us)
    return {
        s: us[s, INSIDE] / us[s, ALONE] for s in shapes if (s, INSIDE) in us and (s, ALONE) in us
    }


def _verdict(rows: list[dict], noise: float) -> str:
    rungs, step = _ratios(rows, ROW_MAJOR), _ratios(rows, PRODUCTION)
    parts, ok = [], []
    if rungs:
        parts.append(f"row-major takes {cases.ratio_text(rungs)} the time with the norm inside")
    if "lm_head" in rungs:
        ok.append(rungs["lm_head"] > 1.3)
    if step:
        ok.append(max(step.values()) < 1 - noise)
        parts.append(f"production takes {cases.ratio_text(step)}")
    if not parts:
        only = ", ".join(
            f"{r['kernel']} {r['shape']} {r['placement']} {r['us']:.1f} us" for r in rows
        )
        return f"Nothing to compare: {only}. Noise {100 * noise:.1f} %."
    old = ""
    if "lm_head" in rungs:
        same = rungs["lm_head"] > 1 + noise
        old = f" Old card, slower inside every CTA: {'the same here' if same else 'not here'}"
        old += " for row-major lm_head."
    words = f"{cases.held(all(ok))}: " if ok else ""
    return f"{words}{'; '.join(parts)}.{old} Noise {100 * noise:.1f} %."


def claims(plate) -> list[tuple[str, bool]]:
    """What must not change between runs."""
    rungs, step = _ratios(plate.rows, ROW_MAJOR), _ratios(plate.rows, PRODUCTION)
    found = [("every product agrees with float64 before and after", cases.accurate(plate.rows))]
    if "lm_head" in rungs:
        found.append(("row-major lm_head is slower with the norm inside", rungs["lm_head"] > 1))
    for shape, ratio in step.items():
        found.append((f"production {shape} is faster with the norm inside", ratio < 1))
    return found


def draw(plate, fig) -> None:
    """Bars of time: a panel per shape, kernels and placements down the side."""
    from .. import figure

    shapes = list(dict.fromkeys(r["shape"] for r in plate.rows))
    sides = [
        (kernel, placement)
        for kernel in KERNELS
        for placement in PLACEMENTS
        if (kernel, placement) in {(r["kernel"], r["placement"]) for r in plate.rows}
    ]
    gap = 0.5  # between the kernels
    places = {side: i + gap * KERNELS.index(side[0]) for i, side in enumerate(sides)}
    colours = dict(zip(PLACEMENTS, ("#0072B2", "#E69F00"), strict=True))
    axes = cases.axes_grid(fig, 1, len(shapes))
    for ax, shape in zip(axes, shapes, strict=True):
        own = [r for r in plate.rows if r["shape"] == shape]
        for r in own:
            y = places[r["kernel"], r["placement"]]
            ax.barh(y, r["us"], 0.72, color=colours[r["placement"]])
            ax.plot([r["product_us"]] * 2, [y - 0.45, y + 0.45], color=figure.DARK, linewidth=2.5)
            ax.annotate(
                f"{figure.number(r['us'])} us\n{round(r['us'] - r['product_us'], 1) + 0.0:+.1f} us",
                (max(r["us"], r["product_us"]), y), (7, 0), textcoords="offset points",
                va="center", fontsize=12,
            )  # fmt: skip
        ax.set_xlim(0, 1.45 * max(max(r["us"], r["product_us"]) for r in own))
        ax.set_title(f"{shape}: {own[0]['rows']:,} x {own[0]['cols']:,}", loc="left")
        ax.locator_params(axis="x", nbins=4)
        ax.set_xlabel("norm and product [us]\n┃ = the product alone", loc="left")
    axes[0].set_yticks(list(places.values()), [f"{kernel}, {p}" for kernel, p in sides])
    axes[0].set_ylim(max(places.values()) + 0.6, -0.6)
