"""Timing: repeats with warm-up, alternating series, spread, noise band, and the byte floor.

Functions take callables and return seconds. `sync` is called before each clock reading, so the same
code times a CPU (nothing to wait for) and a GPU (`sync_for("cuda")`): without it a GPU call returns
before its work is done and looks tens of times too fast.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import PlateError
from .plate import CEILING_SLACK, Missing


@dataclass(frozen=True)
class Stats:
    """Summary of repeated runs, in the unit of the samples. `std` needs two runs."""

    median: float
    best: float
    worst: float
    mean: float
    std: float | Missing
    runs: int


def stats(samples: Sequence[float], best: str = "min") -> Stats:
    """Stats of samples; `best` is "min" for times and "max" for rates. Raises on an empty list."""
    if not samples:
        raise PlateError("no run was timed; statistics need at least one")
    if best not in ("min", "max"):
        raise PlateError(f"best is {best!r}; needs 'min' or 'max'")
    low, high = min(samples), max(samples)
    return Stats(
        median=statistics.median(samples),
        best=low if best == "min" else high,
        worst=high if best == "min" else low,
        mean=statistics.fmean(samples),
        std=statistics.stdev(samples) if len(samples) > 1 else Missing("1 run has no deviation"),
        runs=len(samples),
    )


def no_sync() -> None:
    """A CPU call has done its work when it returns."""


def sync_for(device: str) -> Callable[[], None]:
    """What to call before reading the clock on `device` ("cpu", "cuda", "cuda:1")."""
    if not device.startswith("cuda"):
        return no_sync
    import torch

    return lambda: torch.cuda.synchronize(device)


def repeat(
    run: Callable[[], object],
    runs: int = 7,
    warmup: int = 2,
    sync: Callable[[], None] = no_sync,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each of `runs` calls after `warmup` calls that do not count."""
    return alternate({"": run}, runs, warmup, sync, clock)[""]


def alternate(
    variants: Mapping[str, Callable[[], object]],
    runs: int = 7,
    warmup: int = 2,
    sync: Callable[[], None] = no_sync,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per variant, measured in turn: A B, B A, A B, ... after `warmup` rounds.

    Clocks and neighbours drift over minutes; samples with one index are seconds apart, so their
    ratio (`ratios`) does not carry the drift. Turning the order round removes the effect of place.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(warmup + runs):
        order = list(variants) if index % 2 == 0 else list(variants)[::-1]
        for name in order:
            sync()
            start = clock()
            variants[name]()
            sync()
            if index >= warmup:
                samples[name].append(clock() - start)
    return samples


def ratios(samples: Sequence[float], reference: Sequence[float], best: str = "max") -> Stats:
    """Stats of samples[i] / reference[i] of one alternating series (dimensionless)."""
    if len(samples) != len(reference):
        raise PlateError(f"{len(samples)} and {len(reference)} runs cannot be paired")
    return stats([a / b for a, b in zip(samples, reference, strict=True)], best)


def noise_band(first: Sequence[float], second: Sequence[float]) -> float:
    """Relative difference of the medians of one variant timed twice: no gain inside it counts."""
    a, b = statistics.median(first), statistics.median(second)
    return abs(a - b) / min(a, b)


def compare(old: float, new: float, noise: float) -> str:
    """ "faster", "slower" or "no change" of two times, given the noise band of the series."""
    change = new / old - 1
    if abs(change) <= noise:
        return "no change"
    return "slower" if change > 0 else "faster"


def rate(amount: float, seconds: float, what: str = "bytes") -> float | Missing:
    """amount per second; a run that did nothing, or took no time, has no rate."""
    if amount <= 0:
        return Missing(f"{amount:g} {what} in {seconds:g} s is no rate")
    if not 0 < seconds < float("inf"):
        return Missing(f"{amount:g} {what} in {seconds:g} s: the clock did not work")
    return amount / seconds


def check_floor(
    n_bytes: float,
    seconds: float,
    read_rate: float,
    name: str = "run",
    slack: float = CEILING_SLACK,
) -> float:
    """Share of the measured ceiling (1.0 = all of it) that reading `n_bytes` in `seconds` reaches.

    `read_rate` in GB/s. Raises PlateError when the rate beats the ceiling by more than `slack`:
    then bytes are miscounted, work is missing or the clock stopped early. An error, not a triumph.
    """
    if not seconds > 0:
        raise PlateError(f"{name}: {seconds!r} s; a timed run needs a positive time")
    if not read_rate > 0:
        raise PlateError(f"{name}: read rate {read_rate!r} GB/s; needs the measured ceiling")
    reached = n_bytes / seconds * 1e-9
    if reached > read_rate * (1 + slack):
        raise PlateError(
            f"{name}: {reached:.1f} GB/s is above this machine's measured {read_rate:.1f} GB/s; "
            "the time or the byte count is wrong"
        )
    return reached / read_rate


def graph_times(
    run: Callable[[int], object], launches: int, runs: int = 9, warmup: int = 2
) -> list[float]:
    """Seconds per launch on CUDA: `run(0) .. run(launches - 1)` captured in one graph, replayed.

    The launches of a graph follow each other without the host. `run(i)` should take the i-th of
    several inputs that together exceed the L2, or it measures the cache.
    """
    import torch

    for i in range(min(launches, 2)):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i)
    return [t / launches for t in event_times(graph.replay, runs, warmup)]


def event_times(run: Callable[[], object], runs: int = 9, warmup: int = 2) -> list[float]:
    """Seconds of each of `runs` calls on the current CUDA stream, between two events."""
    import torch

    seconds = []
    for index in range(warmup + runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if index >= warmup:
            seconds.append(start.elapsed_time(end) * 1e-3)
    return seconds
