"""Hardware counters by Nsight Compute: one `ncu` run over a child process, its CSV parsed.

The child (`python -m decodev2.lab.ncu OUT KERNEL:SHAPE ...`) launches each target's kernel exactly
once while it lets ncu look, checks the result and writes the errors as JSON; `collect` pairs them
with the CSV's rows.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from .. import ladder, load, native, ops, panels, persistent, plan, state, step, synth, toggles
from ..errors import DecodeError
from ..linear import cuda_product, cuda_scratch_bytes
from ..nf4 import Packed, decode_nf4
from .card import PROJECT
from .cases import SHAPES, random_weights

TIMEOUT_S = 300
CHECKED_ROWS = 1024  # of a matrix: the whole head in float64 would take longer than its profile
ATTENTION_SHAPES = {"3B at 100": 100, "3B at 2000": 2000}
PROMPT_COLUMNS = 256
PROMPT_SHAPES = {f"{name} x {PROMPT_COLUMNS}": name for name in ("gate_proj", "down_proj")}
STEP_SHAPES = {"3B step at 100": 100}
MAX_SEQ = 2048

# What is asked of ncu, by our name: the first one that this chip has is taken.
METRICS = {
    "us": ("gpu__time_duration.sum",),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "dram": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "tensor": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "lsu": (
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
        "l1tex__lsuin_requests.avg.pct_of_peak_sustained_elapsed",
    ),
    "issue": ("sm__inst_issued.avg.pct_of_peak_sustained_active",),
    "dram_bytes": ("dram__bytes_read.sum",),
    "registers": ("launch__registers_per_thread",),
}
# Powers of ten of the units that ncu may print a time or an amount in, to us and to bytes.
_SCALES = {
    "nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3,
    "second": 1e6, "s": 1e6, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """How a target is launched: `name` is a pattern of the kernel's C++ name, `limit` what its
    result may be off by."""

    name: str
    switches: dict
    shapes: tuple[str, ...]
    limit: float = 1e-3


MATRICES = ("o_proj", "down_proj", "gate_proj", "lm_head")
KERNELS = {
    "gemv": Kernel("gemv_(ring|direct)", {"linear": "gemv"}, MATRICES),
    "gemv, direct loads": Kernel("gemv_direct", {"linear": "gemv", "gemv": "direct"}, MATRICES),
    "mma": Kernel("nf4_gemm", {"linear": "mma"}, MATRICES),
    "row-major, table in shared": Kernel("ladder_gemv_kernel", {}, MATRICES),
    "attention": Kernel("attn_decode_kernel", {"attention": "one_launch"}, tuple(ATTENTION_SHAPES)),
    "attention, one warp": Kernel(
        "attn_one_warp_kernel", {"attention": "one_warp"}, tuple(ATTENTION_SHAPES)
    ),
    "prompt by mma": Kernel("nf4_gemm", {"prefill": "mma"}, tuple(PROMPT_SHAPES)),
    "prompt by wgmma": Kernel("nf4_wgmma", {"prefill": "wgmma"}, tuple(PROMPT_SHAPES)),
    # after many layers, beside the logits of the step by its kernels
    "one kernel a token": Kernel("persistent_step", {}, tuple(STEP_SHAPES), 2e-2),
}


@dataclass(frozen=True)
class Counted:
    """One kernel launch: its C++ name, its metrics by the names of METRICS (None: this chip or this
    ncu has none), and the error of its result."""

    kernel: str
    metrics: dict[str, float | None]
    error: float


# ---- running ncu ----


def find_ncu() -> str:
    """Path of Nsight Compute's command line. Raises DecodeError."""
    found = shutil.which("ncu")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in filter(None, homes):
        path = Path(home) / "bin" / "ncu"
        if not found and path.is_file():
            found = str(path)
    if not found:
        raise DecodeError("Nsight Compute (ncu) is not on PATH; counters need it")
    return found


def collect(targets: Sequence[tuple[str, str]], run=subprocess.run) -> list[Counted]:
    """Profile (kernel, shape) targets in one child under ncu, in order. Raises DecodeError: ncu is
    missing, not permitted or too slow, or the child failed."""
    wanted = sorted({name for names in METRICS.values() for name in names})
    while True:
        text, said, found = _profile(targets, wanted, run)
        problem = refusal(said)
        if '"ID"' in text or not problem:
            break
        unknown = [name for name in wanted if name in problem]  # an ncu that refuses, not skips
        if not unknown or len(unknown) == len(wanted):
            raise DecodeError(problem)
        wanted = [name for name in wanted if name not in unknown]
    if found is None:
        last = [line for line in said.splitlines() if line.strip()][-1:]
        raise DecodeError(f"the profiled process failed: {''.join(last) or 'it said nothing'}")
    rows = parse(text)
    if len(rows) != len(targets):
        raise DecodeError(f"ncu saw {len(rows)} kernels, needs {len(targets)}")
    counted = []
    for (kernel, shape), (name, metrics), error in zip(targets, rows, found, strict=True):
        if not re.search(rf"\b{KERNELS[kernel].name}\b", name):
            raise DecodeError(f"ncu saw {name} where {kernel} of {shape} should be")
        counted.append(Counted(name, metrics, error))
    return counted


