"""What programmatic launch buys: plain, started early but idle, and with weights ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ... import graph, ops, plan, state, step, synth, toggles
from ...errors import DecodeError
from ...linear import Linear
from ...load import ModelWeights, load_weights
from ...state import DecodeState
from .. import bench, cases
from ..plate import Measured, Missing
from .attention import kv_bytes

TITLE = "Programmatic launch: starting early, and bringing weights before x is there"
QUESTION = (
    "What does each kernel of a step take in a chain, and how much of it does an early start hide?"
)
PREDICTION = (
    "Both together are recorded: a step of 183 kernels takes 0.23 ms longer by plain launches. A "
    "node of a graph that does nothing costs 1.54 us, with programmatic launch 1.00 us: starting "
    "early alone is worth 0.54 us a kernel, 2.7 us a layer, 0.10 ms a step. The other 0.13 ms, 0.9 "
    "us for each of 145 products, is then what is there already when x comes: the table (64 KB of "
    "stores) and the first weights (a trip to memory). So the later half of the gain is the larger."
)
PLAIN, IDLE, AHEAD = "plain", "early but idle", "weights ahead"
LAUNCHES = {
    PLAIN: {"pdl": False},
    IDLE: {"pdl": True, "ahead": "nothing"},
    AHEAD: {"pdl": True, "ahead": "weights"},
}
PRODUCTS = ("qkv", "o", "gate and up", "down")
LAYER, STEP = "layer", "step"
CHAINS = (*PRODUCTS, LAYER, STEP)
VARIANTS = toggles.CHOICES["gemv"]
PARAMS = {
    "shape": ("qwen2.5-3b", "a named shape, see decodev2/plan.py"),
    "chains": ([], "what is chained, separated by commas; all if left out"),
    "launches": ([], "ways to launch, separated by commas; all if left out"),
    "variants": (["auto"], "kernels of the products, separated by commas"),
    "position": (100, "tokens before the one that the layer and the step are timed at"),
    "runs": (11, "timed replays of each graph"),
    "seed": (0, "seed of weights, keys and values"),
}
TOGGLES = {
    "chain": ("chains", CHAINS),
    "launch": ("launches", tuple(LAUNCHES)),
    "variant": ("variants", VARIANTS),
}
DEPENDS = ("nf4_gemv.cu", "attn.cu", "step.cu", "*.cuh", "*.h")
DEVICE = "cuda"
MAX_SEQ = 2048
ALL_LABELLED = 24  # bars of a figure that have room for a number each
COLUMNS = [
    {"name": "chain", "unit": ""},
    {"name": "launch", "unit": ""},
    {"name": "variant", "unit": ""},
    {"name": "kernels", "unit": "1"},
    *cases.US_COLUMNS,
    {"name": "kernel_us", "unit": "us"},
    {"name": "mb", "unit": "MB"},
    {"name": "floor_us", "unit": "us"},
    {"name": "gb_s", "unit": "GB/s"},
    {"name": "share", "unit": "%"},
]


@dataclass(frozen=True)
class Chain:
    """`take()` launches `links` times `kernels` kernels, one after the other; each link reads
    `n_bytes` that no other link of the chain reads."""

    take: Callable[[], None]
    links: int
    kernels: int
    n_bytes: float


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per chain, launch and variant; all launches must leave the same bits."""
    chains = cases.chosen(params["chains"], CHAINS, "chain")
    launches = cases.chosen(params["launches"], LAUNCHES, "launch")
    variants = cases.chosen(params["variants"], VARIANTS, "variant")
    if not 0 <= params["position"] < MAX_SEQ:
        raise DecodeError(f"position is {params['position']}, needs 0 to {MAX_SEQ - 1}")
    read_rate = cases.begin("pdl")
    total = len(chains) * len(launches) * len(variants)
    progress(0, total, "weights")
    spec = plan.with_max_seq(plan.named_spec(params["shape"]), MAX_SEQ)
    torch.manual_seed(params["seed"])
    weights = load_weights(synth.random_packed(spec, params["seed"]), DEVICE)
    live = state.allocate_state(spec, DEVICE, 1)
    live.kv.k.normal_()
    live.kv.v.normal_()
    rows, noise = [], 0.0
    for name in chains:
        chain = chains_of(live, weights, params["position"])[name]
        for variant in variants:
            for launch in launches:
                progress(len(rows), total, f"{name}, {launch}, {variant}")
                row = {"chain": name, "launch": launch, "variant": variant}
                row |= {"kernels": chain.kernels, "mb": chain.n_bytes / 1e6}
                with toggles.using(linear="gemv", gemv=variant, **LAUNCHES[launch]):
                    made, band = timed_chain(live, weights, chain, row, params)
                rows.append(row | made)
                noise = max(noise, band)
    progress(total, total, "done")
    made = cases.end(read_rate)
    for row in rows:
        if isinstance(row["us"], Missing):
            row |= {n: row["us"] for n in ("kernel_us", "floor_us", "gb_s", "share")}
        else:
            row["kernel_us"] = row["us"] / row["kernels"]
            cases.add_rates(row, row["mb"] * 1e6, made["read_rate"]["gb_s"])
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=made,
        notes=[
            cases.noise_note(noise, f"every chain, {AHEAD},"),
            "us is one link of a chain: a kernel, the five kernels of a layer, or all of a step. "
            "A chain is one graph over the weights of all layers, so every kernel finds its own "
            "weights cold.",
            "Each graph left the same bits as plain launches one by one, before and after it was "
            "timed.",
        ],
        figure={"kind": "own"},
    )


