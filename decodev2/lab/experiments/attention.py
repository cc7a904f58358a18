"""Attention of one column: the kernels of the lab log's experiments 6 to 9 and 14, by length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ... import ops, plan, state, toggles
from ...errors import DecodeError
from .. import bench, cases
from ..figure import number
from ..plate import Measured, Missing
from .limits import log_ticks

TITLE = "Attention of one token: kernels by live length"
QUESTION = "Which attention fills the card at one token, and does its cost follow the live length?"
PREDICTION = (
    "At length 2,000 the 3B shape reads 2 x 2,000 x 2 x 128 x 2 bytes = 2.0 MB, 0.5 us at 4,600 "
    "GB/s: every kernel here is bound by latency and by how many multiprocessors it uses. One "
    "launch stays under 5 us at every length. Two launches add about 1 us, RoPE apart too. One "
    "warp per head walks 2,000 positions alone on 16 of 132 multiprocessors: over 100 us, slower "
    "than SDPA, as on the old card. SDPA masks the whole axis of 2,048: one time at every length."
)
LENGTHS = (1, 100, 512, 1000, 2000)
SHAPES = {"3B": "qwen2.5-3b", "0.5B": "qwen2.5-0.5b"}
KERNELS = ("one_launch", "two_launch", "rope_apart", "sdpa", "one_warp")
MAX_SEQ = 2048
PARAMS = {
    "attention": ([], "kernels to time, separated by commas; all if left out"),
    "length": ([], "live lengths, separated by commas; all if left out"),
    "shape": ([], "3B, 0.5B or both, separated by commas; both if left out"),
    "cold_mb": (300, "megabytes of keys and values in rotation at full length"),
    "runs": (9, "timed replays of each graph"),
    "seed": (0, "seed of keys, values and queries"),
}
TOGGLES = {
    "attention": ("attention", KERNELS),
    "length": ("length", LENGTHS),
    "shape": ("shape", tuple(SHAPES)),
}
DEPENDS = (
    "attn*.cu", "attn.cuh", "ladder_attn.cu", "attn_checks.h", "checks.h", "refuse.h",
    "device.cuh", "nf4.cuh", "ptx.cuh", "launch.h",
)  # fmt: skip
DEVICE = "cuda"
# Relative to the length of the output. SDPA rounds queries, weights and output to bf16.
ERROR_LIMITS = dict.fromkeys(KERNELS, 1e-3) | {"sdpa": 2e-2}
LIVE_GAIN = 30.0  # on the newest value: forgetting that row would be off by far more than a limit
DEAD = 100.0  # fills the slots past the live prefix: attending to one shows
COLUMNS = [
    {"name": "shape", "unit": ""},
    {"name": "attention", "unit": ""},
    {"name": "length", "unit": "tokens"},
    *cases.TIME_COLUMNS,
]


def measure(params: dict, progress: Callable[[int, int, str], None]) -> Measured:
    """One row per shape, kernel and length, each checked against float64 before and after."""
    shapes = cases.chosen([str(s) for s in params["shape"]], SHAPES, "shape")
    kernels = cases.chosen([str(k) for k in params["attention"]], KERNELS, "attention")
    lengths = cases.chosen([str(n) for n in params["length"]], map(str, LENGTHS), "length")
    read_rate = cases.begin("attention")
    torch.manual_seed(params["seed"])
    rows, noise = [], 0.0
    total, done = len(shapes) * len(kernels) * len(lengths), 0
    for shape in shapes:
        spec = _spec(SHAPES[shape], params["cold_mb"])
        live = state.allocate_state(spec, DEVICE, 1)
        live.kv.k.normal_()
        live.kv.v.normal_()
        for kernel in kernels:
            for length in map(int, lengths):
                progress(done, total, f"{shape} {kernel} at {length}")
                done += 1
                row = {"shape": shape, "attention": kernel, "length": length}
                if kernel not in toggles.CHOICES["attention"]:
                    rows.append(row | _absent(f"no attention {kernel} in this build"))
                    continue
                with toggles.using(attention=kernel, pdl=True):
                    made, times = _timed(live, length, kernel, params["runs"])
                    if kernel == "one_launch":
                        again = _times(live, length, params["runs"])
                        noise = max(noise, bench.noise_band(times, again))
                rows.append(row | made)
        del live
        torch.cuda.empty_cache()
    progress(total, total, "done")
    made = cases.end(read_rate)
    for row in rows:
        if isinstance(row["us"], Missing):
            row |= {"floor_us": row["us"], "gb_s": row["us"], "share": row["us"]}
        else:
            spec = plan.named_spec(SHAPES[row["shape"]])
            n_bytes = kv_bytes(spec, row["length"])
            cases.add_rates(row, n_bytes, made["read_rate"]["gb_s"])
    return Measured(
        columns=COLUMNS,
        rows=rows,
        verdict=_verdict(rows, noise),
        card=made,
        notes=[
            cases.noise_note(noise, "one_launch")
            if noise
            else "No noise band: one_launch was not timed.",
            "Times include what each kernel needs before it: rope_apart and one_warp and sdpa are "
            "preceded by the kernel that rotates and writes the cache.",
            "Layers are walked over so that keys and values come from memory at long lengths; a "
            "short prefix stays in the L2 between replays.",
        ],
        figure={"kind": "own"},
    )


def kv_bytes(spec: plan.ArchSpec, length: int) -> int:
    """Bytes of bf16 keys and values that one column must read."""
    return 2 * length * spec.n_kv * spec.head_dim * 2


def _spec(name: str, cold_mb: int) -> plan.ArchSpec:
    """The shape with as many layers as `cold_mb` of cache takes, and nothing else of its size."""
    spec = replace(plan.named_spec(name), max_seq=MAX_SEQ)
    layers = max(2, -(-cold_mb * 10**6 // kv_bytes(spec, MAX_SEQ)))
    return replace(spec, n_layers=layers, vocab=64, intermediate=64)


# ---- verify, time, verify ----


def _timed(live, length: int, kernel: str, runs: int) -> tuple[dict, list[float]]:
    before = _check(live, length, kernel)
    times = _times(live, length, runs)
    after = _check(live, length, kernel)
    return cases.times_row(times) | {"error_before": before, "error_after": after}, times


def _times(live, length: int, runs: int) -> list[float]:
    _fresh_column(live, length)
    layers = live.spec.n_layers
    return bench.graph_times(
        lambda i: ops.attention(live.decode, live, i % layers, in_step=True), max(layers, 96), runs
    )


def _fresh_column(live, length: int) -> None:
    """New q, k and v of the token at position length - 1."""
    c = live.decode
    c.qkv.normal_()
    c.v.mul_(LIVE_GAIN)
    c.position.fill_(length - 1)
    c.valid_len.fill_(length)


def _attended(live, layer: int) -> torch.Tensor:
    """Attention's output, as the timed kernels make it; what they may read early is there."""
    live.decode.attn.fill_(torch.nan)
    if live.decode.attn.is_cuda:
        torch.cuda.synchronize()
    ops.attention(live.decode, live, layer, in_step=True)
    return live.decode.attn


