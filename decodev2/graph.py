"""CUDA graphs of one state: a greedy step, and a full chunk of a prompt.

Captured once, replayed for any position: what depends on it is read from the state's tensors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from . import toggles
from .arena import Arena
from .load import ModelWeights
from .state import DecodeState, snapshot
from .step import forward, greedy_decode


@dataclass(frozen=True)
class DecodeGraph:
    """`replay()` is one greedy token on the current stream: no recapture, allocation or sync."""

    graph: torch.cuda.CUDAGraph
    take: Callable[[], None] | None = None  # what was captured: it keeps the buffers alive

    def replay(self) -> None:
        self.graph.replay()


def capture(state: DecodeState, weights: ModelWeights) -> DecodeGraph:
    """Capture `greedy_decode` against this state's buffers; token, position and flags stay as they
    were (the cache row at the current position may have been written).

    The kernels are those of `toggles.current`. Raises RuntimeError when something in the step
    cannot be captured; the stream is usable afterwards.
    """
    return capture_step(state, functools.partial(greedy_decode, state, weights))


def capture_step(state: DecodeState, take: Callable[[], None]) -> DecodeGraph:
    """Capture `take()`, one greedy step of `state`, as `capture` does."""
    device = state.logits.device
    with torch.cuda.device(device):
        restore = snapshot(state)
        before = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(before)
        try:
            with torch.cuda.stream(side):  # builds, attributes and lazy set-up: not in the capture
                take()
            before.wait_stream(side)
            graph = record(take, side)
        finally:
            restore()
    return DecodeGraph(graph, take)


def record(take: Callable[[], None], side: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """The launches of `take()` as a graph; they do not run. Its set-up must have been done."""
    before = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            take()
    finally:
        torch.cuda.set_stream(before)  # torch stays on `side` when a capture fails
    return graph


def capture_or_none(state: DecodeState, weights: ModelWeights) -> DecodeGraph | None:
    """`capture`, or None with a notice on stderr: the caller then steps eagerly."""
    try:
        return capture(state, weights)
    except RuntimeError as error:
        _say_why_not(error, "stepping eagerly")
        return None


@dataclass
class ChunkGraph:
    """A full chunk of a prompt: launched the first time, captured the second, then replayed.

    So a prompt with one full chunk pays for no capture, and the first pass, which does what a
    capture must not (builds, attributes, lazy set-up), is one of the prompt's own. Turned toggles
    start it anew: their kernels are not those of the graph.
    """

    state: DecodeState
    weights: ModelWeights
    columns: Arena  # of the state's prompt, as many as a full chunk has
    kernels: toggles.Toggles | None = None  # those of the last pass
    again: Callable[[], None] | None = None  # the next pass by the same kernels

    def take(self) -> None:
        """`forward` over the columns, on the current stream. A capture that fails says so on
        stderr, once; every pass is then launched from Python."""
        launch = functools.partial(forward, self.columns, self.state, self.weights)
        if toggles.current != self.kernels:
            launch()
            self.kernels, self.again = replace(toggles.current), None
        else:
            self.again = self.again or replay_of(launch, self.state.logits.device)
            self.again()


def replay_of(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The replay of a capture of `launch`, or with a notice on stderr `launch` itself."""
    with torch.cuda.device(device):
        try:
            return record(launch, torch.cuda.Stream()).replay
        except RuntimeError as error:
            _say_why_not(error, "launching prompts eagerly")
            return launch


def full_chunk(state: DecodeState, weights: ModelWeights, chunk: int | None = None) -> ChunkGraph:
    """The ChunkGraph of `chunk` columns, or of all that the state has."""
    return ChunkGraph(state, weights, state.prompt.first(chunk or len(state.prompt.token)))


def _say_why_not(error: RuntimeError, instead: str) -> None:
    # what broke the capture, not that it could not be ended
    reason = str(error.__context__ or error).split("\n", 1)[0]
    print(f"decodev2: no CUDA graph ({reason}); {instead}", file=sys.stderr)
