"""Upload: the same bytes on the device, for any size against the pinned pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodev2 import upload

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 2001, 7777])
def test_bytes_arrive_whatever_the_size(device, size, monkeypatch):
    monkeypatch.setattr(upload, "PIECE_BYTES", 1000)
    upload._pieces.cache_clear()
    rng = np.random.default_rng(size)
    sent = rng.integers(0, 256, size, dtype=np.uint8)
    found = upload.upload(sent, device)
    np.testing.assert_array_equal(found.cpu().numpy(), sent)
    upload._pieces.cache_clear()


@pytest.mark.parametrize("device", DEVICES)
def test_shape_type_and_strides(device):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (33, 64), dtype=np.uint8)
    scales = rng.standard_normal((33, 6)).astype(np.float16)
    for array in (codes, scales, codes[::2], codes[:, 3:9], np.asfortranarray(scales)):
        found = upload.upload(array, device)
        assert found.shape == array.shape and found.is_contiguous()
        np.testing.assert_array_equal(found.cpu().numpy(), array)


@pytest.mark.parametrize("device", DEVICES)
def test_the_source_is_free_afterwards(device):
    source = np.arange(4096, dtype=np.uint8)
    expected = source.copy()
    found = upload.upload(source, device)
    source[:] = 0
    np.testing.assert_array_equal(found.cpu().numpy(), expected)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
