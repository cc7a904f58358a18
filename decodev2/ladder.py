"""The GEMV rungs: every idea the lab log tried at one column, still runnable and named.

They work on plain row-major `.chr` data, so that a rung differs from its neighbour in one idea and
not in a layout; kernels: `csrc/ladder_gemv.cu`. They run alone (`gemv`, `qkv`, `gate_up`), and a
whole step runs on them (the `step_*` functions) where the weights were loaded with layout "rows"
and the backend is `rows`. The product that the step uses otherwise is `linear.py`; the log's first
experiment, tensor cores at one column, is its backend `mma`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from . import native, toggles
from .errors import DecodeError
from .nf4 import Packed, padded
from .plan import GROUP
from .upload import upload

TABLES = toggles.CHOICES["table"]
ROWS_SHARING_X = (1, 2, 4, 8)
MANY_ROWS = 4096  # from here on the grid fills the card with four rows per CTA
QKV_WAYS = ("separate", "fused", "concatenated")
GATE_UP_WAYS = QKV_WAYS


@dataclass(frozen=True)
class RowMajor:
    """W [rows, cols] as the file has it: codes uint8 [rows, K_pad / 2], scales float16 [rows,
    K_pad / 64]."""

    codes: torch.Tensor
    scales: torch.Tensor
    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __post_init__(self):
        width = padded(self.cols)
        for name, found, needed in (
            ("codes", self.codes.shape, (self.rows, width // 2)),
            ("scales", self.scales.shape, (self.rows, width // GROUP)),
        ):
            if tuple(found) != needed:
                raise DecodeError(
                    f"{self.rows} x {self.cols}: {name} are {list(found)}, need {list(needed)}"
                )


def from_packed(packed: Packed, device: torch.device | str) -> RowMajor:
    """One matrix on `device`, its bytes in the order of the file."""
    codes, scales = (upload(part, device) for part in (packed.codes, packed.scales))
    return RowMajor(codes, scales, *packed.shape)


def concatenate(parts: Sequence[RowMajor]) -> RowMajor:
    """Matrices of one width row on row, as a second copy of their bytes (what the log's fourth
    experiment paid for)."""
    _same_width(parts)
    codes, scales = (torch.cat([getattr(p, n) for p in parts]) for n in ("codes", "scales"))
    return RowMajor(codes, scales, len(codes), parts[0].cols)


def pick_nr(rows: int) -> int:
    """Rows that share each x: `CHR_NF4_GEMV_NR`, else 4 from 4096 rows on and 1 below."""
    wanted = os.environ.get("CHR_NF4_GEMV_NR")
    if not wanted:
        return 4 if rows >= MANY_ROWS else 1
    if wanted not in map(str, ROWS_SHARING_X):
        raise DecodeError(f"CHR_NF4_GEMV_NR is {wanted!r}, needs 1, 2, 4 or 8")
    return int(wanted)


def gemv(
    x: torch.Tensor,
    w: RowMajor | Sequence[RowMajor],
    y: torch.Tensor,
    table: str = "lut_shared",
    split_k: bool = True,
    stage_x: bool = False,
    nr: int | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    load_bytes: int | None = None,
    swiglu: bool = False,
) -> None:
    """y = W x (+ bias) (+ residual, which may be y). x float32 [cols], y float32 [rows].

    w         one matrix, or up to three of one width in one grid, one after the other in y
    table     where the 16 levels live, one of `TABLES`
    split_k   four warps share the K of a row; else one warp a row
    stage_x   copy all of x into shared memory first (needs split_k); else read it from global
              memory per use
    nr        rows that share each x they load: 1, 2, 4 or 8; None is `pick_nr`
    norm      [cols]: every CTA finds the RMS of x for itself and norms on the way in
    load_bytes  4 or 16 bytes of codes per load; None chooses by alignment, K and `stage_x`
    swiglu    w is gate and up, y = silu(gate x) * (up x)
    """
    w = [w] if isinstance(w, RowMajor) else list(w)
    _same_width(w)
    if table not in TABLES:
        raise DecodeError(f"table is {table!r}, needs one of {', '.join(TABLES)}")
    if nr is None:
        nr = pick_nr(y.numel())
    if nr not in ROWS_SHARING_X:
        raise DecodeError(f"nr is {nr!r}, needs 1, 2, 4 or 8")
    if load_bytes not in (None, 4, 16):
        raise DecodeError(f"load_bytes is {load_bytes!r}, needs 4 or 16")
    if stage_x and not split_k:
        raise DecodeError("stage_x needs split_k")
    if swiglu and (table != "lut_shared" or not split_k or stage_x):
        raise DecodeError("fused gate_up has only table lut_shared, split_k and no stage_x")
    if x.numel() != w[0].cols:
        raise DecodeError(f"x has {x.numel()} elements, the matrix needs {w[0].cols}")
    if not x.is_cuda:
        raise DecodeError(f"x is on {x.device}, the GEMV rungs need a CUDA device")
    native.cuda("ladder_gemv").gemv(
        x, [p.codes for p in w], [p.scales for p in w], y, swiglu, norm, eps, bias, residual,
        TABLES.index(table), nr, split_k, stage_x, load_bytes or 0,
    )  # fmt: skip


def qkv(
    x: torch.Tensor,
    w: Sequence[RowMajor],
    y: torch.Tensor,
    how: str = "fused",
    bias: torch.Tensor | None = None,
    **options,
) -> None:
    """y [rows of q + k + v] = the three products, and `bias` [the same] if it is not forgotten.

    how  separate      three launches
         fused         one grid over the rows of all three; `w` stays three matrices
         concatenated  one launch over `w` = [concatenate([q, k, v])]
    Options are those of `gemv` but `residual`.
    """
    _refuse(options, "qkv", "residual")
    if _parts(how, QKV_WAYS, w, 3) != "separate":
        return gemv(x, w, y, bias=bias, **options)
    start = 0
    for part in w:
        rows = slice(start, start + part.rows)
        gemv(x, part, y[rows], bias=None if bias is None else bias[rows], **options)
        start += part.rows


def gate_up(
    x: torch.Tensor,
    w: Sequence[RowMajor],
    y: torch.Tensor,
    how: str = "fused",
    scratch: torch.Tensor | None = None,
    **options,
) -> None:
    """y [units] = silu(gate x) * (up x).

    how  separate      two products into `scratch` [2 * units], then a launch for silu
         fused         one launch, a gate row and its up row side by side
         concatenated  one product over `w` = [concatenate([gate, up])] into `scratch`, then silu
    Options are those of `gemv` but `bias` and `residual`; fused has the defaults of `table`,
    `split_k` and `stage_x` only.
    """
    _refuse(options, "gate_up", "bias", "residual")
    if _parts(how, GATE_UP_WAYS, w, 2) == "fused":
        return gemv(x, w, y, swiglu=True, **options)
    if scratch is None:
        raise DecodeError(f"gate_up {how} needs scratch of {2 * y.numel()} floats, found none")
    units = y.numel()
    halves = [scratch] if how == "concatenated" else [scratch[:units], scratch[units:]]
    for part, half in zip(w, halves, strict=True):
        gemv(x, part, half, **options)
    native.cuda("ladder_gemv").silu_multiply(scratch, y)


# ---- the operations of a step on row-major weights, as `toggles` say ----


def step_product(x, w: RowMajor, y, **tensors) -> None:
    """y = W x (one column); `tensors` are those of `gemv`."""
    gemv(x, w, y, **_options(), **tensors)


def step_qkv(x, w: tuple[RowMajor, ...], y, **tensors) -> None:
    """y = q, k, v of one column; `w` is three matrices, or their concatenated copy."""
    qkv(x, w, y, _way(w), **_options(), **tensors)


def step_swiglu(x, w: tuple[RowMajor, ...], y, scratch: torch.Tensor, **tensors) -> None:
    """y = silu(gate x) * (up x) of one column. scratch: bytes, at least 8 per unit. The fused
    kernel exists for levels in shared memory and split K; other tables take two launches."""
    options, way = _options(), _way(w)
    if way == "fused" and options["table"] != "lut_shared":
        way = "separate"
    if way == "fused":
        options["stage_x"] = False
    floats = scratch[: 8 * y.numel()].view(torch.float32)
    gate_up(x, w, y, way, floats, **options, **tensors)


def _options() -> dict:
    t = toggles.current
    split_k = t.table != "lut_constant"  # the log's first table had one warp a row
    stage_x = t.stage_x or t.table == "lut_pair"  # its CTAs stay for many rows
    return {
        "table": t.table,
        "split_k": split_k,
        "stage_x": stage_x,
        "nr": None if t.nr == "auto" else t.nr,
    }


def _way(w: tuple[RowMajor, ...]) -> str:
    return "concatenated" if len(w) == 1 else toggles.current.parts


def sdpa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    valid_len: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """torch's attention of one column over the whole cache, its dead tail masked: the log's sixth
    experiment. q, out float32 [1, n_q * head_dim] after RoPE, caches bf16 [max_seq, n_kv,
    head_dim]. torch allocates its intermediates: inside a graph they lie in the graph's pool."""
    slots, _, head_dim = k_cache.shape
    live = torch.arange(slots, device=q.device) < valid_len
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.view(1, -1, 1, head_dim).to(k_cache.dtype),
        k_cache.transpose(0, 1)[None],
        v_cache.transpose(0, 1)[None],
        attn_mask=live.view(1, 1, 1, slots),
        enable_gqa=True,
    )
    out.copy_(attended.view(1, -1))


