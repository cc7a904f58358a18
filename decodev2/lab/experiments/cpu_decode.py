"""Decode and prompt speed on a CPU: our executors, and llama.cpp beside them when it is there.

All executors of a model are loaded in one process and run in turn, so that their ratio does not
carry the drift of clocks and neighbours. Decode and prompt are timed apart; loading and the first
run have columns of their own. Executors of the same packed weights must first agree on the ids.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import DecodeError, ModelError
from .. import bench, card, models
from ..plate import Measured, Missing

TITLE = "Decoding on a CPU: tokens per second against the memory bound"
QUESTION = "How fast does each executor decode on this CPU, and how near is it to the read rate?"
PREDICTION = (
    "A decode step reads all packed weights once, so tok/s is at most read rate / packed bytes. "
    "decodev2 stays on packed weights and should reach more than half of that on a model larger "
    "than the caches; tokenloop, which pays Python between ops, less; llama.cpp about the same as "
    "decodev2."
)
PARAMS = {
    "models": ("models", "folder holding HF folders with their .chr"),
    "only": ([], "names of models, separated by commas; all if left out"),
    "executors": (["decodev2", "tokenloop"], "executors to time, separated by commas"),
    "gguf": ("", "GGUF of the same model for llama.cpp (needs llama-cpp-python); one model only"),
    "prompt_tokens": (48, "ids in the prompt"),
    "new_tokens": (64, "ids generated after it, end tokens ignored"),
    "max_seq": (512, "capacity of the KV cache"),
    "threads": (0, "CPU threads; 0 takes torch's setting"),
    "runs": (5, "timed rounds; each runs every executor once"),
    "warmup": (1, "rounds before them that do not count"),
}
DEPENDS = ("cpu/**/*", "refuse.h")
DEVICE = "cpu"
PEER = "llama.cpp"
SETTLE_S = 0.3  # idle threads of one library's pool spin for a while after its last work

_RATE = ("", "_best", "_worst")
COLUMNS = [
    {"name": "model", "unit": ""},
    {"name": "executor", "unit": ""},
    {"name": "runs", "unit": "runs"},
    {"name": "decode_tokens", "unit": "tokens"},
    {"name": "decode_s", "unit": "s"},
    *({"name": f"decode_tok_s{end}", "unit": "tok/s"} for end in _RATE),
    {"name": "decode_tok_s_std", "unit": "tok/s"},
    {"name": "noise", "unit": "%"},
    {"name": "decode_bytes_per_token", "unit": "B"},
    {"name": "decode_gb_s", "unit": "GB/s"},
    {"name": "share", "unit": "%"},
    {"name": "ceiling_tok_s", "unit": "tok/s"},
    {"name": "prompt_tokens", "unit": "tokens"},
    {"name": "prompt_s", "unit": "s"},
    *({"name": f"prompt_tok_s{end}", "unit": "tok/s"} for end in _RATE),
    {"name": "load_s", "unit": "s"},
    {"name": "first_run_s", "unit": "s"},
    {"name": "ids_agree", "unit": "tokens"},
    {"name": "ratio_to_llama_cpp", "unit": "x"},
]


@dataclass
class Contestant:
    """One executor with a model loaded. `run(prompt_ids, n)` -> (ids, prompt_s, decode_s)."""

    name: str
    run: Callable[[list[int], int], tuple[list[int], float, float]]
    close: Callable[[], None]
    bytes_per_token: int
    load_s: float
    first_run_s: float
    packed: bool = True  # the same packed weights as others of this kind: ids must agree
    prompt_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    agree: int | Missing = 0


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per model and executor. Raises DecodeError if a rate beats the measured read rate."""
    import torch

    found = models.find(params["models"], params["only"])
    _check(params, found)
    threads = params["threads"] or torch.get_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        read_rate = card.measure_read_rate(threads)
        groups = []
        rounds = params["warmup"] + params["runs"]
        for index, model in enumerate(found):
            report = functools.partial(_report, progress, index * rounds, len(found) * rounds)
            groups.append((model, _time_model(model, params, threads, report)))
            gc.collect()  # the next model may need the memory of this one
        read_rate = card.faster_read_rate(read_rate, card.measure_read_rate(threads))
    finally:
        torch.set_num_threads(before)
    rows = [
        _row(model, own, group, params, read_rate["gb_s"])
        for model, group in groups
        for own in group
    ]
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows),
        figure={
            "kind": "bars",
            "value": "decode_tok_s",
            "label": "executor",
            "group": "model",
            "low": "decode_tok_s_worst",
            "high": "decode_tok_s_best",
            "mark": "ceiling_tok_s",
            "mark_text": "ceiling: read rate / bytes per token",
            "also": ["share"],
            "axis": "decode rate, median and range",
        },
        notes=[
            f"read rate measured before and after, better one kept: {read_rate['gb_s']:.1f} GB/s",
            "decode_s and prompt_s are medians of the runs; the first new id counts as prompt",
            "noise: the executor's odd rounds against its even rounds; less is no difference",
            "ids_agree: ids equal to the first executor's on two prompts, smaller count",
        ],
        card=card.card("cpu", threads, read_rate),
    )


