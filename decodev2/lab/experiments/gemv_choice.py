"""Which kernel takes which product of a step: all of them on every product of six sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ... import load, native, ops, plan, state, synth, toggles
from ...errors import DecodeError
from ...linear import GEMV_VARIANTS
from ...panels import TILE_ROWS
from ...state import DecodeState
from .. import cases
from ..plate import Measured, Missing
from . import pdl
from .step_roofline import SHAPES

TITLE = "The GEMV's kernels on every product of a step, 0.5 to 32 billion weights"
QUESTION = "Which of the GEMV's four kernels is fastest on which product, and is that one chosen?"
PREDICTION = (
    "Each kernel of a chain starts while the one before still runs, if there is room beside it. Of "
    "227 KB of shared memory a multiprocessor, two stages of eight warps take 64 for the table, 35 "
    "for the ring and 2 bytes a column: two such CTAs fit up to 6,900 columns, and there that "
    "kernel should be best, by a microsecond or two. Above, the wide ring has its first four "
    "stages on the way before x is there, 139 KB a multiprocessor, 18 MB in all: it should be best "
    "from some 20 MB on, down of 7B, 14B and 32B. Down of 3B has 12 MB, a tile or less a CTA; a "
    "trial took 6.3 us by direct loads, 6.8 by two stages of eight warps, 7.5 by the wide ring."
)
QKV, OUT, GATE_UP, DOWN, HEAD = *pdl.PRODUCTS, "head"
PRODUCTS = (QKV, OUT, GATE_UP, DOWN, HEAD)
KERNELS = tuple(name for name in GEMV_VARIANTS if name != "auto")
PARAMS = {
    "shapes": (list(SHAPES), "named shapes, separated by commas"),
    "products": ([], "products of a step, separated by commas; all if left out"),
    "kernels": ([], "kernels of the GEMV, separated by commas; all if left out"),
    **cases.COMMON_PARAMS,
}
TOGGLES = {
    "shape": ("shapes", SHAPES),
    "product": ("products", PRODUCTS),
    "kernel": ("kernels", KERNELS),
}
DEPENDS = cases.GEMV_SOURCES
DEVICE = "cuda"
POSITION = 100
COSTS = 1.05  # a choice that takes longer than this times the fastest is a wrong one
ALIKE_LIMIT = 2e-3  # relative difference from products by the tensor cores' other kernel
COLUMNS = [
    {"name": "shape", "unit": ""},
    {"name": "product", "unit": ""},
    {"name": "rows", "unit": "1"},
    {"name": "cols", "unit": "1"},
    {"name": "kernel", "unit": ""},
    {"name": "chosen", "unit": ""},
    *cases.US_COLUMNS,
    {"name": "over_best", "unit": "x"},
    {"name": "mb", "unit": "MB"},
    {"name": "floor_us", "unit": "us"},
    {"name": "gb_s", "unit": "GB/s"},
    {"name": "share", "unit": "%"},
    {"name": "difference", "unit": "1"},
]


@dataclass(frozen=True)
class Product:
    """A product of a step over cold copies of its weights: `run(i)` takes the i-th one from its x
    to what it leaves in `left`."""

    name: str
    rows: int
    cols: int
    n_bytes: int
    copies: int
    run: Callable[[int], None]
    left: torch.Tensor

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE_ROWS)

    @property
    def chain(self) -> pdl.Chain:
        links = self.copies * -(-cases.LAUNCHES // self.copies)
        return pdl.Chain(
            lambda: [self.run(i % self.copies) for i in range(links)], links, 1, self.n_bytes
        )


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape, product and kernel, checked before and after it is timed."""
    specs = [plan.named_spec(name) for name in params["shapes"] or SHAPES]
    wanted = cases.chosen(params["products"], PRODUCTS, "product")
    kernels = cases.chosen(params["kernels"], KERNELS, "kernel")
    read_rate = cases.begin("gemv_choice")
    total, rows, noise = len(specs) * len(wanted) * len(kernels), [], 0.0
    for spec in specs:
        progress(len(rows), total, spec.name)
        for product, live, weights in _products(spec, wanted, params):
            choice = native.cuda("nf4_gemv").chosen(product.cols, product.tiles)
            for kernel in kernels:
                progress(len(rows), total, f"{spec.name}, {product.name}, {kernel}")
                row = {
                    "shape": spec.name, "product": product.name, "rows": product.rows,
                    "cols": product.cols, "kernel": kernel,
                    "chosen": "yes" if GEMV_VARIANTS[kernel] == choice else "no",
                    "mb": product.n_bytes / 1e6,
                }  # fmt: skip
                with toggles.using(linear="gemv", gemv=kernel):
                    made, band = _timed(live, weights, product, row, params)
                rows.append(row | made)
                noise = max(noise, band)
        torch.cuda.empty_cache()
    progress(total, total, "done")
    made = cases.end(read_rate)
    for row in rows:
        reason = row["us"] if isinstance(row["us"], Missing) else None
        if reason:
            row |= {n: reason for n in ("over_best", "floor_us", "gb_s", "share")}
        else:
            row["over_best"] = row["us"] / _best(rows, row)["us"]
            cases.add_rates(row, row["mb"] * 1e6, made["read_rate"]["gb_s"])
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=made,
        notes=[
            cases.noise_note(noise, "every product by every kernel"),
            "us is one product of a graph that takes it again and again, each time with other "
            "weights, all of them several times the L2; what comes from the product before is its "
            "early start, as in a step.",
            f"difference: of what the first product leaves, from the prefill kernel's, "
            f"{ALIKE_LIMIT:.0e} at most, on input drawn anew, before and after. Each graph left "
            "the bits of plain launches one by one.",
        ],
        figure={"kind": "own"},
    )


