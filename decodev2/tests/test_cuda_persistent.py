"""The persistent step against the oracle and the graph: shapes, lengths, requests, failures."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hf import hf_tensors
from tiny import BYTES, chain, write_model

from decodev2 import graph, oracle, persistent, runner, session, step, toggles
from decodev2.errors import ModelError, StepError
from decodev2.load import load_weights
from decodev2.plan import MEDIUM_LLAMA, TINY_LLAMA, ArchSpec
from decodev2.prefill import forward_prefill
from decodev2.state import allocate_state, load_token, reset
from decodev2.synth import build

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
    reason="no CUDA device of sm_90 or newer",
)
CAP = 0.05
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def shape(name: str, **changes) -> ArchSpec:
    return replace(MEDIUM_LLAMA, name=name, max_seq=192, **changes)


SPECS = {
    "medium": shape("medium"),
    "three layers": shape("three layers", n_layers=3),  # an odd count: the parity of launches
    "seven queries": shape("seven queries", hidden=896, n_q=14, n_kv=2, intermediate=1216),
    "three KV heads": shape("three KV heads", hidden=576, n_q=9, n_kv=3, intermediate=1536),
    "head 128, eight queries": shape("head 128", hidden=1024, n_q=8, n_kv=1, head_dim=128,
                                     intermediate=2816, n_layers=2),
    "head 128, one query": shape("one query", hidden=512, n_q=4, n_kv=4, head_dim=128, n_layers=2),
    "biases": shape("biases", qkv_bias=True, model_type="qwen2", n_layers=2),
    "tied": shape("tied", tied=True, n_layers=2, vocab=1000),
    "large vocabulary": shape("large vocabulary", vocab=40001, n_layers=2),
    "one layer": shape("one layer", n_layers=1),
    "down in parts": shape("down in parts", hidden=2304, n_q=18, n_kv=6, head_dim=128,
                           intermediate=4096, n_layers=2, vocab=1000),
    "x stays": shape("x stays", hidden=2048, n_q=16, n_kv=2, head_dim=128, intermediate=1024,
                     n_layers=2, vocab=1000),
    "x stays, head 64": shape("x stays", hidden=4096, n_q=4, n_kv=1, n_layers=1, vocab=1000),
}  # fmt: skip


@pytest.fixture(scope="module", params=SPECS)
def model(request):
    return build(SPECS[request.param], 7)


def ids_of(spec: ArchSpec, n: int) -> list[int]:
    return [(7 * i + 3) % spec.vocab for i in range(n)]


@needs_hopper
def test_logits_along_a_context(model):
    """Teacher-forced, one launch a position, over the edges of chunks of 64; a poisoned tail."""
    spec, weights = model.spec, load_weights(model, "cuda")
    state = allocate_state(spec, "cuda")
    state.kv.k.fill_(torch.nan)
    state.kv.v.fill_(torch.nan)
    one = persistent.prepare(state, weights)
    ids = ids_of(spec, 132)
    expected = oracle.step_logits(model, ids)
    reset(state)
    for i, token_id in enumerate(ids):
        load_token(state, token_id)
        state.position.fill_(i)
        persistent.forward_decode(one)
        worst = np.abs(state.logits[0].cpu().numpy() - expected[i]).max()
        assert worst < CAP, f"position {i}: {worst}"
        assert int(state.valid_len) == i + 1
    persistent.check(one)


@needs_hopper
def test_greedy_ids_of_several_requests(model):
    """By launches and by a captured graph: the oracle's ids, the second request as the first."""
    spec, weights = model.spec, load_weights(model, "cuda")
    state = allocate_state(spec, "cuda")
    one = persistent.prepare(state, weights)
    captured = graph.capture_step(state, lambda: persistent.greedy_decode(one))
    for run in (lambda: persistent.greedy_decode(one), captured.replay):
        for prompt in (PROMPT[:4], PROMPT, ids_of(spec, 70)):
            found = runner.generate(state, weights, prompt, 12, step=run, steps_per_read=4).ids
            logits = oracle.step_logits(model, prompt + found[:-1])[len(prompt) - 1 :]
            parting = oracle.first_parting(logits, found)
            assert parting is None or parting.margin < CAP, str(parting)
    persistent.check(one)


