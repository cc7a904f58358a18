"""A whole greedy step and a prompt on CUDA, at a real shape with random packed weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import graph, load, native, plan, prefill, state, step, synth, toggles
from ...errors import DecodeError
from .. import bench, card
from ..plate import Measured

TITLE = "One greedy step: graph and eager, by kernels and by position"
QUESTION = "What does one token cost, how does it grow with the context, and what buys what?"
PREDICTION = (
    "The floor is the packed bytes at the read rate. Five kernels a layer with programmatic launch "
    "should stay under 1.25 ms on the 3B shape (llama.cpp Q4_K_M at the same shape: 2.5 ms); a "
    "plain graph costs about 1 us more per kernel, eager steps are bound by Python."
)
PARAMS = {
    "shape": ("qwen2.5-3b", "a named shape, see decodev2/plan.py"),
    "max_seq": (2048, "capacity of the KV cache"),
    "positions": (["0", "100", "2000"], "positions of the step, separated by commas"),
    "prompts": (["48", "512"], "prompt lengths, separated by commas"),
    "chunk": (32, "columns per prefill chunk"),
    "runs": (15, "timed replays"),
    "seed": (0, "seed of the weights"),
}
DEPENDS = ("*.cu", "*.cuh", "*.h")
DEVICE = "cuda"
WAYS = {
    "graph": {"linear": "gemv"},
    "graph, plain launches": {"linear": "gemv", "pdl": False},
    "graph, norm alone": {"linear": "gemv", "norm": "alone"},
    "graph, two-launch attention": {"linear": "gemv", "attention": "two_launch"},
    "graph, mma at one column": {"linear": "mma"},
}
COLUMNS = [
    {"name": "case", "unit": ""},
    {"name": "kernels", "unit": ""},
    {"name": "ms", "unit": "ms"},
    {"name": "ms_best", "unit": "ms"},
    {"name": "ms_worst", "unit": "ms"},
    {"name": "runs", "unit": "runs"},
    {"name": "tokens", "unit": "tokens"},
    {"name": "tok_s", "unit": "tok/s"},
    {"name": "floor_ms", "unit": "ms"},
    {"name": "share", "unit": "%"},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """Rows of the step at each position for each way, an eager row, and the prompts."""
    if not torch.cuda.is_available():
        raise DecodeError("decode_step needs a CUDA device")
    spec = plan.with_max_seq(plan.named_spec(params["shape"]), params["max_seq"])
    positions = [_whole(text, spec.max_seq - 1) for text in params["positions"]]
    prompts = [_whole(text, spec.max_seq) for text in params["prompts"]]
    native.build_cuda()
    read_rate = card.measure_read_rate(1, "cuda")
    total = len(WAYS) + 1 + len(prompts)
    progress(0, total, "weights")
    weights = load.load_weights(synth.random_packed(spec, params["seed"]), "cuda")
    live = state.allocate_state(spec, "cuda", params["chunk"])
    rows = []
    for index, (name, switches) in enumerate(WAYS.items()):
        progress(index, total, name)
        with toggles.using(**switches):
            replay = graph.capture(live, weights).replay
            rows += _step_rows(name, replay, live, positions, params["runs"])
    with toggles.using(linear="gemv"):
        progress(len(WAYS), total, "eager")
        eager = lambda: step.greedy_decode(live, weights)  # noqa: E731
        rows += _step_rows("eager", eager, live, positions[:1], params["runs"])
        for index, n in enumerate(prompts):
            progress(len(WAYS) + 1 + index, total, f"prompt {n}")
            ids = [(7 * i + 3) % spec.vocab for i in range(n)]
            times = bench.event_times(
                lambda ids=ids: prefill.forward_prefill(live, weights, ids), min(7, params["runs"])
            )
            rows.append(
                {"case": f"prompt of {n}", "kernels": f"chunks of {params['chunk']}", "tokens": n}
                | _times(times)
            )
    progress(total, total, "done")
    read_rate = card.faster_read_rate(read_rate, card.measure_read_rate(1, "cuda"))
    floor = weights.bytes_per_token / read_rate["gb_s"] * 1e-6
    for row in rows:
        passes = 1 if row["tokens"] == 1 else -(-row["tokens"] // params["chunk"])
        row["floor_ms"] = floor * passes
        row["share"] = 100 * row["floor_ms"] / row["ms"]
        row["tok_s"] = row["tokens"] / row["ms"] * 1e3
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, floor),
        card=card.card("cuda", read_rate=read_rate),
        notes=[f"{weights.bytes_per_token / 1e6:.1f} MB of packed weights per token"],
        figure={"kind": "own"},
    )


def draw(plate, fig) -> None:
    """Bars: the step's time per way and position against the floor. The prompts stand below."""
    steps = [row for row in plate.rows if row["tokens"] == 1]
    ax = fig.subplots()
    cases = list(dict.fromkeys(row["case"] for row in steps))
    ways = list(dict.fromkeys(row["kernels"] for row in steps))
    shades = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]
    longest = max(row["ms"] for row in steps)
    for row in steps:
        case = cases.index(row["case"])
        y = ways.index(row["kernels"]) + (case - 1) * 0.27
        ax.barh(y, row["ms"], 0.25, color=shades[case % 4])
        ax.annotate(
            f"{row['ms']:.3f} ms, {row['tok_s']:.0f} tok/s", (row["ms"], y), (5, 0),
            textcoords="offset points", va="center", fontsize=10.5,
        )  # fmt: skip
    floor = steps[0]["floor_ms"]
    ax.axvline(floor, color="#222222", linewidth=1.5)
    ax.annotate(
        "packed bytes at the read rate", (floor, -0.75), (5, 0),
        textcoords="offset points", va="center", fontsize=11.5,
    )  # fmt: skip
    ax.set_yticks(range(len(ways)), ways)
    ax.set_ylim(len(ways) - 0.4, -1)
    ax.set_xlim(0, 1.3 * longest)
    prompts = ", ".join(
        f"{row['case']} in {row['ms']:.1f} ms" for row in plate.rows if row["tokens"] > 1
    )
    ax.set_xlabel(f"one greedy step [ms]{'; ' * bool(prompts)}{prompts}")
    handles = [ax.barh(0, 0, color=shades[i % 4]) for i in range(len(cases))]
    ax.legend(handles, cases, loc="lower right", fontsize=11.5)


