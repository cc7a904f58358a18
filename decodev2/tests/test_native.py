"""Builds of the kernels: never at import, keyed by content, safe to kill and to start twice.

The builds here are of a ten-line extension without torch headers, which compiles in a second.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from decodev2 import native
from decodev2.errors import BuildError

SOURCE = """\
#include <Python.h>
#include "answer.h"
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(kAnswer); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "toy", "", -1, methods};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""
FLAGS = ["-O0"]
CHILD = f"""
from pathlib import Path
from decodev2 import native
folder = Path({{!r}})
print(native._build("toy", sorted(folder.iterdir()), {FLAGS}, folder).answer())
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder of sources and an empty build cache."""
    monkeypatch.setenv("DECODEV2_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "toy.cpp").write_text(SOURCE)
    (folder / "answer.h").write_text("constexpr long kAnswer = 42;\n")
    return folder


def build(folder):
    return native._build("toy", sorted(folder.iterdir()), FLAGS, folder)


def builds():
    return sorted(p for p in native.cache_folder().glob("*") if p.is_dir())


def python(code, **environment):
    """Run Python code in a process of its own, with the package and these changes of
    environment."""
    root = str(Path(native.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, **environment}
    env = {key: value for key, value in env.items() if value is not None}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=180
    )


# ---- never at import ----


def test_import_builds_nothing(tmp_path):
    """Every module, with no compiler, no ninja, no writable home: import needs none of them."""
    code = (
        "import decodev2, importlib, pkgutil\n"
        "names = [m.name for m in pkgutil.walk_packages(decodev2.__path__, 'decodev2.')]\n"
        "names = [n for n in names if '.tests' not in n and not n.endswith('__main__')]\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "print(len(names))"
    )
    cache = tmp_path / "cache"
    done = python(code, PATH="", CXX=None, CUDA_VISIBLE_DEVICES="", DECODEV2_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
    assert not cache.exists() and "compiling" not in done.stderr


def test_import_of_the_command_line_needs_no_torch():
    done = python("import sys, decodev2.cli; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


# ---- the key ----


def test_a_build_is_found_again_without_any_tool(toy, monkeypatch, capfd):
    assert build(toy).answer() == 42
    assert "compiling" in capfd.readouterr().err
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/nonexistent")
    assert build(toy).answer() == 42
    assert capfd.readouterr().err == ""
    assert len(builds()) == 1


def test_what_is_built_starts_no_process(toy, monkeypatch):
    """`build_cuda` looks for finished builds before it starts a process for each."""
    started = []

    class Child:
        def __init__(self, command, **_):
            started.append(command[-1])
            self.returncode = 0

        def communicate(self):
            return ("", None)

    recipe = (sorted(toy.iterdir()), FLAGS, None)
    monkeypatch.setattr(native, "CUDA_EXTENSIONS", ("toy",))
    monkeypatch.setattr(native, "_cuda_recipe", lambda name: recipe)
    monkeypatch.setattr(native.subprocess, "Popen", Child)
    native.build_cuda()
    (code,) = started
    assert code == native._BUILD_ONE.format("toy")
    monkeypatch.undo()
    monkeypatch.setenv("DECODEV2_CACHE", str(toy.parent / "cache"))
    assert build(toy).answer() == 42
    monkeypatch.setattr(native, "CUDA_EXTENSIONS", ("toy",))
    monkeypatch.setattr(native, "_cuda_recipe", lambda name: recipe)
    monkeypatch.setattr(native.subprocess, "Popen", Child)
    started.clear()
    native.build_cuda()
    assert started == []
    (mark,) = native.cache_folder().glob("*/complete")  # as after a build that was killed
    mark.unlink()
    native.build_cuda()
    assert started == [code]


def test_changing_a_constant_builds_anew_and_back_finds_the_old_build(toy, capfd):
    header = toy / "answer.h"
    old = header.read_text()
    stamp = header.stat()
    assert build(toy).answer() == 42
    header.write_text(old.replace("42", "43"))
    os.utime(header, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # file times do not count
    assert build(toy).answer() == 43
    assert len(builds()) == 2
    capfd.readouterr()
    header.write_text(old)
    assert build(toy).answer() == 42
    assert len(builds()) == 2 and "compiling" not in capfd.readouterr().err


def test_the_key_covers_every_source_its_name_and_the_flags(tmp_path):
    csrc = tmp_path / "cpu"
    shutil.copytree(native.csrc_folder() / "cpu", csrc)

    def key(*extra):
        return native.source_hash(list(csrc.iterdir()), *extra)

    first = key("-O3")
    assert first == key("-O3") and len(first) == 12
    assert first != key("-O2") != key("-O3", "2.13")
    for path in sorted(csrc.iterdir()):
        old = path.read_text()
        changed = old.replace(";", "; ", 1)
        assert changed != old, path
        path.write_text(changed)
        assert key("-O3") != first, path
        path.write_text(old)
        assert key("-O3") == first
    (csrc / "kernels.h").rename(csrc / "kernel.h")
    assert key("-O3") != first


def test_other_flags_are_another_build(toy):
    assert build(toy).answer() == 42
    native._build("toy", sorted(toy.iterdir()), ["-O1"], toy)
    assert len(builds()) == 2


# ---- builds that were killed, and builds at the same time ----


def test_left_overs_of_a_killed_build_do_not_block(toy):
    """torch's own `lock` file, and half a library: the next build takes no notice."""
    assert build(toy).answer() == 42
    (folder,) = builds()
    for path in folder.iterdir():
        if path.name != "build.lock":
            path.unlink()
    (folder / "lock").touch()
    (folder / f"{folder.name}.so").write_bytes(b"\x7fELF half a library")
    done = python(CHILD.format(str(toy)))
    assert done.stdout.strip() == "42", done.stderr
    assert len(builds()) == 1 and not (folder / "lock").exists()


def test_two_processes_build_once(toy):
    root = str(Path(native.__file__).parents[1])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD.format(str(toy))], env={**os.environ, "PYTHONPATH": root},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    outputs = [child.communicate(timeout=120) for child in children]
    assert [out.strip() for out, _ in outputs] == ["42", "42"], outputs
    assert sum("compiling" in err for _, err in outputs) == 1
    assert len(builds()) == 1


# ---- errors in one line ----


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_compiler_is_named(toy, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(BuildError) as error:
        build(toy)
    assert "building the toy kernels needs C++ compiler (/nonexistent/g++)" in one_line(error)


def test_a_missing_ninja_is_named(toy, monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None if name == "ninja" else name)
    monkeypatch.setattr(native.sys, "executable", "/nonexistent/bin/python")
    with pytest.raises(BuildError) as error:
        build(toy)
    assert "needs ninja" in one_line(error)


def test_the_real_kernels_without_a_compiler(tmp_path):
    code = "from decodev2 import native\ntry:\n native.cpu()\nexcept Exception as e: print(repr(e))"
    done = python(code, CXX="/nonexistent", DECODEV2_CACHE=str(tmp_path))
    assert done.stdout.startswith("BuildError('building the cpu kernels needs"), done.stderr
    assert done.stderr == ""


def test_sources_that_do_not_compile_point_to_the_log(toy):
    (toy / "answer.h").write_text("constexpr long kAnswer = forty_two;\n")
    with pytest.raises(BuildError) as error:
        build(toy)
    said = one_line(error)
    log = Path(said.split(" in ")[-1])
    assert "did not compile" in said and "forty_two" in log.read_text()
    (toy / "answer.h").write_text("constexpr long kAnswer = 44;\n")
    assert build(toy).answer() == 44


def test_a_second_try_in_the_same_process(toy, monkeypatch):
    """In a notebook: the first build fails, its cause is removed, the same build is tried again."""
    monkeypatch.setenv("CXX", shutil.which("false"))
    with pytest.raises(BuildError, match="did not compile"):
        build(toy)
    monkeypatch.delenv("CXX")
    assert build(toy).answer() == 42


def test_a_damaged_build_is_named(toy):
    build(toy)
    (folder,) = builds()
    library = folder / f"{folder.name}.so"
    library.unlink()
    library.write_bytes(b"not a library")
    done = python(CHILD.format(str(toy)))
    last = done.stderr.strip().splitlines()[-1]
    assert f"BuildError: {library} cannot be loaded" in last and "remove its folder" in last


def test_a_cache_that_cannot_be_written_is_an_os_error(toy, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DECODEV2_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="file"):
        build(toy)


def test_the_environment_is_as_before(toy, monkeypatch):
    before = os.environ["PATH"]
    build(toy)
    assert os.environ["PATH"] == before
    monkeypatch.setenv("CXX", "/nonexistent")
    (toy / "answer.h").write_text("constexpr long kAnswer = 45;\n")
    with pytest.raises(BuildError):
        build(toy)
    assert os.environ["PATH"] == before


# ---- choices by environment ----


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("DECODEV2_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert native.cache_folder() == Path("/a")
    monkeypatch.delenv("DECODEV2_CACHE")
    assert native.cache_folder() == Path("/b/decodev2")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert native.cache_folder() == Path("/c/.cache/decodev2")


def test_instruction_set_by_environment():
    code = "from decodev2 import native; print(native.cpu().isa())"
    done = python(code, DECODEV2_CPU_ISA="portable")
    assert done.stdout.strip() == "portable", done.stderr
    done = python(code, DECODEV2_CPU_ISA="sse9")
    assert done.returncode != 0 and "instruction set 'sse9'" in done.stderr


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