@needs_hopper
def test_the_bits_of_many_launches(model):
    weights, state = load_weights(model, "cuda"), allocate_state(model.spec, "cuda")
    one = persistent.prepare(state, weights)
    forward_prefill(state, weights, ids_of(model.spec, 100))
    state.position.fill_(100)
    persistent.forward_decode(one)
    logits, keys = state.logits.clone(), state.kv.k.clone()
    noise = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    for _ in range(30):
        noise.random_()  # another L2 each time
        persistent.forward_decode(one)
        assert torch.equal(state.logits, logits) and torch.equal(state.kv.k, keys)
    persistent.check(one)


@needs_hopper
def test_near_the_graph_step(model):
    weights = load_weights(model, "cuda")
    by_graph, by_launch = (allocate_state(model.spec, "cuda") for _ in range(2))
    one = persistent.prepare(by_launch, weights)
    for state in (by_graph, by_launch):
        forward_prefill(state, weights, ids_of(model.spec, 90))
        state.position.fill_(90)
        load_token(state, 5)
    with toggles.using(linear="gemv"):
        step.forward_decode(by_graph, weights)
    persistent.forward_decode(one)
    assert (by_graph.logits - by_launch.logits).abs().max() < CAP
    assert (by_graph.kv.k[:, 90].float() - by_launch.kv.k[:, 90].float()).abs().max() < 0.05


# ---- what may go wrong ----


@pytest.fixture
def medium():
    """The persistent step of a model whose next input is id 3, and its logits."""
    model = build(SPECS["medium"], 7)
    state = allocate_state(model.spec, "cuda")
    one = persistent.prepare(state, load_weights(model, "cuda"))
    load_token(state, 3)
    persistent.forward_decode(one)
    persistent.check(one)
    return one, state.logits.clone()


def clean_again(one, clean) -> bool:
    persistent.forward_decode(one)
    persistent.check(one)
    return torch.equal(one.state.logits, clean)


@needs_hopper
def test_a_lost_hand_off_is_an_error_and_the_step_goes_on(medium):
    """With no patience at all the first wait gives up; nothing hangs, and a clean step follows."""
    one, clean = medium
    impatient = replace(one, patience=-1)
    with pytest.raises(StepError, match="gave up waiting"):
        for _ in range(50):
            persistent.forward_decode(impatient)
            persistent.check(impatient)
    assert clean_again(one, clean)


