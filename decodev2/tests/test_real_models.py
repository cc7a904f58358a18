"""Real models: Decode V2, TokenLoop, the oracle and transformers on the same dequantised weights.

Each executor chooses its own ids. The references are then teacher-forced with those ids, one pass
per sequence, and must choose the same id at every position. Where they do not, the two ids must be
a near tie that the measured logit difference explains; it is printed with its margin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from decodev2 import native, oracle, runner
from decodev2.load import load_weights, open_model
from decodev2.state import allocate_state
from decodev2.text import load_text
from decodev2.tokenloop import TokenLoop

NEW = 64
CAP = 0.01  # largest logit difference between any two of them; logits are of size 10 to 30
MAX_SEQ = 512

LONG = (
    "Here is a list of things to know before the question. The first printed book with movable "
    "type in Europe appeared around the year 1455. The steam engine of James Watt was patented in "
    "1769. The telegraph line between Washington and Baltimore opened in 1844. The telephone was "
    "patented in 1876. The first powered flight took place in 1903. The transistor was shown at "
    "the end of 1947, and the integrated circuit followed in 1958. The first message between two "
    "computers of what became the internet was sent in October 1969, and it broke off after two "
    "letters. The personal computer became common in the 1980s, the web in the 1990s, and the "
    "pocket telephone with a touch screen in the 2000s. Each of these changed how people write, "
    "travel, trade and argue, and each was called a passing fashion by somebody who ought to have "
    "known better. Now the question: which of these inventions came first, which came last, and "
    "how many years lie between the two? Answer in one short paragraph, and show the subtraction."
)
CHAT = {
    "capital": "What is the capital of France?",
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "unicode": "Übersetze ins Englische: „Der Fuß ist größer als der Schuh.“ 你好 🎉",
    "list": "Name three primary colours, one per line.",
    "over 200 tokens": LONG,
}
RAW = "def quicksort(items):\n    if len(items) <= 1:\n"
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b")


@dataclass
class Real:
    """One model in every form: packed for the executors, float32 for the two references."""

    folder: Path
    chr_path: Path
    spec: object
    text: object
    weights: object
    state: object
    dense: oracle.DenseModel
    peer: object
    cases: dict[str, list[int]]


@pytest.fixture(scope="module", params=MODELS)
def real(request, real_models):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = real_models / request.param
    chr_path = real_models / f"{request.param}.chr"
    for path in (folder, chr_path):
        if not path.exists():
            pytest.skip(f"{path} is not there: run `make models` or set DECODEV2_MODELS")
    model = open_model(folder, chr_path, MAX_SEQ)
    weights, state = load_weights(model), allocate_state(model.spec)
    dense = oracle.decode_all(model)
    model.tensors.close()

    config = transformers.AutoConfig.from_pretrained(folder)
    peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = {
        name if name.endswith(".bias") else f"{name}.weight": torch.from_numpy(value)
        for name, value in dense.tensors.items()
    }
    if model.spec.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    peer.load_state_dict(tensors, strict=True, assign=True)  # shares the oracle's memory
    peer.eval()

    text = load_text(folder)
    cases = {
        name: text.encode_chat([{"role": "user", "content": prompt}])
        for name, prompt in CHAT.items()
    }
    cases["raw"] = text.encode_raw(RAW)
    yield Real(folder, chr_path, model.spec, text, weights, state, dense, peer, cases)


def decodev2_run(real, prompt, eos_ids):
    """Ids, and the logits each was chosen from: float32 [n, vocab]."""
    rows = []
    result = runner.generate(
        real.state,
        real.weights,
        prompt,
        NEW,
        eos_ids,
        on_token=lambda token_id: rows.append(real.state.logits[0].numpy().copy()),
    )
    return result, np.stack(rows)


def tokenloop_run(real, prompt, eos_ids):
    loop, ids, rows = TokenLoop(real.weights), [], []
    for token_id in prompt:
        last = loop.feed(token_id)
    while True:
        ids.append(last)
        rows.append(loop.logits[0].numpy().copy())
        if last in eos_ids or len(ids) == NEW:
            return ids, np.stack(rows)
        last = loop.feed(last)


def oracle_logits(real, prompt, ids):
    return oracle.step_logits(real.dense, [*prompt, *ids[:-1]])[len(prompt) - 1 :]


def transformers_logits(real, prompt, ids):
    with torch.no_grad():
        out = real.peer(torch.tensor([[*prompt, *ids[:-1]]])).logits
    return out[0, len(prompt) - 1 :].numpy()


def check_choices(label, ids, chosen_from, reference):
    """Every id must be the reference's argmax, or a near tie with it; returns max |difference|."""
    assert np.isfinite(chosen_from).all() and np.isfinite(reference).all()
    worst = float(np.abs(chosen_from - reference).max())
    for position in range(len(ids)):
        here = slice(position, position + 1)
        parting = oracle.first_parting(reference[here], ids[here], chosen_from[here])
        if parting is not None:
            print(f"{label}: at {position}, {parting}")
            assert parting.near_tie(CAP), f"{label}: at {position}, {parting}"
    assert worst < CAP, f"{label}: logits differ by {worst:.3f}"
    return worst


