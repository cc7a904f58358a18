"""Fixtures that several test files share."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

# Waiting threads that spin make tests many times slower when the machine has other work. Read when
# torch loads its thread pool.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hf import hf_tensors
from tiny import ANSWER_ID, BYTES, END_ID, WIDE_BYTES, chain, dense_tensors, run_of, write_model

from decodev2 import native

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def built_kernels():
    """The first build says so on stderr; no test of what a command prints should meet it."""
    native.cpu()


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request):
    """Each instruction set of the CPU kernels that this machine has."""
    kernels = native.cpu()
    before = kernels.isa()
    try:
        kernels.set_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    kernels.set_isa(before)


@pytest.fixture
def set_threads():
    """`torch.set_num_threads`, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def real_models() -> Path:
    """Folder of real models: $DECODEV2_MODELS, or `models/` at the repository root."""
    folder = Path(os.environ.get("DECODEV2_MODELS") or REPOSITORY / "models")
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: run `make models` or set DECODEV2_MODELS")
    return folder


@pytest.fixture(scope="session")
def random_model(tmp_path_factory) -> Path:
    """A packed folder of random weights without end tokens; FOLDER.chr lies beside it."""
    folder = tmp_path_factory.mktemp("random") / "tiny"
    return write_model(folder, replace(BYTES, eos_ids=()), hf_tensors(BYTES))


@pytest.fixture(scope="session")
def talker(tmp_path_factory) -> Path:
    """A packed folder that answers any prompt with "né 🎉" and the end token, then "xy"."""
    ids = [ANSWER_ID, *"né 🎉".encode(), END_ID, *b"xy"]
    folder = tmp_path_factory.mktemp("talker") / "tiny"
    return write_model(folder, WIDE_BYTES, dense_tensors(chain(WIDE_BYTES, run_of(*ids))))
