"""Models of 3 to 32 billion weights on the card: what they allocate, and whether they repeat."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from ... import graph, load, native, plan, runner, state, synth, toggles
from ...errors import DecodeError
from .. import card, cases
from ..plate import Measured

TITLE = "Real shapes on the card: memory, loading, steps that repeat"
QUESTION = "Does a model take more memory than its packed weights, its cache and its buffers?"
PREDICTION = (
    "Packed bytes are 4.25 / 8 of the weights. Matrices are brought into their layout one at a "
    "time, so nothing stays behind: allocated memory within 5 % of weights and state."
)
SHAPES = ("qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "internlm2.5-20b", "qwen2.5-32b")
PARAMS = {
    "shapes": (list(SHAPES), "named shapes, separated by commas"),
    "max_seq": (2048, "capacity of the KV cache"),
    "tokens": (48, "greedy ids of each of the two runs that must agree"),
    "runs": (9, "timed replays"),
    "seed": (0, "seed of the weights"),
}
TOGGLES = {"shape": ("shapes", SHAPES)}
DEPENDS = ("*.cu", "*.cuh", "*.h")
DEVICE = "cuda"
EXCESS_CAP = 5.0  # % of weights and state
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
COLUMNS = [
    {"name": "shape", "unit": ""},
    {"name": "packed_gb", "unit": "GB"},
    {"name": "state_gb", "unit": "GB"},
    {"name": "allocated_gb", "unit": "GB"},
    {"name": "excess", "unit": "%"},
    {"name": "peak_gb", "unit": "GB"},
    {"name": "load_s", "unit": "s"},
    {"name": "ids_that_differ", "unit": "ids"},
    {"name": "distinct_ids", "unit": "ids"},
    *cases.MS_COLUMNS,
    {"name": "floor_ms", "unit": "ms"},
    {"name": "share", "unit": "%"},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape."""
    if not torch.cuda.is_available():
        raise DecodeError("loads needs a CUDA device")
    names = params["shapes"] or SHAPES
    specs = [plan.with_max_seq(plan.named_spec(name), params["max_seq"]) for name in names]
    native.build_cuda()
    read_rate = card.measure_read_rate(1, "cuda")
    rows = []
    with toggles.using(linear="gemv"):
        for index, spec in enumerate(specs):
            progress(index, len(specs), spec.name)
            rows.append({"shape": spec.name} | _row(spec, params, read_rate["gb_s"]))
            gc.collect()
            torch.cuda.empty_cache()
    progress(len(specs), len(specs), "done")
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows),
        card=card.card("cuda", read_rate=read_rate),
        figure={"kind": "own"},
    )


def claims(plate) -> list[tuple[str, bool]]:
    """What a kernel change must not change."""
    return [
        (f"allocated memory within {EXCESS_CAP:.0f} % of weights and state",
         all(row["excess"] <= EXCESS_CAP for row in plate.rows)),
        ("a second run after a reset gives the same ids",
         all(row["ids_that_differ"] == 0 for row in plate.rows)),
    ]  # fmt: skip


def host_timed(row: dict, column: str) -> bool:
    """Loading is the host's memory and the bus."""
    return column == "load_s"


def draw(plate, fig) -> None:
    """Bars: memory by shape, packed weights and state, beside what is allocated."""
    ax = fig.subplots()
    for y, row in enumerate(plate.rows):
        ax.barh(y - 0.18, row["packed_gb"], 0.34, color="#0072B2")
        ax.barh(y - 0.18, row["state_gb"], 0.34, left=row["packed_gb"], color="#E69F00")
        ax.barh(y + 0.18, row["allocated_gb"], 0.34, color="#999999")
        ax.annotate(
            f"{row['allocated_gb']:.2f} GB allocated, {row['excess']:+.2f} %; loaded in "
            f"{row['load_s']:.1f} s; {row['ms']:.2f} ms per token",
            (row["allocated_gb"], y), (6, 0), textcoords="offset points", va="center",
            fontsize=11.5,
        )  # fmt: skip
    longest = max(row["allocated_gb"] for row in plate.rows)
    ax.set_yticks(range(len(plate.rows)), [row["shape"] for row in plate.rows])
    ax.set_ylim(len(plate.rows) - 0.4, -0.6)
    ax.set_xlim(0, 1.9 * longest)
    ax.set_xlabel("memory of the card [GB]")
    shades = {"packed weights": "#0072B2", "cache and buffers": "#E69F00", "allocated": "#999999"}
    handles = [ax.barh(0, 0, color=shade) for shade in shades.values()]
    ax.legend(handles, list(shades), loc="upper right", fontsize=11.5)


def _row(spec, params: dict, read_rate: float) -> dict:
    model = synth.random_packed(spec, params["seed"])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    weights = load.load_weights(model, "cuda")
    live = state.allocate_state(spec, "cuda")
    torch.cuda.synchronize()
    load_s = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() - before
    replay = graph.capture(live, weights).replay
    first, second = (
        runner.generate(live, weights, PROMPT, params["tokens"], step=replay).ids for _ in range(2)
    )
    # Memory that belongs to no tensor of ours counts too; a graph's pool would be in it.
    allocated = torch.cuda.memory_allocated() - before
    held = weights.nbytes + live.nbytes
    times = cases.ms_row(cases.step_times(live, replay, 100, params["runs"]))
    floor = weights.bytes_per_token / read_rate * 1e-6
    return {
        "packed_gb": weights.nbytes / 1e9,
        "state_gb": live.nbytes / 1e9,
        "allocated_gb": allocated / 1e9,
        "excess": 100 * (allocated / held - 1),
        "peak_gb": peak / 1e9,
        "load_s": load_s,
        "ids_that_differ": sum(a != b for a, b in zip(first, second, strict=True)),
        "distinct_ids": len(set(first)),
        "floor_ms": floor,
        "share": 100 * floor / times["ms"],
    } | times


def _verdict(rows: list[dict]) -> str:
    worst = max(rows, key=lambda row: row["excess"])
    differ = sum(row["ids_that_differ"] for row in rows)
    times = ", ".join(f"{row['shape']} {row['ms']:.2f} ms" for row in rows)
    held = worst["excess"] <= EXCESS_CAP and differ == 0
    return (
        f"{'As predicted' if held else 'Not as predicted'}: at most {worst['excess']:.2f} % over "
        f"weights and state ({worst['shape']}), {differ} ids differ between two runs. A step at "
        f"position 100: {times}."
    )
