"""One protocol, one card, one run: our step and prompts beside llama.cpp and 4-bit libraries."""

from __future__ import annotations

import functools
import gc
import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from ... import graph, load, persistent, plan, prefill, state, synth, toggles
from ...errors import DecodeError
from .. import bench, cases, llama_bench, peer_products, random_gguf
from ..figure import number
from ..plate import Measured, Missing
from .decode_step import parse_case, taken
from .limits import log_ticks

TITLE = "Matched peers: a step and a prompt, on one card in one run"
QUESTION = "How long do llama.cpp, torch int4 and bitsandbytes take for what our step does?"
PREDICTION = (
    "On the 3B shape torch int4 takes 3.7, 3.9, 16.0 and 10.7 us for the four products of a layer "
    "and 95 for the head, timed alone: 36 layers and a head are 1.33 ms. bitsandbytes, by its "
    "older kernel gemv_4bit: 6.5, 6.1, 27.7, 21.1 and 165, 2.38 ms. Those are products alone; our "
    "whole step takes 1.15 ms by graph, should take 0.75 in one kernel, and so should beat both. "
    "llama.cpp reads 1,923 MB a token in Q4_K_M, 0.42 ms at 4,600 GB/s; it took 2.5 ms in a trial, "
    "a sixth of that rate: three times ours. A prompt of 2,040 is bound by arithmetic, 11.3 TFLOP: "
    "136 ms in our chunks of 256, 83 TFLOP/s, and 125 in llama.cpp's trial: about level. Of 48 "
    "columns the weights are the larger part: 4.1 ms of ours, half of its 9.5."
)
GRAPH, ONE = "decodev2", "decodev2 in one kernel"
LLAMA = "llama.cpp"
PRODUCTS = {f"{library} products alone": library for library in peer_products.LIBRARIES}
PEERS = (GRAPH, ONE, LLAMA, *PRODUCTS)
TAKES_PROMPTS = (GRAPH, LLAMA)
STEP, PROMPT = "step at", "prompt of"
CASES = ("step at 100", "prompt of 48", "prompt of 512", "prompt of 2040")
PARAMS = {
    "shape": ("qwen2.5-3b", "a named shape, see decodev2/plan.py"),
    "max_seq": (2048, "capacity of our KV cache"),
    "cases": ([], 'like "step at 100" or "prompt of 48", separated by commas; left out: '
                  f"{', '.join(CASES)}"),
    "peers": ([], "names of peers, separated by commas; left out: all that this machine has"),
    "llama_bench": ("", "llama.cpp's llama-bench; left out: the one on PATH, if there is one"),
    "chunk": (plan.CUDA_MAX_N, "columns per pass of our prompts, the fastest of prefill_chunks"),
    "runs": (15, "timed replays; a prompt is timed 7 times at most"),
    "timeout_s": (300, "seconds that llama-bench may take"),
    "seed": (0, "seed of weights and prompts"),
}  # fmt: skip
TOGGLES = {"what": ("cases", CASES), "peer": ("peers", PEERS)}
DEPENDS = ("*.cu", "*.cuh", "*.h")
DEVICE = "cuda"
COLUMNS = [
    {"name": "what", "unit": ""},
    {"name": "peer", "unit": ""},
    {"name": "how", "unit": ""},
    {"name": "tokens", "unit": "tokens"},
    *cases.MS_COLUMNS,
    {"name": "tok_s", "unit": "tok/s"},
    {"name": "ratio", "unit": "x"},
    {"name": "mb", "unit": "MB"},
    {"name": "floor_ms", "unit": "ms"},
    {"name": "share", "unit": "%"},
    {"name": "error_before", "unit": "1"},
    {"name": "error_after", "unit": "1"},
]
LLAMA_RATIO = 2.5  # of its step to ours: three was predicted from two round numbers
ROWS_NOTE = (
    "ratio: time over that of our fastest way. mb, floor_ms, share: packed weights of each peer's "
    "own format, once for each pass over them, at the read rate."
)
PRODUCTS_NOTE = (
    "products alone: those of a step with the library's kernels, distinct weights for every layer, "
    "in one CUDA graph; no attention, norm, activation or choice of token. A step built on these "
    "kernels takes longer: its time is a lower bound, its rate an upper one."
)


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per case and peer. A peer that is not here is left out, with a note, unless `peers`
    or `llama_bench` asks for it: then, or if nothing is left, DecodeError."""
    spec = plan.with_max_seq(plan.named_spec(params["shape"]), params["max_seq"])
    wanted = dict.fromkeys(parse_case(text, spec.max_seq) for text in params["cases"] or CASES)
    positions = [n for what, n in wanted if what == STEP]
    prompts = [n for what, n in wanted if what == PROMPT]
    chosen = cases.chosen(params["peers"], PEERS, "peer")
    named = [peer for peer in chosen if positions or peer in TAKES_PROMPTS]
    if not named:
        raise DecodeError(f"{', '.join(chosen)} takes no prompt; needs a step among the cases")
    absent = _absent(spec, params, named)
    read_rate = cases.begin("peers")
    if ONE in named and (reason := persistent.why_not(spec)):
        absent[ONE] = reason
    for peer, reason in absent.items():
        if params["peers"] or (peer == LLAMA and params["llama_bench"]):
            raise DecodeError(f"{peer}: {reason}")
    here = [peer for peer in named if peer not in absent]
    rows, notes = [], [ROWS_NOTE]
    # llama.cpp first, while nothing of ours is on the card: both never are there at a time.
    if LLAMA in here:
        progress(0, len(here), LLAMA)
        made, note = _llama_rows(spec, params, positions, prompts)
        rows += made
        notes.append(note)
    for peer in here:
        if peer in PRODUCTS:
            progress(len(rows), len(rows) + 1, peer)
            rows += _product_rows(peer, spec, positions, params)
            torch.cuda.empty_cache()
    noise = None
    if ours := [peer for peer in here if peer in (GRAPH, ONE)]:
        progress(len(rows), len(rows) + 1, GRAPH)
        made, noise = _our_rows(ours, spec, params, positions, prompts)
        rows += made
    progress(1, 1, "done")
    found = cases.end(read_rate)
    order = [f"{what} {n}" for what, n in wanted]
    rows.sort(key=lambda row: (order.index(row["what"]), PEERS.index(row["peer"])))
    _add_rates(rows, found["read_rate"]["gb_s"])
    if any(row["peer"] in PRODUCTS for row in rows):
        notes.append(PRODUCTS_NOTE)
    notes += [f"{peer} left out: {reason}." for peer, reason in absent.items()]
    if noise is not None:
        notes.append(cases.noise_note(noise, f"a step of {ours[0]}"))
    return Measured(COLUMNS, rows, _verdict(rows, noise or 0.0), {"kind": "own"}, notes, found)


def _absent(spec: plan.ArchSpec, params: dict, named: list[str]) -> dict[str, str]:
    """{peer: why it cannot be measured here}, for what can be told without the card."""
    found = {
        peer: peer_products.why_not(library, _products(spec))
        for peer, library in PRODUCTS.items()
        if peer in named
    }
    if LLAMA in named:
        try:
            llama_bench.find(params["llama_bench"])
            need, free = random_gguf.nbytes(spec), shutil.disk_usage(tempfile.gettempdir()).free
        except DecodeError as error:
            found[LLAMA] = str(error)
        else:
            if importlib.util.find_spec("gguf") is None:
                found[LLAMA] = "its weights need the package gguf: pip install 'decodev2[fetch]'"
            elif free < 1.05 * need:
                found[LLAMA] = (
                    f"its weights take {need / 1e9:.1f} GB and the temporary folder has "
                    f"{free / 1e9:.1f} free; TMPDIR names another"
                )
    return {peer: reason for peer, reason in found.items() if reason}


def _row(case: tuple[str, int], peer: str, how: str, seconds: list[float], mb: float) -> dict:
    what, n = case
    row = {"what": f"{what} {n}", "peer": peer, "how": how, "mb": mb}
    return row | {"tokens": n if what == PROMPT else 1} | cases.ms_row(seconds)


# ---- llama.cpp ----


def _llama_rows(spec, params: dict, positions: list[int], prompts: list[int]):
    """(rows, note) of llama-bench on random weights of the shape."""
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        gguf = Path(folder) / "random.gguf"
        random_gguf.write(spec, gguf, params["seed"])
        program = llama_bench.find(params["llama_bench"])
        found = llama_bench.run(program, gguf, prompts, params["timeout_s"])
    if not found.gpu:
        raise DecodeError("llama-bench saw no GPU; needs one that was built for this card's CUDA")
    mb = random_gguf.bytes_per_token(spec) / 1e6
    unchecked = dict.fromkeys(("error_before", "error_after"), Missing("a process of its own"))
    last = llama_bench.NEW_TOKENS - 1
    each = [s / llama_bench.NEW_TOKENS for s in found.decode]
    rows = [_row((STEP, n), LLAMA, f"positions 0 to {last}", each, mb) for n in positions]
    for n, seconds in found.prompts.items():
        passes = -(-n // found.batch)
        how = f"batches of {found.batch}"
        rows.append(_row((PROMPT, n), LLAMA, how, seconds, passes * mb))
    note = (
        f"llama.cpp: build {found.build}, on {found.gpu}, Q4_K_M types with random weights, "
        f"{mb:,.1f} MB a token; timed by llama-bench in a process of its own, before anything of "
        f"ours was on the card. Its step is the mean of {llama_bench.NEW_TOKENS} at positions 0 to "
        f"{last}, with all that it does on the host."
    )
    return [row | unchecked for row in rows], note


# ---- products of other libraries ----


def _products(spec: plan.ArchSpec) -> list[tuple[int, int]]:
    """(rows, columns) of a step's products, in order: qkv, o, gate and up, down; the head."""
    layer = [
        (spec.q_dim + 2 * spec.kv_dim, spec.hidden),
        (spec.hidden, spec.q_dim),
        (2 * spec.intermediate, spec.hidden),
        (spec.hidden, spec.intermediate),
    ]
    return spec.n_layers * layer + [(spec.vocab, spec.hidden)]


