"""What this machine can do, one line per item, with the fix where something is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import native
from .errors import BuildError
from .plan import FAMILIES, GROUP, HEAD_DIMS

OLDEST_GPU = 8  # major compute capability


@dataclass(frozen=True)
class Check:
    """`state` is ok, missing (the CPU path does not work) or absent (an optional part is not
    there)."""

    item: str
    state: str
    found: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.state:8s}{self.item:16s}{self.found}"
        return f"{line}  ->  {self.fix}" if self.fix else line


def checks() -> list[Check]:
    """Every check, cheap ones first. Builds nothing."""
    return [*_python(), *_compilers(), *_cuda(), *_extras(), _notebook_kernel(), *_project()]


def _python() -> list[Check]:
    ok = sys.version_info >= (3, 11)
    rows = [
        Check(
            "python",
            "ok" if ok else "missing",
            f"{platform.python_version()} at {sys.executable}",
            "" if ok else "install Python 3.11 or newer",
        )
    ]
    if importlib.util.find_spec("torch") is None:
        return [*rows, Check("torch", "missing", "not installed", "pip install -e .")]
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    rows.append(
        Check("torch", "ok", f"{torch.__version__} ({cuda}), {torch.get_num_threads()} threads")
    )
    return rows


def _compilers() -> list[Check]:
    rows = []
    ninja = shutil.which("ninja") or _if_file(Path(sys.executable).parent / "ninja")
    rows.append(_tool("ninja", ninja, required=True, fix="pip install ninja"))
    compiler = os.environ.get("CXX", "c++")
    found = shutil.which(compiler)
    version = _first_line([found, "--version"]) if found else None
    rows.append(
        _tool(
            "C++ compiler",
            version and f"{found}: {version}",
            True,
            "install g++ 11 or newer, or set CXX",
        )
    )
    return rows


def _cuda() -> list[Check]:
    rows = []
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc") or (home and _if_file(Path(home) / "bin" / "nvcc"))
    if home and not (Path(home) / "bin" / "nvcc").is_file():
        rows.append(
            Check(
                "CUDA_HOME",
                "absent",
                f"{home} holds no bin/nvcc",
                "unset it or point it at a CUDA toolkit",
            )
        )
    version = _last_line([nvcc, "--version"]) if nvcc else None
    rows.append(
        _tool("nvcc", version and f"{nvcc}: {version}", False, "needed for CUDA kernels only")
    )
    if importlib.util.find_spec("torch") is None:
        return rows
    import torch

    if torch.version.cuda and version and f"cuda_{_major(torch.version.cuda)}." not in version:
        found = f"nvcc is not of CUDA {_major(torch.version.cuda)}, which this torch was built with"
        rows.append(Check("nvcc and torch", "absent", found, "set CUDA_HOME to that toolkit"))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = f"{properties.name}, sm_{properties.major}{properties.minor}"
        if properties.major >= OLDEST_GPU:
            rows.append(Check("GPU", "ok", gpu))
        else:
            fix = "the CUDA kernels need sm_80 or newer; everything also runs on the CPU"
            rows.append(Check("GPU", "absent", gpu, fix))
    else:
        why = "no device visible" if torch.version.cuda else "this torch is a CPU build"
        rows.append(Check("GPU", "absent", why, "optional: everything here also runs on the CPU"))
    return rows


def _extras() -> list[Check]:
    wanted = {
        "transformers": "pip install 'decodev2[fetch]' to turn a GGUF into a model folder",
        "gguf": "pip install 'decodev2[fetch]' to turn a GGUF into a model folder",
        "jupyterlab": "pip install 'decodev2[lab]' for the notebooks",
        "ipywidgets": "pip install 'decodev2[lab]' for the notebooks",
        "llama_cpp": "pip install 'decodev2[peers]' to measure llama.cpp beside us",
        "bitsandbytes": "pip install 'decodev2[peers]' to measure its NF4 products on CUDA",
    }
    return [
        _tool(name, importlib.util.find_spec(name) and "installed", required=False, fix=fix)
        for name, fix in wanted.items()
    ]


def _notebook_kernel() -> Check:
    """Whose Python runs the pages: their kernel is called python3, which a stale kernelspec may
    lead to another interpreter."""
    item = "notebook kernel"
    if importlib.util.find_spec("jupyter_client") is None:
        return Check(item, "absent", "no Jupyter", "pip install 'decodev2[lab]' for the notebooks")
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        interpreter = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return Check(item, "absent", "no kernel called python3", "pip install ipykernel")
    if re.fullmatch(r"python\d?(\.\d+)?", interpreter):  # Jupyter puts its own Python there
        interpreter = sys.executable
    found = shutil.which(interpreter) or interpreter
    if Path(found).absolute() == Path(sys.executable).absolute():
        return Check(item, "ok", f"python3 is {found}")
    fix = "python -m ipykernel install --sys-prefix, with this Python"
    return Check(item, "absent", f"python3 is {found}, not {sys.executable}", fix)


def _project() -> list[Check]:
    rows = []
    try:
        rows.append(Check("kernel sources", "ok", str(native.csrc_folder())))
    except BuildError as error:
        rows.append(Check("kernel sources", "missing", str(error)))
    cache = native.cache_folder()
    parent = next((p for p in (cache, *cache.parents) if p.exists()), Path("/"))
    if os.access(parent, os.W_OK):
        built = sorted(p.parent.name for p in cache.glob("*/*.so")) if cache.is_dir() else []
        rows.append(Check("build cache", "ok", f"{cache}, {len(built)} build(s)"))
    else:
        rows.append(
            Check("build cache", "missing", f"{cache} is not writable", "set DECODEV2_CACHE")
        )
    rows.append(Check("models", "ok", f"model_type {', '.join(FAMILIES)}; head_dim {HEAD_DIMS}"))
    rows.append(
        Check(
            "widths", "ok", f"any; rows are padded to whole groups of {GROUP} columns inside .chr"
        )
    )
    return rows


def _major(version: str) -> str:
    return version.split(".")[0]


def _tool(item: str, found: str | None, required: bool, fix: str) -> Check:
    if found:
        return Check(item, "ok", found)
    return Check(item, "missing" if required else "absent", "not found", fix)


def _if_file(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def _output(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _first_line(command: list[str]) -> str | None:
    return next(iter(_output(command)), None)


def _last_line(command: list[str]) -> str | None:
    return next(iter(reversed(_output(command))), None)