def _check(live, length: int, kernel: str) -> float:
    """Error of one layer's output relative to its length, in float64. Raises DecodeError."""
    c, layer = live.decode, live.spec.n_layers - 1
    keys, values = live.kv.k[layer], live.kv.v[layer]
    for cache in (keys, values):
        cache[: length - 1].normal_()
        cache[length - 1 :] = DEAD
    _fresh_column(live, length)
    q, k, v = (t.clone() for t in (c.q, c.k, c.v))
    first = _attended(live, layer).clone()
    expected = _expected(live, length, kernel, q, k, v, keys, values)
    error = float((first.double() - expected).norm() / expected.norm())
    limit = ERROR_LIMITS[kernel]
    if not error < limit:
        raise DecodeError(f"{kernel} at {length} is off by {error:.2e}, needs under {limit:.0e}")
    c.qkv.copy_(torch.cat([q, k, v], dim=1))  # some kernels rotate it in place
    if not torch.equal(_attended(live, layer), first):
        raise DecodeError(f"{kernel} at {length}: two runs on one input differ")
    for cache in (keys, values):
        cache[length - 1 :].normal_()
    return error


def _expected(live, length, kernel, q, k, v, keys, values) -> torch.Tensor:
    """float64 attention over the cache as it lies there, once its new row is the right one."""
    spec = live.spec
    cos, sin = live.cos[length - 1].double(), live.sin[length - 1].double()

    def rotate(x: torch.Tensor, heads: int) -> torch.Tensor:
        x = x.double().view(heads, spec.head_dim)
        a, b = x.chunk(2, dim=1)
        return x * cos + torch.cat([-b, a], dim=1) * sin

    wanted = {
        "key": (keys, rotate(k, spec.n_kv)),
        "value": (values, v.double().view(spec.n_kv, -1)),
    }
    for name, (cache, exact) in wanted.items():
        # half a unit of bf16, and what float32 rounds before
        far = (cache[length - 1].double() - exact).abs() > exact.abs() * 2.0**-8 + 1e-5
        if far.any() or (cache[length:] != DEAD).any():
            raise DecodeError(f"{kernel} at {length}: the cache does not hold the new {name}")
    queries = rotate(q, spec.n_q).view(spec.n_kv, -1, spec.head_dim)
    past_k, past_v = (cache[:length].double().transpose(0, 1) for cache in (keys, values))
    weights = (queries @ past_k.transpose(1, 2) * spec.head_dim**-0.5).softmax(-1)
    return (weights @ past_v).view(1, -1)


