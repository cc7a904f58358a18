"""The lab log's ladder as whole steps: each rung is one greedy step of the 3B shape in a graph."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ... import (
    gates,
    graph,
    load,
    native,
    oracle,
    persistent,
    plan,
    runner,
    state,
    step,
    synth,
    toggles,
)
from ...errors import DecodeError
from .. import bench, card, cases
from ..plate import Measured, Missing

TITLE = "The ladder: one greedy step of the 3B shape, rung by rung"
QUESTION = "What does each idea of the lab log buy on this card, in tokens per second?"
PREDICTION = (
    "The order of the old card holds where an idea removes work (levels out of constant memory, "
    "fused launches, attention that fills the card). Where it only suited that card it may not: "
    "with 132 multiprocessors four rows per CTA need wider matrices to fill it. One kernel for a "
    "token has no starts of kernels left: 0.75 ms where the graph takes 1.15."
)
PARAMS = {
    "rungs": ([], "rungs, separated by commas; all if left out"),
    "shape": ("qwen2.5-3b", "a named shape, see decodev2/plan.py"),
    "max_seq": (2048, "capacity of the KV cache"),
    "position": (100, "position of the step"),
    "runs": (9, "timed replays"),
    "seed": (0, "seed of the weights"),
}
DEPENDS = ("*.cu", "*.cuh", "*.h")
DEVICE = "cuda"


@dataclass(frozen=True)
class Rung:
    """One step: the layout of its weights, the switches, the log's number and its old tok/s (host,
    RTX 3080, Qwen2.5-3B) where the log has them. `in_one`: by the persistent step."""

    idea: str
    log: str
    switches: dict
    layout: str = "rows"
    concatenated: bool = False
    old_tok_s: float | None = None
    in_one: bool = False


def _rows(**switches) -> dict:
    plain = {"linear": "rows", "norm": "alone", "attention": "sdpa", "pdl": False, "nr": 1}
    return plain | switches


def _panels(**switches) -> dict:
    return {"linear": "gemv", "norm": "alone", "attention": "one_launch", "pdl": False} | switches


RUNGS = {
    "mma": Rung("tensor cores at one column", "1",
                _panels(linear="mma", attention="sdpa"), "panels", old_tok_s=30.6),
    "lut_constant": Rung("levels in constant memory, one warp a row", "2",
                         _rows(table="lut_constant", parts="separate"), old_tok_s=34),
    "split_k": Rung("levels in shared memory, four warps split K", "3",
                    _rows(parts="separate"), old_tok_s=113),
    "x_staged": Rung("all of x staged in shared memory", "3b",
                     _rows(parts="separate", stage_x=True)),
    "concatenated": Rung("q, k, v and gate, up as second, joined copies", "4",
                         _rows(), concatenated=True, old_tok_s=100),
    "fused": Rung("one grid for q, k, v with bias; gate, up and silu in one", "5b",
                  _rows(), old_tok_s=128),
    "one_warp": Rung("attention by one warp per head", "6",
                     _rows(attention="one_warp"), old_tok_s=108),
    "flash": Rung("flash-decode in two launches, RoPE and KV write inside", "7, 8",
                  _rows(attention="two_launch"), old_tok_s=182),
    "one_launch": Rung("flash-decode merged in one launch", "9",
                       _rows(attention="one_launch")),
    "rms_inside": Rung("every CTA norms x for itself", "10",
                       _rows(attention="one_launch", norm="inside"), old_tok_s=111),
    "two_rows": Rung("two rows share x everywhere", "11", _rows(attention="one_launch", nr=2)),
    "rows_by_size": Rung("four rows share x from 4096 rows on", "12",
                         _rows(attention="one_launch", nr="auto"), old_tok_s=195),
    "lut_pair": Rung("a table of pairs, private to each bank", "",
                     _rows(attention="one_launch", nr="auto", table="lut_pair")),
    "panels": Rung("panels, bulk copies through a ring, tensor-core sums", "",
                   _panels(), "panels"),
    "panels_norm": Rung("the norm folded into the product, one factor per sum", "",
                        _panels(norm="inside"), "panels"),
    "panels_pdl": Rung("programmatic launch: weights load before x is there", "",
                       _panels(norm="inside", pdl=True), "panels"),
    "one_kernel": Rung("one kernel for a token: weights wait for nothing", "",
                       _panels(norm="inside", pdl=True), "panels", in_one=True),
}  # fmt: skip
ONE = "one_kernel"
TOGGLES = {"rung": ("rungs", tuple(RUNGS))}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CHECKED = 16  # greedy ids of a smaller model that every rung must share with the oracle
COLUMNS = [
    {"name": "rung", "unit": ""},
    {"name": "log", "unit": ""},
    {"name": "idea", "unit": ""},
    {"name": "tokens", "unit": "tokens"},
    *cases.MS_COLUMNS,
    {"name": "tok_s", "unit": "tok/s"},
    {"name": "floor_ms", "unit": "ms"},
    {"name": "share", "unit": "%"},
    {"name": "ids_wrong", "unit": "ids"},
    {"name": "extra_gb", "unit": "GB"},
    {"name": "old_card_tok_s", "unit": "1"},
]


@dataclass
class _Models:
    """The weights of one layout at a time: the shape for timing, a small model for checking."""

    spec: plan.ArchSpec
    seed: int
    big: synth.SynthModel = field(init=False)
    small: synth.SynthModel = field(init=False)
    key: tuple | None = None
    weights: dict = field(default_factory=dict)

    def __post_init__(self):
        self.big = synth.random_packed(self.spec, self.seed)
        self.small = synth.build(plan.MEDIUM_LLAMA, self.seed)

    def on_card(self, rung: Rung) -> dict:
        if self.key != (rung.layout, rung.concatenated):
            self.weights.clear()
            gc.collect()
            self.weights = {
                name: load.load_weights(model, "cuda", rung.layout, rung.concatenated)
                for name, model in (("big", self.big), ("small", self.small))
            }
            self.key = (rung.layout, rung.concatenated)
        return self.weights


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per rung; its ids on a small model are the oracle's before and after it is timed."""
    if not torch.cuda.is_available():
        raise DecodeError("step_ladder needs a CUDA device")
    for name in params["rungs"]:
        if name not in RUNGS:
            raise DecodeError(f"rung {name!r} is unknown; there are {', '.join(RUNGS)}")
    spec = plan.with_max_seq(plan.named_spec(params["shape"]), params["max_seq"])
    if not 0 <= params["position"] < spec.max_seq:
        raise DecodeError(f"position is {params['position']}, needs 0 to {spec.max_seq - 1}")
    native.build_cuda()
    names, left_out = _that_run(params["rungs"], spec)
    read_rate = card.measure_read_rate(1, "cuda")
    progress(0, len(names), "weights")
    models = _Models(spec, params["seed"])
    live = state.allocate_state(spec, "cuda", 1)
    small = state.allocate_state(plan.MEDIUM_LLAMA, "cuda", 1)
    rows = []
    for index, name in enumerate(names):
        progress(index, len(names), name)
        rung = RUNGS[name]
        weights = models.on_card(rung)
        with toggles.using(**rung.switches):
            wrong = _ids_wrong(rung, models.small, weights["small"], small)
            times = _times(rung, weights["big"], live, params)
            wrong += _ids_wrong(rung, models.small, weights["small"], small)
        rows.append({"rung": name} | _row(rung, weights["big"], times, wrong, read_rate["gb_s"]))
    with toggles.using(**rung.switches):  # the last rung again: the noise band
        again = _times(rung, weights["big"], live, params)
    noise = abs(bench.stats(again).median * 1e3 / rows[-1]["ms"] - 1)
    progress(len(names), len(names), "done")
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=card.card("cuda", read_rate=read_rate),
        notes=[
            f"ids_wrong: greedy ids of {plan.MEDIUM_LLAMA.name} that differ from the oracle's, "
            f"{CHECKED} before and {CHECKED} after the timing, each up to the first near tie "
            f"(margin under {gates.CAPS['cuda']})",
            "old_card_tok_s: the lab log's host tok/s on an RTX 3080 with Qwen2.5-3B, max_seq 512",
            f"noise band {100 * noise:.2f} %: {names[-1]} captured and timed twice",
            *left_out,
        ],
        figure={"kind": "own"},
    )