def chains_of(live: DecodeState, weights: ModelWeights, position: int) -> dict[str, Chain]:
    """The chains of a model, by name."""
    c, layers, spec = live.decode, weights.layers, weights.spec

    def layer(i: int) -> None:
        ops.qkv(c, live, layers[i])
        ops.attention(c, live, i, in_step=True)
        ops.project(c.attn, layers[i].o, c, live)
        ops.swiglu(c, live, layers[i])
        ops.project(c.act, layers[i].down, c, live)

    def over_layers(run: Callable[[int], None], kernels: int, n_bytes: float) -> Chain:
        return Chain(lambda: [run(i) for i in range(len(layers))], len(layers), kernels, n_bytes)

    first, cached = layers[0], kv_bytes(spec, position + 1)
    sizes = [nbytes_of(w) for w in (first.qkv, first.o, first.gate_up, first.down)]
    runs = (
        lambda i: ops.qkv(c, live, layers[i]),
        lambda i: ops.project(c.attn, layers[i].o, c, live),
        lambda i: ops.swiglu(c, live, layers[i]),
        lambda i: ops.project(c.act, layers[i].down, c, live),
    )
    found = {
        name: over_layers(run, 1, size)
        for name, run, size in zip(PRODUCTS, runs, sizes, strict=True)
    }
    found[LAYER] = over_layers(layer, 5, sum(sizes) + cached)
    found[STEP] = Chain(
        lambda: step.greedy_decode(live, weights), 1, 5 * len(layers) + 3,
        weights.bytes_per_token + len(layers) * cached,
    )  # fmt: skip
    return found


def nbytes_of(w: Linear | tuple[Linear, ...]) -> int:
    """Packed bytes of a matrix, or of the matrices of a fused op that are kept apart."""
    return sum(part.nbytes for part in w) if isinstance(w, tuple) else w.nbytes


# ---- one row ----


def timed_chain(
    live: DecodeState, weights: ModelWeights, chain: Chain, row: dict, params: dict
) -> tuple[dict, float]:
    """Times of one chain as the toggles say, and their noise band; checked before and after. `row`
    names it (chain, launch, variant); of `params` it takes position and runs."""
    position = params["position"]
    try:
        replay = graph.capture_step(live, chain.take).replay
    except ValueError as refused:  # a variant whose shared memory does not fit this width
        reason = Missing(str(refused))
        return dict.fromkeys(("us", "us_best", "us_worst"), reason) | {"runs": 0}, 0.0

    def samples() -> list[float]:
        taken = cases.step_times(live, replay, position, params["runs"])
        return [t / chain.links for t in taken]

    _check(live, weights, chain, replay, row, position, token=3)
    seconds = samples()
    band = bench.noise_band(seconds, samples()) if row["launch"] == AHEAD else 0.0
    _check(live, weights, chain, replay, row, position, token=5)
    return cases.times_row(seconds), band


def _check(live, weights, chain, replay, row: dict, position: int, token: int) -> None:
    """The graph must leave the bits that plain launches leave from the same start."""
    with toggles.using(pdl=False):
        prepare(live, weights, position, token)
        chain.take()
        expected = [t.clone() for t in _left_by(live)]
        prepare(live, weights, position, token)
    replay()
    if not all(torch.equal(a, b) for a, b in zip(_left_by(live), expected, strict=True)):
        what = f"{row['chain']}, {row['launch']}, {row['variant']}"
        raise DecodeError(f"{what}: its bits are not those of plain launches")


def prepare(live: DecodeState, weights: ModelWeights, position: int, token: int) -> None:
    """Every buffer holds what a step leaves there, whatever a chain did to it. The step takes the
    chosen kernels: the one that is timed may not fit another product of it."""
    live.position.fill_(position)
    live.token.fill_(token)
    with toggles.using(gemv="auto"):
        step.forward_decode(live, weights)


