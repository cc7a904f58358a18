"""A session: folder, packed weights and tokenizer joined, with each executor."""

from __future__ import annotations

import functools
import json
import os
import shutil
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf import hf_tensors
from tiny import (
    ANSWER_ID,
    BYTES,
    END,
    END_ID,
    WIDE_BYTES,
    chain,
    dense_tensors,
    run_of,
    write_model,
)

from decodev2 import native, oracle, session
from decodev2.errors import (
    BuildError,
    ContainerError,
    DecodeError,
    ModelError,
    PromptError,
    StepError,
)
from decodev2.load import load_weights, open_model
from decodev2.session import answer, pick_device
from decodev2.state import allocate_state
from decodev2.step import greedy_decode

EXECUTORS = ("decodev2", "tokenloop", "oracle")


def open_session(*args, device="cpu", **options):
    """These tests are about the CPU, also on a machine with a GPU."""
    return session.open_session(*args, device=device, **options)


@pytest.fixture(params=EXECUTORS)
def opened(request, talker):
    opened = open_session(talker, executor=request.param)
    yield opened
    opened.close()


# ---- answers ----


def test_the_end_token_is_recorded_and_not_shown(opened):
    ids = opened.encode("hi")
    assert ids == [256, *b"hi", 258, ANSWER_ID]
    pieces = []
    text, result = answer(opened, ids, 20, write=pieces.append)
    assert text == "né 🎉" and result.ids == [*text.encode(), END_ID]
    assert result.stop_reason == f"end token {END_ID}"
    # Only whole characters are written, as soon as they are whole.
    assert pieces == ["n", "é", " ", "🎉"]


def test_an_end_token_with_text_of_its_own_is_not_shown(tmp_path):
    """Two end tokens, ordinary in the tokenizer: 3 visible tokens, the reason names the one."""
    spec = replace(WIDE_BYTES, eos_ids=(ord("?"), ord("!")))
    tensors = dense_tensors(chain(spec, run_of(ANSWER_ID, *b"abc!de")))
    folder = write_model(tmp_path / "m", spec, tensors)
    for executor in EXECUTORS:
        opened = open_session(folder, executor=executor)
        text, result = answer(opened, opened.encode("hi"), 6)
        assert text == "abc" and result.ids == [*b"abc!"]
        assert result.stop_reason == f"end token {ord('!')}"
        text, result = answer(opened, opened.encode("hi"), 6, ignore_eos=True)
        assert text == "abc!de" and result.stop_reason == "max_new_tokens"
        opened.close()


def test_ignoring_end_tokens_goes_on(opened):
    text, result = answer(opened, opened.encode("hi"), 11, ignore_eos=True)
    assert result.ids == [*"né 🎉".encode(), END_ID, ord("x"), ord("y")]
    # The tokenizer marks the end token special, so it shows nothing here either.
    assert text == "né 🎉xy" and result.stop_reason == "max_new_tokens"


def test_a_limit_inside_a_character_flushes_the_tail(opened):
    text, result = answer(opened, opened.encode("hi"), 6)
    assert result.ids == list("né 🎉".encode()[:6])
    assert text == "né \ufffd"


def test_raw_text_has_no_template(opened):
    assert opened.encode("hi", raw=True) == [*b"hi"]
    text, _ = answer(opened, opened.encode("hi\ufffd", raw=True), 1)
    assert text == "\0"  # any other id is followed by id 0


def test_a_session_answers_any_number_of_prompts(opened):
    for _ in range(2):
        assert answer(opened, opened.encode("again"), 20)[0] == "né 🎉"
        with pytest.raises(PromptError, match="the prompt has 65 tokens, max_seq is 64"):
            opened.generate([1] * 65, 4)


# ---- executors agree ----


def test_all_executors_give_the_same_ids(random_model):
    found = {}
    for name in EXECUTORS:
        opened = open_session(random_model, executor=name)
        assert opened.executor == name and opened.device == "cpu"
        found[name] = [opened.generate(opened.encode(p), 16).ids for p in ("a", "Zürich!")]
        with open_model(random_model, random_model.with_suffix(".chr")).tensors:
            assert opened.model.spec.max_seq == 64
        opened.close()
    model = open_model(random_model, random_model.with_suffix(".chr"))
    want = oracle.greedy(oracle.decode_all(model), [256, ord("a"), 258, 257], 16)
    assert found["oracle"][0] == want
    assert found["decodev2"] == found["tokenloop"] == found["oracle"]
    model.tensors.close()


