"""Which kernel takes which product of a step: all of them on every product of six sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ... import load, native, ops, plan, state, synth, toggles
from ...errors import DecodeError
from ...linear import GEMV_VARIANTS, nf4_linear
from .. import cases
from ..plate import Measured, Missing
from . import pdl
from .step_roofline import SHAPES

TITLE = "The GEMV's kernels on every product of a step, 0.5 to 32 billion weights"
QUESTION = "Which of the GEMV's four kernels makes a step fastest on which product?"
PREDICTION = (
    "A product is not alone: while it ends the next one starts, if there is room beside it. Of 227 "
    "KB of shared memory a multiprocessor, two stages of eight warps take 64 for the table, 35 for "
    "the ring and 2 bytes a column; two such CTAs fit up to 6,900 columns, and there that kernel "
    "should be best. Down of 1.5B and 3B are wider (8,960 and 11,008 columns), but the q, k, v "
    "that follow are not, and still fit beside it: so the same kernel for them, though in a chain "
    "of downs alone direct loads took 6.2 us, that kernel 6.7 and the wide ring 7.5 on 3B. The "
    "downs of 7B, 14B and 32B leave no room in any case; there 16 warps and three stages should be "
    "best, as they are alone. Down of 0.5B has 56 tiles for 132 multiprocessors: most have room "
    "whatever runs, and 16 warps to a tile should be best. A trial of a step of 3B: 972 us with "
    "two stages of eight warps for all, 987 with the wide ring for down, 988 with direct loads."
)
QKV, OUT, GATE_UP, DOWN, HEAD = *pdl.PRODUCTS, "head"
PRODUCTS = (QKV, OUT, GATE_UP, DOWN, HEAD)
LAYER = pdl.LAYER
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
DEPENDS = ("nf4_gemv.cu", "attn.cu", "step.cu", "*.cuh", "*.h")
DEVICE = "cuda"
POSITION = 100
COSTS = 1.02  # a choice that makes a layer take longer than this times the best is a wrong one
ALIKE_LIMIT = 2e-3  # relative difference from products by the prefill kernel
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
    {"name": "alone_us", "unit": "us"},
    {"name": "alone_floor_us", "unit": "us"},
    {"name": "difference", "unit": "1"},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape, product and kernel, checked before and after it is timed."""
    specs = [plan.named_spec(name) for name in params["shapes"] or SHAPES]
    wanted = cases.chosen(params["products"], PRODUCTS, "product")
    kernels = cases.chosen(params["kernels"], KERNELS, "kernel")
    read_rate = cases.begin("gemv_choice")
    total, rows, noise = len(specs) * len(wanted) * len(kernels), [], {LAYER: 0.0, HEAD: 0.0}
    for spec in specs:
        progress(len(rows), total, spec.name)
        model = _Model(spec, params)
        for product in wanted:
            choice = model.choice(product)
            for kernel in kernels:
                progress(len(rows), total, f"{spec.name}, {product}, {kernel}")
                row = {"shape": spec.name, "product": product, "kernel": kernel}
                row["rows"], row["cols"] = model.shape_of[product]
                row["chosen"] = "yes" if GEMV_VARIANTS[kernel] == choice else "no"
                with toggles.using(linear="gemv"):
                    made, band = model.timed(product, kernel)
                rows.append(row | made)
                what = HEAD if product == HEAD else LAYER
                noise[what] = max(noise[what], band)
        del model
        torch.cuda.empty_cache()
    progress(total, total, "done")
    made = cases.end(read_rate)
    rate = made["read_rate"]["gb_s"]
    for row in rows:
        reason = row["us"] if isinstance(row["us"], Missing) else None
        alone_mb = row.pop("alone_mb")
        row["alone_floor_us"] = 1e3 * alone_mb / rate
        if reason:
            row |= {n: reason for n in ("over_best", "floor_us", "gb_s", "share")}
        else:
            row["over_best"] = row["us"] / _best(rows, row)["us"]
            cases.add_rates(row, row["mb"] * 1e6, rate)
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows),
        card=made,
        notes=[
            f"Noise band {100 * noise[LAYER]:.1f} % of layers, {100 * noise[HEAD]:.1f} % of heads: "
            "the larger difference of each timed twice.",
            f"us: a layer with this kernel for the product and the chosen ones for the others, at "
            f"position {POSITION}; of the head: the head, the choice and the next embedding. "
            "alone_us: the product in a chain with itself. Each link of a chain has other weights, "
            "all of them several times the L2, and starts early, as in a step.",
            f"difference: of the product, before it is added to x, from the prefill kernel's, "
            f"{ALIKE_LIMIT:.0e} at most, on input drawn anew, before and after. Each graph left "
            "the bits of plain launches one by one.",
        ],
        figure={"kind": "own"},
    )


