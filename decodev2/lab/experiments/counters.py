"""Hardware counters of the kernels: which part of the card is busy while they run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import persistent, plan
from ...errors import DecodeError
from ...linear import has_wgmma
from .. import cases, ncu
from ..plate import Measured, Missing
from .attention import kv_bytes

TITLE = "Counters: what is busy while a kernel runs"
QUESTION = "Is the GEMV limited by memory, by shared memory, by issue slots, or by none of them?"
PREDICTION = (
    "On the widest matrix 165 MB in about 45 us are 3.7 TB/s, 75 to 80 % of the memory's peak. "
    "Each 16 x 256 panel needs about 86 shared-memory wavefronts (64 of them table look-ups), so "
    "LSU should stand near 70 %, issue near 45 %, tensor pipe under 20 %. Small matrices leave "
    "everything idle. The old card: occupancy 72 to 86 %, memory 50 % (23 % on o), tensor 0 %: "
    "its GEMV used CUDA cores; ours keeps few warps (one CTA of 18 here), occupancy under 40 %. "
    "One kernel for a token of the 3B shape has 5,700 panels a multiprocessor, 490,000 wavefronts: "
    "in 0.75 ms LSU is 37 % busy and memory 45 %; it waits the rest. 256 columns of a prompt: by "
    "warps the look-ups of each 64 columns bind, the tensor pipe stays under 40 %; by warpgroups "
    "it is over 50 % where the tiles fill the card (gate_proj: 86 of 132 multiprocessors)."
)
SHAPES = (*ncu.MATRICES, *ncu.ATTENTION_SHAPES, *ncu.PROMPT_SHAPES, *ncu.STEP_SHAPES)
PARAMS = {
    "kernel": ([], "kernels to profile, separated by commas; all if left out"),
    "shape": ([], "shapes, separated by commas; all that a kernel has if left out"),
}
TOGGLES = {"kernel": ("kernel", tuple(ncu.KERNELS)), "shape": ("shape", SHAPES)}
DEPENDS = ("nf4_gemv.cu", "nf4_gemm.cu", "nf4_wgmma.cu", "ladder_gemv.cu", "attn.cu",
           "ladder_attn.cu", "persistent.cu", "persistent.h", "*.cuh", "launch.h")  # fmt: skip
DEVICE = "cuda"
ONE, WGMMA, MMA = "one kernel a token", "prompt by wgmma", "prompt by mma"  # of ncu.KERNELS
PERCENT = ("occupancy", "dram", "lsu", "issue", "tensor")
COLUMNS = [
    {"name": "kernel", "unit": ""},
    {"name": "shape", "unit": ""},
    {"name": "us", "unit": "us"},
    *({"name": name, "unit": "%"} for name in PERCENT),
    {"name": "registers", "unit": "1"},
    {"name": "mb", "unit": "MB"},
    {"name": "dram_mb", "unit": "MB"},
    {"name": "error", "unit": "1"},
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per kernel and shape, from one run of ncu over one child process."""
    kernels = cases.chosen([str(k) for k in params["kernel"]], ncu.KERNELS, "kernel")
    shapes = cases.chosen([str(s) for s in params["shape"]], SHAPES, "shape")
    targets = [(k, s) for k in kernels for s in shapes if s in ncu.KERNELS[k].shapes]
    if not targets:
        known = ", ".join(ncu.KERNELS[kernels[0]].shapes)
        raise DecodeError(f"{kernels[0]} has no shape {shapes[0]}; it has {known}")
    ncu.find_ncu()
    read_rate = cases.begin("counters")
    left_out = {k: reason for k in kernels if (reason := _why_not(k))}
    targets = [target for target in targets if target[0] not in left_out]
    if not targets:
        raise DecodeError("; ".join(f"{k}: {reason}" for k, reason in left_out.items()))
    progress(0, 1, f"{len(targets)} kernels under ncu")
    rows = []
    for (kernel, shape), counted in zip(targets, ncu.collect(targets), strict=True):
        if not counted.error < ncu.KERNELS[kernel].limit:
            raise DecodeError(f"{kernel} of {shape} is off by {counted.error:.2e}")
        found = {n: Missing("ncu has no such counter here") if v is None else v
                 for n, v in counted.metrics.items()}  # fmt: skip
        n_bytes = found.pop("dram_bytes")
        rows.append(
            {"kernel": kernel, "shape": shape, "mb": bytes_of(shape) / 1e6, "error": counted.error}
            | found
            | {"dram_mb": n_bytes if isinstance(n_bytes, Missing) else n_bytes / 1e6}
        )
    progress(1, 1, "done")
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows),
        card=cases.end(read_rate),
        notes=[
            "ncu replays a kernel for each group of counters, with caches flushed before each "
            "replay; clocks are left alone. Its times are of one cold launch, longer than in a "
            "graph: not a rate to quote.",
            "occupancy: warps in flight of what the card can hold. dram: of the memory's peak. "
            "lsu: shared and L1 wavefronts of one per clock. issue: issue slots used. tensor: "
            "tensor pipe busy. dram_mb: bytes that memory delivered, beside mb, those of the "
            "weights or of keys and values.",
            *(f"{kernel} was left out: {reason}." for kernel, reason in left_out.items()),
        ],
        figure={"kind": "own"},
    )