def test_auto_is_decodev2(random_model):
    opened = open_session(random_model, device="auto")
    assert opened.device == pick_device("auto")
    assert opened.executor == "decodev2" and opened.state is not None and opened.weights
    assert opened.load_s > 0 and opened.warmup_s > 0
    assert opened.packed_bytes == opened.weights.bytes_per_token > 0
    opened.close()


def test_the_oracle_needs_no_kernels(random_model, monkeypatch):
    def no_build():
        raise AssertionError("the oracle asked for the kernels")

    monkeypatch.setattr(native, "cpu", no_build)
    opened = open_session(random_model, executor="oracle")
    assert opened.weights is None and opened.state is None and opened.packed_bytes == 0
    assert len(opened.generate([1, 2], 4).ids) == 4
    opened.close()


@pytest.mark.parametrize("max_seq", (1, 2, 63, 64))
def test_max_seq_is_the_caches_capacity(random_model, max_seq):
    opened = open_session(random_model, max_seq=max_seq)
    assert opened.spec.max_seq == max_seq == opened.state.kv.k.shape[1]
    result = opened.generate([5] * max_seq, 9)
    assert len(result.ids) == 1 and result.stop_reason == "context full"
    opened.close()


# ---- shapes: tied, head_dim, InternLM2 ----


def open_ids(folder, prompt, n=12, executor="decodev2"):
    opened = open_session(folder, executor=executor)
    ids = opened.generate(prompt, n, ignore_eos=True).ids
    opened.close()
    return ids


def test_a_tied_model_gives_the_ids_of_its_untied_copy(tmp_path):
    tied = replace(BYTES, tied=True)
    tensors = hf_tensors(tied)
    assert "lm_head.weight" not in tensors
    one = write_model(tmp_path / "tied", tied, tensors)
    copy = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    two = write_model(tmp_path / "untied", BYTES, copy)
    for prompt in ([1], [7, 200, 31, 90]):
        ids = open_ids(one, prompt)
        assert ids == open_ids(two, prompt) == open_ids(one, prompt, executor="oracle")
    assert one.with_suffix(".chr").stat().st_size < two.with_suffix(".chr").stat().st_size


@pytest.mark.parametrize(
    "change",
    [
        dict(hidden=128, head_dim=64),  # q gives 256 columns, o takes 256
        dict(hidden=128, head_dim=32),  # null in the config: 128 / 4
        dict(hidden=576, n_q=9, n_kv=3, head_dim=64, intermediate=96),
        dict(n_q=6, n_kv=2, hidden=96, family="internlm_gqa", model_type="internlm2"),
        dict(qkv_bias=True, model_type="qwen2"),
    ],
    ids=["head_dim 64", "head_dim null", "ragged", "internlm2", "qwen2"],
)
def test_packed_shapes_equal_the_oracle(tmp_path, change):
    spec = replace(BYTES, **change)
    null = {"head_dim": None} if change == dict(hidden=128, head_dim=32) else {}
    folder = write_model(tmp_path / "m", spec, hf_tensors(spec), **null)
    prompt = [9, 200, 31, 7, 88]
    ids = open_ids(folder, prompt)
    model = open_model(folder, folder.with_suffix(".chr"))
    assert ids == oracle.greedy(model, prompt, 12) == open_ids(folder, prompt, 12, "tokenloop")
    model.tensors.close()


# ---- what is refused ----


@pytest.fixture
def copy(random_model, tmp_path):
    """A copy of the random model that a test may spoil."""
    folder = tmp_path / "tiny"
    shutil.copytree(random_model, folder)
    for path in random_model.parent.glob("tiny.chr*"):
        shutil.copy(path, tmp_path)
    return folder


def refused(error, call):
    with pytest.raises(error) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said and isinstance(caught.value, DecodeError)
    return said


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("max_seq", (0, -1, 65, 10**9))
def test_max_seq_outside_the_model(random_model, max_seq):
    said = refused(ModelError, lambda: open_session(random_model, max_seq=max_seq))
    assert said == f"max_seq {max_seq} is outside this model's 1..64"