def _same_width(parts: Sequence[RowMajor]) -> None:
    widths = {p.cols for p in parts}
    if len(widths) != 1:
        raise DecodeError(f"matrices have {sorted(widths)} columns, need one width")


def _refuse(options: dict, op: str, *names: str) -> None:
    for name in names:
        if options.get(name) is not None:
            raise DecodeError(f"{op} has no {name}")


def _parts(how: str, ways: Sequence[str], w: Sequence[RowMajor], separate: int) -> str:
    if how not in ways:
        raise DecodeError(f"how is {how!r}, needs one of {', '.join(ways)}")
    needed = 1 if how == "concatenated" else separate
    if len(w) != needed:
        raise DecodeError(f"{how} needs {needed} matrices, found {len(w)}")
    return how


# ---- the rungs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """One idea. `log` is its number in the lab log, or "" for one tried here first; `op` is `gemv`,
    `qkv` or `gate_up` and `options` what it is called with. `norm` and `bias` say that the caller
    passes those tensors."""

    name: str
    log: str
    idea: str
    op: str = "gemv"
    options: dict = field(default_factory=dict)
    norm: bool = False
    bias: bool = False


def _one(**options) -> dict:
    return {"nr": 1, **options}


RUNGS = (
    Rung("lut_constant", "2", "levels in __constant__ memory, one warp a row",
         options=_one(table="lut_constant", split_k=False)),
    Rung("lut_shared", "3", "levels in shared memory, one warp a row",
         options=_one(split_k=False)),
    Rung("split_k", "3", "four warps share the K of a row", options=_one()),
    Rung("x_staged", "3b", "all of x in shared memory", options=_one(stage_x=True)),
    Rung("qkv_separate", "4", "three launches", "qkv", _one(how="separate"), bias=True),
    Rung("qkv_concatenated", "4", "one launch over a copy of q, k and v", "qkv",
         _one(how="concatenated"), bias=True),
    Rung("gate_up_separate", "4", "two launches, then silu", "gate_up", _one(how="separate")),
    Rung("gate_up_concatenated", "4", "one launch over a copy of gate and up, then silu", "gate_up",
         _one(how="concatenated")),
    Rung("qkv_without_bias", "5", "one grid over q, k and v, their bias forgotten", "qkv",
         _one(how="fused")),
    Rung("gate_up_fused", "5", "gate, up and silu in one launch", "gate_up", _one(how="fused")),
    Rung("qkv_fused", "5b", "one grid over q, k and v, bias inside", "qkv", _one(how="fused"),
         bias=True),
    Rung("rms_inside", "10", "every CTA norms x for itself", options=_one(), norm=True),
    Rung("two_rows", "11", "two rows share x", options={"nr": 2}),
    Rung("rows_by_size", "12", "four rows share x from 4096 rows on, else one"),
    Rung("gate_up_rows_by_size", "12", "the same for pairs of gate and up rows", "gate_up",
         {"how": "fused"}),
    Rung("eight_rows", "", "eight rows share x", options={"nr": 8}),
    Rung("lut_shuffle", "", "one level per lane, fetched by shuffle",
         options={"table": "lut_shuffle"}),
    Rung("lut_byte_permute", "", "levels in registers, fetched by byte permutes",
         options={"table": "lut_byte_permute"}),
    Rung("lut_pair", "", "both levels of a byte at once, a private table per bank, x staged",
         options={"table": "lut_pair", "stage_x": True}),
)  # fmt: skip

OPS = {"gemv": gemv, "qkv": qkv, "gate_up": gate_up}


def run_rung(rung: Rung, x: torch.Tensor, w: Sequence[RowMajor], y: torch.Tensor, **tensors):
    """Call one rung: `w` is [W], [q, k, v] or [gate, up], or for the concatenated rungs their
    copy; `tensors` are `norm` and `eps`, `bias`, `scratch`, `residual`."""
    matrix = w[0] if rung.op == "gemv" else w
    OPS[rung.op](x, matrix, y, **rung.options, **tensors)