class _Model:
    """One layer of a shape in cold copies, the head in others, and the chains over them."""

    def __init__(self, spec: plan.ArchSpec, params: dict):
        small = replace(plan.with_max_seq(spec, pdl.MAX_SEQ), n_layers=1)
        torch.manual_seed(params["seed"])
        self.spec, self.params = small, params
        self.weights = load.load_weights(synth.random_packed(small, params["seed"]), pdl.DEVICE)
        self.live = state.allocate_state(small, pdl.DEVICE, 1)
        layer, cold_mb = self.weights.layers[0], params["cold_mb"]
        self.matrices = {
            QKV: layer.qkv, OUT: layer.o, GATE_UP: layer.gate_up, DOWN: layer.down,
            HEAD: self.weights.lm_head,
        }  # fmt: skip
        self.shape_of = {
            QKV: (spec.q_dim + 2 * spec.kv_dim, spec.hidden), OUT: (spec.hidden, spec.q_dim),
            GATE_UP: (2 * spec.intermediate, spec.hidden), DOWN: (spec.hidden, spec.intermediate),
            HEAD: (spec.vocab, spec.hidden),
        }  # fmt: skip
        self.n_bytes = {name: pdl.nbytes_of(w) for name, w in self.matrices.items()}
        smallest = min(self.n_bytes[name] for name in pdl.PRODUCTS)
        count = cases.copies_for(smallest, cold_mb)
        copies = [cases.panel_copies(self.matrices[name], count) for name in pdl.PRODUCTS]
        self.layers = [
            replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)
            for qkv, o, gate_up, down in zip(*copies, strict=True)
        ]
        head = self.weights.lm_head
        self.heads = [
            replace(self.weights, lm_head=w)
            for w in cases.panel_copies(head, cases.copies_for(self.n_bytes[HEAD], cold_mb))
        ]

    def choice(self, product: str) -> int:
        """GemvVariant of the kernel that a step takes."""
        return native.cuda("nf4_gemv").chosen(self.shape_of[product][1])

    def left_by(self, product: str) -> torch.Tensor:
        c = self.live.decode
        left = {QKV: c.qkv, OUT: c.x, GATE_UP: c.act, DOWN: c.x, HEAD: self.live.logits}
        return left[product]

    def take(self, product: str, kernel: str, i: int) -> None:
        """The product by this kernel with the i-th copy of its weights."""
        c, live = self.live.decode, self.live
        layer = self.layers[i % len(self.layers)]
        with toggles.using(gemv=kernel):
            if product == QKV:
                ops.qkv(c, live, layer)
            elif product == OUT:
                ops.project(c.attn, layer.o, c, live)
            elif product == GATE_UP:
                ops.swiglu(c, live, layer)
            elif product == DOWN:
                ops.project(c.act, layer.down, c, live)
            else:
                ops.head(c, live, self.heads[i % len(self.heads)])

    def take_around(self, product: str, kernel: str, i: int) -> None:
        """What the product is a part of: a layer, or what a step ends with."""
        c, live = self.live.decode, self.live
        if product == HEAD:
            self.take(HEAD, kernel, i)
            ops.choose(live, commit=False)
            ops.embed(c, self.weights)
            return
        for part in pdl.PRODUCTS:
            self.take(part, kernel if part == product else "auto", i)
            if part == QKV:
                ops.attention(c, live, 0, in_step=True)

    def take_otherwise(self, product: str) -> None:
        """The product by the prefill kernel, which never takes the head of a step."""
        if product != HEAD:
            self.take(product, "auto", 0)
            return
        c, live = self.live.decode, self.live
        ops.rms(c.x, self.weights.norm, self.spec.rms_eps, c.h)
        nf4_linear(c.h, self.weights.lm_head, live.logits, live.panel)

    def around(self, product: str, kernel: str) -> pdl.Chain:
        """Of layers, or of what a step ends with."""
        copies, kernels = len(self.heads), 3
        n_bytes = self.n_bytes[HEAD]
        if product != HEAD:
            n_bytes, kernels = self.weights.layers[0].nbytes, 5
            copies = cases.copies_for(n_bytes, self.params["cold_mb"])
        links = range(max(copies, cases.LAUNCHES))
        return pdl.Chain(
            lambda: [self.take_around(product, kernel, i) for i in links],
            len(links), kernels, n_bytes,
        )  # fmt: skip

    def alone(self, product: str, kernel: str) -> pdl.Chain:
        copies = len(self.heads if product == HEAD else self.layers)
        links = range(max(copies, cases.LAUNCHES))
        return pdl.Chain(
            lambda: [self.take(product, kernel, i) for i in links],
            len(links), 1, self.n_bytes[product],
        )  # fmt: skip

    def timed(self, product: str, kernel: str) -> tuple[dict, float]:
        """What of a row is measured, and the noise band."""
        around, alone = self.around(product, kernel), self.alone(product, kernel)
        sizes = {"mb": around.n_bytes / 1e6, "alone_mb": alone.n_bytes / 1e6}
        try:
            self.take(product, kernel, 0)
        except ValueError as refused:  # its shared memory does not hold this width
            reason = Missing(str(refused))
            names = ("us", "us_best", "us_worst", "alone_us", "difference")
            return dict.fromkeys(names, reason) | sizes | {"runs": 0}, 0.0
        before = self.difference(product, kernel)
        row = {"chain": f"{self.spec.name}, {product}", "launch": pdl.AHEAD, "variant": kernel}
        params = self.params | {"position": POSITION}
        made, band = pdl.timed_chain(self.live, self.weights, around, row, params)
        own, _ = pdl.timed_chain(self.live, self.weights, alone, row, params)
        difference = max(before, self.difference(product, kernel))
        return made | sizes | {"alone_us": own["us"], "difference": difference}, band

    def difference(self, product: str, kernel: str) -> float:
        """Of the product, before it is added to x, from the prefill kernel's, on input that is
        drawn here. Raises DecodeError past ALIKE_LIMIT."""
        live = self.live
        live.kv.k.normal_()
        live.kv.v.normal_()
        # attention's output and act as half, too
        pdl.prepare(live, self.weights, POSITION, token=7)
        x = torch.randn_like(live.decode.x)

        def left_by(take: Callable[[], None]) -> torch.Tensor:
            live.decode.x.copy_(x)
            take()
            left = self.left_by(product).double()
            return left - x if product in (OUT, DOWN) else left.clone()  # those add to x

        found = left_by(lambda: self.take(product, kernel, 0))
        with toggles.using(linear="mma"):
            expected = left_by(lambda: self.take_otherwise(product))
        error = float((found - expected).norm() / expected.norm())
        if not error < ALIKE_LIMIT:
            raise DecodeError(
                f"{self.spec.name}, {product}, {kernel} is off by {error:.2e}, needs less than "
                f"{ALIKE_LIMIT:.0e}"
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


def predicted(shape: str, product: str) -> str:
    """The kernel of PREDICTION."""
    if product == DOWN:
        large = {"qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"}
        return (
            "ring16x4" if shape == "qwen2.5-0.5b" else "ring16x3" if shape in large else "ring8x2"
        )
    return "ring8x2"


def _verdict(rows: list[dict]) -> str:
    words, pairs = [], _choices(rows)
    foreseen = [
        (r, _best(rows, r))
        for r in _known(rows)
        if r["shape"] in SHAPES and r["kernel"] == predicted(r["shape"], r["product"])
    ]
    if foreseen:
        missed = [f"{_name(a)}, {_compared(a, b)}" for a, b in foreseen if _is_worse(a, b)]
        text = f"{len(foreseen) - len(missed)} of {len(foreseen)} products as predicted"
        words.append(f"{text}, not {'; '.join(missed)}" if missed else text)
    if pairs:
        wrong = [f"{_name(a)}, {_compared(a, b)}" for a, b in pairs if _is_worse(a, b)]
        text = (
            f"the kernel that a step takes is the best, or at most {100 * (COSTS - 1):.0f} % of a "
            f"layer or the head slower, on {len(pairs) - len(wrong)} of {len(pairs)}"
        )
        words.append(f"{text} ({'; '.join(wrong)})" if wrong else text)
        if others := _fastest_alone(rows):
            words.append(
                f"in a chain of its own another one is over a twentieth faster for "
                f"{', '.join(others)}"
            )
    for kernel in dict.fromkeys(r["kernel"] for r in _known(rows)):
        mine = [r for r in _known(rows) if r["kernel"] == kernel]
        worst = max(mine, key=lambda r: r["us"] / _best(rows, r)["us"])
        if worst is not _best(rows, worst):
            times = worst["us"] / _best(rows, worst)["us"]
            words.append(f"{kernel} takes up to {times:.2f} times as long ({_name(worst)})")
    text = "; ".join(words) or f"{len(rows)} rows, of which no two can be compared"
    return f"{text[0].upper()}{text[1:]}."


def _is_worse(row: dict, best: dict) -> bool:
    return row["us"] > COSTS * best["us"]


def _compared(row: dict, best: dict) -> str:
    return f"{row['us']:.2f} us with {row['kernel']}, {best['us']:.2f} with {best['kernel']}"


def _fastest_alone(rows: list[dict]) -> list[str]:
    """Products whose chosen kernel is a twentieth slower than another one in a chain of its own."""
    found = []
    for chosen, _ in _choices(rows):
        least = min(r["alone_us"] for r in _known(rows) if _same(r, chosen))
        if chosen["alone_us"] > 1.05 * least:
            found.append(_name(chosen))
    return found


def claims(plate) -> list[tuple[str, bool]]:
    """What must not change between runs."""
    pairs = _choices(plate.rows)
    layers = [(a, b) for a, b in pairs if a["product"] != HEAD]
    heads = [(a, b) for a, b in pairs if a["product"] == HEAD]
    found = []
    for what, some, words, most in (
        ("a layer", layers, "3 percent", 1.03),
        ("the head", heads, "a tenth", 1.1),  # hundreds of MB: two runs of it differ by as much
    ):
        if some:
            holds = all(a["us"] <= most * b["us"] for a, b in some)
            found.append((f"no other kernel makes {what} faster by more than {words}", holds))
    if len(pairs) == len(SHAPES) * len(PRODUCTS):
        found.append(("no kernel is best everywhere", len({b["kernel"] for _, b in pairs}) > 1))
    return found


def draw(plate, fig) -> None:
    """Dots: a line per product, a colour per kernel, time over the best. Left: of a layer or the
    head's end, the chosen kernel ringed, with its time; right: of the product in its own chain."""
    left, right = fig.subplots(1, 2)
    rows = _known(plate.rows)
    lines = list(dict.fromkeys((r["shape"], r["product"]) for r in plate.rows))
    names = list(dict.fromkeys(r["kernel"] for r in plate.rows))
    for ax, column, most in ((left, "us", 1.3), (right, "alone_us", 1.8)):
        for r in rows:
            least = min(q[column] for q in rows if _same(q, r))
            y = lines.index((r["shape"], r["product"]))
            at, index = min(r[column] / least, most), names.index(r["kernel"])
            ax.plot(at, y, "osD^"[index], color=f"C{index}", markersize=6, zorder=4)
            if r["chosen"] == "yes":
                ax.plot(at, y, "o", markersize=12, markerfacecolor="none",
                        markeredgecolor="#222222", zorder=5)  # fmt: skip
                ax.annotate(f"{r[column]:,.1f} us", (most * 1.01, y), va="center", fontsize=8.5,
                            annotation_clip=False)  # fmt: skip
        for index in range(1, len(lines)):
            if lines[index][0] != lines[index - 1][0]:
                ax.axhline(index - 0.5, color="#cccccc", linewidth=0.8)
        ax.set_ylim(len(lines) - 0.4, -2.6)  # room for the legend
        ax.set_xlim(0.97, most * 1.005)
    labels = [f"{s.removeprefix('qwen2.5-')}  {p}" for s, p in lines]
    left.set_yticks(range(len(lines)), labels, fontsize=9)
    right.set_yticks([])
    left.set_xlabel("layer, or head and choice: time over the best [x]")
    right.set_xlabel("the product alone in its chain [x]")
    handles = [left.plot([], [], "osD^"[i], color=f"C{i}")[0] for i in range(len(names))]
    left.legend(handles, names, loc="upper center", ncols=4, fontsize=10, frameon=False,
                handletextpad=0.2, columnspacing=1)  # fmt: skip
