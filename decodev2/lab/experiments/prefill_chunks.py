"""The prompt in chunks of columns: what a wider pass over the weights saves, by prompt length."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ... import graph, plan, prefill, state, synth, toggles
from ...errors import DecodeError
from ...load import load_weights
from .. import bench, cases
from ..plate import Measured, Missing
from .limits import log_ticks

TITLE = "A prompt in chunks: one pass over the weights for many columns"
QUESTION = "How much does a wider chunk save, and what does a longer cache cost the prompt?"
PREDICTION = (
    "A pass over 1.64 GB of packed weights costs at least 0.36 ms at 4,600 GB/s. One column a "
    "pass is a decode step, near 1.2 ms: 48 tokens 58 ms, 2,040 tokens 2.4 s. A chunk of 32 is 11 "
    "launches a layer from Python, about 3.5 ms: 48 tokens in 2 passes 7 ms (8 times less; the "
    "old card's 918 to 127 ms was 7 times), 2,040 in 64 passes 0.22 s. While Python is the limit, "
    "doubling the chunk halves the time; that ends where the tensor cores become the limit. "
    "Attention reads the live prefix only, so a cache of 2,048 slots costs what 512 do."
)
CHUNKS = (1, 16, 32, 64, 128, 256)
PROMPTS = (48, 512, 2040)
MAX_SEQS = (512, 2048)
PARAMS = {
    "shape": ("qwen2.5-3b", "a named shape, see decodev2/plan.py"),
    "chunk": ([], "columns per pass, separated by commas; all if left out"),
    "prompt": ([], "prompt lengths, separated by commas; all if left out"),
    "max_seq": ([], "capacities of the KV cache, separated by commas; both if left out"),
    "runs": (3, "timed runs of each chunk; a chunk of 1 runs once after one more"),
    "seed": (0, "seed of weights and prompts"),
}
TOGGLES = {
    "chunk": ("chunk", CHUNKS),
    "prompt": ("prompt", PROMPTS),
    "max_seq": ("max_seq", MAX_SEQS),
}
DEPENDS = ("*.cu", "*.cuh", "*.h")
DEVICE = "cuda"
# Relative difference of logits after 36 layers of random weights. Columns are rounded to half
# before each product and keys to bf16, at other places in a chunk than in a step.
ERROR_LIMIT = 5e-2
OLD = (918, 127)  # ms for 48 tokens at 512 slots on the RTX 3080: one column a pass, chunks of 32
COLUMNS = [
    {"name": "max_seq", "unit": "slots"},
    {"name": "prompt", "unit": "tokens"},
    {"name": "chunk", "unit": "columns"},
    {"name": "passes", "unit": "1"},
    *cases.MS_COLUMNS,
    {"name": "host_ms", "unit": "ms"},
    {"name": "tokens", "unit": "tokens"},
    {"name": "tok_s", "unit": "tok/s"},
    {"name": "floor_ms", "unit": "ms"},
    {"name": "share", "unit": "%"},
    {"name": "error_before", "unit": "1"},
    {"name": "error_after", "unit": "1"},
]
_TIMED = ("ms", "ms_best", "ms_worst", "host_ms", "tok_s", "floor_ms", "share", "error_before",
          "error_after")  # fmt: skip


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per capacity, prompt and chunk; logits of each are those of steps of one column."""
    chunks = _numbers(params["chunk"], CHUNKS, "chunk")
    prompts = _numbers(params["prompt"], PROMPTS, "prompt")
    max_seqs = _numbers(params["max_seq"], MAX_SEQS, "max_seq")
    read_rate = cases.begin("prefill_chunks")
    progress(0, 1, "weights")
    base = plan.named_spec(params["shape"])
    weights = load_weights(synth.random_packed(base, params["seed"]), DEVICE)
    rows, noise = [], 0.0
    for max_seq in max_seqs:
        spec = plan.with_max_seq(base, max_seq)
        fitting = [n for n in prompts if n <= max_seq]
        for n in prompts:
            if n not in fitting:
                why = Missing(f"a prompt of {n} does not fit {max_seq} slots")
                rows += [
                    {"max_seq": max_seq, "prompt": n, "chunk": c, "passes": -(-n // c), "runs": 0,
                     "tokens": n} | dict.fromkeys(_TIMED, why)
                    for c in chunks
                ]  # fmt: skip
        ids = {
            n: [_prompt_ids(base.vocab, n, params["seed"] + i) for i in range(2)] for n in fitting
        }
        steps = _by_steps(spec, weights, ids, progress)
        for c in chunks:
            live = None if c == 1 else state.allocate_state(spec, DEVICE, c)
            for n in fitting:
                progress(
                    len(rows), len(chunks) * len(prompts) * len(max_seqs), f"{n} in chunks of {c}"
                )
                logits, times, host = steps[n]
                row = {"max_seq": max_seq, "prompt": n, "chunk": c, "passes": -(-n // c)}
                if c == 1:
                    errors = Missing("what the other chunks are compared with")
                    row |= {"error_before": errors, "error_after": errors}
                else:
                    row["error_before"] = _error(live, weights, ids[n][0], logits[0], c)
                    times, host = _times(live, weights, ids[n][0], c, params["runs"])
                    if c == 32:
                        again, _ = _times(live, weights, ids[n][0], c, params["runs"])
                        noise = max(noise, bench.noise_band(times, again))
                    row["error_after"] = _error(live, weights, ids[n][1], logits[1], c)
                row |= cases.ms_row(times)
                row |= {"host_ms": host * 1e3, "tokens": n, "tok_s": n / row["ms"] * 1e3}
                rows.append(row)
            del live
        torch.cuda.empty_cache()
    made = cases.end(read_rate)
    for row in rows:
        if not isinstance(row["ms"], Missing):
            row["floor_ms"] = (
                row["passes"] * weights.bytes_per_token / made["read_rate"]["gb_s"] * 1e-6
            )
            row["share"] = 100 * row["floor_ms"] / row["ms"]
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=made,
        notes=[
            cases.noise_note(noise, "chunks of 32")
            if noise
            else "No noise band: chunks of 32 were not timed.",
            f"{weights.bytes_per_token / 1e6:,.1f} MB of packed weights per pass, the head once a "
            "prompt (the floor counts it in every pass).",
            "A chunk of 1 is the decode graph, fed with the prompt's ids; other chunks are "
            "launched from Python. host_ms: until Python has launched everything.",
        ],
        figure={"kind": "own"},
    )


def _numbers(given: list, known: tuple[int, ...], what: str) -> list[int]:
    return [int(x) for x in cases.chosen([str(g) for g in given], map(str, known), what)]


def _prompt_ids(vocab: int, n: int, seed: int) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- one column a pass ----


def _by_steps(spec, weights, ids: dict[int, list[list[int]]], progress) -> dict:
    """{prompt length: (logits of both prompts, [seconds of the second], host seconds)}."""
    found = {}
    with toggles.using(linear="gemv"):
        live = state.allocate_state(spec, DEVICE, 1)
        replay = graph.capture(live, weights).replay
        for n, both in ids.items():
            progress(0, 1, f"{n} one by one")
            logits = []
            for prompt in both:
                seconds, host = _feed(live, replay, torch.tensor(prompt, device=DEVICE))
                logits.append(live.logits[0].double().clone())
            found[n] = (logits, [seconds], host)
    return found


def _feed(live, replay: Callable[[], None], ids: torch.Tensor) -> tuple[float, float]:
    """(seconds until done, seconds until launched) of one replay per id."""
    state.reset(live)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(len(ids)):
        live.token.copy_(ids[i : i + 1])
        replay()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return time.perf_counter() - start, launched - start


# ---- chunks ----


def _times(live, weights, ids: list[int], chunk: int, runs: int) -> tuple[list[float], float]:
    """(seconds of each run, median seconds until launched). The check before was the warm-up."""
    seconds, hosts = [], []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        prefill.forward_prefill(live, weights, ids, chunk)
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds, bench.stats(hosts).median


def _error(live, weights, ids: list[int], expected: torch.Tensor, chunk: int) -> float:
    """Relative difference of the last logits. Raises DecodeError past the bound."""
    live.logits.fill_(torch.nan)
    prefill.forward_prefill(live, weights, ids, chunk)
    error = float((live.logits[0].double() - expected).norm() / expected.norm())
    if not error < ERROR_LIMIT:
        raise DecodeError(
            f"chunks of {chunk}, prompt {len(ids)}: logits are off by {error:.2e}, need under "
            f"{ERROR_LIMIT:.0e}"
        )
    return error


# ---- what it says ----


def _verdict(rows: list[dict], noise: float) -> str:
    ms = {
        (r["max_seq"], r["prompt"], r["chunk"]): r["ms"]
        for r in rows
        if not isinstance(r["ms"], Missing)
    }
    if not ms:
        return "Nothing was timed: no prompt fits the cache."
    words = []
    for max_seq, n in dict.fromkeys((s, n) for s, n, _ in ms):
        if {(max_seq, n, 1), (max_seq, n, 32)} <= ms.keys() and n in (48, 2040):
            one, wide = ms[max_seq, n, 1], ms[max_seq, n, 32]
            old = f" (old card {OLD[0] / OLD[1]:.1f}x)" if (max_seq, n) == (512, 48) else ""
            words.append(
                f"{n:,} tokens, {max_seq:,} slots: {one:,.0f} ms one by one, {wide:,.1f} ms in "
                f"chunks of 32, {one / wide:.1f}x{old}"
            )
    last = max(ms, key=lambda key: (key[1], key[0]))[:2]
    best = min((key for key in ms if key[:2] == last), key=ms.get)
    words.append(f"the best chunk for {best[1]:,} tokens is {best[2]}: {ms[best]:,.1f} ms")
    # A time that Python takes says nothing about attention, and it drifts by more than any cache.
    card = {(r["max_seq"], r["prompt"], r["chunk"]) for r in rows if _limited_by_card(r)}
    both = [(n, c) for s, n, c in card if s == 512 and (2048, n, c) in card]
    if both:
        changes = [100 * (ms[2048, n, c] / ms[512, n, c] - 1) for n, c in both]
        same = max(map(abs, changes)) <= 100 * max(noise, 0.05)
        words.append(
            f"2,048 slots instead of 512 cost {min(changes):+.1f} to {max(changes):+.1f} % where "
            f"the card is the limit ({cases.held(same).lower()}: nothing)"
        )
    if len(ms) == 1:
        ((key, value),) = ms.items()
        words = [f"{key[1]:,} tokens in chunks of {key[2]}, {key[0]:,} slots: {value:,.1f} ms"]
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def _limited_by_card(row: dict) -> bool:
    """Was Python done with launching well before the card was done?"""
    return not isinstance(row["ms"], Missing) and row["host_ms"] < 0.9 * row["ms"]


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card and in every run."""
    ms = {(r["max_seq"], r["prompt"], r["chunk"]): r["ms"] for r in plate.rows}
    found = []
    for max_seq, n in dict.fromkeys((s, n) for s, n, _ in ms):
        one, wide = ms.get((max_seq, n, 1)), ms.get((max_seq, n, 32))
        if one and wide:
            text = f"{n:,} tokens, {max_seq:,} slots: chunks of 32 are faster than one by one"
            found.append((text, wide < one))
    errors = [r[name] for r in plate.rows for name in ("error_before", "error_after")]
    kept = all(e < ERROR_LIMIT for e in errors if e is not None)
    return [*found, ("every chunk's logits agree with one column a pass", kept)]


def host_timed(row: dict, column: str) -> bool:
    """Python's own time, and rows that wait for Python."""
    return column == "host_ms" or not _limited_by_card(row)


def draw(plate, fig) -> None:
    """ms over chunk, both logarithmic: one line per prompt and capacity, named at its end."""
    ax = fig.subplots()
    rows = [r for r in plate.rows if r["ms"] is not None]
    chunks = sorted({r["chunk"] for r in rows})
    lines = list(dict.fromkeys((r["prompt"], r["max_seq"]) for r in rows))
    shades = {48: "#0072B2", 512: "#009E73", 2040: "#D55E00"}
    narrow = {(r["prompt"], r["chunk"]): r["ms"] for r in rows if r["max_seq"] == min(MAX_SEQS)}
    for prompt, max_seq in sorted(lines):
        points = sorted(
            (r["chunk"], r["ms"], r["host_ms"])
            for r in rows
            if (r["prompt"], r["max_seq"]) == (prompt, max_seq)
        )
        places = [chunks.index(c) for c, _, _ in points]
        wide = max_seq == max(s for p, s in lines if p == prompt)
        ax.plot(
            places, [ms for _, ms, _ in points], "o-" if wide else "s--", color=shades[prompt],
            linewidth=2, markersize=8 if wide else 6, markerfacecolor=None if wide else "white",
            zorder=3 if wide else 2,
        )  # fmt: skip
        if wide:  # the narrow cache's line lies on it or beside it
            for place, (chunk, ms, _) in zip(places, points, strict=True):
                beside = narrow.get((prompt, chunk), 0)
                # below where the open square lies above
                up = -20 if 1.05 * ms < beside < 2 * ms else 11
                ax.annotate(
                    f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}", (place, ms), (0, up),
                    textcoords="offset points", ha="center", fontsize=11.5, color=shades[prompt],
                )  # fmt: skip
            ax.annotate(
                f"{prompt:,} tokens", (places[-1], points[-1][1]), (14, 0),
                textcoords="offset points", va="center", fontsize=12.5, weight="bold",
                color=shades[prompt],
            )  # fmt: skip
    ax.set_yscale("log")
    low, high = min(r["ms"] for r in rows), max(r["ms"] for r in rows)
    ax.set_ylim(low / 1.6, high * 1.9)
    ticks = log_ticks(low / 1.6, high * 1.9)
    ax.set_yticks(ticks, [f"{t:,g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xticks(range(len(chunks)), [f"{c}" for c in chunks])
    ax.set_xlim(-0.35, len(chunks) - 0.25)
    ax.grid(True, axis="y")
    ax.set_ylabel("the whole prompt [ms]", fontsize=12)
    both = len({s for _, s in lines}) > 1
    ax.set_xlabel(
        "columns per pass over the weights"
        + ("; dashed, open squares: a cache of 512 slots instead of 2,048" * both), fontsize=12,
    )  # fmt: skip