def test_unknown_executor_and_device(random_model):
    said = refused(DecodeError, lambda: open_session(random_model, executor="fast"))
    assert "'fast'" in said and "tokenloop" in said
    assert "'tpu'" in refused(ModelError, lambda: open_session(random_model, device="tpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device(random_model):
    said = refused(ModelError, lambda: open_session(random_model, device="cuda"))
    assert said.startswith("device cuda:") and "--device cpu" in said


def test_a_folder_that_is_none(tmp_path):
    assert "no such folder" in refused(ModelError, lambda: open_session(tmp_path / "no"))
    assert "config.json" in refused(ModelError, lambda: open_session(tmp_path))


def test_a_missing_chr(copy):
    copy.with_suffix(".chr").unlink()
    assert "tiny.chr" in refused(ContainerError, lambda: open_session(copy))


def test_a_chr_of_another_model(copy, tmp_path):
    spec = replace(BYTES, intermediate=192)
    other = write_model(tmp_path / "other", spec, hf_tensors(spec))
    said = refused(ContainerError, lambda: open_session(copy, other.with_suffix(".chr")))
    assert "intermediate_size is 192" in said and "needs 128" in said
    spec = replace(BYTES, n_kv=4)  # no root key tells them apart: a shape does
    other = write_model(tmp_path / "heads", spec, hf_tensors(spec))
    said = refused(ContainerError, lambda: open_session(copy, other.with_suffix(".chr")))
    assert "k_proj" in said
    spec = replace(BYTES, tied=True)
    other = write_model(tmp_path / "tied", spec, hf_tensors(spec))
    said = refused(ContainerError, lambda: open_session(copy, other.with_suffix(".chr")))
    assert "lm_head is missing" in said
    said = refused(ContainerError, lambda: open_session(other, copy.with_suffix(".chr")))
    assert "lm_head has no place" in said


@pytest.mark.parametrize("where", (0, 100, 0.5, -1))
def test_one_flipped_byte(copy, where):
    """In the header, in the first tensor, in the middle, at the end: named, whatever it hits."""
    path = copy.with_suffix(".chr")
    data = bytearray(path.read_bytes())
    at = int(where * len(data)) if isinstance(where, float) else where
    data[at] ^= 0x10
    path.write_bytes(data)
    for executor in EXECUTORS:
        said = refused(
            ContainerError,
            lambda: open_session(copy, executor=executor).generate([1, 2], 2),  # noqa: B023
        )
        assert "tiny.chr" in said


def test_a_side_car_of_another_file(copy, tmp_path):
    other = write_model(tmp_path / "other", BYTES, hf_tensors(BYTES, seed=1))
    shutil.copy(other.parent / "other.chr.sum.json", copy.parent / "tiny.chr.sum.json")
    assert "tiny.chr" in refused(ContainerError, lambda: open_session(copy))


@pytest.mark.parametrize("name", ("config.json", "tokenizer.json"))
def test_a_folder_that_changed_after_packing(copy, name):
    path = copy / name
    path.write_text(path.read_text() + "\n")
    said = refused(ContainerError, lambda: open_session(copy))
    assert f"was packed from another {name}" in said


def test_no_chat_template(tmp_path):
    folder = write_model(tmp_path / "base", BYTES, hf_tensors(BYTES), template=None)
    opened = open_session(folder)
    said = refused(PromptError, lambda: opened.encode("hi"))
    assert "no chat template" in said and "--raw" in said
    assert len(opened.generate(opened.encode("hi", raw=True), 3, ignore_eos=True).ids) == 3
    opened.close()


def test_more_end_tokens_than_a_state_holds(copy):
    edit(copy / "config.json", eos_token_id=list(range(9)))
    (copy.parent / "tiny.chr.sum.json").unlink()  # it would refuse the config first
    opened = open_session(copy)
    assert "9 end tokens" in refused(ModelError, lambda: opened.generate([1, 2], 2))
    opened.close()


def test_nothing_stays_open_after_a_refusal(copy):
    """A notebook retries: a file left open by each failure would add up."""
    path = copy.with_suffix(".chr")

    def is_open():
        return any(os.path.realpath(p) == str(path) for p in Path("/proc/self/fd").iterdir())

    opened = open_session(copy)
    assert is_open()
    opened.close()
    assert not is_open()
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ContainerError) as kept:  # found while loading; its traceback is kept alive
        open_session(copy)
    assert not is_open() and kept
    edit(copy / "config.json", intermediate_size=192)
    (copy.parent / "tiny.chr.sum.json").unlink()
    with pytest.raises(ContainerError) as kept:  # found in the header
        open_session(copy)
    assert not is_open() and kept


def test_state_size_is_known_before_loading(random_model):
    """`session` numbers for the memory budget: packed weights, cache, arena."""
    model = open_model(random_model, random_model.with_suffix(".chr"))
    weights, state = load_weights(model), allocate_state(model.spec)
    assert weights.nbytes >= sum(
        value.nbytes for value in model.tensors.values() if hasattr(value, "codes")
    )
    assert state.nbytes > state.kv.nbytes == 2 * 2 * 64 * 2 * 16 * 4
    model.tensors.close()


def test_end_token_text_is_the_templates(talker):
    assert session.load_text(talker).decode([END_ID], skip_special=False) == END


def test_a_step_that_does_not_exist_is_named(random_model):
    with pytest.raises(
        DecodeError, match="step 'magic' is unknown; needs one of auto, graph, persistent"
    ):
        open_session(random_model, step="magic")


def test_on_the_cpu_there_is_one_step(random_model, capsys):
    opened = open_session(random_model, step="persistent")
    assert opened.graph is None and opened.persistent is None
    assert "no persistent step on the CPU; stepping by its ops" in capsys.readouterr().err
    opened.close()


# ---- one kernel a token, its launches played by the CPU's step ----


class Played:
    """Stands in for `persistent`: what was checked and cleared, and a fault at some step."""

    def __init__(self, monkeypatch, opened, fails_at: int | None = None):
        self.taken, self.checked, self.cleared, self.fails_at = 0, 0, 0, fails_at
        self.fault = torch.zeros(1, dtype=torch.int32)
        self.take = functools.partial(greedy_decode, opened.state, opened.weights)
        monkeypatch.setattr(session.persistent, "check", self.check)
        monkeypatch.setattr(session.persistent, "clear", self.clear)
        opened.persistent = self
        opened.graph = types.SimpleNamespace(replay=self.replay)

    def replay(self) -> None:
        self.take()
        self.taken += 1
        if self.taken == self.fails_at:
            self.fault.fill_(7)

    def check(self, one) -> None:
        assert one is self and int(self.fault) == 7
        self.checked += 1
        raise StepError("the persistent step gave up waiting")

    def clear(self, one) -> None:
        assert one is self
        self.fault.zero_()
        self.cleared += 1


@pytest.fixture
def on_cpu(random_model):
    opened = open_session(random_model)
    yield opened
    opened.close()


def test_hand_offs_that_came_are_not_looked_at_again(on_cpu, monkeypatch):
    expected = on_cpu.generate([1, 2], 20).ids
    played = Played(monkeypatch, on_cpu)
    assert on_cpu.generate([1, 2], 20).ids == expected
    assert (played.taken, played.checked, played.cleared) == (19, 0, 0)


@pytest.mark.parametrize(
    ("fails_at", "shown"), [(1, 1), (8, 1), (9, 9), (16, 9), (17, 17), (19, 17)]
)
def test_ids_of_a_step_that_failed_are_not_shown(on_cpu, monkeypatch, fails_at, shown):
    """The fault word is read with every batch, 8 steps each."""
    expected, seen = on_cpu.generate([1, 2], 20).ids, []
    played = Played(monkeypatch, on_cpu, fails_at)
    with pytest.raises(StepError):
        on_cpu.generate([1, 2], 20, on_token=seen.append)
    assert seen == expected[:shown] and (played.checked, played.cleared) == (1, 1)
    assert on_cpu.generate([1, 2], 20).ids == expected
    assert (played.checked, played.cleared) == (1, 1)


@pytest.mark.parametrize("error", (KeyboardInterrupt, BrokenPipeError))
def test_what_breaks_a_request_off_leaves_no_hand_off_behind(on_cpu, monkeypatch, error):
    expected = on_cpu.generate([1, 2], 20).ids
    played = Played(monkeypatch, on_cpu)

    def stop(token_id):
        if token_id == expected[3]:  # five more steps of this read were taken
            raise error

    with pytest.raises(error):
        on_cpu.generate([1, 2], 20, on_token=stop)
    assert played.cleared == 1
    assert on_cpu.generate([1, 2], 20).ids == expected


@pytest.mark.parametrize(
    "error",
    [ModelError("tiny: no persistent step, why"), RuntimeError("persistent step: too large\nmore")],
)
def test_where_one_kernel_cannot_run_the_graph_does(on_cpu, monkeypatch, capsys, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(session.persistent, "prepare", refuse)
    assert session._persistent_or_none(on_cpu.state, on_cpu.weights) == (None, None)
    said = capsys.readouterr().err
    assert said == f"decodev2: {str(error).splitlines()[0]}; stepping by the graph\n"


def test_kernels_that_do_not_compile_are_no_reason_for_the_graph(on_cpu, monkeypatch):
    def broken(*_):
        raise BuildError("no compiler")

    monkeypatch.setattr(session.persistent, "prepare", broken)
    with pytest.raises(BuildError):
        session._persistent_or_none(on_cpu.state, on_cpu.weights)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
