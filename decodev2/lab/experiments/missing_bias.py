"""A real Qwen2.5 decoded with its q, k, v bias and without it: the log's fifth experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ... import session
from ...errors import DecodeError
from ...graph import capture_or_none
from ...load import LayerWeights, ModelWeights
from ...runner import Result
from .. import card, cases, models
from ..plate import Measured

TITLE = "The forgotten bias: one model with and without its q, k, v bias"
QUESTION = "What does a Qwen2.5 say when the bias of q, k or v is forgotten?"
PREDICTION = (
    "The bias of q and k is larger than what their products vary by, so without it attention looks "
    "elsewhere: the first id already differs and the text falls into a loop (old card, 3B: token "
    "220, a space, for ever). The bias of v is small; without it alone the text should stay close. "
    "Speed would tell nothing: a bias is 2 KB beside megabytes. A check of ids tells at once."
)
PARAMS = {
    "models": ("models", "folder holding HF folders with their .chr"),
    "only": (["qwen2.5-coder-0.5b"], "names of models with a q, k, v bias, separated by commas"),
    "bias": ([], "kept, without q, without k, without v, without all; all if left out"),
    "prompts": ([], "question, code; both if left out"),
    "new_tokens": (32, "ids generated at most"),
    "device": ("cpu", "cpu or cuda"),
}
DEPENDS = ("cpu/**/*", "refuse.h")
DEVICE = "cpu"
KEPT, NO_BIAS = "kept", "without all"
DROPPED = {KEPT: "", "without q": "q", "without k": "k", "without v": "v", NO_BIAS: "qkv"}
PROMPTS = {  # text, and whether it goes in without the chat template
    "question": ("What is the capital of France? Answer in one sentence.", False),
    "code": ("def fibonacci(n):\n", True),
}
TOGGLES = {"bias": ("bias", tuple(DROPPED)), "prompt": ("prompts", tuple(PROMPTS))}
OLD_ID = 220  # a space in Qwen2.5's vocabulary: what the old card repeated
MAX_SEQ = 512
SHOWN_IDS = 8
COLUMNS = [
    {"name": "model", "unit": ""},
    {"name": "prompt", "unit": ""},
    {"name": "bias", "unit": ""},
    {"name": "new", "unit": "tokens"},
    {"name": "same", "unit": "tokens"},
    {"name": "distinct", "unit": "ids"},
    {"name": "id_220", "unit": "tokens"},
    {"name": "stop", "unit": ""},
    {"name": "first_ids", "unit": ""},
    {"name": "text", "unit": ""},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per model, prompt and way; `same` counts the leading ids of the whole model's text.

    The model is loaded once, its layers are replaced by copies with parts of the bias at zero.
    """
    ways = cases.chosen(params["bias"], DROPPED, "bias")
    prompts = cases.chosen(params["prompts"], PROMPTS, "prompt")
    found = models.find(params["models"], params["only"])
    rows, notes, done = [], [], 0
    total = len(found) * len(ways) * len(prompts)
    for model in found:
        progress(done, total, model.name)
        opened = session.open_session(
            model.folder, model.chr, device=params["device"], max_seq=MAX_SEQ
        )
        try:
            whole = opened.weights
            if not whole.spec.qkv_bias:
                raise DecodeError(f"{model.name} has no q, k, v bias; needs a model with one")
            notes.append(f"{model.name}, rms of the bias by layer: {_sizes(whole)}.")
            expected = {p: _answer(opened, whole, p, params["new_tokens"]) for p in prompts}
            for way in ways:
                weights = _without(whole, DROPPED[way])
                for prompt in prompts:
                    progress(done, total, f"{model.name}, {way}, {prompt}")
                    text, result = _answer(opened, weights, prompt, params["new_tokens"])
                    row = {"model": model.name, "prompt": prompt, "bias": way}
                    rows.append(row | _row(text, result, expected[prompt][1].ids))
                    done += 1
        finally:
            opened.close()
    progress(total, total, "done")
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows),
        card=card.card(params["device"]),
        notes=notes,
        figure={"kind": "own"},
    )


def _without(whole: ModelWeights, parts: str) -> ModelWeights:
    """The same weights with the bias of `parts` (letters of "qkv") at zero."""
    if not parts:
        return whole
    spec = whole.spec
    widths = [spec.q_dim, spec.kv_dim, spec.kv_dim]

    def layer(old: LayerWeights) -> LayerWeights:
        if isinstance(old.qkv_bias, tuple):  # CPU: three vectors, CUDA: one
            kept = tuple(
                torch.zeros_like(b) if name in parts else b
                for name, b in zip("qkv", old.qkv_bias, strict=True)
            )
        else:
            kept = old.qkv_bias.clone()
            for name, part in zip("qkv", kept.split(widths), strict=True):
                if name in parts:
                    part.zero_()
        return replace(old, qkv_bias=kept)

    return replace(whole, layers=tuple(map(layer, whole.layers)))


def _answer(
    opened: session.Session, weights: ModelWeights, prompt: str, new_tokens: int
) -> tuple[str, Result]:
    """Greedy text and ids of the session's model with these weights in it."""
    if opened.weights is not weights:
        opened.weights = weights
        if opened.graph:  # it holds the old layers' addresses
            opened.graph = capture_or_none(opened.state, weights)
    text, raw = PROMPTS[prompt]
    return session.answer(opened, opened.encode(text, raw), new_tokens)


