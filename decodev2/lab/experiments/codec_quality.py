"""What NF4 costs in accuracy: error of every packed tensor against the checkpoint it came from."""

from __future__ import annotations

import math
from collections.abc import Callable

from ... import pack
from ...errors import ContainerError
from .. import models
from ..plate import Measured, Missing

TITLE = "What NF4 costs: error of packed weights by kind of tensor"
QUESTION = "How far are packed weights from the checkpoint's, by kind of tensor, and at what size?"
PREDICTION = (
    "Relative rmse 0.092 where a group of 64 weights is Gaussian, up to 0.105 where its tails are "
    "heavier (Laplace, Student t); 0.531 bytes per weight when the width is a multiple of 64."
)
PARAMS = {
    "models": ("models", "folder holding HF folders with their .chr"),
    "only": ([], "names of models, separated by commas; all if left out"),
}
TOGGLES = {"model": ("only", ("qwen2.5-coder-0.5b", "smollm2-135m"))}
DEPENDS = ()
DEVICE = "cpu"
BYTES_PER_WEIGHT = 4.25 / 8
WORST_REL_RMSE = 0.125  # an eighth: no kind of a trained matrix may be further off
GAUSSIAN_REL_RMSE = 0.0919  # simulated: 4000 groups of 64 standard normal weights

COLUMNS = [
    {"name": "model", "unit": ""},
    {"name": "kind", "unit": ""},
    {"name": "codec", "unit": ""},
    {"name": "tensors", "unit": "tensors"},
    {"name": "weights", "unit": "weights"},
    {"name": "bytes_per_weight", "unit": "B"},
    {"name": "rmse", "unit": "1"},
    {"name": "rel_rmse", "unit": "1"},
    {"name": "max_abs", "unit": "1"},
]
# In the order of the data path; kinds that are not here follow by name.
_KIND_ORDER = ("embed", "q", "k", "v", "o", "gate", "up", "down", "lm_head", "other", "norm")


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per model and kind: rmse over all weights of the kind, relative to their rms."""
    found = models.find(params["models"], params["only"])
    rows = []
    for index, model in enumerate(found):
        progress(index, len(found), model.name)
        tensors = pack.verify(model.chr, model.folder)
        for fault in (t["fault"] for t in tensors if t["fault"]):
            raise ContainerError(f"{model.name}: {fault}")
        kinds = {(t["kind"], t["codec"]) for t in tensors}
        for kind, codec in sorted(kinds, key=_order):
            own = [t for t in tensors if (t["kind"], t["codec"]) == (kind, codec)]
            rows.append({"model": model.name, "kind": kind, "codec": codec, **_summary(own)})
    progress(len(found), len(found), "done")
    packed = [row for row in rows if row["codec"] == "nf4"]
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(packed),
        figure={
            "kind": "bars",
            "value": "rel_rmse",
            "label": "model",
            "group": "kind",
            "axis": "rmse of packed weights / rms of the original weights",
            "floor": GAUSSIAN_REL_RMSE,
            "floor_text": "Gaussian weights",
            "also": ["bytes_per_weight"],
        },
    )


def claims(plate) -> list[tuple[str, bool]]:
    """What holds for every checkpoint whose widths are multiples of 64."""
    packed = [row for row in plate.rows if row["codec"] == "nf4"]
    kept = [row for row in plate.rows if row["codec"] != "nf4"]
    errors = [row["rel_rmse"] for row in packed if row["rel_rmse"] is not None]
    return [
        ("every packed kind takes 4.25 bits per weight",
         all(abs(row["bytes_per_weight"] - BYTES_PER_WEIGHT) < 1e-9 for row in packed)),
        ("norms and biases are kept as they are", all(row["rmse"] == 0 for row in kept)),
        ("every packed kind is off by less than an eighth of its rms",
         bool(errors) and max(errors) < WORST_REL_RMSE),
        ("none is nearer than Gaussian weights by more than a tenth",
         bool(errors) and min(errors) > 0.9 * GAUSSIAN_REL_RMSE),
    ]  # fmt: skip


def _order(pair: tuple[str, str]) -> tuple:
    kind, codec = pair
    place = _KIND_ORDER.index(kind) if kind in _KIND_ORDER else len(_KIND_ORDER)
    return (codec != "nf4", place, kind)


def _summary(tensors: list[dict]) -> dict:
    """One row over several `pack.verify` rows; errors are pooled over weights, not over tensors."""
    weights = [math.prod(t["shape"]) for t in tensors]
    squares = sum(t["rmse"] ** 2 * n for t, n in zip(tensors, weights, strict=True))
    # An all-zero tensor has no relative error (None) and adds nothing to the energy.
    energy = sum(
        (t["rmse"] / t["rel_rmse"]) ** 2 * n
        for t, n in zip(tensors, weights, strict=True)
        if t["rel_rmse"]
    )
    if all(t["rel_rmse"] is None for t in tensors):
        relative = Missing("all weights are zero")
    else:
        relative = math.sqrt(squares / energy) if squares else 0.0
    return {
        "tensors": len(tensors),
        "weights": sum(weights),
        "bytes_per_weight": sum(t["bytes"] for t in tensors) / sum(weights),
        "rmse": math.sqrt(squares / sum(weights)),
        "rel_rmse": relative,
        "max_abs": max(t["max_abs"] for t in tensors),
    }


def _verdict(packed: list[dict]) -> str:
    known = [row for row in packed if not isinstance(row["rel_rmse"], Missing)]
    if not known:
        return "No packed matrix with non-zero weights was found."
    low = min(known, key=lambda row: row["rel_rmse"])
    high = max(known, key=lambda row: row["rel_rmse"])
    inside = 0.9 * GAUSSIAN_REL_RMSE <= low["rel_rmse"] and high["rel_rmse"] <= 0.105
    size = sum(r["bytes_per_weight"] * r["weights"] for r in packed)
    size /= sum(r["weights"] for r in packed)
    return (
        f"{'As predicted' if inside else 'Not as predicted'}: relative rmse from "
        f"{low['rel_rmse']:.4f} ({low['model']} {low['kind']}) to {high['rel_rmse']:.4f} "
        f"({high['model']} {high['kind']}), {size:.3f} bytes per packed weight."
    )