def _absent(reason: str) -> dict:
    names = ("us", "us_best", "us_worst", "error_before", "error_after")
    return {name: Missing(reason) for name in names} | {"runs": 0}


# ---- what it says ----


def _verdict(rows: list[dict], noise: float) -> str:
    us = {
        (r["shape"], r["attention"], r["length"]): r["us"]
        for r in rows
        if not isinstance(r["us"], Missing)
    }
    if not us:
        return "Nothing was timed."
    shape = next(iter(us))[0]
    lengths = sorted({n for s, _, n in us if s == shape})
    last = lengths[-1]
    at = {k: us[shape, k, last] for k in KERNELS if (shape, k, last) in us}
    words = [
        f"{shape} at {last:,}: "
        + ", ".join(f"{k} {number(t)} us" for k, t in sorted(at.items(), key=lambda item: item[1]))
    ]
    own = [us[shape, "one_launch", n] for n in lengths if (shape, "one_launch", n) in us]
    if len(own) > 1:
        words.append(
            f"one_launch takes {number(min(own))} to {number(max(own))} us from {lengths[0]} to "
            f"{last:,} tokens ({cases.held(max(own) < 5).lower()}: under 5)"
        )
    if {"one_launch", "two_launch"} <= at.keys():
        change = bench.compare(at["two_launch"], at["one_launch"], noise)
        words.append(
            f"One launch against two: {change} ({at['two_launch'] / at['one_launch']:.2f}x); on "
            "the old card two launches stayed, because its cooperative merge gave wrong ids"
        )
    if {"sdpa", "one_warp"} <= at.keys():
        slower = at["one_warp"] > at["sdpa"]
        words.append(
            f"One warp per head is {'slower' if slower else 'faster'} than SDPA, "
            f"{'as' if slower else 'not as'} on the old card"
        )
    return f"{'. '.join(words)}."