def _left_by(live: DecodeState) -> list[torch.Tensor]:
    c = live.decode
    return [c.x, c.qkv, c.attn, c.act, live.logits, live.next_token, live.position]


# ---- what it says ----


def _times(rows: list[dict], variant: str = "auto") -> dict[tuple[str, str], float]:
    return {
        (r["chain"], r["launch"]): r["us"]
        for r in rows
        if r["variant"] == variant and isinstance(r["us"], int | float)
    }


def _verdict(rows: list[dict], noise: float) -> str:
    us = _times(rows)
    words = []
    for name, unit in ((STEP, "step"), (LAYER, "layer")):
        if all((name, launch) in us for launch in LAUNCHES):
            plain, idle, ahead = (us[name, launch] for launch in LAUNCHES)
            held = plain - idle < idle - ahead
            words.append(
                f"{cases.held(held).lower()} for the {unit}: starting early takes "
                f"{plain - idle:,.1f} us from {plain:,.1f} "
                f"({bench.compare(plain, idle, noise)}), weights ahead {idle - ahead:,.1f} more "
                f"({bench.compare(idle, ahead, noise)}), {ahead:,.1f} are left"
            )
    nodes = [f"{n} {us[n, AHEAD]:.2f} us" for n in PRODUCTS if (n, AHEAD) in us]
    if nodes:
        words.append(f"a kernel in its chain, {AHEAD}: {', '.join(nodes)}")
    for name in PRODUCTS:
        known = {r["variant"]: r["us"] for r in rows
                 if (r["chain"], r["launch"]) == (name, AHEAD)
                 and isinstance(r["us"], int | float)}  # fmt: skip
        if len(known) > 1 and "auto" in known:
            best = min(known, key=known.get)
            change = bench.compare(known["auto"], known[best], noise)
            words.append(f"{name} is best with {best} ({known[best]:.2f} us, {change})")
    if not words:
        words = [f"{chain}, {launch}: {t:.2f} us" for (chain, launch), t in us.items()]
    if not words:
        words = ["no variant that was asked for fits"]
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}. The old card had no programmatic launch."


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card that has programmatic launch, and in every run."""
    us = _times(plate.rows)
    found = []
    for first, second, text in (
        (AHEAD, PLAIN, "weights ahead beat plain launches"),
        (AHEAD, IDLE, "weights ahead beat an early start without them"),
    ):
        chains = [n for n in CHAINS if (n, first) in us and (n, second) in us]
        if chains:
            holds = all(us[n, first] < us[n, second] for n in chains)
            found.append((f"{text}: {', '.join(chains)}", holds))
    return found


def draw(plate, fig) -> None:
    """Bars: microseconds per kernel of each chain and launch, a tick at its bytes."""
    ax = fig.subplots()
    rows = [r for r in plate.rows if r["us"] is not None]
    shades = dict(zip(LAUNCHES, ("#999999", "#E69F00", "#0072B2"), strict=True))
    lines = list(dict.fromkeys((r["chain"], r["variant"]) for r in rows))
    longest = max(r["kernel_us"] for r in rows)
    present = [launch for launch in LAUNCHES if any(r["launch"] == launch for r in rows)]
    height = 0.84 / len(present)
    for r in rows:
        y = lines.index((r["chain"], r["variant"]))
        y += (present.index(r["launch"]) - (len(present) - 1) / 2) * height
        ax.barh(y, r["kernel_us"], height * 0.92, color=shades[r["launch"]])
        if len(rows) <= ALL_LABELLED or r["launch"] == present[-1]:
            text = f"{r['kernel_us']:.2f} us"
            if r["kernels"] > 1:
                text += f"; {r['us']:,.1f} us for {r['kernels']} kernels"
            ax.annotate(text, (r["kernel_us"], y), (6, 0), textcoords="offset points",
                        va="center", fontsize=11 if len(rows) <= ALL_LABELLED else 9)  # fmt: skip
        floor = r["floor_us"] / r["kernels"]
        ax.plot([floor, floor], [y - height / 2, y + height / 2], color="#222222", linewidth=2)
    names = [c if v == "auto" else f"{c}, {v}" for c, v in lines]
    ax.set_yticks(range(len(lines)), names)
    ax.set_ylim(len(lines) - 0.4, -0.6)
    ax.set_xlim(0, 1.25 * longest)
    ax.set_xlabel("time per kernel of a chain [us]; tick: its bytes at the read rate")
    handles = [ax.barh(0, 0, color=shades[launch]) for launch in present]
    ax.legend(handles, present, loc="lower right", fontsize=12)