def _product_rows(peer: str, spec, positions: list[int], params: dict) -> list[dict]:
    """One time for all positions: the products do not depend on them."""
    make = peer_products.LIBRARIES[PRODUCTS[peer]]
    matrices = [make(*shape, seed) for seed, shape in enumerate(_products(spec))]
    one_of_each = {(m.rows, m.cols): m for m in matrices}.values()

    def worst() -> float:
        return max(peer_products.check(m, peer_products.column(m.cols)) for m in one_of_each)

    before = worst()
    x = {m.cols: peer_products.column(m.cols) for m in matrices}
    each = bench.graph_times(
        lambda i: matrices[i].run(x[matrices[i].cols]), len(matrices), params["runs"]
    )
    errors = {"error_before": before, "error_after": worst()}
    mb = sum(m.nbytes for m in matrices) / 1e6
    seconds = [s * len(matrices) for s in each]
    how = f"{len(matrices)} products, a lower bound"
    return [_row((STEP, n), peer, how, seconds, mb) | errors for n in positions]


# ---- ours ----


def _our_rows(ours: list[str], spec, params: dict, positions: list[int], prompts: list[int]):
    """(rows, noise band or None) of the step by each way, and of prompts if the graph is one."""
    weights = load.load_weights(synth.random_packed(spec, params["seed"]), DEVICE)
    live = state.allocate_state(spec, DEVICE, params["chunk"])
    torch.manual_seed(params["seed"])
    for cache in (live.kv.k, live.kv.v):  # attention must have something to read
        cache.normal_()
    mb, rows, noise = weights.bytes_per_token / 1e6, [], None
    with toggles.using(linear="gemv"):
        for peer in ours if positions else []:
            how = "CUDA graph" if peer == GRAPH else "one kernel"
            take = taken("graph" if peer == GRAPH else "persistent", live, weights)
            for n in positions:
                state.reset(live)
                before = cases.step_error(live, weights, take, n, 11)
                seconds = cases.step_times(live, take, n, params["runs"])
                if not rows:
                    again = cases.step_times(live, take, n, params["runs"])
                    noise = bench.noise_band(seconds, again)
                after = cases.step_error(live, weights, take, n, 12)
                errors = {"error_before": before, "error_after": after}
                rows.append(_row((STEP, n), peer, how, seconds, mb) | errors)
        if prompts and GRAPH in ours:
            rows += _prompt_rows(live, weights, params, prompts)
    return rows, noise


