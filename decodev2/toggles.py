"""The switches of the CUDA step: which kernel stands behind an op. Ablations and widgets turn them.

They are read when an op is launched, so a captured step keeps the kernels it was captured with; a
chunk of a prompt is captured anew when they are turned (`graph.ChunkGraph`).
`CHR_NF4_DECODE=mma|gemv|rows` sets `linear`; `CHR_NF4_GEMV_NR` is what `nr` auto takes if set.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from .errors import DecodeError

CHOICES = {
    # products of one column: the prefill kernel, the GEMV, or the rungs on row-major weights
    "linear": ("mma", "gemv", "rows"),
    # products of a chunk of the prompt: by warps, or by the warpgroup instructions of sm_90a where
    # the card has them and the chunk is wide enough (linear.WGMMA_FROM), elsewhere still by warps
    "prefill": ("wgmma", "mma"),
    "gemv": ("auto", "direct", "ring8x2", "ring16x4", "ring16x3"),
    "norm": ("inside", "alone"),  # RMSNorm inside the product that reads it, or its own kernel
    "attention": ("one_launch", "two_launch", "one_warp", "sdpa", "rope_apart"),
    # what the product of gate and up hands to the one of down: act as half, as that one reads it,
    # or act itself; one column by the GEMV and chunks by wgmma can do both
    "act": ("half", "float"),
    "attended": ("half", "float"),  # the same of attention for the product of o, by the GEMV only
    "pdl": (True, False),  # programmatic dependent launch
    # what kernels do with it before the one ahead has ended: the GEMV brings weights and builds its
    # table, attention asks for keys and values; or nothing
    "ahead": ("weights", "nothing"),
    # of `rows` only (ladder.py): where the levels live, rows that share x, x staged whole, and
    # q, k, v or gate, up in one launch or several
    "table": ("lut_constant", "lut_shared", "lut_shuffle", "lut_byte_permute", "lut_pair"),
    "nr": ("auto", 1, 2, 4, 8),
    "stage_x": (False, True),
    "parts": ("fused", "separate"),
}


@dataclass
class Toggles:
    linear: str = "mma"
    prefill: str = "wgmma"
    gemv: str = "auto"
    norm: str = "inside"
    attention: str = "one_launch"
    act: str = "half"
    attended: str = "half"
    pdl: bool = True
    ahead: str = "weights"
    table: str = "lut_shared"
    nr: int | str = "auto"
    stage_x: bool = False
    parts: str = "fused"

    def set(self, name: str, value) -> None:
        """Turn one switch. Raises DecodeError naming the choices."""
        if name not in CHOICES:
            raise DecodeError(f"toggle {name!r} is unknown; there are {', '.join(CHOICES)}")
        if value not in CHOICES[name]:
            known = ", ".join(map(str, CHOICES[name]))
            raise DecodeError(f"{name} is {value!r}, needs one of {known}")
        setattr(self, name, value)


def _from_environment() -> Toggles:
    chosen = Toggles()
    backend = os.environ.get("CHR_NF4_DECODE")
    if backend:
        if backend not in CHOICES["linear"]:
            known = ", ".join(CHOICES["linear"])
            raise DecodeError(f"CHR_NF4_DECODE is {backend!r}, needs one of {known}")
        chosen.set("linear", backend)
    return chosen


current = _from_environment()


@contextlib.contextmanager
def using(**changes) -> Iterator[Toggles]:
    """Turn switches for the length of a `with` block."""
    before = asdict(current)
    try:
        for name, value in changes.items():
            current.set(name, value)
        yield current
    finally:
        for field in fields(current):
            setattr(current, field.name, before[field.name])