def _products(
    spec: plan.ArchSpec, wanted: list[str], params: dict
) -> Iterator[tuple[Product, DecodeState, load.ModelWeights]]:
    """Every wanted product of one layer and the head, with copies of its weights; a state and a
    model of one layer for them."""
    small = replace(plan.with_max_seq(spec, pdl.MAX_SEQ), n_layers=1)
    torch.manual_seed(params["seed"])
    weights = load.load_weights(synth.random_packed(small, params["seed"]), pdl.DEVICE)
    live = state.allocate_state(small, pdl.DEVICE, 1)
    c, layer = live.decode, weights.layers[0]
    makes = {
        QKV: (spec.q_dim + 2 * spec.kv_dim, spec.hidden, layer.qkv, c.qkv,
              lambda w: ops.qkv(c, live, replace(layer, qkv=w))),
        OUT: (spec.hidden, spec.q_dim, layer.o, c.x, lambda w: ops.project(c.attn, w, c, live)),
        GATE_UP: (2 * spec.intermediate, spec.hidden, layer.gate_up, c.act,
                  lambda w: ops.swiglu(c, live, replace(layer, gate_up=w))),
        DOWN: (spec.hidden, spec.intermediate, layer.down, c.x,
               lambda w: ops.project(c.act, w, c, live)),
        HEAD: (spec.vocab, spec.hidden, weights.lm_head, live.logits,
               lambda w: ops.head(c, live, replace(weights, lm_head=w))),
    }  # fmt: skip
    for name in wanted:
        rows, cols, first, left, run = makes[name]
        n_bytes = pdl.nbytes_of(first)
        copies = cases.panel_copies(first, cases.copies_for(n_bytes, params["cold_mb"]))

        def run_copy(i: int, run=run, copies=copies) -> None:
            run(copies[i])

        yield Product(name, rows, cols, n_bytes, len(copies), run_copy, left), live, weights


def _timed(live, weights, product: Product, row: dict, params: dict) -> tuple[dict, float]:
    """Times of a product by the kernel that the toggles name, and their noise band."""
    try:
        product.run(0)
    except ValueError as refused:  # its shared memory does not hold this width
        reason = Missing(str(refused))
        names = ("us", "us_best", "us_worst", "difference")
        return dict.fromkeys(names, reason) | {"runs": 0}, 0.0
    what = {"chain": f"{row['shape']}, {product.name}", "launch": pdl.AHEAD}
    what |= {"variant": row["kernel"]}
    before = _difference(live, weights, product, row)
    made, band = pdl.timed_chain(
        live, weights, product.chain, what, params | {"position": POSITION}
    )
    return made | {"difference": max(before, _difference(live, weights, product, row))}, band


def _difference(
    live: DecodeState, weights: load.ModelWeights, product: Product, row: dict
) -> float:
    """Of what the product leaves, from the prefill kernel's, on input that is drawn here. Raises
    DecodeError past ALIKE_LIMIT."""
    live.kv.k.normal_()
    live.kv.v.normal_()
    pdl.prepare(live, weights, POSITION, token=7)  # attention's output and act, as half, too
    x = torch.randn_like(live.decode.x)

    def left() -> torch.Tensor:
        live.decode.x.copy_(x)
        product.run(0)
        return product.left.double().clone()

    found = left()
    with toggles.using(linear="mma"):
        expected = left()
    error = float((found - expected).norm() / expected.norm())
    if not error < ALIKE_LIMIT:
        raise DecodeError(
            f"{row['shape']}, {product.name}, {row['kernel']} is off by {error:.2e}, needs less "
            f"than {ALIKE_LIMIT:.0e}"
        )
    return error