def _prompt_rows(live, weights, params: dict, prompts: list[int]) -> list[dict]:
    """A prompt of each length as a session takes it; its logits are those of steps, one a token."""
    chunk, vocab, mb = params["chunk"], live.spec.vocab, weights.bytes_per_token / 1e6
    chance = torch.Generator().manual_seed(params["seed"])
    texts = [torch.randint(vocab, (max(prompts),), generator=chance) for _ in range(2)]
    by_steps = [_logits_by_steps(live, weights, ids, prompts) for ids in texts]
    rows, full = [], graph.full_chunk(live, weights, chunk)
    for n in prompts:
        first, second = (ids[:n].tolist() for ids in texts)
        before = _prompt_error(live, weights, first, by_steps[0][n], full)
        seconds = bench.repeat(
            functools.partial(prefill.forward_prefill, live, weights, first, chunk, full),
            min(7, params["runs"]), sync=bench.sync_for(DEVICE),
        )  # fmt: skip
        after = _prompt_error(live, weights, second, by_steps[1][n], full)
        row = _row((PROMPT, n), GRAPH, f"chunks of {chunk}", seconds, -(-n // chunk) * mb)
        rows.append(row | {"error_before": before, "error_after": after})
    return rows


def _logits_by_steps(live, weights, ids: torch.Tensor, lengths: list[int]) -> dict:
    """{length: logits after that many of `ids`, taken one a step by the graph}."""
    take, ids, found = graph.capture(live, weights).replay, ids.to(DEVICE), {}
    state.reset(live)
    for i in range(len(ids)):
        live.token.copy_(ids[i : i + 1])
        take()
        if i + 1 in lengths:
            found[i + 1] = live.logits[0].double().clone()
    return found


def _prompt_error(live, weights, ids: list[int], expected: torch.Tensor, full) -> float:
    live.logits.fill_(torch.nan)
    prefill.forward_prefill(live, weights, ids, full=full)
    error = float((live.logits[0].double() - expected).norm() / expected.norm())
    if not error < cases.STEP_LIMIT:
        raise DecodeError(
            f"a prompt of {len(ids)} is off by {error:.2e}, needs under {cases.STEP_LIMIT:.0e}"
        )
    return error


# ---- what it says ----


def _add_rates(rows: list[dict], read_rate: float) -> None:
    fastest = _fastest(rows)
    for row in rows:
        name = f"{row['peer']}, {row['what']}"
        share = bench.check_floor(row["mb"] * 1e6, row["ms"] * 1e-3, read_rate, name)
        row |= {"floor_ms": row["mb"] / read_rate, "share": 100 * share}
        row["tok_s"] = row["tokens"] / row["ms"] * 1e3
        ours = fastest.get(row["what"])
        row["ratio"] = row["ms"] / ours["ms"] if ours else Missing("decodev2 was not timed")


def _fastest(rows: list[dict]) -> dict[str, dict]:
    """{what: row of our fastest way}."""
    ours = [row for row in rows if row["peer"] in (GRAPH, ONE)]
    ours.sort(key=lambda row: row["ms"], reverse=True)
    return {row["what"]: row for row in ours}


def _is_step(row: dict) -> bool:
    return row["what"].startswith(STEP)


def _verdict(rows: list[dict], noise: float) -> str:
    fastest, parts, kept = _fastest(rows), [], []
    for what in dict.fromkeys(row["what"] for row in rows):
        own, words = fastest.get(what), []
        for row in rows:
            if row["what"] != what or row is own:
                continue
            words.append(f"{row['peer']} {number(row['ms'])} ms")
            if own:
                words[-1] += f" ({row['ratio']:.2f}x)"
                if row["peer"] in PRODUCTS:
                    kept.append(bench.compare(own["ms"], row["ms"], noise) == "slower")
                elif row["peer"] == LLAMA and _is_step(row):
                    kept.append(row["ratio"] >= LLAMA_RATIO)
        beside = ", ".join(words)
        if own:
            rate = f", {own['tok_s']:,.0f} tok/s" * _is_step(own)
            beside = f"{own['peer']} {number(own['ms'])} ms{rate}" + f"; {beside}" * bool(words)
        parts.append(f"{what}: {beside}")
    found = ". ".join(parts)
    if not kept:
        return f"{found}."
    return f"{cases.held(all(kept))} ({LLAMA_RATIO:g}x llama.cpp, no products faster): {found}."


def claims(plate) -> list[tuple[str, bool]]:
    """What a kernel change must not change; pairs that the plate lacks are left out."""
    ms = {(row["what"], row["peer"]): row["ms"] for row in plate.rows}
    fastest = {what: row["ms"] for what, row in _fastest(plate.rows).items()}
    found = []
    for text, of, limit in (
        ("our logits are those of other kernels, before and after", (GRAPH, ONE), cases.STEP_LIMIT),
        ("products of other libraries agree with float32", PRODUCTS, peer_products.ERROR_LIMIT),
    ):
        rows = [row for row in plate.rows if row["peer"] in of]
        errors = [row[name] for row in rows for name in ("error_before", "error_after")]
        if errors:
            found.append((text, max(errors) < limit))
    for peer, text in (
        (LLAMA, "our step is faster than llama.cpp's"),
        *((peer, f"our whole step is faster than {peer}") for peer in PRODUCTS),
    ):
        both = [what for what, p in ms if p == peer and what in fastest and what.startswith(STEP)]
        if both:
            found.append((text, all(fastest[what] < ms[what, peer] for what in both)))
    short = "prompt of 48"
    if (short, LLAMA) in ms and short in fastest:
        found.append((f"a {short} is faster than llama.cpp's", fastest[short] < ms[short, LLAMA]))
    return found


def host_timed(row: dict, column: str) -> bool:
    """llama.cpp measures with the host's clock; our prompts are launched by Python."""
    return row["peer"] == LLAMA or not _is_step(row)


# ---- figure ----

SHADES = {GRAPH: "#0072B2", ONE: "#56B4E9", LLAMA: "#D55E00"}
OTHER = "#BBBBBB"


def draw(plate, fig) -> None:
    """Left tokens per second of the first step, one bar per peer; right the prompts, ms over their
    length, both logarithmic."""
    steps = [row for row in plate.rows if _is_step(row)]
    steps = [row for row in steps if row["what"] == steps[0]["what"]]
    prompts = [row for row in plate.rows if not _is_step(row)]
    if steps and prompts:
        left, right = fig.subplots(1, 2, width_ratios=(1.75, 1))
    else:
        left = right = fig.subplots()
    if steps:
        _draw_steps(steps, left)
    if prompts:
        _draw_prompts(prompts, right)


def _draw_steps(rows: list[dict], ax) -> None:
    rows = sorted(rows, key=lambda row: row["ms"])
    for y, row in enumerate(rows):
        alone = row["peer"] in PRODUCTS
        ax.barh(y, row["tok_s"], 0.62, color=SHADES.get(row["peer"], OTHER),
                hatch="//" if alone else None, edgecolor="white")  # fmt: skip
        words = f"{'at most ' * alone}{number(row['tok_s'])}   {number(row['ms'])} ms"
        if row["ratio"] is not None and row["ratio"] > 1:
            words += f", {row['ratio']:.2f}x"
        ax.annotate(words, (row["tok_s"], y), (5, 0), textcoords="offset points", va="center",
                    fontsize=11.5)  # fmt: skip
    ax.set_yticks(range(len(rows)), [_two_lines(row) for row in rows])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, 1.6 * max(row["tok_s"] for row in rows))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel(f"{rows[0]['what']} [tok/s]; x: time over our fastest")


def _two_lines(row: dict) -> str:
    """Whose step it is, and below what is particular about it."""
    peer = row["peer"]
    whose = LLAMA if peer == LLAMA else PRODUCTS.get(peer, GRAPH)
    return f"{whose}\n{peer.removeprefix(whose).strip() or row['how']}"


def _draw_prompts(rows: list[dict], ax) -> None:
    lengths = sorted({row["tokens"] for row in rows})
    for peer in TAKES_PROMPTS:
        line = sorted((r for r in rows if r["peer"] == peer), key=lambda row: row["tokens"])
        if line:
            ax.plot([r["tokens"] for r in line], [r["ms"] for r in line], "o-", color=SHADES[peer],
                    label=peer)  # fmt: skip
    for n in lengths:
        of_one = sorted((r for r in rows if r["tokens"] == n), key=lambda row: row["ms"])
        for row in of_one:  # the slower one's number above the lines, the other's below
            above = row is of_one[-1]
            ax.annotate(
                number(row["ms"]), (n, row["ms"]), (-5, 5) if above else (5, -5),
                ha="right" if above else "left", va="bottom" if above else "top",
                textcoords="offset points", fontsize=11.5, color=SHADES[row["peer"]],
            )  # fmt: skip
    times = [row["ms"] for row in rows]
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(0.35 * lengths[0], 2.5 * lengths[-1])
    ax.set_ylim(0.4 * min(times), 2.5 * max(times))
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ticks = log_ticks(*ax.get_ylim())
    ax.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("tokens of the prompt")
    ax.set_ylabel("a prompt [ms]")
    ax.legend(loc="upper left", frameon=False, fontsize=11.5)