def _why_not(kernel: str) -> str | None:
    """Why this card cannot run it."""
    if kernel == ONE:
        return persistent.why_not(plan.named_spec("qwen2.5-3b"))
    if kernel == WGMMA and not has_wgmma(torch.device("cuda", 0)):
        return "needs sm_90"
    return None


def bytes_of(shape: str) -> float:
    """Bytes that a shape's kernel must read."""
    spec = plan.named_spec("qwen2.5-3b")
    if shape in ncu.ATTENTION_SHAPES:
        return kv_bytes(spec, ncu.ATTENTION_SHAPES[shape])
    if shape in ncu.STEP_SHAPES:
        matrices = [s for name, s in plan.tensor_shapes(spec).items() if len(s) == 2]
        keys = kv_bytes(spec, ncu.STEP_SHAPES[shape] + 1)
        return sum(cases.weight_bytes(*s) for s in matrices) + spec.n_layers * keys
    return cases.weight_bytes(*cases.SHAPES[ncu.PROMPT_SHAPES.get(shape, shape)])


# ---- what it says ----


def _verdict(rows: list[dict]) -> str:
    def known(row: dict, *names: str) -> bool:
        return all(not isinstance(row[name], Missing) for name in names)

    words = []
    by_shape = {r["shape"]: r for r in rows if r["kernel"] == "gemv"}
    wide, small = by_shape.get("lm_head"), by_shape.get("o_proj")
    if wide and known(wide, *PERCENT):
        ok = wide["dram"] >= 70 and wide["occupancy"] < 40
        words.append(
            f"on lm_head the GEMV keeps memory {wide['dram']:.0f} % busy, LSU {wide['lsu']:.0f}, "
            f"issue slots {wide['issue']:.0f}, the tensor pipe {wide['tensor']:.0f}, with "
            f"{wide['occupancy']:.0f} % of the warps ({cases.held(ok).lower()})"
        )
    if small and known(small, "dram"):
        words.append(f"on o_proj memory is {small['dram']:.0f} % busy (old card 23)")
    found = [r["occupancy"] for r in by_shape.values() if known(r, "occupancy")]
    if found:
        high = max(found)
        words.append(
            f"its occupancy is {min(found):.0f} to {high:.0f} % where the old card's was 72 to 86"
            + (", so warps in flight are not what makes it fast" if high < 72 else "")
        )
    (step,) = [r for r in rows if r["kernel"] == ONE] or [None]
    if step and known(step, "dram", "lsu", "issue"):
        words.append(
            f"one kernel for a token keeps memory {step['dram']:.0f} % busy, LSU "
            f"{step['lsu']:.0f}, issue slots {step['issue']:.0f}"
        )
    tensor = {(r["kernel"], r["shape"]): r["tensor"] for r in rows if known(r, "tensor")}
    for shape in ncu.PROMPT_SHAPES:
        if (WGMMA, shape) in tensor and (MMA, shape) in tensor:
            words.append(
                f"{shape}: the tensor pipe is {tensor[WGMMA, shape]:.0f} % busy by warpgroups, "
                f"{tensor[MMA, shape]:.0f} by warps"
            )
    if not words:
        words = [
            f"{r['kernel']} on {r['shape']}: "
            + ", ".join(f"{n} {r[n]:.0f} %" for n in PERCENT if known(r, n))
            for r in rows
        ]
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card and in every run."""
    rows = {(r["kernel"], r["shape"]): r for r in plate.rows}
    found = []
    small, large = rows.get(("gemv", "o_proj")), rows.get(("gemv", "lm_head"))
    if small and large and None not in (small["dram"], large["dram"]):
        text = "gemv: lm_head keeps the memory busier than o_proj"
        found.append((text, large["dram"] > small["dram"]))
    if large and large["dram_mb"] is not None:
        text = "gemv: lm_head's weights are read from memory once, within 5 %"
        found.append((text, abs(large["dram_mb"] / large["mb"] - 1) < 0.05))
    busiest = [r[n] for (kernel, _), r in rows.items() if kernel == "gemv" for n in PERCENT]
    if busiest and None not in busiest:
        text = "gemv: nothing is more than nine tenths busy on any shape"
        found.append((text, max(busiest) < 90))
    plain = rows.get(("row-major, table in shared", "lm_head"))
    if plain and large and None not in (plain["dram"], plain["issue"], large["dram"]):
        text = "row-major rung on lm_head: issue slots are busier than memory"
        found.append((text, plain["issue"] > plain["dram"]))
        text = "lm_head: the gemv keeps memory busier than the row-major rung does"
        found.append((text, large["dram"] > plain["dram"]))
    step = next((r for r in plate.rows if r["kernel"] == ONE), None)
    if step and step["dram_mb"] is not None:
        text = "one kernel a token: its weights are read from memory once, within 5 %"
        found.append((text, abs(step["dram_mb"] / step["mb"] - 1) < 0.05))
    pairs = [(rows[WGMMA, s]["tensor"], rows[MMA, s]["tensor"]) for s in ncu.PROMPT_SHAPES
             if (WGMMA, s) in rows and (MMA, s) in rows]  # fmt: skip
    if pairs and all(None not in pair for pair in pairs):
        text = "256 columns: warpgroups keep the tensor pipe busier than warps do"
        found.append((text, all(by_groups > by_warps for by_groups, by_warps in pairs)))
    within = all(r["error"] < ncu.KERNELS[r["kernel"]].limit for r in plate.rows)
    return [*found, ("every profiled launch computed the right result", within)]


def draw(plate, fig) -> None:
    """A heat map: kernels and shapes down, counters across, the number in each cell."""
    ax = fig.subplots()
    rows = plate.rows
    values = [[float("nan") if r[n] is None else r[n] for n in PERCENT] for r in rows]
    ax.imshow(values, cmap="Blues", vmin=0, vmax=130, aspect="auto")
    size = 11.5 if len(rows) > 14 else 13
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            known = value == value
            shade = "white" if known and value > 75 else "#222222"
            ax.text(x, y, f"{value:.0f} %" if known else "no counter", ha="center", va="center",
                    fontsize=size, color=shade)  # fmt: skip
        us = rows[y]["us"]
        ax.text(len(PERCENT) - 0.42, y, "-" if us is None else f"{us:,.1f} us", ha="left",
                va="center", fontsize=size)  # fmt: skip
    ax.set_xlim(-0.5, len(PERCENT) + 0.1)
    names = ("occupancy", "memory", "LSU (shared, L1)", "issue slots", "tensor pipe")
    ax.set_xticks(range(len(PERCENT)), names)
    ax.tick_params(axis="both", length=0)
    ax.set_yticks(range(len(rows)), [f"{r['kernel']}, {r['shape']}" for r in rows], fontsize=size)
    ax.grid(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.set_xlabel("share of what the card could do [%]; at the right the launch's time under ncu")