# ---- what it says ----


def _known(rows: list[dict]) -> list[dict]:
    return [r for r in rows if isinstance(r["us"], int | float)]


def _same(a: dict, b: dict) -> bool:
    return (a["shape"], a["product"]) == (b["shape"], b["product"])


def _best(rows: list[dict], row: dict) -> dict:
    """The row of the fastest kernel on the product of `row`."""
    return min((r for r in _known(rows) if _same(r, row)), key=lambda r: r["us"])


def _choices(rows: list[dict]) -> list[tuple[dict, dict]]:
    """(row of the chosen kernel, row of the fastest) of each product whose chosen one was timed."""
    return [(r, _best(rows, r)) for r in _known(rows) if r["chosen"] == "yes"]


def _name(row: dict) -> str:
    return f"{row['product']} of {row['shape'].removeprefix('qwen2.5-')}"


def _verdict(rows: list[dict], noise: float) -> str:
    pairs = _choices(rows)
    if not pairs:
        return f"None of the chosen kernels was timed; {len(rows)} rows of others."
    wrong = [(a, b) for a, b in pairs if a["us"] > COSTS * b["us"]]
    words = [
        f"the chosen kernel is the fastest, or within {100 * (COSTS - 1):.0f} % of it, on "
        f"{len(pairs) - len(wrong)} of {len(pairs)} products"
    ]
    words += [
        f"{_name(a)} takes {a['us']:.2f} us by {a['kernel']}, {b['us']:.2f} by {b['kernel']}"
        for a, b in wrong
    ]
    worst = {}
    for kernel in dict.fromkeys(r["kernel"] for r in rows):
        mine = [r for r in _known(rows) if r["kernel"] == kernel]
        if mine:
            worst[kernel] = max(mine, key=lambda r: r["us"] / _best(rows, r)["us"])
    words += [
        f"{kernel} alone would take up to {r['us'] / _best(rows, r)['us']:.2f} times as long "
        f"({_name(r)})"
        for kernel, r in worst.items()
        if len(worst) > 1
    ]
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}. Noise {100 * noise:.1f} %."


def claims(plate) -> list[tuple[str, bool]]:
    """What must not change between runs."""
    pairs = _choices(plate.rows)
    found = []
    if pairs:
        right = all(a["us"] <= COSTS * b["us"] for a, b in pairs)
        percent = f"{100 * (COSTS - 1):.0f}"
        found.append((f"no kernel beats the chosen one by more than {percent} percent", right))
    winners = {r["kernel"] for _, r in pairs}
    if len(pairs) == len(SHAPES) * len(PRODUCTS):
        found.append(("no kernel is the fastest everywhere", len(winners) > 1))
    return found


def draw(plate, fig) -> None:
    """Dots: a line per product, a colour per kernel, time over the fastest; the chosen ringed."""
    ax = fig.subplots()
    rows = _known(plate.rows)
    lines = list(dict.fromkeys((r["shape"], r["product"]) for r in plate.rows))
    kernels = list(dict.fromkeys(r["kernel"] for r in plate.rows))
    most = 1.6  # what lies beyond stands at the edge, with its number
    for index, kernel in enumerate(kernels):
        mine = [r for r in rows if r["kernel"] == kernel]
        ax.plot(
            [min(r["over_best"], most) for r in mine],
            [lines.index((r["shape"], r["product"])) for r in mine],
            "osD^"[index % 4], markersize=7, label=kernel, zorder=4 - 0.1 * index,
        )  # fmt: skip
    for r in rows:
        y = lines.index((r["shape"], r["product"]))
        if r["chosen"] == "yes":
            ax.plot(min(r["over_best"], most), y, "o", markersize=13, markerfacecolor="none",
                    markeredgecolor="#222222", label="_chosen", zorder=5)  # fmt: skip
            ax.annotate(f"{r['us']:,.2f} us", (most * 1.02, y), va="center", fontsize=9,
                        annotation_clip=False)  # fmt: skip
    for shape in dict.fromkeys(s for s, _ in lines):
        first = min(i for i, (s, _) in enumerate(lines) if s == shape)
        if first:
            ax.axhline(first - 0.5, color="#cccccc", linewidth=0.8)
    ax.set_yticks(range(len(lines)), [f"{s.removeprefix('qwen2.5-')}  {p}" for s, p in lines],
                  fontsize=9)  # fmt: skip
    ax.set_ylim(len(lines) - 0.4, -0.6)
    ax.set_xlim(0.97, most * 1.01)
    ax.set_xlabel(f"time over the fastest kernel's (at the edge: {most} or more); ringed, with its "
                  "time: the chosen one")  # fmt: skip
    ax.legend(loc="lower right", fontsize=11)
