"""A real packed model on CUDA: ids against the CPU executor, many replays, tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch

from ... import gates, native, persistent, plan, prefill, session
from ...errors import DecodeError
from ...state import reset
from .. import bench, card, cases, models
from ..plate import Measured, Missing

TITLE = "A real model on CUDA: the same ids as the CPU, and how fast"
QUESTION = "Does the captured step choose the CPU executor's ids on a real checkpoint, for ever?"
PREDICTION = (
    "The same ids for 64 tokens, or a near tie that the measured logit difference explains; 10,000 "
    "replays over many resets repeat them and grow no memory. A step of SmolLM2 is 30 x 5 + 3 = "
    "153 kernels over 71 MB, of Qwen2.5-0.5B 24 x 5 + 3 = 123 over 262 MB. With 2.7 us a kernel, "
    "what 23 of them take in the four-layer toy, and bytes at 4,600 GB/s that is 0.41 + 0.02 = "
    "0.43 ms and 0.33 + 0.06 = 0.39 ms: launches are the limit, and the larger model is the faster "
    "one. The host reads ids once in 8 steps and never holds up the card: within 5 % of the time "
    "that the replays alone take (old card: 195 tok/s by the host, 201 in the device window, 3 %). "
    "One kernel a token has five hand-offs a layer, a microsecond each, in place of the launches: "
    "30 x 5 + 0.02 and 24 x 5 + 0.06, 0.17 and 0.18 ms, and the work in between on top."
)
PARAMS = {
    "models": ("models", "folder holding HF folders with their .chr"),
    "only": ([], "names of models, separated by commas; all if left out"),
    "steps": ([], "ways to take a step, separated by commas; all that can be taken if left out"),
    "replays": (gates.REPLAYS, "replays of the endurance row, by graph"),
    "persistent_replays": (50_000, "the same, by one kernel a token"),
    "new_tokens": (256, "ids of the timed run, end tokens ignored"),
    "runs": (5, "timed runs"),
}
GRAPH, PERSISTENT = "gemv, graph", "gemv, persistent"
STEPS = {GRAPH: "graph", PERSISTENT: "persistent"}
TOGGLES = {
    "model": ("only", ("qwen2.5-coder-0.5b", "smollm2-135m")),
    "kernels": ("steps", tuple(STEPS)),
}
DEPENDS = ("*.cu", "*.cuh", "*.h", "*_binding.cpp")
DEVICE = "cuda"
HOST, WINDOW = "speed seen by the host", "speed in the device window"
MAX_SEQ = 1024
HOST_LIMIT = 0.05  # of the window's time: what the host may add
COLUMNS = [
    {"name": "model", "unit": ""},
    {"name": "gate", "unit": ""},
    {"name": "kernels", "unit": ""},
    {"name": "measured", "unit": "1"},
    {"name": "limit", "unit": "1"},
    {"name": "ok", "unit": ""},
    {"name": "note", "unit": ""},
    {"name": "tokens", "unit": "tokens"},
    *cases.MS_COLUMNS,
    {"name": "tok_s", "unit": "tok/s"},
    {"name": "step_ms", "unit": "ms"},
    {"name": "host_over_window", "unit": "x"},
    {"name": "floor_ms", "unit": "ms"},
    {"name": "share", "unit": "%"},
    {"name": "prompt_tokens", "unit": "tokens"},
    {"name": "prompt_ms", "unit": "ms"},
]
SPEED = [column["name"] for column in COLUMNS if column["unit"] not in ("", "1")]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """The rows of `gates.run_model` and two of speed per model: host clock and device window."""
    if not torch.cuda.is_available():
        raise DecodeError("cuda_model needs a CUDA device")
    if params["new_tokens"] < 2 or params["runs"] < 1:
        raise DecodeError("timing needs new_tokens of at least 2 and runs of at least 1")
    found = models.find(params["models"], params["only"])
    steps = cases.chosen(params["steps"], STEPS, "step")
    native.build_cuda()
    read_rate = card.measure_read_rate(1, "cuda")
    rows, noise, left_out = [], 0.0, []
    wanted = [(model, kernels) for model in found for kernels in steps]
    for index, (model, kernels) in enumerate(wanted):
        progress(index, len(wanted), f"{model.name}, {kernels}")
        if kernels == PERSISTENT and (reason := _why_not(model.folder)):
            left_out.append(f"{model.name}: no persistent step, {reason}.")
            continue
        step = STEPS[kernels]
        no_speed = dict.fromkeys(SPEED, Missing("a gate has no speed"))
        replays = params["replays" if step == "graph" else "persistent_replays"]
        for row in gates.run_model(str(model.folder), str(model.chr), replays, step):
            rows.append(no_speed | asdict(row) | {"model": model.name})
        opened = session.open_session(
            model.folder, model.chr, device="cuda", max_seq=MAX_SEQ, step=step
        )
        made, band = speed_rows(opened, params["new_tokens"], params["runs"], read_rate["gb_s"])
        rows += [row | {"model": model.name, "kernels": kernels} for row in made]
        noise = max(noise, band)
        opened.close()
        del opened
        torch.cuda.empty_cache()
    progress(len(wanted), len(wanted), "done")
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows),
        card=card.card("cuda", read_rate=read_rate),
        notes=[
            f"{HOST}: the ids after the first, from the first id's arrival to the last's.",
            f"{WINDOW}: as many replays after the same prompt, between two CUDA events. Runs of "
            "the two alternate, and the window's ids must be the host's.",
            cases.noise_note(noise, "the window, its odd and even runs,"),
            "share: the packed bytes at the read rate, of the time. A model of the size of the L2 "
            "is partly read from there.",
            *left_out,
        ],
        figure={"kind": "own"},
    )


def _why_not(folder) -> str | None:
    return persistent.why_not(plan.with_max_seq(plan.spec_from_folder(folder), MAX_SEQ))


def speed_rows(opened, new_tokens: int, runs: int, read_rate: float) -> tuple[list[dict], float]:
    """The host's row and the window's of an open session, and the window's noise band.

    Raises DecodeError when the replays between two events choose other ids than the host saw.
    """
    prompt = opened.encode(gates.SHORT)
    steps = new_tokens - 1
    host, window, prompts = [], [], []
    for index in range(-1, runs):  # the first warms up
        result = opened.generate(prompt, new_tokens, ignore_eos=True)
        if len(result.ids) != new_tokens:
            raise DecodeError(
                f"{len(result.ids)} ids came ({result.stop_reason}), timing needs {new_tokens}"
            )
        ids, seconds = _window(opened, prompt, steps)
        if ids != result.ids:
            differ = sum(a != b for a, b in zip(ids, result.ids, strict=True))
            raise DecodeError(f"replays in the device window: {differ} ids differ from the host's")
        if index >= 0:
            host.append(result.decode_s)
            window.append(seconds)
            prompts.append(result.prefill_s)
    over = bench.ratios(host, window).median
    floor = 1e3 * steps * opened.weights.bytes_per_token / (read_rate * 1e9)
    nothing = Missing("the window holds decode steps only")
    rows = []
    for gate, seconds in ((HOST, host), (WINDOW, window)):
        timed = cases.ms_row(seconds)
        is_host = gate == HOST
        rows.append(timed | {
            "gate": gate, "note": "",
            "measured": over - 1 if is_host else 0,
            "limit": HOST_LIMIT if is_host else 0,
            "ok": not is_host or over - 1 <= HOST_LIMIT,
            "tokens": steps, "tok_s": 1e3 * steps / timed["ms"], "step_ms": timed["ms"] / steps,
            "host_over_window": over if is_host else Missing("the window is the reference"),
            "floor_ms": floor, "share": 100 * floor / timed["ms"],
            "prompt_tokens": len(prompt) if is_host else nothing,
            "prompt_ms": 1e3 * bench.stats(prompts).median if is_host else nothing,
        })  # fmt: skip
    return rows, bench.noise_band(window[::2], window[1::2] or window)


def _window(opened, prompt: list[int], steps: int) -> tuple[list[int], float]:
    """(ids, seconds of `steps` replays between two events) after the prompt and its first id."""
    state = opened.state
    reset(state)
    prefill.consume_prompt(state, opened.weights, prompt)
    (seconds,) = bench.event_times(lambda: [opened.graph.replay() for _ in range(steps)], 1, 0)
    return state.history[len(prompt) : len(prompt) + steps + 1].tolist(), seconds


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card and in every run."""
    rows = plate.rows

    def ok(start: str) -> bool:
        found = [row["ok"] for row in rows if start in row["gate"]]
        return bool(found) and all(found)

    beside = []
    if any(row["kernels"] == PERSISTENT for row in rows):
        models = {row["model"] for row in rows if row["kernels"] == PERSISTENT}
        count = len(models) * plate.params.get("persistent_replays", 0)
        beside = [
            ("one kernel a token chooses the graph's ids, up to near ties",
             ok("ids beside the graph's")),
            ("100,000 persistent steps and more repeat them",
             ok("rounds that differ") and count >= 100_000),
            ("one kernel a token beats the graph, on every model", _is_faster(rows)),
        ]  # fmt: skip
    return [
        ("the step chooses the CPU executor's ids, up to near ties", ok("ids, ")),
        ("10,000 replays and more repeat the ids",
         ok("rounds that differ") and plate.params.get("replays", 0) >= gates.REPLAYS),
        *beside,
        ("no memory grows over the replays", ok("bytes grown")),
        ("no memory is held beyond weights and state", ok("allocated beyond")),
        ("replays in the device window choose the ids that the host saw", ok(WINDOW)),
        ("the host takes at most a twentieth longer than the replays alone", ok(HOST)),
    ]  # fmt: skip


