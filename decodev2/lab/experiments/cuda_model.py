"""A real packed model on CUDA: ids against the CPU executor, many replays, tokens per second."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict

import torch

from ... import gates, session
from ...errors import DecodeError
from .. import card, models
from ..plate import Measured

TITLE = "A real model on CUDA: the same ids as the CPU, and how fast"
QUESTION = "Does the captured step choose the CPU executor's ids on a real checkpoint, for ever?"
PREDICTION = (
    "The same ids for 64 tokens, or a near tie that the measured logit difference explains; 10,000 "
    "replays over many resets repeat them and grow no memory."
)
PARAMS = {
    "models": ("models", "folder holding HF folders with their .chr"),
    "only": ([], "names of models, separated by commas; all if left out"),
    "replays": (gates.REPLAYS, "graph replays of the endurance row"),
    "new_tokens": (256, "ids of the timed run, end tokens ignored"),
    "runs": (5, "timed runs"),
}
DEPENDS = ("*.cu", "*.cuh", "*.h", "*_binding.cpp")
DEVICE = "cuda"
COLUMNS = [
    {"name": "model", "unit": ""},
    {"name": "gate", "unit": ""},
    {"name": "kernels", "unit": ""},
    {"name": "measured", "unit": "1"},
    {"name": "limit", "unit": "1"},
    {"name": "ok", "unit": ""},
    {"name": "note", "unit": ""},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """The rows of `gates.run_model` and one of speed per model."""
    if not torch.cuda.is_available():
        raise DecodeError("cuda_model needs a CUDA device")
    found = models.find(params["models"], params["only"])
    rows, speeds = [], []
    for index, model in enumerate(found):
        progress(index, len(found), model.name)
        for row in gates.run_model(str(model.folder), str(model.chr), params["replays"]):
            rows.append(asdict(row) | {"model": model.name})
        speed = _tok_s(model, params["new_tokens"], params["runs"])
        speeds.append(f"{model.name} {speed:.0f} tok/s")
        rows.append(
            {
                "model": model.name, "gate": f"host tok/s over {params['new_tokens']} ids",
                "kernels": "gemv, graph", "measured": speed, "limit": 0, "ok": True, "note": "",
            }
        )  # fmt: skip
        torch.cuda.empty_cache()
    failed = [row for row in rows if not row["ok"]]
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=f"{'FAILED' if failed else 'Passed'}, {len(rows)} rows; {', '.join(speeds)}.",
        card=card.card("cuda"),
    )


def _tok_s(model, new_tokens: int, runs: int) -> float:
    """Median decode rate seen by the host, prompt excluded."""
    opened = session.open_session(model.folder, model.chr, device="cuda", max_seq=1024)
    prompt = opened.encode(gates.SHORT)
    rates = [opened.generate(prompt, new_tokens, True).decode_tok_s for _ in range(runs + 1)]
    opened.close()
    return statistics.median(rates[1:])
