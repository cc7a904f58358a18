"""The machine card and the state of the code: where a plate's numbers come from.

Nothing here may fail a run: what cannot be found out is null with a `..._reason` beside it. Nothing
that names a person or a folder (host name, user, paths) goes in.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
PROJECT = PACKAGE.parent
GIT_TIMEOUT_S = 5.0
READ_BUFFER_MB = 512
CUDA_READ_BUFFER_MB = 4096  # many times any L2
CUDA_READ_PASSES = 4  # between two events, so that a launch does not count

# Flags that decide which CPU kernel can run, oldest first.
ISA_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx_vnni",
    "avx512_vnni", "avx512_bf16", "amx_tile", "neon", "asimd", "asimddp", "sve",
)  # fmt: skip


# ---- the card ----


def card(
    device: str = "cpu", threads: int | None = None, read_rate: dict | None = None
) -> dict[str, object]:
    """Describe the machine that `device` ("cpu" or "cuda") numbers are measured on.

    `threads` is how many CPU threads the run uses (left out: torch's setting). `read_rate` is a
    result of `measure_read_rate`; left out, it is measured now (about two seconds on a CPU).
    """
    import torch

    threads = threads or torch.get_num_threads()
    cpu = _cpu(threads)
    gpu, gpu_reason = _gpu()
    if read_rate is None:
        read_rate = measure_read_rate(threads, device)
    name = gpu["name"] if device.startswith("cuda") and gpu else f"{cpu['model']} {threads}t"
    return {
        "device": "cuda" if device.startswith("cuda") else "cpu",
        "slug": slug(name),
        "cpu": cpu,
        "gpu": gpu,
        "gpu_reason": gpu_reason,
        "os": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "versions": _versions(),
        "read_rate": read_rate,
    }


def slug(name: str) -> str:
    """File-name form of a device name: lower case, digits, dashes; without marketing marks."""
    text = re.sub(r"\((r|tm)\)|@.*?ghz|\b(cpu|processor)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def _cpu(threads_used: int) -> dict[str, object]:
    info = _proc_cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    physical = info.get("physical_cores")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": info.get("model name") or platform.processor() or platform.machine() or "unknown",
        "cores": physical,
        "cores_reason": None if physical else "the system does not list physical cores",
        "threads": usable,
        "threads_used": threads_used,
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "caches": _caches(),
        "ram_gb": _ram_gb(),
    }


def _proc_cpuinfo() -> dict[str, object]:
    """First processor's fields of /proc/cpuinfo plus the number of physical cores; {} elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    blocks = []
    for block in text.strip().split("\n\n"):
        pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
        blocks.append({key.strip(): value.strip() for key, value in pairs})
    cores = {(b.get("physical id"), b["core id"]) for b in blocks if "core id" in b}
    return blocks[0] | {"physical_cores": len(cores) or None}


def _caches() -> dict[str, str]:
    """Data cache sizes of the first CPU as the kernel prints them, e.g. {"L3": "32768K"}."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / n).read_text().strip() for n in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            sizes[f"L{level}"] = size
    return sizes


def _ram_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _gpu() -> tuple[dict | None, str | None]:
    """(facts, None) of the current CUDA device, or (None, why not)."""
    import torch

    if torch.version.cuda is None:
        return None, "this torch is built without CUDA"
    try:
        if not torch.cuda.is_available():
            return None, "torch finds no CUDA device"
        p = torch.cuda.get_device_properties(torch.cuda.current_device())
    except RuntimeError as error:
        return None, str(error).splitlines()[0]
    driver, reason = _driver()
    return {
        "name": p.name,
        "arch": f"sm_{p.major}{p.minor}",
        "sms": p.multi_processor_count,
        "l2_mb": round(getattr(p, "L2_cache_size", 0) / 2**20, 1) or None,
        "memory_gb": round(p.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "driver": driver,
        "driver_reason": reason,
    }, None


def _driver() -> tuple[str | None, str | None]:
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return None, str(error)
    return version.decode() if isinstance(version, bytes) else version, None


def _versions() -> dict[str, str]:
    import numpy
    import torch

    from .. import __version__

    return {
        "decodev2": __version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
    }


# ---- the ceiling ----


def measure_read_rate(threads: int, device: str = "cpu", runs: int = 7) -> dict[str, object]:
    """Fastest read-only stream this machine showed, in GB/s (1e9 bytes per second).

    Best, not median: it is used as a ceiling, and other load can only lower it. CPU: {gb_s,
    by_threads, method, buffer_mb, runs}; every thread count 1, 2, 4 .. `threads` is tried, because
    a shared memory controller can serve fewer threads faster. CUDA: {gb_s, copy_gb_s, method,
    buffer_mb, runs}; copy_gb_s counts bytes read and bytes written.
    """
    if device.startswith("cuda"):
        return _cuda_read_rate(device, runs)
    counts = sorted({n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < threads} | {threads})
    megabytes = int(min(READ_BUFFER_MB, (_ram_gb() or 4) * 1024 / 8))
    by_threads = {str(n): _stream_rate(n, megabytes, runs) for n in counts}
    return {
        "gb_s": round(max(by_threads.values()), 3),
        "by_threads": {n: round(rate, 3) for n, rate in by_threads.items()},
        "method": "read_all of csrc/cpu/binding.cpp",
        "buffer_mb": megabytes,
        "runs": runs,
    }


def faster_read_rate(a: dict, b: dict) -> dict:
    """The better of two `measure_read_rate` results: measure before and after a long run."""
    return max(a, b, key=lambda rate: rate["gb_s"] or 0.0)


def _stream_rate(threads: int, megabytes: int, runs: int) -> float:
    """GB/s of the best of `runs` passes over one buffer by `threads` threads."""
    import torch

    from .. import native

    read_all = native.cpu().read_all
    # Written, not just allocated: untouched pages all map to one page of zeros, which is in cache.
    words = torch.ones(megabytes * 2**20 // 8, dtype=torch.int64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best = float("inf")
        for _ in range(runs):
            start = time.perf_counter()
            read_all(words)
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return megabytes * 2**20 / best * 1e-9


def _cuda_read_rate(device: str, runs: int) -> dict[str, object]:
    import torch

    with torch.cuda.device(device):
        free_mb = torch.cuda.mem_get_info()[0] // 2**20
        megabytes = min(CUDA_READ_BUFFER_MB, free_mb // 2)
        if megabytes < 1:
            return {"gb_s": None, "gb_s_reason": "no free memory on the device to read"}
        read, copy = _cuda_stream_rates(megabytes, runs)
        torch.cuda.empty_cache()  # whoever measures next needs the memory
    return {
        "gb_s": round(read, 3),
        "copy_gb_s": round(copy, 3),
        "method": "read_all of csrc/read_rate.cu; copy by torch, bytes read and written",
        "buffer_mb": megabytes,
        "runs": runs,
    }


def _cuda_stream_rates(megabytes: int, runs: int) -> tuple[float, float]:
    """GB/s of reading a buffer, and of copying one half of it to the other."""
    import torch

    from .. import native

    read_all = native.cuda("read_rate").read_all
    words = torch.empty(megabytes * 2**18, dtype=torch.int32, device="cuda").random_()
    checksum = torch.zeros(1, dtype=torch.int32, device="cuda")
    first, second = words.chunk(2)
    return (
        _cuda_stream_rate(lambda: read_all(words, checksum), words.nbytes, runs),
        _cuda_stream_rate(lambda: first.copy_(second), words.nbytes, runs),
    )


def _cuda_stream_rate(work: Callable[[], object], nbytes: int, runs: int) -> float:
    """GB/s of the best of `runs` groups of passes on the current stream, after one to warm up."""
    import torch

    best = float("inf")
    for _ in range(runs + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CUDA_READ_PASSES):
            work()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3)
    return CUDA_READ_PASSES * nbytes / best * 1e-9


# ---- the state of the code ----


def csrc_folder(root: Path = PROJECT) -> Path | None:
    """Kernel sources: inside the package when installed from a wheel, beside it in a checkout."""
    for folder in (root / PACKAGE.name / "csrc", root / "csrc"):
        if folder.is_dir():
            return folder
    return None


def files_hash(folder: Path, patterns: tuple[str, ...] = ("**/*",)) -> tuple[str | None, list[str]]:
    """(12 hex digits of sha256 over sorted names and contents, the names); (None, []) if none."""
    digest, names = hashlib.sha256(), []
    found = {p for pattern in patterns for p in folder.glob(pattern) if p.is_file()}
    for path in sorted(found, key=lambda p: p.relative_to(folder).as_posix()):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") or part == "__pycache__" for part in parts):
            continue
        # Line ends do not count: a checkout may translate them.
        content = path.read_bytes().replace(b"\r\n", b"\n")
        name = "/".join(parts)
        digest.update(f"{len(name)} {len(content)} {name}\n".encode() + content)
        names.append(name)
    return (digest.hexdigest()[:12] if names else None), names


def csrc_hash(root: Path = PROJECT, patterns: tuple[str, ...] = ("**/*",)) -> str | None:
    """12 hex digits over the kernel sources (or those matching `patterns`), None without any."""
    folder = csrc_folder(root)
    return files_hash(folder, patterns)[0] if folder else None


def package_hash(root: Path = PROJECT) -> str | None:
    """12 hex digits over the package's Python files. Tests do not count: they measure nothing."""
    folder = root / PACKAGE.name
    names = [n for n in files_hash(folder, ("**/*.py",))[1] if not n.startswith("tests/")]
    return files_hash(folder, tuple(names))[0] if names else None


# Taken when this module is imported, which is close to when the rest was: a file edited later in a
# notebook session is not the code that runs.
_AT_IMPORT = (csrc_hash(), package_hash())


def code_state(depends: tuple[str, ...] = (), root: Path = PROJECT) -> dict[str, object]:
    """Commit, dirty flag and hashes of the code in use; never raises, never prints.

    `depends` are glob patterns below csrc/ of the kernels that an experiment runs, so that a later
    reader can tell whether those very kernels have changed since (`is_current`).
    """
    csrc, package = _AT_IMPORT if root == PROJECT else (csrc_hash(root), package_hash(root))
    folder = csrc_folder(root)
    hashed, files = files_hash(folder, depends) if folder and depends else (None, [])
    state = {
        "csrc": csrc,
        "package": package,
        "changed_since_import": (csrc, package) != (csrc_hash(root), package_hash(root)),
        "depends": {"patterns": list(depends), "files": files, "hash": hashed},
    }
    if csrc is None:
        state["csrc_reason"] = "no kernel sources found"
    if package is None:
        state["package_reason"] = "no package sources found"
    return state | _git_state(root)


def is_current(code: dict, root: Path = PROJECT) -> bool:
    """True if the kernels that a plate's `code` block depends on are byte for byte today's."""
    patterns = tuple(code["depends"]["patterns"])
    return not patterns or csrc_hash(root, patterns) == code["depends"]["hash"]


def _git_state(root: Path, timeout: float = GIT_TIMEOUT_S) -> dict[str, object]:
    state = {"commit": None, "dirty": None}
    _, error = _git(root, timeout, "rev-parse", "--is-inside-work-tree")
    if error:
        return state | {"commit_reason": error, "dirty_reason": error}
    # Saved plates are results, not code: the first one must not make the second one "dirty".
    changes, error = _git(
        root, timeout, "status", "--porcelain", "--untracked-files=normal", "--", ".",
        ":(exclude)runs",
    )  # fmt: skip
    state |= {"dirty_reason": error} if error else {"dirty": bool(changes)}
    commit, error = _git(root, timeout, "rev-parse", "--verify", "HEAD")
    if error:
        return state | {"commit_reason": error}
    # Installed inside somebody else's repository (a .venv there): that commit is not ours.
    ours, error = _git(root, timeout, "ls-files", "--", ".")
    if error or not ours:
        reason = error or "the enclosing git repository does not hold this code"
        return {"commit": None, "dirty": None, "commit_reason": reason, "dirty_reason": reason}
    return state | {"commit": commit}


def _git(root: Path, timeout: float, *arguments: str) -> tuple[str, str | None]:
    """(output, None) or ("", one-line reason without paths)."""
    # Set inside hooks; they would point git at another repository than `root`.
    drop = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    env = {k: v for k, v in os.environ.items() if k not in drop}
    env |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    # Files, not pipes: a helper that git leaves behind would keep a pipe open past the timeout.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                ["git", "-C", str(root), *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env,
                start_new_session=sys.platform != "win32",
            )  # fmt: skip
        except FileNotFoundError:
            return "", "git is not installed"
        except OSError as error:
            return "", f"git cannot be started ({type(error).__name__})"
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            kill_group(process)
            return "", f"git did not answer in {timeout:g} s"
        out.seek(0)
        err.seek(0)
        message = err.read().decode("utf-8", "replace")
        if status == 0:
            return out.read().decode("utf-8", "replace").strip(), None
    for words, reason in (
        ("dubious ownership", "git refuses a checkout that belongs to another user"),
        ("not a git repository", "not a git repository"),
        ("Needed a single revision", "no commit yet"),
    ):
        if words in message:
            return "", reason
    return "", f"git {arguments[0]} failed with status {status}"


def kill_group(process: subprocess.Popen) -> None:
    """End a process started as a session of its own, and what it started."""
    if sys.platform == "win32":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