def _row(text: str, result: Result, expected: list[int]) -> dict:
    ids = result.ids
    pairs = zip(ids, expected, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(expected)))
    return {
        "new": len(ids),
        "same": same,
        "distinct": len(set(ids)),
        "id_220": ids.count(OLD_ID),
        "stop": result.stop_reason,
        "first_ids": " ".join(map(str, ids[:SHOWN_IDS])),
        "text": text,
    }


def _sizes(weights: ModelWeights) -> str:
    """ "q 1.0 to 7.9, ...": the smallest and the largest rms of a layer."""
    spec = weights.spec
    widths = [spec.q_dim, spec.kv_dim, spec.kv_dim]
    sizes = []
    for layer in weights.layers:
        bias = layer.qkv_bias
        parts = bias if isinstance(bias, tuple) else bias.split(widths)
        sizes.append([float(part.square().mean().sqrt()) for part in parts])
    parts = zip("qkv", zip(*sizes, strict=True), strict=True)
    return ", ".join(f"{name} {min(s):.2g} to {max(s):.2g}" for name, s in parts)


def _loops(row: dict) -> bool:
    """Does one id, or a short phrase, make up most of the text?"""
    return row["distinct"] <= row["new"] / 3


def _verdict(rows: list[dict]) -> str:
    dropped = [r for r in rows if r["bias"] != KEPT]
    if not dropped:
        return f"The bias was kept in all {len(rows)} rows; nothing to compare."
    parts = []
    for way in dict.fromkeys(r["bias"] for r in dropped):
        own = [r for r in dropped if r["bias"] == way]
        first = sum(r["same"] == 0 for r in own)
        loops = sum(map(_loops, own))
        word = f" ({loops} in a loop)" if loops else ""
        parts.append(f"{first} of {len(own)} {way}{word}")
    every = [r for r in dropped if r["bias"] == NO_BIAS]
    spaces = sum(r["id_220"] for r in every)
    ok = [r["same"] == 0 and _loops(r) for r in every]
    ok += [r["same"] > 0 for r in dropped if r["bias"] == "without v"]
    old = ""
    if every:
        ids = sum(r["new"] for r in every)
        same = spaces > ids / 2
        old = (
            f" Old card, token {OLD_ID} for ever: {'the same here' if same else 'not here'}, "
            f"{spaces} of {ids} ids; wrong ids from the start: "
            f"{'the same here' if all(r['same'] == 0 for r in every) else 'not here'}."
        )
    words = f"{cases.held(all(ok))}: " if ok else ""
    found = f"texts that differ from the first id on: {', '.join(parts)}."
    return f"{words}{found if words else found.capitalize()}{old}"


def claims(plate) -> list[tuple[str, bool]]:
    """What must not change between runs."""
    rows = plate.rows
    found = []
    if asked := [r for r in rows if r["bias"] == KEPT and r["prompt"] == "question"]:
        right = all("Paris" in r["text"] for r in asked)
        found.append(("with its bias the model names Paris", right))
    for way in DROPPED:
        own = [r for r in rows if r["bias"] == way]
        if own and way == KEPT:
            found.append(("kept twice, the ids are the same", all(_repeats(r) for r in own)))
        elif own:
            found.append((f"{way}: the ids differ", not any(_repeats(r) for r in own)))
    if every := [r for r in rows if r["bias"] == NO_BIAS]:
        found.append((f"{NO_BIAS}: wrong from the first id", all(r["same"] == 0 for r in every)))
    return found


def _repeats(row: dict) -> bool:
    return row["same"] == row["new"]


def draw(plate, fig) -> None:
    """A panel per prompt: how many leading ids agree, as a bar, and how the text begins."""
    from .. import figure

    groups = list(dict.fromkeys((r["model"], r["prompt"]) for r in plate.rows))
    axes = cases.axes_grid(fig, len(groups), 1)
    longest = max(r["new"] for r in plate.rows)
    size = 12 if len(groups) < 3 else 10
    for ax, (model, prompt) in zip(axes, groups, strict=True):
        own = [r for r in plate.rows if (r["model"], r["prompt"]) == (model, prompt)]
        for y, r in enumerate(own):
            ax.barh(y, r["same"], 0.62, color="#0072B2" if r["bias"] == KEPT else "#E69F00")
            ax.annotate(
                f"{r['same']} of {r['new']}", (r["same"], y), (6, 0), va="center",
                textcoords="offset points", fontsize=size,
            )  # fmt: skip
            ax.annotate(
                _shown(r["text"]), (0.36, y), xycoords=("axes fraction", "data"), va="center",
                fontsize=size, color=figure.DARK if r["bias"] == KEPT else figure.GREY,
            )  # fmt: skip
        ax.set_yticks(range(len(own)), [r["bias"] for r in own])
        ax.set_ylim(len(own) - 0.5, -0.5)
        ax.set_xlim(0, 4.2 * longest)
        ax.set_title(f"{model}, {prompt}: {_shown(PROMPTS[prompt][0])}", loc="left")
        ax.grid(False)
        ax.spines["bottom"].set_visible(False)
        ax.set_xticks([])
    axes[-1].set_xlabel("leading ids that agree with the whole model [tokens], and the text",
                        loc="left")  # fmt: skip


def _shown(text: str, width: int = 66) -> str:
    """One line of at most `width` characters that the figure's font has."""
    words = " ".join(text.replace("\n", " ⏎ ").split())
    line = "".join(c if c.isprintable() and (ord(c) < 0x250 or c == "⏎") else "□" for c in words)
    return line if len(line) <= width else f"{line[: width - 1]}…"
