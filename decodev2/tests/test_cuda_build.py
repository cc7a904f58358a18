"""Every CUDA source compiles for every architecture without a warning, and every kernel keeps its
registers. Needs nvcc, but no GPU and no CUDA build of torch.

`cuda_resources.json` holds registers and spilled bytes of each kernel on sm_90a. After a change
that is meant, write it again:

    python decodev2/tests/test_cuda_build.py --update
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from decodev2 import native
from decodev2.errors import BuildError

ARCHITECTURES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0))  # (9, 0) is sm_90a
MEASURED = (9, 0)
TABLE = Path(__file__).with_name("cuda_resources.json")
UPDATE = "python decodev2/tests/test_cuda_build.py --update"
SOURCES = sorted(path.name for path in native.csrc_folder().glob("*.cu"))
REGISTERS_PER_CTA = 65536  # of a multiprocessor, every architecture here


@dataclass(frozen=True)
class Kernel:
    """Resources of one kernel as ptxas reports them, and the launch bounds it was compiled for."""

    registers: int
    spilled: int  # bytes stored and loaded
    threads: int  # 0: no launch bound
    ctas: int


@dataclass(frozen=True)
class Compiled:
    status: int
    said: str
    kernels: dict[str, Kernel]

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.said.splitlines() if re.search(r"\bwarning( #| ?:)", line)]


# ---- compiling ----


@functools.cache
def nvcc() -> str | None:
    return native.find_nvcc()


@functools.cache
def nvcc_version() -> str:
    """As nvcc prints it, e.g. V13.0.88."""
    said = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V[\d.]+", said).group()


@functools.cache
def nvcc_architectures() -> str:
    command = [nvcc(), "--list-gpu-arch"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_source(path: Path, capability: tuple[int, int]) -> Compiled:
    """One source with the package's own flags, host code once (for MEASURED); nothing is kept.

    What compiled once is remembered in the build cache under a hash of source, headers, flags and
    nvcc.
    """
    gencode = native.gencode(*capability)
    what = "-c" if capability == MEASURED else "-cubin"
    command = [nvcc(), *native.CUDA_FLAGS, gencode, "-Xptxas", "-v", what]
    headers = [p for p in path.parent.iterdir() if p.suffix in (".h", ".cuh")]
    key = native.source_hash([path, *headers], *command[1:], nvcc_version(), "1")
    remembered = native.cache_folder() / "compiled" / f"{path.stem}-{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        value = json.loads(remembered.read_text())
        kernels = {name: Kernel(**entry) for name, entry in value["kernels"].items()}
        return Compiled(0, value["said"], kernels)
    with tempfile.TemporaryDirectory() as folder:
        kept = ["--keep", "--keep-dir", folder]  # the PTX holds the launch bounds
        done = subprocess.run(
            [*command, *kept, str(path), "-o", f"{folder}/{path.stem}.o"],
            capture_output=True, text=True,
        )  # fmt: skip
        said = done.stdout + done.stderr
        ptx = Path(folder) / f"{path.stem}.ptx"
        bounds = launch_bounds(ptx.read_text()) if ptx.exists() else {}
    result = Compiled(done.returncode, said, kernels_of(said, bounds))
    if done.returncode == 0:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        temporary = remembered.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"said": said, "kernels": _plain(result.kernels)}))
        temporary.replace(remembered)
    return result


def launch_bounds(ptx: str) -> dict[str, tuple[int, int]]:
    """Mangled kernel -> (threads, CTAs per multiprocessor) of its `__launch_bounds__`."""
    found = {}
    for name, head in re.findall(r"\.entry (\w+)\((.*?)\{", ptx, re.DOTALL):
        threads = re.search(r"\.maxntid (\d+)", head)
        ctas = re.search(r"\.minnctapersm (\d+)", head)
        found[name] = (int(threads.group(1)) if threads else 0, int(ctas.group(1)) if ctas else 1)
    return found


def kernels_of(said: str, bounds: dict[str, tuple[int, int]]) -> dict[str, Kernel]:
    """Kernels by readable name, from what `ptxas -v` said. Spills of functions that were not
    inlined count for the kernel they are reported with."""
    found = {}
    for block in said.split("Compiling entry function '")[1:]:
        mangled = block.split("'", 1)[0]
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", block)
        registers = re.search(r"Used (\d+) registers", block)
        if not spills or not registers:
            continue
        threads, ctas = bounds.get(mangled, (0, 1))
        found[readable(mangled)] = Kernel(
            int(registers.group(1)), sum(map(int, spills)), threads, ctas
        )
    return found


def readable(mangled: str) -> str:
    """The kernel's name and template arguments, without namespaces and parameters."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    buffer = demangle(mangled.encode(), None, None, ctypes.byref(status))
    if status.value:
        return mangled
    text = ctypes.string_at(buffer).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(buffer))
    for noise in ("(anonymous namespace)::", "decodev2::", "void "):
        text = text.replace(noise, "")
    return re.sub(r"\((?!\w+\)\d).*$", "", text)  # parameters, but not (Kind)0 in the template


