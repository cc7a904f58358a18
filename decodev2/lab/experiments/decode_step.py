"""A whole greedy step and a prompt on CUDA, at a real shape with random packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ... import graph, load, native, persistent, plan, prefill, state, step, synth, toggles
from ...errors import DecodeError
from .. import bench, card, cases
from ..plate import Measured

TITLE = "One greedy step: graph and eager, by kernels and by position"
QUESTION = "What does one token cost, how does it grow with the context, and what buys what?"
PREDICTION = (
    "The floor is the packed bytes at the read rate: 1,639 MB at 4,600 GB/s, 0.36 ms. 36 layers of "
    "five kernels and three more are 183 kernels; with programmatic launch they should stay under "
    "1.25 ms on the 3B shape (llama.cpp Q4_K_M at the same shape: 2.5 ms). A plain graph costs "
    "about 1 us more per kernel, 0.18 ms in all; eager steps are bound by Python. 2,000 positions "
    "add 75 MB of keys and values, 0.02 ms at the read rate, and some latency per layer."
)
CASES = ("step at 0", "step at 100", "step at 2000", "prompt of 48", "prompt of 512")
WAYS = {
    "graph": {"linear": "gemv"},
    "graph, plain launches": {"linear": "gemv", "pdl": False},
    "graph, norm alone": {"linear": "gemv", "norm": "alone"},
    "graph, nothing ahead": {"linear": "gemv", "ahead": "nothing"},
    "graph, act as float": {"linear": "gemv", "act": "float"},
    "graph, attended as float": {"linear": "gemv", "attended": "float"},
    "graph, two-launch attention": {"linear": "gemv", "attention": "two_launch"},
    "graph, mma at one column": {"linear": "mma"},
    "persistent": {"linear": "gemv"},
    "eager": {"linear": "gemv"},
}
PARAMS = {
    "shape": ("qwen2.5-3b", "a named shape, see decodev2/plan.py"),
    "max_seq": (2048, "capacity of the KV cache"),
    "cases": ([], "like \"step at 100\" or \"prompt of 48\", separated by commas; left out: "
                  f"{', '.join(CASES)}"),
    "kernels": ([], "ways to take a step, separated by commas, their \"graph, \" left out; all if "
                    "left out"),
    "chunk": (plan.CUDA_MAX_N, "columns per prefill chunk"),
    "runs": (15, "timed replays"),
    "seed": (0, "seed of the weights"),
}  # fmt: skip
TOGGLES = {
    "case": ("cases", tuple(case for case in CASES if case.startswith("step"))),
    "kernels": ("kernels", tuple(WAYS)),
}
DEPENDS = ("*.cu", "*.cuh", "*.h")
DEVICE = "cuda"
COLUMNS = [
    {"name": "case", "unit": ""},
    {"name": "kernels", "unit": ""},
    *cases.MS_COLUMNS,
    {"name": "tokens", "unit": "tokens"},
    {"name": "tok_s", "unit": "tok/s"},
    {"name": "floor_ms", "unit": "ms"},
    {"name": "share", "unit": "%"},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """Rows of the step at each position for each way, and the prompts."""
    spec = plan.with_max_seq(plan.named_spec(params["shape"]), params["max_seq"])
    wanted = [parse_case(text, spec.max_seq) for text in params["cases"] or CASES]
    positions = [n for what, n in wanted if what == "step at"]
    prompts = [n for what, n in wanted if what == "prompt of"]
    ways = [_way(text) for text in params["kernels"] or WAYS] if positions else []
    if not torch.cuda.is_available():
        raise DecodeError("decode_step needs a CUDA device")
    native.build_cuda()
    read_rate = card.measure_read_rate(1, "cuda")
    total = len(ways) + len(prompts)
    progress(0, total, "weights")
    weights = load.load_weights(synth.random_packed(spec, params["seed"]), "cuda")
    live = state.allocate_state(spec, "cuda", params["chunk"])
    rows, noise = [], None
    for index, way in enumerate(ways):
        progress(index, total, way)
        with toggles.using(**WAYS[way]):
            run = taken(way, live, weights)
            if run is None:
                continue
            rows += _step_rows(way, run, live, positions, params["runs"])
            if noise is None:
                again = _step_rows(way, run, live, positions[:1], params["runs"])[0]["ms"]
                noise = abs(again / rows[0]["ms"] - 1)
    with toggles.using(linear="gemv"):
        full = graph.full_chunk(live, weights)
        for index, n in enumerate(prompts):
            progress(len(ways) + index, total, f"prompt of {n}")
            ids = [(7 * i + 3) % spec.vocab for i in range(n)]
            take = functools.partial(prefill.forward_prefill, live, weights, ids, full=full)
            times = bench.event_times(take, min(7, params["runs"]))
            rows.append(
                {"case": f"prompt of {n}", "kernels": f"chunks of {params['chunk']}", "tokens": n}
                | cases.ms_row(times)
            )
    progress(total, total, "done")
    read_rate = card.faster_read_rate(read_rate, card.measure_read_rate(1, "cuda"))
    floor = weights.bytes_per_token / read_rate["gb_s"] * 1e-6
    for row in rows:
        passes = 1 if row["tokens"] == 1 else -(-row["tokens"] // params["chunk"])
        row["floor_ms"] = floor * passes
        row["share"] = 100 * row["floor_ms"] / row["ms"]
        row["tok_s"] = row["tokens"] / row["ms"] * 1e3
    notes = [f"{weights.bytes_per_token / 1e6:.1f} MB of packed weights per token"]
    if noise is not None:
        notes.append(cases.noise_note(noise, f"{ways[0]} at {positions[0]}"))
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise or 0.0),
        card=card.card("cuda", read_rate=read_rate),
        notes=notes,
        figure={"kind": "own"} if positions else None,
    )


def claims(plate) -> list[tuple[str, bool]]:
    """What a kernel change must not change; pairs that the plate lacks are left out."""
    ms = {(row["case"], row["kernels"]): row["ms"] for row in plate.rows}
    steps = list(dict.fromkeys(case for case, _ in ms if case.startswith("step")))
    found = []
    for better, worse, text in (
        ("graph", "graph, plain launches", "programmatic launch beats plain launches"),
        ("graph", "graph, mma at one column", "the GEMV beats tensor-core tiles at one column"),
        ("graph", "graph, two-launch attention", "one launch of attention beats two"),
        ("graph", "eager", "the graph beats eager steps"),
    ):
        both = [case for case in steps if (case, better) in ms and (case, worse) in ms]
        if both:
            held = all(ms[case, better] < ms[case, worse] for case in both)
            found.append((f"{text}, at every position measured with both", held))
    if {("step at 0", "graph"), ("step at 2000", "graph")} <= set(ms):
        grown = ms["step at 2000", "graph"] / ms["step at 0", "graph"]
        found.append(("2,000 positions of context add less than a quarter", grown < 1.25))
    return found


def host_timed(row: dict, column: str) -> bool:
    """Eager steps are launched one kernel at a time by Python."""
    return row["kernels"] == "eager"


def draw(plate, fig) -> None:
    """Bars: the step's time per way and position against the floor. The prompts stand below."""
    steps = [row for row in plate.rows if row["tokens"] == 1]
    ax = fig.subplots()
    places = list(dict.fromkeys(row["case"] for row in steps))
    ways = list(dict.fromkeys(row["kernels"] for row in steps))
    shades = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]
    longest = max(row["ms"] for row in steps)
    for row in steps:
        case = places.index(row["case"])
        y = ways.index(row["kernels"]) + (case - 1) * 0.27
        ax.barh(y, row["ms"], 0.25, color=shades[case % 4])
        ax.annotate(
            f"{row['ms']:.3f} ms, {row['tok_s']:.0f} tok/s", (row["ms"], y), (5, 0),
            textcoords="offset points", va="center", fontsize=9.5,
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
    handles = [ax.barh(0, 0, color=shades[i % 4]) for i in range(len(places))]
    ax.legend(handles, places, loc="upper right", fontsize=11.5)


def taken(way: str, live: state.DecodeState, weights: load.ModelWeights):
    """What takes one step, or None where the card or the shape cannot take it this way."""
    if way == "eager":
        return functools.partial(step.greedy_decode, live, weights)
    if way != "persistent":
        return graph.capture(live, weights).replay
    if persistent.why_not(live.spec):
        return None
    one = persistent.prepare(live, weights)
    return graph.capture_step(live, functools.partial(persistent.greedy_decode, one)).replay


def parse_case(text: str, max_seq: int) -> tuple[str, int]:
    """("step at" or "prompt of", number) of a case, which must fit the cache."""
    what, _, number = text.rpartition(" ")
    lowest, highest = {"step at": (0, max_seq - 1), "prompt of": (1, max_seq)}.get(what, (0, -1))
    if not (number.isdigit() and lowest <= int(number) <= highest):
        raise DecodeError(
            f'case {text!r} is unknown; needs "step at N" or "prompt of N" within {max_seq}'
        )
    return what, int(number)


def _way(text: str) -> str:
    for way in WAYS:
        if text in (way, way.removeprefix("graph, ")):
            return way
    raise DecodeError(f"way {text!r} is unknown; there are {'; '.join(WAYS)}")


def _step_rows(name: str, run, live, positions: list[int], runs: int) -> list[dict]:
    rows = []
    for position in positions:
        state.reset(live)
        times = cases.step_times(live, run, position, runs)
        rows.append(
            {"case": f"step at {position}", "kernels": name, "tokens": 1} | cases.ms_row(times)
        )
    return rows


def _verdict(rows: list[dict], noise: float) -> str:
    steps = [row for row in rows if row["tokens"] == 1]
    first = next((row for row in steps if row["kernels"] == "graph"), (steps or rows)[0])
    text = (
        f"{first['case']}: {first['ms']:.3f} ms, {first['tok_s']:.0f} tok/s, "
        f"{first['share']:.0f} % of the {first['floor_ms']:.3f} ms floor"
    )
    if first["kernels"] == "graph":
        text = f"{cases.held(first['ms'] < 1.25)} (1.25 ms): {text}"
        grown = [row for row in steps if row["kernels"] == "graph"][-1]
        if grown is not first:
            text += f"; {grown['case']}: {grown['ms']:.3f} ms"
    others = [r for r in steps if r["case"] == first["case"] and r is not first]
    words = [
        f"{r['kernels'].removeprefix('graph, ')} {r['ms']:.2f} ms "
        f"({bench.compare(first['ms'], r['ms'], noise)})"
        for r in others
    ]
    text += f". Beside it: {', '.join(words)}." if words else "."
    mma = next((r for r in others if r["kernels"] == "graph, mma at one column"), None)
    if mma and first["kernels"] == "graph":
        slower = mma["ms"] > first["ms"]
        text += " Tensor cores at one column are "
        text += "slower, as on the old card." if slower else "not slower, unlike the old card."
    return text