def _profile(targets, metrics: list[str], run) -> tuple[str, str, list[float] | None]:
    """(ncu's table, all that was printed, the child's errors or None if it did not finish)."""
    patterns = "|".join(sorted({KERNELS[kernel].name for kernel, _ in targets}))
    with tempfile.TemporaryDirectory() as folder:
        table, errors = Path(folder) / "counters.csv", Path(folder) / "errors.json"
        command = [
            find_ncu(), "--clock-control", "none", "--csv", "--page", "raw", "--print-units",
            "base", "--target-processes", "all", "--profile-from-start", "off", "--replay-mode",
            "kernel", "--kernel-name-base", "function",
            "--kernel-name", f"regex:{patterns}", "--metrics", ",".join(metrics),
            "--log-file", str(table), sys.executable, "-m", "decodev2.lab.ncu", str(errors),
            *(f"{kernel}:{shape}" for kernel, shape in targets),
        ]  # fmt: skip
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), env.get("PYTHONPATH")]))
        try:
            done = run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DecodeError(f"ncu did not finish in {TIMEOUT_S} s") from None
        except OSError as error:
            raise DecodeError(f"ncu cannot be started ({error.strerror})") from None
        text = table.read_text(errors="replace") if table.exists() else ""
        found = json.loads(errors.read_text()) if errors.exists() else None
    return text, "\n".join([text, done.stdout or "", done.stderr or ""]), found


def refusal(text: str) -> str | None:
    """Why ncu measured nothing, from what it printed; None if it does not say so."""
    if "ERR_NVGPUCTRPERM" in text:
        return "ncu may not read this card's counters (ERR_NVGPUCTRPERM); needs the permission"
    for line in text.splitlines():
        if line.startswith("==ERROR=="):
            return f"ncu: {line.removeprefix('==ERROR==').strip()}"
    if "No kernels were profiled" in text:
        return "ncu profiled no kernel"
    return None


def parse(text: str) -> list[tuple[str, dict[str, float | None]]]:
    """(kernel name, metrics by our names) per launch of `ncu --csv --page raw`.

    The table starts at the line of its header, after ncu's own lines; the row below the header
    holds units. Times become us, amounts bytes. Raises DecodeError for text without such a table.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        raise DecodeError("ncu printed no table of counters")
    body = [line for line in lines[starts[0] :] if line.startswith('"')]
    table = list(csv.reader(body))
    header, rest = table[0], table[1:]
    if "Kernel Name" not in header:
        raise DecodeError("ncu's table has no column 'Kernel Name'")
    name_at = header.index("Kernel Name")
    units = dict.fromkeys(header, "")
    if rest and not rest[0][header.index("ID")].strip():
        units = dict(zip(header, rest[0], strict=True))
        rest = rest[1:]
    found = []
    for row in rest:
        cells = dict(zip(header, row, strict=True))
        metrics = {}
        for ours, names in METRICS.items():
            values = (_number(cells[n], units[n]) for n in names if n in cells)
            metrics[ours] = next((v for v in values if v is not None), None)
        found.append((row[name_at], metrics))
    return found


def _number(text: str, unit: str) -> float | None:
    """A cell as a number; None for `n/a` and the like."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value * _SCALES.get(unit, 1.0) if np.isfinite(value) else None


# ---- the child ----


def main(argv: list[str]) -> int:
    """Launch every target once; write the list of errors to argv[0]."""
    out, names = argv[0], argv[1:]
    errors = []
    for name in names:
        kernel, _, shape = name.partition(":")
        launch = _product
        for shapes, other in (
            (ATTENTION_SHAPES, _attention), (PROMPT_SHAPES, _prompt), (STEP_SHAPES, _step)
        ):  # fmt: skip
            launch = other if shape in shapes else launch
        errors.append(launch(KERNELS[kernel].switches, shape, kernel))
        torch.cuda.empty_cache()
    Path(out).write_text(json.dumps(errors))
    return 0