def _report(progress, start: int, total: int, done: int, text: str) -> None:
    progress(start + done, total, text)


def _check(params: dict, found: list[models.Model]) -> None:
    if params["new_tokens"] < 2:
        raise DecodeError(f"new_tokens is {params['new_tokens']}; timing decode needs at least 2")
    if params["runs"] < 1:
        raise DecodeError(f"runs is {params['runs']}; needs at least 1")
    if params["prompt_tokens"] + params["new_tokens"] > params["max_seq"]:
        total = params["prompt_tokens"] + params["new_tokens"]
        raise DecodeError(f"prompt and new tokens are {total}; max_seq is {params['max_seq']}")
    if params["gguf"] and len(found) != 1:
        raise DecodeError(
            f"gguf is one model's file; pick that model with only= ({len(found)} found)"
        )


# ---- executors ----


def _contestants(model: models.Model, params: dict, threads: int) -> list[Contestant]:
    opened = [_open_ours(model, name, params) for name in params["executors"]]
    if params["gguf"]:
        opened.append(_open_llama_cpp(Path(params["gguf"]), params, threads))
    return opened


def _open_ours(model: models.Model, executor: str, params: dict) -> Contestant:
    from ...session import open_session

    session = open_session(
        model.folder, model.chr, executor=executor, device="cpu", max_seq=params["max_seq"]
    )

    def run(prompt_ids: list[int], new_tokens: int):
        result = session.generate(prompt_ids, new_tokens, ignore_eos=True)
        return result.ids, result.prefill_s, result.decode_s

    return Contestant(
        executor, run, session.close, session.packed_bytes, session.load_s, session.warmup_s
    )


def _open_llama_cpp(gguf: Path, params: dict, threads: int) -> Contestant:
    """llama.cpp on its own quantisation of the model, greedy, timed over the same ids as ours."""
    try:
        import llama_cpp
    except ImportError:
        raise DecodeError("llama-cpp-python is not installed; gguf= needs it") from None
    import numpy as np

    if not gguf.is_file():
        raise ModelError(f"{gguf}: no such file; gguf= needs a GGUF file")
    start = time.perf_counter()
    llama = llama_cpp.Llama(
        str(gguf),
        n_ctx=params["max_seq"],
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    load_s = time.perf_counter() - start

    def next_id() -> int:
        logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(llama.n_vocab(),)).argmax())

    def run(prompt_ids: list[int], new_tokens: int):
        llama.reset()
        start = time.perf_counter()
        llama.eval(prompt_ids)
        ids = [next_id()]
        middle = time.perf_counter()
        while len(ids) < new_tokens:
            llama.eval(ids[-1:])
            ids.append(next_id())
        return ids, middle - start, time.perf_counter() - middle

    start = time.perf_counter()
    run([0], 2)
    first_run_s = time.perf_counter() - start
    size = llama_bytes_per_token(llama)
    return Contestant(PEER, run, llama.close, size, load_s, first_run_s, packed=False)


def llama_bytes_per_token(llama) -> int:
    """Bytes of weights one llama.cpp step reads: the file's tensors, all of them.

    For models with tied embeddings that is exact; others read one row of the embedding only, which
    `llama_model_size` counts in full, so the GB/s of llama.cpp is then an upper estimate.
    """
    import llama_cpp

    return int(llama_cpp.llama_model_size(llama.model))


# ---- timing ----


def prompt(n: int, vocab: int, seed: int) -> list[int]:
    """`n` ids spread over the vocabulary; speed does not depend on which, agreement might."""
    return [(7919 * (i + 1) + 104729 * seed) % vocab for i in range(n)]


