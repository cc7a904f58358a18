"""The prompt in chunks of columns: what a wider pass over the weights saves, by prompt length, by
kernel, and as a graph."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ... import graph, linear, plan, prefill, state, synth, toggles
from ...errors import DecodeError
from ...load import load_weights
from .. import bench, cases
from ..figure import number
from ..plate import Measured, Missing
from .limits import log_ticks

TITLE = "A prompt in chunks: one pass over the weights for many columns"
QUESTION = "How much does a wider chunk save, and what does a longer cache cost the prompt?"
PREDICTION = (
    "A pass over 1.64 GB of packed weights costs at least 0.36 ms at 4,600 GB/s. One column a "
    "pass is a decode step, near 1.2 ms: 48 tokens 58 ms, 2,040 tokens 2.4 s. A pass by mma took "
    "the card 3.4 ms at 32 columns and 16 at 256, and Python 2.8 to launch. By wgmma 256 columns "
    "and 2.78 G weights of the layers are 1.42 TFLOP, 1.8 ms at the 790 TFLOP/s of a dense "
    "product; whole tiles and norms make it 4. So 48 tokens, one pass, take what Python "
    "does, 2.8 ms; 512 take 2 passes, 8.4 with attention; 2,040 take 8, and attention with bf16 "
    "parts 6 ms more: 38, a quarter to a third of mma's 136. A graph saves nothing where the card "
    "is the limit, at 256 columns; 64 by wgmma are 1.8 ms of the card, 2.8 of Python, and gain a "
    "third. Attention reads the live prefix only, so a cache of 2,048 slots costs what 512 do."
)
PREDICTED = {48: 2.8, 512: 8.4, 2040: 38.0}  # ms of whole prompts, with wgmma
SLACK = 1.25  # times and parts of a prediction that count as held
CHUNKS = (1, 16, 32, 64, 128, 256)
PROMPTS = (48, 512, 2040)
MAX_SEQS = (512, 2048)
KERNELS = ("gemv", "mma", "wgmma")  # gemv: one column a pass
LAUNCHES = ("eager", "graph")  # eager: every kernel of a pass from Python
PARAMS = {
    "shape": ("qwen2.5-3b", "a named shape, see decodev2/plan.py"),
    "chunk": ([], "columns per pass, separated by commas; all if left out"),
    "prompt": ([], "prompt lengths, separated by commas; all if left out"),
    "max_seq": ([], "capacities of the KV cache, separated by commas; both if left out"),
    "kernel": ([], "kernels of the products, separated by commas; all if left out"),
    "launch": ([], "ways to launch a full chunk, separated by commas; both if left out"),
    "runs": (3, "timed runs of each chunk; a chunk of 1 runs once after one more"),
    "seed": (0, "seed of weights and prompts"),
}
TOGGLES = {
    "chunk": ("chunk", CHUNKS),
    "prompt": ("prompt", PROMPTS),
    "max_seq": ("max_seq", MAX_SEQS),
    "kernel": ("kernel", KERNELS),
    "launch": ("launch", LAUNCHES),
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
    {"name": "kernel", "unit": ""},
    {"name": "launch", "unit": ""},
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
    """One row per capacity, prompt, chunk, kernel and launch that there is (`_ways`); logits of
    each are those of steps of one column."""
    chunks = _numbers(params["chunk"], CHUNKS, "chunk")
    prompts = _numbers(params["prompt"], PROMPTS, "prompt")
    max_seqs = _numbers(params["max_seq"], MAX_SEQS, "max_seq")
    kernels = cases.chosen(params["kernel"], KERNELS, "kernel")
    launches = cases.chosen(params["launch"], LAUNCHES, "launch")
    read_rate = cases.begin("prefill_chunks")
    has_wgmma = linear.has_wgmma(torch.device(DEVICE))
    if not has_wgmma:
        kernels = [kernel for kernel in kernels if kernel != "wgmma"]
    wanted = [
        (max_seq, c, n, kernel, launch)
        for max_seq in max_seqs
        for c in chunks
        for n in prompts
        for kernel, launch in _ways(c, n, max_seq == max(max_seqs), kernels, launches)
    ]
    if not wanted:
        raise DecodeError(
            f"no such chunk: 1 is gemv by graph, mma starts at 2 and wgmma at {linear.WGMMA_FROM}"
            f"{'' if has_wgmma else ', on sm_90 only'}; a graph needs a prompt with a full chunk"
        )
    progress(0, 1, "weights")
    base = plan.named_spec(params["shape"])
    weights = load_weights(synth.random_packed(base, params["seed"]), DEVICE)
    rows, noise = [], 0.0
    for max_seq in max_seqs:
        spec = plan.with_max_seq(base, max_seq)
        ids = {
            n: [_prompt_ids(base.vocab, n, params["seed"] + i) for i in range(2)]
            for n in prompts
            if n <= max_seq
        }
        steps = _by_steps(spec, weights, ids, progress)
        for c in chunks:
            live = None if c == 1 else state.allocate_state(spec, DEVICE, c)
            for n, kernel, launch in (way[2:] for way in wanted if way[:2] == (max_seq, c)):
                progress(len(rows), len(wanted), f"{n} in chunks of {c}, {kernel}, {launch}")
                row = {"max_seq": max_seq, "prompt": n, "chunk": c, "kernel": kernel,
                       "launch": launch, "passes": -(-n // c), "tokens": n}  # fmt: skip
                rows.append(row)
                if n not in ids:
                    why = Missing(f"a prompt of {n} does not fit {max_seq} slots")
                    row |= {"runs": 0} | dict.fromkeys(_TIMED, why)
                    continue
                logits, times, host = steps[n]
                if c == 1:
                    errors = Missing("what the other chunks are compared with")
                    row |= {"error_before": errors, "error_after": errors}
                else:
                    with toggles.using(linear="gemv", prefill=kernel):
                        full = graph.full_chunk(live, weights) if launch == "graph" else None
                        row["error_before"] = _error(live, weights, ids[n][0], logits[0], full)
                        times, host = _times(live, weights, ids[n][0], params["runs"], full)
                        if c == 32 and launch == launches[-1]:
                            again, _ = _times(live, weights, ids[n][0], params["runs"], full)
                            noise = max(noise, bench.noise_band(times, again))
                        row["error_after"] = _error(live, weights, ids[n][1], logits[1], full)
                row |= cases.ms_row(times)
                row |= {"host_ms": host * 1e3, "tok_s": n / row["ms"] * 1e3}
            del live
        torch.cuda.empty_cache()
    made = cases.end(read_rate)
    for row in rows:
        if not isinstance(row["ms"], Missing):
            row["floor_ms"] = (
                row["passes"] * weights.bytes_per_token / made["read_rate"]["gb_s"] * 1e-6
            )
            row["share"] = 100 * row["floor_ms"] / row["ms"]
    notes = [
        cases.noise_note(noise, "chunks of 32")
        if noise
        else "No noise band: chunks of 32 were not timed.",
        f"{weights.bytes_per_token / 1e6:,.1f} MB of packed weights per pass, the head once a "
        "prompt (the floor counts it in every pass).",
        "What a graph saves is said of the longest prompt, what slots cost of rows where the card "
        "and not Python is the limit.",
        "A chunk of 1 is the decode graph, fed with the prompt's ids. Eager chunks are launched "
        "from Python; by graph full chunks are replayed, and a rest is launched. host_ms: until "
        "Python has launched everything.",
        f"wgmma from {linear.WGMMA_FROM} columns on, and in the largest cache only; in others by "
        "graph, if there is a full chunk.",
    ]
    if not has_wgmma:
        notes.append("No wgmma: the card is not sm_90.")
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=made,
        notes=notes,
        figure={"kind": "own"},
    )


def _ways(
    chunk: int, prompt: int, largest: bool, kernels: list[str], launches: list[str]
) -> list[tuple[str, str]]:
    """(kernel, launch) of a chunk: what there is for it, and of that what is asked for. Where the
    cache is not the `largest`, one way is enough to compare the two."""
    if chunk == 1:
        there = [("gemv", "graph")]
    else:
        how = LAUNCHES if prompt >= chunk else ("eager",)
        by = ("mma", "wgmma") if chunk >= linear.WGMMA_FROM and largest else ("mma",)
        there = [(kernel, launch) for kernel in by for launch in (how if largest else how[-1:])]
    return [way for way in there if way[0] in kernels and way[1] in launches]


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


def _times(live, weights, ids: list[int], runs: int, full) -> tuple[list[float], float]:
    """(seconds of each run, median seconds until launched). With the check before, the first call
    is the warm-up: even a prompt of one full chunk has captured it then."""
    seconds, hosts = [], []
    prefill.forward_prefill(live, weights, ids, full=full)
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        prefill.forward_prefill(live, weights, ids, full=full)
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds, bench.stats(hosts).median


def _error(live, weights, ids: list[int], expected: torch.Tensor, full) -> float:
    """Relative difference of the last logits. Raises DecodeError past the bound."""
    live.logits.fill_(torch.nan)
    prefill.forward_prefill(live, weights, ids, full=full)
    error = float((live.logits[0].double() - expected).norm() / expected.norm())
    if not error < ERROR_LIMIT:
        raise DecodeError(
            f"chunks of {len(live.prompt.token)}, prompt {len(ids)}: logits are off by "
            f"{error:.2e}, need under {ERROR_LIMIT:.0e}"
        )
    return error


# ---- what it says ----


def _verdict(rows: list[dict], noise: float) -> str:
    timed = [r for r in rows if not isinstance(r["ms"], Missing)]
    if not timed:
        return "Nothing was timed: no prompt fits the cache."
    if len(timed) == 1:
        (r,) = timed
        words = [
            f"{r['prompt']:,} tokens in chunks of {r['chunk']}, {r['kernel']}, {r['launch']}, "
            f"{r['max_seq']:,} slots: {number(r['ms'])} ms"
        ]
    else:
        largest = max(r["max_seq"] for r in timed)
        wide = [r for r in timed if r["max_seq"] == largest]
        words = [_best(wide), _old_gain(timed), _kernels(wide), _graphs(wide)]
        words.append(_capacities(timed, noise))
    return "; ".join(filter(None, words)) + "."


def _best(rows: list[dict]) -> str:
    """The fastest way for each prompt, beside what was predicted."""
    best = _fastest(rows, "prompt")
    text = f"{_list(best)} tokens take {_list(map(number, best.values()))} ms at best"
    if any(r["kernel"] == "wgmma" for r in rows) and best.keys() <= PREDICTED.keys():
        expected = [PREDICTED[n] for n in best]
        ok = all(1 / SLACK <= best[n] / PREDICTED[n] <= SLACK for n in best)
        text = f"{cases.held(ok)}: {text} (predicted {_list(map(number, expected))})"
    return text


def _old_gain(rows: list[dict]) -> str:
    """What chunks of 32 gain where the old card was measured."""
    ms = _fastest(rows, "max_seq", "prompt", "chunk")
    if not {(512, 48, 1), (512, 48, 32)} <= ms.keys():
        return ""
    gain = ms[512, 48, 1] / ms[512, 48, 32]
    return f"chunks of 32 gain {gain:.1f}x for 48 tokens (old card {OLD[0] / OLD[1]:.1f}x)"


def _kernels(rows: list[dict]) -> str:
    """wgmma beside mma, in the widest chunks that both were timed for."""
    ms = _fastest(rows, "chunk", "prompt", "kernel")
    both = [(c, n) for c, n, kernel in ms if kernel == "wgmma" and (c, n, "mma") in ms and n >= c]
    if not both:
        return ""
    chunk = max(both)[0]
    ratios = [ms[c, n, "mma"] / ms[c, n, "wgmma"] for c, n in both if c == chunk]
    return f"wgmma is {_range(ratios, '.1f')}x as fast as mma in chunks of {chunk}"


def _graphs(rows: list[dict]) -> str:
    """What a graph saves the longest prompt."""
    ms = _fastest(rows, "prompt", "chunk", "kernel", "launch")
    saved = {
        (n, c, kernel): 100 * (1 - ms[n, c, kernel, "graph"] / eager)
        for (n, c, kernel, launch), eager in ms.items()
        if launch == "eager" and (n, c, kernel, "graph") in ms
    }
    longest = max((n for n, _, _ in saved), default=0)
    saved = {key[1:]: change for key, change in saved.items() if key[0] == longest}
    if not saved:
        return ""
    chunk, kernel = max(saved, key=saved.get)
    return f"a graph saves {_range(saved.values(), '.0f')} %, most at {chunk} columns by {kernel}"


def _capacities(rows: list[dict], noise: float) -> str:
    """A larger cache, where the card is the limit: a time that Python takes says nothing about
    attention, and it drifts by more than any cache."""
    by_card = [r for r in rows if _limited_by_card(r)]
    ms = _fastest(by_card, "max_seq", "prompt", "chunk", "kernel", "launch")
    changes = [
        100 * (ms[2048, *way] / small - 1)
        for (slots, *way), small in ms.items()
        if slots == 512 and (2048, *way) in ms
    ]
    if not changes:
        return ""
    same = max(map(abs, changes)) <= 100 * max(noise, 0.05)
    return (
        f"2,048 slots instead of 512 cost {_range(changes, '+.1f')} % "
        f"({cases.held(same).lower()}: nothing)"
    )


def _fastest(rows: list[dict], *keys: str) -> dict:
    """{values of the keys (the value, if there is one key): least ms}, in the order of the keys."""
    found: dict = {}
    for row in rows:
        key = row[keys[0]] if len(keys) == 1 else tuple(row[name] for name in keys)
        found[key] = min(row["ms"], found.get(key, row["ms"]))
    return dict(sorted(found.items()))


def _list(items) -> str:
    """ "48, 512 and 2,040"."""
    texts = [f"{item:,}" if isinstance(item, int) else str(item) for item in items]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _range(values, digits: str) -> str:
    low, high = format(min(values), digits), format(max(values), digits)
    return low if low == high else f"{low} to {high}"


def _limited_by_card(row: dict) -> bool:
    """Was Python done with launching well before the card was done?"""
    timed = row["ms"] is not None and not isinstance(row["ms"], Missing)
    return timed and row["host_ms"] < 0.9 * row["ms"]


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card and in every run."""
    ms: dict[tuple, list[float]] = {}
    for r in plate.rows:
        if r["ms"] is not None:
            ms.setdefault((r["max_seq"], r["prompt"], r["chunk"]), []).append(r["ms"])
    found = []
    for max_seq, n in dict.fromkeys((s, n) for s, n, _ in ms):
        one, wide = ms.get((max_seq, n, 1)), ms.get((max_seq, n, 32))
        if one and wide:
            text = f"{n:,} tokens, {max_seq:,} slots: chunks of 32 are faster than one by one"
            found.append((text, max(wide) < min(one)))
    # plates that are older than wgmma have no column for it
    by_kernel = {
        (r["prompt"], r["launch"], r["kernel"]): r["ms"]
        for r in plate.rows
        if "kernel" in r and r["chunk"] == plan.CUDA_MAX_N <= r["prompt"] and r["ms"] is not None
        and r["max_seq"] == max(row["max_seq"] for row in plate.rows)
    }  # fmt: skip
    both = [way for *way, kernel in by_kernel if kernel == "wgmma" and (*way, "mma") in by_kernel]
    if both:
        faster = all(by_kernel[*way, "wgmma"] < by_kernel[*way, "mma"] for way in both)
        found.append((f"full chunks of {plan.CUDA_MAX_N} are faster by wgmma than by mma", faster))
    errors = [r[name] for r in plate.rows for name in ("error_before", "error_after")]
    kept = all(e < ERROR_LIMIT for e in errors if e is not None)
    by_every = ", by every kernel" if any("kernel" in r for r in plate.rows) else ""
    return [*found, (f"every chunk's logits agree with one column a pass{by_every}", kept)]