def claims(plate) -> list[tuple[str, bool]]:
    """What must hold on every card and in every run."""
    us = {(r["shape"], r["attention"], r["length"]): r["us"] for r in plate.rows}
    found = []
    for shape in SHAPES:
        last = max((n for s, _, n in us if s == shape), default=0)
        at = {k: us.get((shape, k, last)) for k in KERNELS}
        for slow in ("sdpa", "one_warp"):
            if at["one_launch"] and at[slow]:
                text = f"{shape} at {last:,}: one_launch is faster than {slow}"
                found.append((text, at["one_launch"] < at[slow]))
        pairs = [
            (us[shape, "one_launch", n], us[shape, "two_launch", n])
            for n in LENGTHS
            if us.get((shape, "one_launch", n)) and us.get((shape, "two_launch", n))
        ]
        if pairs:
            text = f"{shape}: one_launch is faster than two_launch at every length"
            found.append((text, all(one < two for one, two in pairs)))
        flat = [t for (s, k, _), t in us.items() if t and (s, k) == (shape, "sdpa")]
        if len(flat) > 1:
            text = f"{shape}: SDPA takes the same time at every length, within a tenth"
            found.append((text, max(flat) < 1.1 * min(flat)))
    checked = [r for r in plate.rows if r["error_before"] is not None]
    within = all(
        max(r["error_before"], r["error_after"]) < ERROR_LIMITS[r["attention"]] for r in checked
    )
    return [*found, ("every output agrees with float64 within its kernel's bound", within)]


def draw(plate, fig) -> None:
    """One panel per shape: time over length, one line per kernel, named at its end."""
    shapes = list(dict.fromkeys(r["shape"] for r in plate.rows))
    all_us = [r["us"] for r in plate.rows if r["us"] is not None]
    axes = fig.subplots(1, len(shapes), squeeze=False)[0]
    for ax, shape in zip(axes, shapes, strict=True):
        rows = [r for r in plate.rows if r["shape"] == shape and r["us"] is not None]
        _draw_shape(ax, shape, rows, min(all_us, default=1), max(all_us, default=1))
    axes[0].set_ylabel("one token's attention in one layer [us]", fontsize=12)


def _draw_shape(ax, shape: str, rows: list[dict], low: float, high: float) -> None:
    lengths = sorted({r["length"] for r in rows})
    shades = dict(
        zip(KERNELS, ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"), strict=True)
    )
    ends = {}
    for kernel in KERNELS:
        points = sorted((r["length"], r["us"]) for r in rows if r["attention"] == kernel)
        if points:
            ax.plot(
                [lengths.index(n) for n, _ in points], [t for _, t in points], "o-",
                color=shades[kernel], linewidth=2, markersize=7,
            )  # fmt: skip
            ends[kernel] = points[-1][1]
    ax.set_yscale("log")
    low, high = low / 1.4, high * 1.5
    ax.set_ylim(low, high)
    places = spread({k: _log_share(t, low, high) for k, t in ends.items()}, 0.05)
    for kernel, share in places.items():
        t = ends[kernel]
        ax.text(
            len(lengths) - 0.85, share, f"{kernel} {number(t)}",
            transform=ax.get_xaxis_transform(), va="center", fontsize=11.5,
            color=shades[kernel], weight="bold",
        )  # fmt: skip
    ticks = log_ticks(low, high)
    ax.set_yticks(ticks, [f"{t:,g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    ax.set_xlim(-0.3, len(lengths) - 0.5 + 0.35 * len(lengths))
    ax.grid(True, axis="y")
    spec = plan.named_spec(SHAPES[shape])
    ax.set_xlabel(
        f"live length [tokens], {shape}: {spec.n_q} query and {spec.n_kv} KV heads of "
        f"{spec.head_dim}", fontsize=11.5,
    )  # fmt: skip


def _log_share(value: float, low: float, high: float) -> float:
    """Where a value lies on a logarithmic axis: 0 at `low`, 1 at `high`."""
    return math.log(value / low) / math.log(high / low)


def spread(places: dict[str, float], gap: float) -> dict[str, float]:
    """Labels moved apart until neighbours are `gap` from each other, in their order."""
    names = sorted(places, key=places.get)
    moved = [places[name] for name in names]
    for _ in range(200):
        close = [i for i in range(len(moved) - 1) if moved[i + 1] - moved[i] < gap - 1e-9]
        if not close:
            break
        for i in close:
            push = (gap - (moved[i + 1] - moved[i])) / 2
            moved[i] -= push
            moved[i + 1] += push
    return dict(zip(names, moved, strict=True))