@pytest.mark.parametrize("name", [*CHAT, "raw", "ignoring end tokens"])
def test_all_four_choose_the_same_ids(real, name, record_property):
    prompt = real.cases.get(name, real.cases["list"])
    eos_ids = () if name == "ignoring end tokens" else real.spec.eos_ids
    assert real.spec.eos_ids
    if name == "over 200 tokens":
        assert len(prompt) > 200

    result, rows = decodev2_run(real, prompt, eos_ids)
    ids = result.ids
    assert len(ids) == NEW or ids[-1] in eos_ids
    assert not set(ids[:-1]) & set(eos_ids)
    expected_reason = f"end token {ids[-1]}" if ids[-1] in eos_ids else "max_new_tokens"
    assert result.stop_reason == expected_reason

    label = f"{real.spec.name}, {name}"
    reference = oracle_logits(real, prompt, ids)
    gap = check_choices(f"{label}, decodev2 against oracle", ids, rows, reference)
    peer = transformers_logits(real, prompt, ids)
    peer_gap = check_choices(f"{label}, decodev2 against transformers", ids, rows, peer)

    plain_ids, plain_rows = tokenloop_run(real, prompt, eos_ids)
    if plain_ids == ids:
        plain_gap = check_choices(f"{label}, tokenloop against oracle", ids, plain_rows, reference)
    else:  # it left at a near tie: from there on it is judged on its own ids
        own = oracle_logits(real, prompt, plain_ids)
        plain_gap = check_choices(f"{label}, tokenloop against oracle", plain_ids, plain_rows, own)
        at = next(i for i, (a, b) in enumerate(zip(ids, plain_ids, strict=False)) if a != b)
        print(f"{label}: tokenloop leaves decodev2 at {at}")
        difference = float(np.abs(rows[at] - plain_rows[at]).max())
        assert rows[at][ids[at]] - rows[at][plain_ids[at]] <= 2 * difference < 2 * CAP

    shown = real.text.decode(ids)
    print(
        f"{label}: {len(prompt)} + {len(ids)} ids, {result.stop_reason}; max abs logits "
        f"oracle {gap:.1e}, transformers {peer_gap:.1e}, tokenloop {plain_gap:.1e}; {shown[:60]!r}"
    )
    record_property("max_abs_logits", max(gap, peer_gap, plain_gap))
    assert "\ufffd" not in shown[:-1]


def test_answers_make_sense(real):
    """The one thing no comparison shows: that all of them are not wrong together."""
    result = runner.generate(real.state, real.weights, real.cases["capital"], 24, real.spec.eos_ids)
    assert "Paris" in real.text.decode(result.ids)


def test_a_second_run_gives_the_same_bits(real):
    prompt = real.cases["list"]
    first, rows = decodev2_run(real, prompt, real.spec.eos_ids)
    second, again = decodev2_run(real, prompt, real.spec.eos_ids)
    assert first.ids == second.ids
    np.testing.assert_array_equal(rows, again)


# ---- memory ----

MEASURE = """
import os, sys
child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, *sys.argv[1:]])
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss * 1024, file=sys.stderr)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
BASELINE = (
    "import decodev2.cli, decodev2.session; from decodev2 import native; native.cpu(); "
    "import torch; a = torch.ones(64, 64); a @ a"
)


def peak_bytes(*args):
    """Largest resident size of `python ARGS`, and its stdout."""
    root = str(Path(native.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, args)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]), done.stdout


@pytest.mark.parametrize("name", MODELS)
def test_generating_holds_the_packed_model_once(name, real_models, record_property):
    """Peak memory of `decodev2 generate`: packed weights, cache and arena, and little else."""
    folder, chr_path = real_models / name, real_models / f"{name}.chr"
    if not chr_path.exists():
        pytest.skip(f"{chr_path} is not there: run `make models` or set DECODEV2_MODELS")
    model = open_model(folder, chr_path)
    weights, state = load_weights(model), allocate_state(model.spec)
    model.tensors.close()
    needed = weights.nbytes + state.nbytes
    base, _ = peak_bytes("-c", BASELINE)
    peak, _ = peak_bytes(
        "-m", "decodev2", "generate", "--model", folder, "--prompt", "Hello", "--json",
        "--max-new-tokens", "16", "--device", "cpu",
    )  # fmt: skip
    over = peak - base - needed
    print(
        f"{name}: peak {peak / 1e6:.0f} MB, bare process {base / 1e6:.0f} MB, weights "
        f"{weights.nbytes / 1e6:.0f} MB, cache and arena {state.nbytes / 1e6:.0f} MB, "
        f"rest {over / 1e6:.0f} MB"
    )
    record_property("rest_bytes", over)
    assert over < 300e6
    assert weights.nbytes * 32 / 4.25 > 300e6, "the model is too small to show a dense copy"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-s"]))
