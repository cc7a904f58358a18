"""Hardware counters of the one-column kernels: which part of the card is busy while they run."""

from __future__ import annotations

from collections.abc import Callable

from ... import plan
from ...errors import DecodeError
from .. import cases, ncu
from ..plate import Measured, Missing
from .attention import kv_bytes

TITLE = "Counters: what is busy while one column is computed"
QUESTION = "Is the GEMV limited by memory, by shared memory, by issue slots, or by none of them?"
PREDICTION = (
    "On the widest matrix 165 MB in about 45 us are 3.7 TB/s, 75 to 80 % of the memory's peak. "
    "Each 16 x 256 panel needs about 86 shared-memory wavefronts (64 of them table look-ups), so "
    "LSU should stand near 70 %, issue near 45 %, tensor pipe under 20 %. Small matrices leave "
    "everything idle. The old card: occupancy 72 to 86 %, memory 50 % (23 % on o), tensor 0 %: "
    "its GEMV used CUDA cores; ours keeps few warps (one CTA of 18 here), occupancy under 40 %."
)
SHAPES = (*ncu.MATRICES, *ncu.ATTENTION_SHAPES)
PARAMS = {
    "kernel": ([], "kernels to profile, separated by commas; all if left out"),
    "shape": ([], "shapes, separated by commas; all that a kernel has if left out"),
}
TOGGLES = {"kernel": ("kernel", tuple(ncu.KERNELS)), "shape": ("shape", SHAPES)}
DEPENDS = ("nf4_gemv.cu", "nf4_gemm.cu", "ladder_gemv.cu", "attn.cu", "ladder_attn.cu", "*.cuh",
           "launch.h")  # fmt: skip
DEVICE = "cuda"
ERROR_LIMIT = 1e-3
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
    progress(0, 1, f"{len(targets)} kernels under ncu")
    rows = []
    for (kernel, shape), counted in zip(targets, ncu.collect(targets), strict=True):
        if not counted.error < ERROR_LIMIT:
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
        ],
        figure={"kind": "own"},
    )


def bytes_of(shape: str) -> float:
    """Bytes that a shape's kernel must read."""
    if shape in ncu.ATTENTION_SHAPES:
        return kv_bytes(plan.named_spec("qwen2.5-3b"), ncu.ATTENTION_SHAPES[shape])
    return cases.weight_bytes(*cases.SHAPES[shape])


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
    within = all(r["error"] < ERROR_LIMIT for r in plate.rows)
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