def _that_run(asked: list[str], spec: plan.ArchSpec) -> tuple[list[str], list[str]]:
    """(rungs, notes) that the card and the shape can run. Raises DecodeError where one that was
    asked for cannot."""
    names = asked or list(RUNGS)
    if ONE not in names:
        return names, []
    reason = persistent.why_not(spec) or persistent.why_not(plan.MEDIUM_LLAMA)
    if reason and asked:
        raise DecodeError(f"{ONE}: no persistent step, {reason}")
    left_out = [f"{ONE} is left out: no persistent step, {reason}"] if reason else []
    return [name for name in names if name != ONE or not reason], left_out


def _step(rung: Rung, live: state.DecodeState, weights: load.ModelWeights):
    """(one greedy step of `live`, what raises if one of them failed)."""
    if not rung.in_one:
        return functools.partial(step.greedy_decode, live, weights), lambda: None
    one = persistent.prepare(live, weights)
    return tuple(functools.partial(f, one) for f in (persistent.greedy_decode, persistent.check))


def _times(rung: Rung, weights, live: state.DecodeState, params: dict) -> list[float]:
    take, check = _step(rung, live, weights)
    replay = graph.capture_step(live, take).replay
    times = cases.step_times(live, replay, params["position"], params["runs"])
    check()
    return times