def _plain(kernels: dict[str, Kernel]) -> dict[str, dict]:
    return {name: asdict(kernels[name]) for name in sorted(kernels)}


# ---- the rule ----


def problems(found: dict[str, Kernel], recorded: dict[str, dict], same_nvcc: bool) -> list[str]:
    """What is wrong with the kernels of one source, against its part of the table.

    Registers and spills must be as recorded when the compiler is the one of the table. Another
    compiler may take other registers, but spills only where the table has some.
    """
    out = [f"{name} is gone" for name in recorded if name not in found]
    for name, kernel in found.items():
        if not kernel.threads:
            out.append(f"{name} has no __launch_bounds__")
        in_use = -(-kernel.registers // 8) * 8 * kernel.threads * kernel.ctas
        if in_use > REGISTERS_PER_CTA:
            out.append(f"{name} needs {in_use} registers for {kernel.ctas} x {kernel.threads}")
        if name not in recorded:
            out.append(f"{name} is new")
            continue
        was = Kernel(**recorded[name])
        if kernel.spilled > was.spilled:
            out.append(f"{name} spills {kernel.spilled} bytes, recorded are {was.spilled}")
        if same_nvcc and kernel != was:
            out.append(f"{name} is {kernel}, recorded is {was}")
    return out


# ---- fixtures: every selected pair compiled, two at a time ----

needs_nvcc = pytest.mark.skipif(not nvcc(), reason="nvcc was not found")


def _wanted(items) -> list[tuple[str, tuple[int, int]]]:
    """(source, architecture) of the selected tests, the largest sources first."""
    pairs = set()
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "source" in parameters and "compiled" in item.fixturenames:
            pairs.add((parameters["source"], parameters.get("capability", MEASURED)))
    size = {name: (native.csrc_folder() / name).stat().st_size for name in SOURCES}
    return sorted(pairs, key=lambda pair: (-size[pair[0]], pair))


@pytest.fixture(scope="module")
def jobs(request):
    pool = ThreadPoolExecutor(2)
    folder = native.csrc_folder()
    known = nvcc_architectures()
    yield {
        (source, capability): pool.submit(compile_source, folder / source, capability)
        for source, capability in _wanted(request.session.items)
        if "compute_{}{}\n".format(*capability) in known
    }
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def compiled(jobs, request):
    parameters = request.node.callspec.params
    capability = parameters.get("capability", MEASURED)
    job = jobs.get((parameters["source"], capability))
    if job is None:
        pytest.skip(f"nvcc {nvcc_version()} does not know sm_{capability[0]}{capability[1]}")
    return job.result()


@needs_nvcc
@pytest.mark.parametrize("capability", ARCHITECTURES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_without_a_warning(source, capability, compiled):
    assert compiled.status == 0, compiled.said
    assert compiled.warnings == []
    assert compiled.kernels


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES)
def test_registers_and_spills_are_as_recorded(source, compiled):
    table = json.loads(TABLE.read_text())
    recorded = table["kernels"].get(source, {})
    found = problems(compiled.kernels, recorded, table["nvcc"] == nvcc_version())
    assert not found, "\n".join([*found, f"if all of this is meant: {UPDATE}"])


# ---- without nvcc ----


def test_every_source_is_an_extension_and_in_the_table():
    folder = native.csrc_folder()
    assert sorted(f"{name}.cu" for name in native.CUDA_EXTENSIONS) == SOURCES
    assert all((folder / f"{name}_binding.cpp").is_file() for name in native.CUDA_EXTENSIONS)
    assert sorted(json.loads(TABLE.read_text())["kernels"]) == SOURCES, UPDATE


def test_what_the_rule_refuses():
    good = Kernel(128, 0, 128, 2)
    was = {"k": asdict(good)}
    assert problems({"k": good}, was, True) == []
    assert problems({}, was, True) == ["k is gone"]
    assert problems({"k": good, "l": good}, was, True) == ["l is new"]
    more = Kernel(136, 0, 128, 2)
    assert len(problems({"k": more}, was, True)) == 1
    assert problems({"k": more}, was, False) == []  # another compiler
    spills = Kernel(128, 16, 128, 2)
    assert "spills 16 bytes" in problems({"k": spills}, was, False)[0]
    assert problems({"k": spills}, {"k": asdict(spills)}, False) == []
    assert "no __launch_bounds__" in problems({"k": Kernel(128, 0, 0, 1)}, was, False)[0]
    assert "needs 67584 registers" in problems({"k": Kernel(257, 0, 128, 2)}, was, False)[0]


MANGLED = {
    "_ZN8decodev239_GLOBAL__N__600315f5_7_attn_cu_b2b63b5f14rope_kv_kernelENS_13AttnArgumentsE":
        "rope_kv_kernel",
    "_ZN8decodev239_GLOBAL__N__600315f5_7_attn_cu_b2b63b5f18attn_decode_kernelILi16ELi8ELb1EEEvNS_"
    "13AttnArgumentsEi": "attn_decode_kernel<16, 8, true>",
    "_ZN8decodev244_GLOBAL__N__09a26969_11_nf4_gemm_cu_3854e0508nf4_gemmILi4ELNS_11GemmVariantE0EE"
    "EvNS0_15KernelArgumentsE": "nf4_gemm<4, (GemmVariant)0>",
}  # fmt: skip


@pytest.mark.parametrize("mangled", MANGLED)
def test_names_do_not_hold_what_differs_between_files(mangled):
    assert readable(mangled) == MANGLED[mangled]


# ---- that the checks see what they look for ----

WARNS = "__global__ void __launch_bounds__(32) k(int* p) { int unused; *p = 1; }\n"
SPILLS = """\
__global__ void __launch_bounds__(1024, 2) k(float* p) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = v[i] * v[63 - i];
}
__global__ void unbound(int* p) { *p = 1; }
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setenv("DECODEV2_CACHE", str(tmp_path / "cache"))

    def compile_text(text: str) -> Compiled:
        path = tmp_path / "toy.cu"
        path.write_text(text)
        return compile_source(path, MEASURED)

    return compile_text


@needs_nvcc
def test_a_warning_is_seen(toy):
    for _ in range(2):  # the second comes from the cache
        said = toy(WARNS)
        assert said.status == 0 and len(said.warnings) == 1, said.said


@needs_nvcc
def test_spills_and_launch_bounds_are_seen(toy):
    kernels = toy(SPILLS).kernels
    assert kernels["k"].registers == 32 and kernels["k"].spilled > 64
    assert (kernels["k"].threads, kernels["k"].ctas) == (1024, 2)
    assert kernels["unbound"] == Kernel(kernels["unbound"].registers, 0, 0, 1)
    assert toy(SPILLS).kernels == kernels


@needs_nvcc
def test_an_error_is_seen_and_not_remembered(toy):
    for _ in range(2):
        failed = toy("__global__ void k() { nothing(); }\n")
        assert failed.status != 0 and "nothing" in failed.said and not failed.kernels


@needs_nvcc
def test_a_changed_header_compiles_anew(toy, tmp_path):
    header = tmp_path / "bound.h"
    text = '#include "bound.h"\n__global__ void __launch_bounds__(kThreads) k(int* p) { *p = 1; }\n'
    for threads in (32, 64, 32):
        header.write_text(f"constexpr int kThreads = {threads};\n")
        assert toy(text).kernels["k"].threads == threads


# ---- prerequisites and architecture of a build (C9) ----


def test_each_architecture_has_its_flag():
    flags = [native.gencode(*capability) for capability in ARCHITECTURES]
    assert flags[3] == "-gencode=arch=compute_90a,code=sm_90a"
    assert flags[4] == "-gencode=arch=compute_100,code=sm_100"
    assert len(set(flags)) == len(flags)


def test_the_arch_list_of_another_card_is_left_aside(monkeypatch):
    """torch adds the architectures of $TORCH_CUDA_ARCH_LIST unless the flags name one."""
    from torch.utils import cpp_extension

    asked = []
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(native, "_build", lambda *arguments: asked.append(arguments))
    native.cuda.__wrapped__("step")
    flags = asked[0][4]
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    assert cpp_extension._get_cuda_arch_flags(flags) == []
    assert any("70" in flag for flag in cpp_extension._get_cuda_arch_flags([]))


def test_the_arch_is_part_of_the_build_key(tmp_path):
    path = tmp_path / "k.cu"
    path.write_text("")
    keys = {native.source_hash([path], native.gencode(*c)) for c in ARCHITECTURES}
    assert len(keys) == len(ARCHITECTURES)


@pytest.fixture
def toy_extension(tmp_path, monkeypatch):
    monkeypatch.setenv("DECODEV2_CACHE", str(tmp_path / "cache"))
    (tmp_path / "toy.cu").write_text(WARNS)
    return lambda: native._build("toy", [tmp_path / "toy.cu"], [], tmp_path, ["-O0"])


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_an_empty_cuda_home_is_one_line(toy_extension, tmp_path, monkeypatch, capfd, variable):
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "empty"))
    with pytest.raises(BuildError) as error:
        toy_extension()
    said = str(error.value)
    assert said.startswith("building the toy kernels needs nvcc (CUDA_HOME is ")
    assert str(tmp_path / "empty") in said and "\n" not in said
    assert capfd.readouterr().err == ""


def test_a_missing_nvcc_is_named(toy_extension, monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(native, "find_nvcc", lambda: None)
    with pytest.raises(BuildError, match=r"^building the toy kernels needs nvcc$"):
        toy_extension()


def test_side_by_side_builds_report_one_line(monkeypatch, capfd):
    """The processes of `build_cuda` pass on what stopped them, without tracebacks."""
    monkeypatch.setattr(native, "CUDA_EXTENSIONS", ("one", "two"))
    monkeypatch.setattr(native, "_is_built", lambda name: False)
    start = native._BUILD_ONE.replace("native.cuda({!r})", "raise BuildError('no {}')")
    monkeypatch.setattr(native, "_BUILD_ONE", start)
    with pytest.raises(BuildError, match=r"^no one$"):
        native.build_cuda()
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_build_runs_here_whatever_the_arch_list_says(tmp_path):
    code = (
        "import torch\nfrom decodev2 import native\n"
        "words = torch.arange(1000, 1400, dtype=torch.int32, device='cuda')\n"
        "sum = torch.zeros(1, dtype=torch.int32, device='cuda')\n"
        "native.cuda('read_rate').read_all(words, sum)\nprint(int(sum))"
    )
    root = str(Path(native.__file__).parents[1])
    env = os.environ | {
        "TORCH_CUDA_ARCH_LIST": "7.0", "DECODEV2_CACHE": str(tmp_path), "PYTHONPATH": root,
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    expected = functools.reduce(lambda a, b: a ^ b, range(1000, 1400))
    assert done.stdout.strip() == str(expected), done.stderr


# ---- the table ----


def update(allowed: list[str]) -> int:
    """Compile for sm_90a and write the table. Spills go in only for kernels named in `allowed`."""
    if not nvcc():
        print("nvcc was not found", file=sys.stderr)
        return 1
    folder = native.csrc_folder()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda name: compile_source(folder / name, MEASURED), SOURCES))
    for name, result in zip(SOURCES, results, strict=True):
        if result.status:
            print(f"{name} does not compile:\n{result.said}", file=sys.stderr)
            return 1
    refused = [
        f"{name}: {kernel} spills {resources.spilled} bytes; needs --allow-spills '{kernel}'"
        for name, result in zip(SOURCES, results, strict=True)
        for kernel, resources in result.kernels.items()
        if resources.spilled and kernel not in allowed
    ]
    if refused:
        print("\n".join(refused), file=sys.stderr)
        return 1
    table = {
        "arch": "sm_90a",
        "nvcc": nvcc_version(),
        "kernels": {n: _plain(r.kernels) for n, r in zip(SOURCES, results, strict=True)},
    }
    TABLE.write_text(_text(table))
    print(f"{TABLE.name}: {sum(map(len, table['kernels'].values()))} kernels")
    return 0


def _text(table: dict) -> str:
    """JSON with one kernel a line, so that a change is one line of a diff."""
    text = json.dumps(table, indent=1)
    return re.sub(r"\{\s+(\"registers\"[^}]*?)\s+\}", _joined, text) + "\n"


def _joined(match: re.Match) -> str:
    return "{" + " ".join(match.group(1).split()) + "}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run these tests, or write the table again.")
    parser.add_argument("--update", action="store_true", help="write cuda_resources.json")
    parser.add_argument("--allow-spills", action="append", default=[], metavar="KERNEL")
    arguments = parser.parse_args()
    if arguments.update:
        return update(arguments.allow_spills)
    return pytest.main([__file__, "-q"])


if __name__ == "__main__":
    raise SystemExit(main())