def _whole(text: str, limit: int) -> int:
    if not text.isdigit() or int(text) > limit:
        raise DecodeError(f"{text!r} is not a whole number from 0 to {limit}")
    return int(text)


def _step_rows(name: str, run, live, positions: list[int], runs: int) -> list[dict]:
    rows = []
    for position in positions:
        state.reset(live)

        def at_position(position=position) -> None:
            live.position.fill_(position)
            live.token.fill_(1)

        times = []
        for index in range(runs + 2):
            at_position()
            seconds = bench.event_times(run, 1, 0)
            times += seconds if index >= 2 else []
        rows.append({"case": f"step at {position}", "kernels": name, "tokens": 1} | _times(times))
    return rows


def _times(seconds: list[float]) -> dict:
    s = bench.stats([t * 1e3 for t in seconds])
    return {"ms": s.median, "ms_best": s.best, "ms_worst": s.worst, "runs": s.runs}


def _verdict(rows: list[dict], floor: float) -> str:
    graph_rows = [r for r in rows if r["kernels"] == "graph"]
    first, last = graph_rows[0], graph_rows[-1]
    others = [r for r in rows if r["case"] == first["case"] and r is not first]
    words = ", ".join(f"{r['kernels']} {r['ms']:.2f} ms" for r in others)
    return (
        f"{first['case']}: {first['ms']:.3f} ms, {first['tok_s']:.0f} tok/s, "
        f"{first['share']:.0f} % of the {floor:.3f} ms floor; {last['case']}: "
        f"{last['ms']:.3f} ms. Beside it: {words}."
    )