def claims(plate) -> list[tuple[str, bool]]:
    """What a kernel change must not change."""
    ms = {row["rung"]: row["ms"] for row in plate.rows}
    graphs = {rung: t for rung, t in ms.items() if rung != ONE}
    in_one = [("one kernel for a token beats every graph", ms[ONE] < min(graphs.values()))
              ] if ONE in ms and graphs else []  # fmt: skip

    def faster(a: str, b: str) -> bool:
        return a in ms and b in ms and ms[a] < ms[b]

    return [
        ("every rung gives the oracle's ids", all(row["ids_wrong"] == 0 for row in plate.rows)),
        ("levels in shared memory beat constant memory", faster("split_k", "lut_constant")),
        ("fused launches beat separate ones", faster("fused", "split_k")),
        ("flash-decode beats one warp per head", faster("flash", "one_warp")),
        ("panels beat every row-major rung", all(
            faster("panels", name) for name in ms if RUNGS[name].layout == "rows")),
        (f"programmatic launch is the fastest {'graph' if in_one else 'rung'}",
         bool(graphs) and min(graphs, key=graphs.get) == "panels_pdl"),
        *in_one,
    ]  # fmt: skip


def draw(plate, fig) -> None:
    """Bars: tokens per second per rung, the old card's as a mark, floor at the right."""
    ax = fig.subplots()
    top = max(row["tok_s"] for row in plate.rows)
    for y, row in enumerate(plate.rows):
        rung = RUNGS[row["rung"]]
        colour = "#0072B2" if rung.layout == "rows" else "#CC79A7" if rung.in_one else "#009E73"
        ax.barh(y, row["tok_s"], 0.7, color=colour)
        text = f"{row['tok_s']:,.0f}"
        if row["old_card_tok_s"] is not None:
            ax.plot(row["old_card_tok_s"], y, "D", color="#E69F00", markersize=8, zorder=3)
            text += f"   (old card {row['old_card_tok_s']:g})"
        ax.annotate(text, (row["tok_s"], y), (8, 0), textcoords="offset points", va="center",
                    fontsize=11)  # fmt: skip
    names = [f"{row['idea']}  [{row['log'] or 'new'}]" for row in plate.rows]
    ax.set_yticks(range(len(names)), names, fontsize=10.5)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, 1.3 * top)
    ax.set_xlabel(f"greedy tokens per second at position {plate.params['position']}")
    in_one = any(RUNGS[row["rung"]].in_one for row in plate.rows)
    ax.annotate(
        f"blue: row-major weights\ngreen: panels{', pink: in one kernel' * in_one}\n"
        "diamonds: RTX 3080, host\n[n]: number in the log",
        (1, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize=11, color="#444444",
    )  # fmt: skip


def _ids_wrong(rung: Rung, model, weights, live: state.DecodeState) -> int:
    """Greedy ids that are not the oracle's choice. Where the first such id is a near tie (a margin
    that the rounding of half inputs and bf16 keys explains), the comparison ends there."""
    take, check = _step(rung, live, weights)
    found = runner.generate(live, weights, PROMPT[:4], CHECKED, chunk=1, step=take).ids
    check()
    logits = oracle.step_logits(model, PROMPT[:4] + found[:-1])[3:]
    parting = oracle.first_parting(logits, found)
    if parting is None or parting.margin < gates.CAPS["cuda"]:
        return 0
    return sum(token_id != row.argmax() for token_id, row in zip(found, logits, strict=True))


def _row(rung: Rung, weights, times: list[float], wrong: int, read_rate: float) -> dict:
    timed = cases.ms_row(times)
    floor = weights.bytes_per_token / read_rate * 1e-6
    joined = [layer.qkv[0].nbytes + layer.gate_up[0].nbytes for layer in weights.layers
              if rung.concatenated]  # fmt: skip
    return timed | {
        "log": rung.log,
        "idea": rung.idea,
        "tokens": 1,
        "tok_s": 1e3 / timed["ms"],
        "floor_ms": floor,
        "share": 100 * floor / timed["ms"],
        "ids_wrong": wrong,
        "extra_gb": sum(joined) / 1e9,
        "old_card_tok_s": rung.old_tok_s or Missing("the lab log has no whole-step figure"),
    }


def _verdict(rows: list[dict], noise: float) -> str:
    ms = {row["rung"]: row["ms"] for row in rows}
    wrong = sum(row["ids_wrong"] for row in rows)
    best = min(rows, key=lambda row: row["ms"])
    first = (
        f"From {rows[0]['tok_s']:,.0f} tok/s ({rows[0]['rung']}) to {best['tok_s']:,.0f} "
        f"({best['rung']}), {best['share']:.0f} % of the read rate; {wrong} ids of {len(rows)} "
        "rungs differ from the oracle's."
    )
    parts = []
    for newer, older, what in (
        ("split_k", "lut_constant", "shared against constant levels"),
        ("concatenated", "split_k", "joined copies against separate launches"),
        ("fused", "split_k", "fused against separate launches"),
        ("one_launch", "flash", "one against two attention launches"),
        ("rms_inside", "one_launch", "the norm in every CTA against alone"),
        ("two_rows", "one_launch", "two rows everywhere against one"),
        ("rows_by_size", "one_launch", "four rows for wide matrices against one"),
        ("lut_pair", "rows_by_size", "pair table against 16 levels"),
        ("panels", "rows_by_size", "panels and ring against rows"),
        ("panels_pdl", "panels_norm", "programmatic launch against plain"),
        (ONE, "panels_pdl", "one kernel for a token against a graph"),
    ):
        if newer in ms and older in ms:
            word = bench.compare(ms[older], ms[newer], noise)
            parts.append(f"{what}: {word} ({ms[older] / ms[newer]:.2f}x)")
    return f"{first} {'; '.join(parts)}."