@contextlib.contextmanager
def _looked_at():
    """ncu sees what is launched inside, and nothing else: not what a result is checked with."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _product(switches: dict, shape: str, kernel: str) -> float:
    packed = random_weights(SHAPES[shape], 0)
    rows, cols = packed.shape
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((1, cols), np.float32)).cuda()
    y = torch.full((1, rows), torch.nan, device="cuda")
    if kernel.startswith("row-major"):
        w = ladder.from_packed(packed, "cuda")
        with _looked_at():
            ladder.gemv(x[0], w, y[0])
    else:
        w = panels.from_packed(packed, "cuda")
        groups = packed.scales.shape[1]
        need = native.cuda("nf4_gemm").workspace_bytes(w.tiles, groups, 1)
        scratch = torch.empty(need, dtype=torch.uint8, device="cuda")
        with toggles.using(pdl=False, **switches), _looked_at():
            cuda_product(x, w, y, scratch)
    return product_error(packed, x[0].cpu().numpy(), y[0].cpu().numpy())


def _prompt(switches: dict, shape: str, kernel: str) -> float:
    packed = random_weights(SHAPES[PROMPT_SHAPES[shape]], 0)
    rows, cols = packed.shape
    n = PROMPT_COLUMNS
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((n, cols), np.float32)).cuda()
    y = torch.full((n, rows), torch.nan, device="cuda")
    w = panels.from_packed(packed, "cuda")
    need = cuda_scratch_bytes([(w.tiles, packed.scales.shape[1])], n)
    scratch = torch.empty(need, dtype=torch.uint8, device="cuda")
    with toggles.using(pdl=False, **switches), _looked_at():
        cuda_product(x, w, y, scratch)
    columns = [(t[i].cpu().numpy() for t in (x, y)) for i in (0, n - 1)]
    return max(product_error(packed, *column) for column in columns)


def _step(switches: dict, shape: str, kernel: str) -> float:
    spec = plan.with_max_seq(plan.named_spec("qwen2.5-3b"), MAX_SEQ)
    weights = load.load_weights(synth.random_packed(spec, 0), "cuda")
    live, other = (state.allocate_state(spec, "cuda", 1) for _ in range(2))
    for cache, its in ((live.kv.k, other.kv.k), (live.kv.v, other.kv.v)):
        cache.normal_()
        its.copy_(cache)
    for each in (live, other):
        each.token.fill_(1)
        each.position.fill_(STEP_SHAPES[shape])
        each.logits.fill_(torch.nan)
    one = persistent.prepare(live, weights)
    with _looked_at():
        persistent.forward_decode(one)
    persistent.check(one)
    with toggles.using(linear="gemv", **switches):
        step.forward_decode(other, weights)
    expected = other.logits.double()
    return float((live.logits.double() - expected).norm() / expected.norm())


def product_error(packed: Packed, x: np.ndarray, y: np.ndarray) -> float:
    """|y - W x| over the size of the terms, in float64, on up to CHECKED_ROWS rows."""
    rows = np.unique(np.linspace(0, packed.shape[0] - 1, CHECKED_ROWS).astype(int))
    terms = decode_nf4(packed, rows).astype(np.float64) * x.astype(np.float64)
    difference = np.linalg.norm(y[rows] - terms.sum(1))
    return float(difference / np.linalg.norm(terms))


def _attention(switches: dict, shape: str, kernel: str) -> float:
    length = ATTENTION_SHAPES[shape]
    spec = plan.with_max_seq(plan.named_spec("qwen2.5-3b"), MAX_SEQ)
    spec = replace(spec, n_layers=1, vocab=64, intermediate=64)
    torch.manual_seed(2)
    live = state.allocate_state(spec, "cuda", 1)
    c, keys, values = live.decode, live.kv.k[0], live.kv.v[0]
    keys.normal_()
    values.normal_()
    c.qkv.normal_()
    c.position.fill_(length - 1)
    c.valid_len.fill_(length)
    c.attn.fill_(torch.nan)
    q = c.q.clone()
    with toggles.using(pdl=False, **switches), _looked_at():
        ops.attention(c, live, 0)
    cos, sin = live.cos[length - 1].double(), live.sin[length - 1].double()
    queries = q.double().view(spec.n_q, spec.head_dim)
    a, b = queries.chunk(2, dim=1)
    queries = (queries * cos + torch.cat([-b, a], dim=1) * sin).view(spec.n_kv, -1, spec.head_dim)
    past_k, past_v = (t[:length].double().transpose(0, 1) for t in (keys, values))
    weights = (queries @ past_k.transpose(1, 2) * spec.head_dim**-0.5).softmax(-1)
    expected = (weights @ past_v).view(1, -1)
    return float((c.attn.double() - expected).norm() / expected.norm())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