def _is_faster(rows: list[dict]) -> bool:
    ms = {(r["model"], r["kernels"]): r["step_ms"] for r in rows if r["gate"] == WINDOW}
    both = [model for model, kernels in ms if kernels == PERSISTENT and (model, GRAPH) in ms]
    return bool(both) and all(ms[model, PERSISTENT] < ms[model, GRAPH] for model in both)


def host_timed(row: dict, column: str) -> bool:
    """A prompt of one chunk is launched by Python."""
    return column == "prompt_ms"


def draw(plate, fig) -> None:
    """Bars: time of a step by the host's clock and in the window, the packed bytes' inside."""
    ax = fig.subplots()
    speeds = [row for row in plate.rows if row["tok_s"] is not None]
    names = list(dict.fromkeys((row["model"], row["kernels"]) for row in speeds))
    longest = max(row["step_ms"] for row in speeds)
    for row in speeds:
        is_host = row["gate"] == HOST
        y = names.index((row["model"], row["kernels"])) + (-0.2 if is_host else 0.2)
        ax.barh(y, row["step_ms"], 0.38, color="#0072B2" if is_host else "#009E73")
        floor = row["floor_ms"] / row["tokens"]
        ax.plot([floor, floor], [y - 0.19, y + 0.19], color="#222222", linewidth=2.5)
        who = f"host, {100 * (row['host_over_window'] - 1):+.1f} %" if is_host else "device window"
        ax.annotate(
            f"{row['tok_s']:,.0f} tok/s   {row['step_ms']:.3f} ms\n{who}", (row["step_ms"], y),
            (8, 0), textcoords="offset points", va="center", fontsize=10.5,
        )  # fmt: skip
    labels = []
    for model, kernels in names:
        of = [r for r in plate.rows if (r["model"], r["kernels"]) == (model, kernels)]
        ok = [row["ok"] for row in of if row["tok_s"] is None]
        labels.append(f"{model}\n{kernels}\n{sum(ok)} of {len(ok)} gates hold")
    ax.set_yticks(range(len(names)), labels)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, 1.35 * longest)
    ax.set_xlabel("one greedy step [ms]; black tick: its packed bytes at the read rate")


