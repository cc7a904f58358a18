"""Builds and loads the kernels in `csrc/`, lazily. The only module that knows compilers.

One extension per kernel file group. The build key is a hash of every source in the group, the
flags, torch's version and, for CUDA, the architectures: changing any of them builds anew, changing
it back finds the old build. A lock that dies with its process guards each build, so a killed build
never blocks the next one and two processes never build the same thing twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from .errors import BuildError

CPU_FLAGS = ["-O3", "-std=c++17", "-fopenmp"]
CUDA_FLAGS = ["-O3", "-std=c++17"]  # and one `gencode`


def csrc_folder() -> Path:
    """The kernel sources: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "csrc", package / "csrc"):
        if folder.is_dir():
            return folder
    raise BuildError(f"kernel sources not found beside or in {package}; reinstall decodev2")


def cache_folder() -> Path:
    """Where builds live: $DECODEV2_CACHE, else $XDG_CACHE_HOME/decodev2, else ~/.cache/decodev2."""
    explicit = os.environ.get("DECODEV2_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decodev2"


def source_hash(files: list[Path], *extra: str) -> str:
    """12 hex digits over the names and contents of `files` and the strings in `extra`."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for text in extra:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _exclusive(lock_path: Path):
    """Hold an advisory lock; the kernel releases it when the process dies."""
    with open(lock_path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _missing_tools(cuda: bool) -> list[str]:
    compiler = os.environ.get("CXX", "c++")
    found = {
        "ninja": shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists(),
        f"C++ compiler ({compiler})": shutil.which(compiler),
    }
    if cuda:  # torch takes nvcc from this folder or not at all, whatever PATH has
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        if home:
            where = f"nvcc (CUDA_HOME is {home}, which holds no bin/nvcc)"
            found[where] = (Path(home) / "bin" / "nvcc").is_file()
        else:
            found["nvcc"] = find_nvcc()
    return [name for name, path in found.items() if not path]


def _module_name(
    name: str, files: list[Path], flags: list[str], cuda_flags: list[str] | None
) -> str:
    import torch

    key = source_hash(
        files, " ".join(flags), str(cuda_flags), torch.__version__, sys.version.split()[0]
    )
    return f"decodev2_{name}_{key}"


def _results(module_name: str) -> tuple[Path, Path]:
    """Where a build leaves its library, and the mark that says that it ended well."""
    folder = cache_folder() / module_name
    return folder / f"{module_name}.so", folder / "complete"


def _build(
    name: str,
    files: list[Path],
    flags: list[str],
    include: Path,
    cuda_flags: list[str] | None = None,
):
    """Compile `files` (every one counts for the key, `.cpp` and `.cu` are sources) into an
    extension, or load the build that is already there."""
    module_name = _module_name(name, files, flags, cuda_flags)
    library, complete = _results(module_name)
    folder = library.parent
    folder.mkdir(parents=True, exist_ok=True)
    # ninja may live in the virtual environment's bin without that being on PATH
    path = os.environ.get("PATH", "")
    if not shutil.which("ninja"):
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    try:
        with _exclusive(folder / "build.lock"):
            if complete.exists() and library.exists():  # needs no ninja and no compiler
                return _load(module_name, library)
            missing = _missing_tools(cuda_flags is not None)
            if missing:
                raise BuildError(f"building the {name} kernels needs {' and '.join(missing)}")
            print(
                f"compiling the {name} kernels (about a minute, once) ...",
                file=sys.stderr,
                flush=True,
            )
            from torch.utils import cpp_extension

            started = time.perf_counter()
            (folder / "lock").unlink(missing_ok=True)  # left by a build that was killed
            # torch would not build twice in one process what failed once
            cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(module_name, None)
            try:
                module = cpp_extension.load_inline(
                    module_name,
                    cpp_sources=[
                        f'#include "{path.name}"' for path in files if path.suffix == ".cpp"
                    ],
                    cuda_sources=[
                        f'#include "{path.name}"' for path in files if path.suffix == ".cu"
                    ],
                    extra_cflags=flags,
                    extra_cuda_cflags=cuda_flags,
                    extra_include_paths=[str(include)],
                    build_directory=str(folder),
                    no_implicit_headers=True,
                )
            except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
                log = folder / "build.log"
                log.write_text(str(error))
                raise BuildError(
                    f"the {name} kernels did not compile; the compiler's words are in {log}"
                ) from None
            complete.touch()  # a build that was killed leaves a library that cannot be trusted
            seconds = time.perf_counter() - started
            print(f"compiled in {seconds:.0f} s", file=sys.stderr, flush=True)
            return module
    finally:
        os.environ["PATH"] = path


def _load(module_name: str, library: Path):
    """Import a finished build; None of torch's build machinery runs."""
    spec = importlib.util.spec_from_file_location(module_name, library)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        words = " ".join(str(error).split())
        raise BuildError(f"{library} cannot be loaded ({words}); remove its folder") from None
    return module


# ---- CUDA ----

CUDA_EXTENSIONS = (
    "nf4_gemv",
    "nf4_gemm",
    "nf4_wgmma",
    "ladder_gemv",
    "attn",
    "attn_prefill",
    "ladder_attn",
    "step",
    "read_rate",
    "persistent",
    "handoff",
    "ring_ablations",
)  # csrc/NAME.cu and csrc/NAME_binding.cpp each


def gencode(major: int, minor: int) -> str:
    """nvcc's flag for one architecture; Hopper's own instructions need the `a` target."""
    arch = f"{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    return f"-gencode=arch=compute_{arch},code=sm_{arch}"


@functools.cache
def cuda(name: str):
    """One extension of CUDA kernels, built for the current device. Raises BuildError."""
    files, flags, cuda_flags = _cuda_recipe(name)
    return _build(name, files, flags, csrc_folder(), cuda_flags)


def _cuda_recipe(name: str) -> tuple[list[Path], list[str], list[str]]:
    """Sources, flags of the C++ compiler, flags of nvcc."""
    import torch

    folder = csrc_folder()
    headers = [p for p in folder.iterdir() if p.suffix in (".h", ".cuh")]
    files = [folder / f"{name}.cu", folder / f"{name}_binding.cpp", *headers]
    # its own -gencode makes torch leave $TORCH_CUDA_ARCH_LIST alone
    flags = [*CUDA_FLAGS, gencode(*torch.cuda.get_device_capability())]
    flags += os.environ.get("DECODEV2_NVCC_FLAGS", "").split()  # part of the key, e.g. -lineinfo
    return files, ["-O2", "-std=c++17"], flags


def _is_built(name: str) -> bool:
    return all(path.exists() for path in _results(_module_name(name, *_cuda_recipe(name))))


def find_nvcc() -> str | None:
    """Path of nvcc: under $CUDA_HOME, else on PATH, else where torch would look."""
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return str(Path(home) / "bin" / "nvcc")
    found = shutil.which("nvcc")
    if found:
        return found
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    return str(Path(home) / "bin" / "nvcc") if home else None


_BUILD_ONE = """\
import sys
from decodev2 import native
from decodev2.errors import BuildError
try:
    native.cuda({!r})
except BuildError as error:
    print(error)
    sys.exit(1)
"""


def build_cuda() -> None:
    """Build every CUDA extension that is not built yet, side by side, one process each. Raises
    BuildError."""
    names = [name for name in CUDA_EXTENSIONS if not _is_built(name)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _BUILD_ONE.format(name)], stdout=subprocess.PIPE, text=True
        )
        for name in names
    ]
    said = [child.communicate()[0].strip() for child in children]
    failed = [(n, s) for n, c, s in zip(names, children, said, strict=True) if c.returncode]
    if failed:
        names = ", ".join(name for name, _ in failed)
        raise BuildError(failed[0][1] or f"CUDA kernels did not build: {names}")


# ---- CPU ----


@functools.cache
def cpu():
    """The CPU kernels. `DECODEV2_CPU_ISA=portable|avx2|avx512` overrides the choice made from the
    CPU."""
    folder = csrc_folder() / "cpu"
    files = [*sorted(folder.iterdir()), csrc_folder() / "refuse.h"]
    module = _build("cpu", files, CPU_FLAGS, folder)
    wanted = os.environ.get("DECODEV2_CPU_ISA")
    if wanted:
        try:
            module.set_isa(wanted)
        except ValueError as error:
            raise BuildError(f"DECODEV2_CPU_ISA: {error}") from None
    return module
