"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from decodev2 import native

REPOSITORY = Path(__file__).resolve().parents[2]


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
