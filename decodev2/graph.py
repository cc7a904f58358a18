"""One greedy step as a CUDA graph: captured once per state, replayed for any position."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from .load import ModelWeights
from .state import DecodeState, snapshot
from .step import greedy_decode


@dataclass(frozen=True)
class DecodeGraph:
    """`replay()` is one greedy token on the current stream: no recapture, allocation or sync."""

    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


def capture(state: DecodeState, weights: ModelWeights) -> DecodeGraph:
    """Capture `greedy_decode` against this state's buffers; token, position and flags stay as they
    were (the cache row at the current position may have been written).

    The kernels are those of `toggles.current`. Raises RuntimeError when something in the step
    cannot be captured; the stream is usable afterwards.
    """
    device = state.logits.device
    with torch.cuda.device(device):
        restore = snapshot(state)
        before = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(before)
        try:
            with torch.cuda.stream(side):  # builds, attributes and lazy set-up: not in the capture
                greedy_decode(state, weights)
            before.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                greedy_decode(state, weights)
        finally:
            torch.cuda.set_stream(before)  # torch stays on `side` when a capture fails
            restore()
    return DecodeGraph(graph)


def capture_or_none(state: DecodeState, weights: ModelWeights) -> DecodeGraph | None:
    """`capture`, or None with a notice on stderr: the caller then steps eagerly."""
    try:
        return capture(state, weights)
    except RuntimeError as error:
        # what broke the capture, not that it could not be ended
        reason = str(error.__context__ or error).split("\n", 1)[0]
        print(f"decodev2: no CUDA graph ({reason}); stepping eagerly", file=sys.stderr)
        return None
