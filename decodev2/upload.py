"""Arrays to the device, through pinned memory, in pieces."""

from __future__ import annotations

import functools

import numpy as np
import torch

PIECE_BYTES = 16 << 20  # two of these stay pinned for the life of the process


def upload(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A copy of `array` on `device`, same shape and type.

    For CUDA the array goes through two pinned buffers in turn: while one piece travels, the host
    reads the next one (from the page cache, for the tensors of a file). The copy is ordered on the
    current stream; `array` is free again when this returns.
    """
    device = torch.device(device)
    array = np.ascontiguousarray(array)
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    source = array.reshape(-1).view(np.uint8)
    with torch.cuda.device(device):
        out = torch.empty(array.nbytes, dtype=torch.uint8, device=device)
        for index, start in enumerate(range(0, array.nbytes, PIECE_BYTES)):
            piece = source[start : start + PIECE_BYTES]
            pinned, sent = _pieces(torch.cuda.current_device())[index % 2]
            sent.synchronize()  # what it held before is on the device
            pinned.numpy()[: piece.size] = piece
            out[start : start + piece.size].copy_(pinned[: piece.size], non_blocking=True)
            sent.record()
    return out.view(torch.from_numpy(array[:0]).dtype).view(array.shape)


@functools.cache
def _pieces(device: int) -> tuple[tuple[torch.Tensor, torch.cuda.Event], ...]:
    def one():
        return torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()

    return one(), one()
