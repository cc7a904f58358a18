"""What compute-sanitizer watches: every kind of kernel once, on small shapes.

`compute-sanitizer --tool memcheck python -m decodev2.lab.sanitizer_target` (see the experiment
`sanitizer`). Results are compared with the oracle's or with exact ones, so a clean report is not
one of a run that went nowhere. torch's own kernels are left out; so is, and that is printed, what
this card cannot run.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import torch

from decodev2 import (
    ladder,
    linear,
    native,
    nf4,
    ops,
    oracle,
    panels,
    persistent,
    prefill,
    runner,
    step,
    synth,
    toggles,
)
from decodev2.lab.experiments import handoff, ring_ablations
from decodev2.load import load_weights
from decodev2.plan import MEDIUM_LLAMA, TINY_INTERNLM, TINY_LLAMA
from decodev2.state import allocate_state

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
OURS = ("one_launch", "two_launch", "one_warp", "rope_apart")
# A tool and other programs on the card make waits long, but one for ever must end: two minutes.
PATIENCE_CYCLES = 60 * persistent.PATIENCE_CYCLES
CAP = 0.05  # of logits
SMALL = replace(
    MEDIUM_LLAMA, name="small", n_layers=2, hidden=256, n_q=4, intermediate=512, max_seq=320
)
# Both kernels of attention, several CTAs to a tile and one, a tile's last panel narrow and whole,
# x of gate/up in shared memory and with the warps.
IN_ONE = (
    SMALL,
    replace(SMALL, name="small-128", hidden=320, n_kv=1, head_dim=128, qkv_bias=True, n_layers=1,
            tied=True, model_type="qwen2"),
    replace(SMALL, name="small-wide", hidden=2048, n_layers=1),
)  # fmt: skip


def steps() -> int:
    """Prefill and greedy steps of both tiny models, by every product and attention."""
    done = 0
    for spec, seed in ((TINY_LLAMA, 0), (TINY_INTERNLM, 1)):
        model = synth.build(spec, seed)
        expected = oracle.greedy(model, PROMPT[:5], 4)
        panels, rows = (load_weights(model, "cuda", layout) for layout in ("panels", "rows"))
        state = allocate_state(spec, "cuda")
        ways = [{"linear": "mma"}, {"linear": "gemv", "norm": "alone", "pdl": False}]
        ways += [{"linear": "gemv", "gemv": v} for v in toggles.CHOICES["gemv"][1:]]
        ways += [{"linear": "gemv", "act": "float", "ahead": "nothing"}]
        ways += [{"linear": "gemv", "attention": a} for a in OURS]
        ways += [{"linear": "rows", "parts": p} for p in toggles.CHOICES["parts"]]
        for way in ways:
            with toggles.using(**way):
                weights, chunk = (rows, 1) if way["linear"] == "rows" else (panels, None)
                found = runner.generate(state, weights, PROMPT[:5], 4, chunk=chunk).ids
            if found != expected:
                raise SystemExit(f"{spec.name} {way}: ids {found}, the oracle's are {expected}")
            done += 1
    return done


def rungs() -> int:
    """Every rung of the GEMV ladder on odd shapes: 65 rows, 192 and 65 columns."""
    done = 0
    rng = np.random.default_rng(0)
    for cols in (192, 65):
        packed = [synth.random_matrix(65, cols, rng) for _ in range(3)]
        parts = [ladder.from_packed(p, "cuda") for p in packed]
        x = torch.randn(cols, device="cuda")
        for rung in ladder.RUNGS:
            count = {"gemv": 1, "qkv": 3, "gate_up": 2}[rung.op]
            w = parts[:count]
            if rung.options.get("how") == "concatenated":
                w = [ladder.concatenate(w)]
            y = torch.full((65 * (3 if rung.op == "qkv" else 1),), torch.nan, device="cuda")
            tensors = {}
            if rung.op == "gate_up":
                tensors["scratch"] = torch.empty(130, device="cuda")
            if rung.norm:
                tensors |= {"norm": torch.ones(cols, device="cuda"), "eps": 1e-5}
            if rung.bias:
                tensors["bias"] = torch.ones_like(y)
            ladder.run_rung(rung, x, w, y, **tensors)
            if not bool(torch.isfinite(y).all()):
                raise SystemExit(f"{rung.name}: not every output was written")
            done += 1
    return done


def small() -> int:
    """Kernels that a step of the tiny models leaves out."""
    x = torch.randn(3, 576, device="cuda")
    ops.rms(x, torch.ones(576, device="cuda"), 1e-5, torch.empty_like(x))
    data = torch.ones(1 << 18, dtype=torch.int32, device="cuda")
    native.cuda("read_rate").read_all(data, torch.zeros(1, dtype=torch.int32, device="cuda"))
    return 2


def in_one() -> int:
    """One kernel a token: ids of a short request, and a step whose context has several chunks."""
    for spec in IN_ONE:
        if reason := persistent.why_not(spec):
            return _left_out("one kernel a token", reason)
    for seed, spec in enumerate(IN_ONE):
        model = synth.build(spec, seed)
        weights, (live, other) = load_weights(model, "cuda"), _lives(spec)
        one = persistent.prepare(live, weights, PATIENCE_CYCLES)
        take = functools.partial(persistent.greedy_decode, one)
        found = runner.generate(live, weights, PROMPT[:3], 4, step=take, chunk=3).ids
        logits = oracle.step_logits(model, PROMPT[:3] + found[:-1])[2:]
        parting = oracle.first_parting(logits, found)
        if parting and not parting.margin < CAP:
            raise SystemExit(f"one kernel a token, {spec.name}: {parting}")
        for mine, its in ((live.kv.k, other.kv.k), (live.kv.v, other.kv.v)):
            its.copy_(mine)
        for state in (live, other):
            state.position.fill_(300)
            state.token.fill_(7)
        persistent.forward_decode(one, persistent.timeline_of(one) if seed else None)
        with toggles.using(linear="gemv"):
            step.forward_decode(other, weights)
        _close(live.logits, other.logits, f"one kernel a token, {spec.name} at 300")
        persistent.check(one)
    return 2 * len(IN_ONE)


def _lives(spec):
    """Two states, the first with keys and values in all slots."""
    live, other = (allocate_state(spec, "cuda") for _ in range(2))
    for cache in (live.kv.k, live.kv.v):
        cache.normal_()
    return live, other


def prompts() -> int:
    """Products of the warpgroups: a prompt with all that may follow a product, tiles of 64, 128 and
    256 columns, K whole and split."""
    if not linear.has_wgmma(torch.device("cuda", 0)):
        return _left_out("products of the warpgroups", "needs sm_90")
    with toggles.using(linear="gemv", prefill="wgmma"):
        spec = IN_ONE[1]
        model = synth.build(spec, 2)
        ids = [(7 * i + 3) % spec.vocab for i in range(40)]
        live = allocate_state(spec, "cuda", 64)
        prefill.forward_prefill(live, load_weights(model, "cuda"), ids)
        expected = torch.from_numpy(oracle.step_logits(model, ids)[-1:])
        _close(live.logits, expected.cuda(), "a prompt by the warpgroups")
        # one panel cannot be split; few rows and many panels are; many rows take 256 columns
        shapes = ((300, 192, 50), (300, 1100, 100), (8704, 64, 256))
        for rows, cols, n in shapes:
            packed = synth.random_matrix(rows, cols, np.random.default_rng(rows))
            x = torch.randn(n, cols, device="cuda")
            y = torch.full((n, rows), torch.nan, device="cuda")
            need = linear.wgmma_bytes(cols, n)
            scratch = torch.empty(need, dtype=torch.uint8, device="cuda")
            linear.cuda_product(x, panels.from_packed(packed, "cuda"), y, scratch)
            exact = torch.from_numpy(nf4.decode_nf4(packed)).cuda()
            _close(y, x @ exact.T, f"{rows} x {cols} x {n}")
    return 1 + len(shapes)


def exchanges() -> int:
    """Every way to hand a vector over, checked as the experiment `handoff` checks it."""
    if torch.cuda.get_device_capability()[0] < 9:
        return _left_out("hand-offs", "needs sm_90 or newer")
    rng = np.random.default_rng(0)
    for way in handoff.WAYS:
        made = handoff.Rounds(way, 4, 16, PATIENCE_CYCLES)
        first = rng.integers(0, 2**31, made.words, dtype=np.uint32) * np.uint32(2)
        made.start_from(first)
        made.take()
        made.check(first)
    return len(handoff.WAYS)


def late_ring() -> int:
    """The ring's whole loop where a slot is refilled late: five rounds of two slots."""
    if torch.cuda.get_device_capability()[0] < 9:
        return _left_out("the ring with parts left out", "needs sm_90 or newer")
    packed = synth.random_matrix(48, 40 * 256, np.random.default_rng(1))
    w = panels.from_packed(packed, "cuda")
    x = torch.randn(1, w.cols, device="cuda")
    y = torch.full((1, w.rows), torch.nan, device="cuda")
    seen = torch.zeros(1, dtype=torch.int32, device="cuda")
    parts, ring = ring_ablations.PARTS[ring_ablations.LATE], ring_ablations.RINGS["8x2"][0]
    native.cuda("ring_ablations").product(
        x, w.panels, w.tiles, y, seen, parts, ring, True, None, None
    )
    _close(y, x @ torch.from_numpy(nf4.decode_nf4(packed)).cuda().T, "the late ring")
    return 1


def _close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    worst = float((found.double() - expected.double()).abs().max())
    if not worst < CAP:
        raise SystemExit(f"{what} is off by {worst:.1e}")


def _left_out(what: str, reason: str) -> int:
    print(f"left out: {what}, {reason}")
    return 0


KINDS = (steps, rungs, small, in_one, prompts, exchanges, late_ring)

if __name__ == "__main__":
    total = sum(kind() for kind in KINDS)
    torch.cuda.synchronize()
    print(f"{total} cases done")