def writers_of(one) -> torch.Tensor:
    """How many CTAs write each tile's sums of qkv, where a launch reads it."""
    spec = one.state.spec
    tiles = -(-(spec.q_dim + 2 * spec.kv_dim) // 16)
    return one.tables[-2 * tiles : -tiles]


@needs_hopper
def test_a_stuck_hand_off_ends_every_launch_behind_it(medium):
    """Sums that nobody writes are waited for in every layer: one patience for all of them, and the
    launches that are on their way already end at once."""
    one, clean = medium
    stuck = replace(one, patience=200_000_000)  # a tenth of a second
    writers_of(one).add_(1)
    started = time.perf_counter()
    for _ in range(8):
        persistent.forward_decode(stuck)
    with pytest.raises(StepError, match="gave up waiting"):
        persistent.check(stuck)
    assert time.perf_counter() - started < 2
    writers_of(one).sub_(1)
    assert clean_again(one, clean)


@needs_hopper
def test_twenty_thousand_steps_over_resets_repeat_their_ids(medium):
    """Replays of one graph over one set of hand-offs; every request has the ids of the first."""
    one, _ = medium
    state = one.state
    replay = graph.capture_step(state, functools.partial(persistent.greedy_decode, one)).replay
    first, differ = None, torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(20_000 // 160):
        reset(state)
        load_token(state, 3)
        for _ in range(160):
            replay()
        ids = state.history[1:161].clone()
        first = ids if first is None else first
        differ += (ids != first).sum()
    persistent.check(one)
    assert int(differ) == 0 and len(set(first.tolist())) > 1


@needs_hopper
def test_other_work_of_this_process_is_no_matter(medium):
    """Large products on another stream take the multiprocessors in turn with the launches."""
    one, clean = medium
    busy, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(200):
            matrix @ matrix
    wrong = 0
    for _ in range(300):
        persistent.forward_decode(one)
        wrong += (one.state.logits != clean).any()
    persistent.check(one)
    torch.cuda.synchronize()
    assert int(wrong) == 0


@needs_hopper
def test_two_states_on_two_streams(medium):
    """Neither has room for all of its CTAs while the other one runs."""
    one, clean = medium
    state, patience = allocate_state(one.state.spec, "cuda"), persistent.PATIENCE_CYCLES // 10
    both = [replace(one, patience=patience), persistent.prepare(state, one.weights, patience)]
    load_token(state, 3)
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, each in zip(streams, both, strict=True):
            with torch.cuda.stream(stream):
                persistent.forward_decode(each)
    torch.cuda.synchronize()
    for each in both:
        persistent.check(each)
        assert torch.equal(each.state.logits, clean)


NEIGHBOUR = """
import time, torch
matrix = torch.randn(8192, 8192, device="cuda")
data = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
print("busy", flush=True)
until = time.time() + 6
while time.time() < until:
    for _ in range(8):
        matrix @ matrix
        data.add_(1)
    torch.cuda.synchronize()
"""


@needs_hopper
def test_another_process_on_the_card_is_no_matter(medium):
    one, clean = medium
    neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout.readline() == b"busy\n"
        until, steps, wrong = time.time() + 3, 0, 0
        while time.time() < until:
            for _ in range(50):
                persistent.forward_decode(one)
                wrong += (one.state.logits != clean).any()
                steps += 1
            torch.cuda.synchronize()
        persistent.check(one)
        assert int(wrong) == 0 and steps >= 50
        assert neighbour.poll() is None  # it was there all along
    finally:
        neighbour.kill()
        neighbour.wait()


# ---- sessions ----

PACKED = replace(
    BYTES, name="packed", hidden=512, n_q=8, n_kv=2, head_dim=64, intermediate=1024, max_seq=192,
    eos_ids=(),
)  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with tokenizer and .chr of a model that one kernel can run."""
    return write_model(tmp_path_factory.mktemp("packed") / "m", PACKED, hf_tensors(PACKED, 3))


@pytest.fixture
def opened(packed):
    """A session by one kernel."""
    opened = session.open_session(packed, device="cuda", step="persistent")
    assert opened.persistent is not None and opened.graph is not None
    yield opened
    opened.close()


@needs_hopper
def test_a_session_answers_as_by_the_graph(packed, opened):
    by_graph = session.open_session(packed, device="cuda")
    expected = by_graph.generate([1, 2], 150, ignore_eos=True).ids
    by_graph.close()
    first = opened.generate([1, 2], 150, ignore_eos=True).ids
    if first != expected:  # what follows a near tie may differ
        at = next(i for i, (a, b) in enumerate(zip(first, expected, strict=True)) if a != b)
        logits = oracle.step_logits(opened.model, [1, 2, *first[:at]])[-1]
        assert abs(logits[first[at]] - logits[expected[at]]) < 2 * CAP
    assert all(opened.generate([1, 2], 150, ignore_eos=True).ids == first for _ in range(20))


@needs_hopper
@pytest.mark.parametrize("attention, one", [("one_launch", True), ("two_launch", False)])
def test_auto_takes_one_kernel_unless_toggles_ask_for_others(packed, attention, one):
    with toggles.using(linear="gemv", attention=attention):
        opened = session.open_session(packed, device="cuda", step="auto")
    assert (opened.persistent is not None) == one and opened.graph is not None
    opened.close()


@needs_hopper
def test_a_cancelled_request_leaves_nothing_behind(opened):
    """Cancelled while steps of the same read are on their way, at every place in it."""
    expected = opened.generate([1, 2], 150, ignore_eos=True).ids
    for place in range(1, 2 * session.STEPS_PER_READ + 2):
        seen = []

        def cancel(token_id, seen=seen, place=place):
            seen.append(token_id)
            if len(seen) == place:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            opened.generate([1, 2], 150, True, on_token=cancel)
        assert seen == expected[:place]
        assert opened.generate([1, 2], 150, ignore_eos=True).ids == expected


@needs_hopper
def test_a_session_outlives_a_stuck_step(opened):
    expected, seen = opened.generate([1, 2], 150, ignore_eos=True).ids, []
    writers = writers_of(opened.persistent)
    writers.add_(1)
    started = time.perf_counter()
    with pytest.raises(StepError, match="the step graph has none"):
        opened.generate([1, 2], 150, True, on_token=seen.append)
    assert time.perf_counter() - started < 10  # seconds; the patience is two
    assert seen == expected[:1]  # of the prompt, which takes other kernels
    writers.sub_(1)
    assert opened.generate([1, 2], 150, ignore_eos=True).ids == expected


INTERRUPTED = """
import sys
from decodev2 import session
opened = session.open_session(sys.argv[1], device="cuda", step="persistent")
expected = opened.generate([1, 2], 150, True).ids
print("ready", flush=True)
try:
    while True:
        assert opened.generate([1, 2], 150, True).ids == expected
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert all(opened.generate([1, 2], 150, True).ids == expected for _ in range(10))
print("right", flush=True)
"""


@needs_hopper
def test_ctrl_c_in_the_middle_of_steps(packed):
    root = str(Path(session.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(packed)], env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == "ready\n", child.stderr.read()
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        said, errors = child.communicate(timeout=30)
        assert (said, child.returncode) == ("interrupted\nright\n", 0), errors
    finally:
        child.kill()
        child.wait()


@needs_hopper
def test_a_shape_that_does_not_fit_takes_the_graph(random_model, capsys):
    opened = session.open_session(random_model, device="cuda", step="persistent")
    said = capsys.readouterr().err
    assert "no persistent step, head_dim is neither 64 nor 128; stepping by the graph" in said
    assert opened.persistent is None and opened.graph is not None
    by_graph = session.open_session(random_model, device="cuda")
    assert opened.generate([1, 2], 12).ids == by_graph.generate([1, 2], 12).ids
    opened.close()
    by_graph.close()


@needs_hopper
def test_shapes_that_do_not_fit_are_named():
    for spec, words in (
        (TINY_LLAMA, "head_dim is neither 64 nor 128"),
        (shape("many", hidden=640, n_q=10, n_kv=1), "more than 8 query heads"),
        (shape("odd", intermediate=1000), "no multiple of 64"),
    ):
        assert words in persistent.why_not(spec)
        if spec is TINY_LLAMA:
            state = allocate_state(spec, "cuda")
            with pytest.raises(ModelError, match="no persistent step, head_dim"):
                persistent.prepare(state, load_weights(build(spec, 0), "cuda"))
    assert persistent.why_not(MEDIUM_LLAMA) is None
    assert "needs cuda" in persistent.why_not(MEDIUM_LLAMA, "cpu")


@needs_hopper
def test_an_end_token_stops_the_device():
    model = chain(SPECS["medium"], {3: 5, 5: 9, 9: 2})
    weights, state = load_weights(model, "cuda"), allocate_state(model.spec, "cuda")
    one = persistent.prepare(state, weights)
    result = runner.generate(
        state, weights, [3], 8, (2,), step=lambda: persistent.greedy_decode(one), steps_per_read=4
    )
    assert result.ids[-1] == 2 and result.stop_reason == "end token 2"


@needs_hopper
def test_the_time_line_is_in_order():
    model = build(SPECS["medium"], 7)
    weights, state = load_weights(model, "cuda"), allocate_state(model.spec, "cuda")
    one = persistent.prepare(state, weights)
    load_token(state, 3)
    line = persistent.timeline_of(one)
    persistent.forward_decode(one, line)
    layers = line[:-1, :20].cpu().unflatten(1, (5, 4))  # the others are those of attention
    assert (layers > 0).all()
    assert (layers[:, :, 2] >= layers[:, :, 1]).all()  # of one warp; the others may be of others


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