def _verdict(rows: list[dict]) -> str:
    failed = [f"{row['model']}: {row['gate']}" for row in rows if not row["ok"]]
    hosts = [row for row in rows if row["gate"] == HOST]
    rates = {}
    for row in hosts:
        way = "graph" if row["kernels"] == GRAPH else "one kernel"
        rates.setdefault(row["model"], []).append(f"{row['tok_s']:,.0f} tok/s by {way}")
    text = f"{'FAILED, ' + '; '.join(failed) if failed else f'All {len(rows)} rows hold'}: "
    text += "; ".join(f"{model} {', '.join(each)}" for model, each in rates.items())
    if hosts:
        over = max(row["host_over_window"] for row in hosts)
        text += f"; by the host, at most {over:.3f}x the time in the device window"
    ms = {row["model"]: row["step_ms"] for row in hosts if row["kernels"] == GRAPH}
    if {"smollm2-135m", "qwen2.5-coder-0.5b"} <= set(ms):
        larger = ms["qwen2.5-coder-0.5b"] < ms["smollm2-135m"]
        text += f". By graph the larger model is {'' if larger else 'not '}the faster one, "
        text += f"{'as' if larger else 'not as'} predicted"
    if any(row["kernels"] == PERSISTENT for row in hosts):
        faster = _is_faster(rows)
        text += f". One kernel a token {'beats' if faster else 'does not beat'} the graph"
        text += "" if faster else " on every model"
    near = bool(hosts) and all(row["host_over_window"] <= 1 + HOST_LIMIT for row in hosts)
    return f"{text}. The host is {'as' if near else 'not as'} near the window as on the old card."