def _time_model(model, params, threads, report) -> list[Contestant]:
    from ...plan import spec_from_folder

    vocab = spec_from_folder(model.folder).vocab
    report(0, f"{model.name}: loading")
    group = _contestants(model, params, threads)
    first, second = (prompt(params["prompt_tokens"], vocab, seed) for seed in (0, 1))
    _agree(model.name, group, first, params["new_tokens"])

    rounds = params["warmup"] + params["runs"]
    for index in range(rounds):
        report(index, model.name)
        for own in group if index % 2 == 0 else group[::-1]:
            time.sleep(SETTLE_S)
            ids, prompt_s, decode_s = own.run(first, params["new_tokens"])
            if len(ids) != params["new_tokens"]:
                raise DecodeError(
                    f"{model.name} {own.name}: {len(ids)} ids, needs {params['new_tokens']}"
                )
            if index >= params["warmup"]:
                own.prompt_s.append(prompt_s)
                own.decode_s.append(decode_s)
    # Fresh input afterwards: a result kept from the timed prompt would show here.
    _agree(model.name, group, second, params["new_tokens"])
    for own in group:
        own.close()
        own.run = own.close = None  # lets go of the weights
    return group


def _agree(model: str, group: list[Contestant], prompt_ids: list[int], n: int) -> None:
    """Count leading ids equal to the first packed executor's. None equal is a wrong executor."""
    reference = None
    for own in group:
        if not own.packed:
            own.agree = Missing("another quantisation of the model")
            continue
        ids = own.run(prompt_ids, n)[0]
        reference = ids if reference is None else reference
        pairs = zip(ids, reference, strict=False)
        count = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(reference)))
        if count == 0:
            raise DecodeError(
                f"{model} {own.name}: first id is {ids[:1]}, {group[0].name} has {reference[:1]}"
            )
        own.agree = min(own.agree or n, count)


# ---- rows ----


def _row(model, own: Contestant, group: list[Contestant], params: dict, ceiling: float) -> dict:
    steps = params["new_tokens"] - 1
    decode_s, prompt_s = statistics.median(own.decode_s), statistics.median(own.prompt_s)
    decode = bench.rate(steps, decode_s, "tokens")
    if isinstance(decode, Missing):
        raise DecodeError(f"{model.name} {own.name}: {decode.reason}")
    share = bench.check_floor(
        own.bytes_per_token * steps, decode_s, ceiling, f"{model.name} {own.name}"
    )
    each = bench.stats([steps / s for s in own.decode_s], best="max")
    each_prompt = bench.stats([params["prompt_tokens"] / s for s in own.prompt_s], best="max")
    peer = next((other for other in group if other.name == PEER), None)
    if peer is None:
        ratio = Missing("llama.cpp was not run")
    else:
        ratio = bench.ratios(peer.decode_s, own.decode_s).median
    return {
        "model": model.name,
        "executor": own.name,
        "runs": each.runs,
        "decode_tokens": steps,
        "decode_s": decode_s,
        "decode_tok_s": decode,
        "decode_tok_s_best": each.best,
        "decode_tok_s_worst": each.worst,
        "decode_tok_s_std": each.std,
        "noise": _noise(own.decode_s),
        "decode_bytes_per_token": own.bytes_per_token,
        "decode_gb_s": own.bytes_per_token * decode * 1e-9,
        "share": 100 * share,
        "ceiling_tok_s": ceiling * 1e9 / own.bytes_per_token,
        "prompt_tokens": params["prompt_tokens"],
        "prompt_s": prompt_s,
        "prompt_tok_s": params["prompt_tokens"] / prompt_s,
        "prompt_tok_s_best": each_prompt.best,
        "prompt_tok_s_worst": each_prompt.worst,
        "load_s": own.load_s,
        "first_run_s": own.first_run_s,
        "ids_agree": own.agree,
        "ratio_to_llama_cpp": ratio,
    }


def _noise(decode_s: list[float]) -> float | Missing:
    """Noise band in percent, from the two halves that every other round makes."""
    if len(decode_s) < 2:
        return Missing("1 run has no second to compare with")
    return 100 * bench.noise_band(decode_s[::2], decode_s[1::2])


def _verdict(rows: list[dict]) -> str:
    ours = [row for row in rows if row["executor"] == "decodev2"]
    if not ours:
        return "decodev2 was not run."
    parts = []
    for row in ours:
        text = (
            f"{row['model']}: {row['decode_tok_s']:.1f} tok/s, {row['share']:.0f}% of the ceiling"
        )
        if not isinstance(row["ratio_to_llama_cpp"], Missing):
            text += f", {row['ratio_to_llama_cpp']:.2f} x llama.cpp"
        parts.append(text)
    enough = all(row["share"] > 50 for row in ours)
    return f"{'As predicted' if enough else 'Short of the prediction'}. {'; '.join(parts)}."
