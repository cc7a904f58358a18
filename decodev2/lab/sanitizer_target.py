"""What compute-sanitizer watches: every kind of kernel once, on small shapes.

`compute-sanitizer --tool memcheck python -m decodev2.lab.sanitizer_target` (see the experiment
`sanitizer`). Greedy ids are compared with the oracle, so a clean report is not one of a run that
went nowhere. torch's own kernels are left out.
"""

from __future__ import annotations

import numpy as np
import torch

from decodev2 import ladder, native, ops, oracle, runner, synth, toggles
from decodev2.load import load_weights
from decodev2.plan import TINY_INTERNLM, TINY_LLAMA
from decodev2.state import allocate_state

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
OURS = ("one_launch", "two_launch", "one_warp", "rope_apart")


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


if __name__ == "__main__":
    total = steps() + rungs() + small()
    torch.cuda.synchronize()
    print(f"{total} cases done")