def host_timed(row: dict, column: str) -> bool:
    """Python's own time, and rows that wait for Python."""
    return column == "host_ms" or not _limited_by_card(row)


# ---- figure ----


def draw(plate, fig) -> None:
    """ms over chunk in the largest cache, both logarithmic: for each prompt the fastest way, named
    at its end, and beside it mma and launches from Python where they are not the fastest."""
    ax = fig.subplots()
    rows = [r for r in plate.rows if r["ms"] is not None]
    rows = [r for r in rows if r["max_seq"] == max(row["max_seq"] for row in rows)]
    chunks = sorted({r["chunk"] for r in rows})
    beside = _BESIDE if "kernel" in rows[0] else ()  # older plates know one kernel and no graph
    shades = {48: "#0072B2", 512: "#009E73", 2040: "#D55E00"}
    drawn: dict[int, list[float]] = {c: [] for c in chunks}
    labels = []
    for prompt in sorted({r["prompt"] for r in rows}):
        here, shade = [r for r in rows if r["prompt"] == prompt], shades[prompt]
        for chosen, style in [(None, _FASTEST), *(way[1:] for way in beside)]:
            line = _line([r for r in here if chosen is None or chosen(r)])
            places, ms = [chunks.index(c) for c in line], [r["ms"] for r in line.values()]
            ax.plot(places, ms, color=shade, **style)
            for c, value in zip(line, ms, strict=True):
                drawn[c].append(value)
            if chosen is None:
                labels += [(c, value, shade) for c, value in zip(line, ms, strict=True)]
                ax.annotate(
                    f"{prompt:,} tokens", (places[-1], ms[-1]), (14, 0), va="center",
                    textcoords="offset points", fontsize=12.5, weight="bold", color=shade,
                )  # fmt: skip
    for c, value, shade in labels:
        above = min((v / value for v in drawn[c] if v > 1.02 * value), default=1e9)
        below = min((value / v for v in drawn[c] if value > 1.02 * v), default=1e9)
        if max(above, below) < 1.7:  # marks above and below: beside it, where lines come down from
            place = {"xytext": (-9, -3), "ha": "right", "va": "top"}
        elif above > below:
            place = {"xytext": (0, 10), "ha": "center", "va": "bottom"}
        else:
            place = {"xytext": (0, -12), "ha": "center", "va": "top"}
        ax.annotate(
            f"{value:,.0f}" if value >= 100 else f"{value:.1f}", (chunks.index(c), value),
            textcoords="offset points", fontsize=11.5, color=shade, zorder=3,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, **place,
        )  # fmt: skip
    ax.set_yscale("log")
    low, high = min(r["ms"] for r in rows), max(r["ms"] for r in rows)
    ax.set_ylim(low / 2, high * 1.9)
    ticks = log_ticks(low / 2, high * 1.9)
    ax.set_yticks(ticks, [f"{t:,g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xticks(range(len(chunks)), [f"{c}" for c in chunks])
    ax.set_xlim(-0.35, len(chunks) - 0.25)
    ax.grid(True, axis="y")
    ax.set_ylabel("the whole prompt [ms]", fontsize=12)
    ax.set_xlabel("columns per pass over the weights", fontsize=12)
    if beside:
        names = {"the fastest way": _FASTEST} | {name: style for name, _, style in beside}
        handles = [ax.plot([], [], color="#222222", **style)[0] for style in names.values()]
        ax.legend(handles, names, loc="upper right", fontsize=11.5)


_FASTEST = {"marker": "o", "linewidth": 2.2, "markersize": 8, "zorder": 4}
# What is drawn beneath the fastest way, and seen where it is slower.
_BESIDE = (
    ("by mma", lambda r: r["kernel"] == "mma",
     {"linestyle": "--", "linewidth": 1.6, "marker": "s", "markersize": 6,
      "markerfacecolor": "white", "zorder": 2}),
    ("launched by Python", lambda r: r["launch"] == "eager",
     {"linestyle": ":", "linewidth": 1.8, "marker": "x", "markersize": 7, "zorder": 2}),
)  # fmt: skip


def _line(rows: list[dict]) -> dict[int, dict]:
    """{chunk: its fastest row}."""
    slowest_first = sorted(rows, key=lambda r: r["ms"], reverse=True)
    return dict(sorted({r["chunk"]: r for r in slowest_first}.items()))
