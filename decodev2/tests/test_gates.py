"""The correctness gates: they pass here, each of them can fail, and kernels that no committed plate
vouches for make this file red on any machine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodev2 import cli, gates, native, ops, persistent, step, synth
from decodev2.errors import BuildError, DecodeError
from decodev2.lab import card, gate_plate, plate
from decodev2.load import load_weights
from decodev2.plan import TINY_LLAMA
from decodev2.state import allocate_state

REPOSITORY = Path(__file__).resolve().parents[2]
READ_RATE = {"gb_s": 40.0, "method": "given"}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def failed(rows) -> set[str]:
    return {row.gate for row in rows if not row.ok}


# ---- the gates ----


def test_every_gate_passes_on_the_cpu():
    rows = list(gates.run("cpu"))
    assert not [row for row in rows if not row.ok]
    found = [(row.gate, row.model, row.kernels) for row in rows]
    assert len(found) == len(set(found))
    assert set(found) == gates.expected_rows("cpu")
    assert len(rows) == 8 * len(gates.CASES)


@needs_cuda
def test_every_gate_passes_on_cuda():
    rows = list(gates.run("cuda"))
    assert not [row for row in rows if not row.ok]
    found = {(row.gate, row.model, row.kernels) for row in rows}
    assert found == gates.expected_rows("cuda") and len(found) == len(rows)


def test_what_runs_where():
    cpu = {row[0] for row in gates.expected_rows("cpu")}
    cuda = {row[0] for row in gates.expected_rows("cuda")}
    longer = {gate.__name__ for gate in LONGER}
    assert cuda - cpu == {"nothing_allocated", "prompt_logits"} | longer and cpu < cuda
    rows = gates.expected_rows("cuda")
    by_kernels, in_one = 9 * len(gates.CASES) * 4, 12 * len(gates.LONG_CASES) * 2
    assert len(rows) == by_kernels + in_one + 2 * len(gates.PROMPT_CASES)
    assert {row[2] for row in rows if row[0] in longer} == {
        "persistent, eager", "persistent, graph"
    }  # fmt: skip
    assert {row[2] for row in rows if row[0] == "prompt_logits"} == {
        "prompt by mma", "prompt by wgmma"
    }  # fmt: skip
    assert cuda == {gate.__name__ for gate in gates.all_gates("cuda")}
    assert all(gate.__doc__ for gate in gates.all_gates("cuda"))
    assert len({spec.name for spec, _ in gates.cases("cuda")}) == len(gates.cases("cuda"))


# ---- those of longer contexts, with the CPU's step in the place of the persistent one ----

LONGER = (gates.many_ids, gates.context_edges, gates.same_bits)
SHORT_OF_LAYERS = replace(gates.LONG_LLAMA, name="short-of-layers", n_layers=1, hidden=128, n_q=2,
                          intermediate=192)  # fmt: skip


@pytest.fixture(scope="module")
def long_bench():
    case = gates.Case(synth.build(SHORT_OF_LAYERS, 6))
    return gates.Bench(case, load_weights(case.model), allocate_state(SHORT_OF_LAYERS))


def ran(gate, bench) -> bool:
    """Does it hold?"""
    about = (gate, bench.spec, "cpu")
    (row,) = gates._checked(*about, lambda: gate(bench, "cpu"))
    return row.ok


@pytest.mark.parametrize("gate", LONGER, ids=lambda gate: gate.__name__)
def test_longer_gates_pass_on_the_cpu(long_bench, gate):
    assert ran(gate, long_bench)


def _forgets_the_first_chunk(monkeypatch):
    """From 256 positions on, attention leaves out the first one."""
    attention = ops.attention

    def wrong(c, state, layer, **how):
        if len(c.x) == 1 and int(c.position) > 256:
            state.kv.v[layer, :64].zero_()
        attention(c, state, layer, **how)

    monkeypatch.setattr(ops, "attention", wrong)


def _adds_in_any_order(monkeypatch):
    head = ops.head

    def wrong(c, state, weights):
        head(c, state, weights)
        state.logits[0, 0] += 1e-6 * float(torch.rand(()))

    monkeypatch.setattr(ops, "head", wrong)


@pytest.mark.parametrize(
    "mistake, fails",
    [
        (_forgets_the_first_chunk, {gates.context_edges}),
        (_adds_in_any_order, {gates.same_bits}),
        (lambda monkeypatch: _no_mlp(monkeypatch), {gates.context_edges, gates.many_ids}),
    ],
)
def test_a_wrong_op_fails_the_longer_gates(long_bench, monkeypatch, mistake, fails):
    mistake(monkeypatch)
    assert {gate for gate in LONGER if not ran(gate, long_bench)} == fails


def test_prompts_are_compared_with_the_oracle(monkeypatch):
    """The gate of prompts, by the CPU's kernels; one that loses a column of each chunk fails."""
    case = gates.Case(synth.build(gates.LONG_ODD, 5))
    weights = load_weights(case.model)
    monkeypatch.setattr(gates, "PROMPT_CHUNKS", ((33, 33), (64, 64), (100, 40)))
    assert [row[2] for row in gates.prompt_logits(case, weights, "cpu")] == [True]
    swiglu = ops.swiglu

    def wrong(c, state, layer, **how):
        swiglu(c, state, layer)
        c.act[-1].zero_()

    monkeypatch.setattr(ops, "swiglu", wrong)
    assert [row[2] for row in gates.prompt_logits(case, weights, "cpu")] == [False]


# ---- a card that cannot run a path ----


@pytest.fixture
def older_card(monkeypatch):
    """Rows of `run("cuda")` on a card without sm_90's instructions; nothing else runs."""
    reason = "the device is sm_86, needs sm_90 or newer"
    monkeypatch.setattr(persistent, "why_not", lambda spec, device="cuda": reason)
    monkeypatch.setattr(gates.linear, "has_wgmma", lambda device: False)
    case = gates.Case(synth.build(TINY_LLAMA, 0))
    weights = load_weights(case.model)
    way = gates.Way(gates.PERSISTENT, True, ((TINY_LLAMA, 0),))
    return [
        *gates._rows_of(case, weights, "cuda", way),
        *gates._prompt_rows(case, weights, "wgmma"),
    ]


def test_what_a_card_cannot_run_neither_passes_nor_fails(older_card):
    assert len(older_card) == 9 + 1
    assert all(row.ok is None and np.isnan(row.measured) for row in older_card)
    assert older_card[0].note == "did not run: the device is sm_86, needs sm_90 or newer"
    assert older_card[-1].kernels == "prompt by wgmma" and "needs sm_90" in older_card[-1].note
    good = gates.Row("greedy_ids", "tiny", "gemv, graph", 0, 0, True)
    bad = replace(good, ok=False)
    said = gate_plate._verdict([good, *older_card])
    assert said == "Passed, 1 rows. Not run here: persistent, graph, prompt by wgmma (10 rows)."
    assert gate_plate._verdict([bad, *older_card]).startswith("FAILED: greedy_ids (1 of 11 rows).")


def test_a_plate_of_such_a_card_does_not_vouch(passing, tmp_path, older_card, monkeypatch):
    rows = [*passing.rows, gate_plate._row(older_card[0])]
    made = replace(passing, rows=rows)
    path = saved(made, tmp_path)
    assert plate.lint(path) == []
    (row,) = (row for row in plate.load(path).rows if row["ok"] is None)
    assert row["ok_reason"] == row["note"] and row["measured"] is None
    assert gate_plate.faults(path, "cpu") == [f"{path}: greedy_ids did not run"]


def test_such_a_card_is_no_failure_of_the_command(quick, tmp_path, capfd, monkeypatch, older_card):
    run = gates.run
    monkeypatch.setattr(gates, "run", lambda device: iter([*run(device), older_card[0]]))
    assert cli.main(["gates", "--device", "cpu", "--runs", str(tmp_path)]) == 0
    verdict, _ = capfd.readouterr().out.splitlines()
    assert verdict == "Passed, 8 rows. Not run here: persistent, graph (1 rows)."


# ---- each gate can fail: one op made wrong at a time ----


def _no_mlp(monkeypatch):
    monkeypatch.setattr(ops, "swiglu", lambda c, state, layer: c.act.zero_())


def _other_ids(monkeypatch):
    choose = ops.choose

    def wrong(state, commit):
        state.logits[0, 0] = 100.0
        state.next_token.zero_()
        choose(state, commit)

    monkeypatch.setattr(ops, "choose", wrong)


def _reads_one_slot_too_many(monkeypatch):
    attention = ops.attention

    def wrong(c, state, layer, **how):
        c.valid_len.add_(1).clamp_(max=state.spec.max_seq)
        attention(c, state, layer, **how)

    monkeypatch.setattr(ops, "attention", wrong)


def _writes_past_the_end_into_the_last_slot(monkeypatch):
    attention = ops.attention

    def wrong(c, state, layer, **how):
        position = c.position.clone()
        c.position.clamp_(max=state.spec.max_seq - 1)
        attention(c, state, layer, **how)
        c.position.copy_(position)

    monkeypatch.setattr(ops, "attention", wrong)


def _never_finishes(monkeypatch):
    choose = ops.choose

    def wrong(state, commit):
        choose(state, commit)
        state.finished.zero_()

    monkeypatch.setattr(ops, "choose", wrong)


def _skips_a_position(monkeypatch):
    choose = ops.choose

    def wrong(state, commit):
        choose(state, commit)
        if commit:
            state.position.add_(1)

    monkeypatch.setattr(ops, "choose", wrong)


def _replay_is_another_step(monkeypatch):
    launch = gates.Bench.launch

    def wrong(bench):  # the state that is compared with is the second one of this device
        if benches.setdefault(id(bench.state), len(benches)) == 0:
            step.forward_decode(bench.state, bench.weights)
        else:
            launch(bench)

    benches = {}
    monkeypatch.setattr(gates.Bench, "step", wrong)


def _keeps_the_last_request(monkeypatch):
    """The second request of a state finds keys of the first where its own should be."""
    attention, lengths = ops.attention, {}

    def wrong(c, state, layer, **how):
        attention(c, state, layer, **how)
        seen = lengths.setdefault(id(state), 0)
        lengths[id(state)] = seen + 1
        if seen > 40 * state.spec.n_layers:  # a fresh state does not get there
            c.attn.zero_()

    monkeypatch.setattr(ops, "attention", wrong)


def _no_logits(monkeypatch):
    def wrong(c, state, weights):
        state.logits.fill_(torch.nan)
        state.next_token.fill_(-1)

    monkeypatch.setattr(ops, "head", wrong)


MISTAKES = {
    _no_mlp: {"greedy_ids", "teacher_forced_logits"},
    _other_ids: {"greedy_ids", "teacher_forced_logits"},
    _reads_one_slot_too_many: {"dirty_tail"},
    _writes_past_the_end_into_the_last_slot: {"nothing_past_the_cache"},
    _never_finishes: {"end_token"},
    _skips_a_position: {"counts_after_steps"},
    _replay_is_another_step: {"replay_equals_eager", "counts_after_steps"},
    _keeps_the_last_request: {"reset_equals_fresh"},
    _no_logits: {"greedy_ids", "teacher_forced_logits", "dirty_tail"},
}


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(gates, "CASES", ((TINY_LLAMA, 0),))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_wrong_op_fails_its_gates(mistake, monkeypatch, one_case):
    mistake(monkeypatch)
    rows = list(gates.run("cpu"))
    assert MISTAKES[mistake] <= failed(rows)
    assert {(row.gate, row.model, row.kernels) for row in rows} == gates.expected_rows("cpu")


def test_every_gate_is_failed_by_some_mistake():
    assert set().union(*MISTAKES.values()) == {gate.__name__ for gate in gates.all_gates("cpu")}


def test_a_gate_that_breaks_off_has_failed_and_says_why(monkeypatch, one_case):
    _no_logits(monkeypatch)
    row = next(row for row in gates.run("cpu") if row.gate == "greedy_ids")
    assert not row.ok and np.isnan(row.measured)
    assert row.note.startswith("ModelError: no finite logit")


def test_a_build_error_is_no_failed_gate(monkeypatch, one_case):
    def broken(*_):
        raise BuildError("no compiler")

    monkeypatch.setattr(ops, "head", broken)
    with pytest.raises(BuildError, match="no compiler"):
        list(gates.run("cpu"))


# ---- the plate ----


@pytest.fixture(scope="module")
def passing():
    """A plate of the CPU gates on this machine."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(card, "measure_read_rate", lambda *_: READ_RATE)
        return gate_plate.record("cpu")


@pytest.fixture
def quick(monkeypatch, one_case):
    monkeypatch.setattr(card, "measure_read_rate", lambda *_: READ_RATE)


def saved(made, tmp_path) -> Path:
    return plate.save(made, tmp_path / "runs")


def faults(made, tmp_path, device="cpu", **options) -> str:
    return "\n".join(gate_plate.faults(saved(made, tmp_path), device, **options))


def test_a_passing_plate_vouches_for_these_kernels(passing, tmp_path):
    path = saved(passing, tmp_path)
    assert gate_plate.faults(path, "cpu") == []
    assert path.parent.name == "gates" and plate.lint(tmp_path / "runs") == []
    assert passing.verdict == f"Passed, {8 * len(gates.CASES)} rows."
    assert passing.code["depends"]["hash"] == card.csrc_hash(patterns=gate_plate.DEPENDS["cpu"])
    assert {note.split(":")[0] for note in passing.notes} == {row["gate"] for row in passing.rows}


def test_a_plate_of_other_sources_does_not_count(passing, tmp_path):
    """Change one constant and back: the hash is over contents, not over file times."""
    shutil.copytree(native.csrc_folder(), tmp_path / "csrc")
    assert faults(passing, tmp_path, root=tmp_path) == ""
    header = tmp_path / "csrc" / "cpu" / "kernels.h"
    old = header.read_text()
    header.write_text(old + "// changed\n")
    was = passing.code["depends"]["hash"]
    assert f"was made with kernel sources {was}" in faults(passing, tmp_path, root=tmp_path)
    header.write_text(old)
    assert faults(passing, tmp_path, root=tmp_path) == ""
    (tmp_path / "csrc" / "nf4_gemv.cu").write_text("")  # none of the CPU's business
    assert faults(passing, tmp_path, root=tmp_path) == ""


def test_a_plate_with_a_failed_row_does_not_count(passing, tmp_path):
    rows = [dict(row) for row in passing.rows]
    rows[3]["ok"] = False
    said = faults(replace(passing, rows=rows), tmp_path)
    assert said.endswith(f"{rows[3]['gate']} failed")
    rows[3]["ok"] = True
    assert faults(replace(passing, rows=rows), tmp_path) == ""


def test_a_plate_that_lacks_a_row_does_not_count(passing, tmp_path):
    assert "1 rows are missing" in faults(replace(passing, rows=passing.rows[1:]), tmp_path)


def test_a_plate_of_another_device_or_experiment_does_not_count(passing, tmp_path):
    assert "is not a plate of the gates on cuda" in faults(passing, tmp_path, "cuda")
    other = replace(passing, experiment="other")
    assert "is not a plate of the gates" in faults(other, tmp_path)


def test_a_plate_that_names_fewer_sources_does_not_count(passing, tmp_path):
    depends = passing.code["depends"] | {"patterns": []}
    code = passing.code | {"depends": depends}
    assert "names other sources" in faults(replace(passing, code=code), tmp_path)


def test_a_plate_edited_by_hand_does_not_count(passing, tmp_path):
    path = saved(passing, tmp_path)
    value = json.loads(path.read_text())
    value["rows"][0]["measured"] = 0.5
    path.write_text(plate.dumps(value))
    assert "is named otherwise than its contents say" in gate_plate.faults(path, "cpu")[0]


def test_sources_that_change_during_the_run_are_refused(quick, monkeypatch):
    monkeypatch.setattr(card, "is_current", lambda *_: False)
    with pytest.raises(DecodeError, match="changed while the gates ran"):
        gate_plate.record("cpu")


def test_the_two_stamps_share_one_header_and_leave_none_out():
    folder = native.csrc_folder()
    cuda = card.files_hash(folder, gate_plate.DEPENDS["cuda"])[1]
    cpu = card.files_hash(folder, gate_plate.DEPENDS["cpu"])[1]
    assert set(cuda) & set(cpu) == {"refuse.h"}  # both bindings report errors with it
    assert sorted({*cuda, *cpu}) == card.files_hash(folder)[1]
    for name in native.CUDA_EXTENSIONS:
        assert {f"{name}.cu", f"{name}_binding.cpp"} <= set(cuda)


def test_folders_do_not_get_into_a_note():
    clean = gate_plate._without_folders
    assert clean("OSError: '/a/b/c.so' is gone") == "OSError: 'c.so' is gone"
    assert clean("no path here, 3 of 4") == "no path here, 3 of 4"


# ---- the command ----


def test_command(quick, tmp_path, capfd):
    assert cli.main(["gates", "--device", "cpu", "--runs", str(tmp_path)]) == 0
    verdict, path = capfd.readouterr().out.splitlines()
    assert verdict == "Passed, 8 rows."
    assert gate_plate.faults(Path(path), "cpu") == [] and plate.lint(tmp_path) == []
    assert "Passed, 8 rows." in (tmp_path / "README.md").read_text()


def test_command_when_a_gate_fails(quick, tmp_path, capfd, monkeypatch):
    """Exit status 1; the plate is there all the same, and its verdict names the gates."""
    _reads_one_slot_too_many(monkeypatch)
    assert cli.main(["gates", "--device", "cpu", "--runs", str(tmp_path)]) == 1
    *rows, verdict, path = capfd.readouterr().out.splitlines()
    assert verdict.startswith("FAILED: ") and "dirty_tail" in verdict
    assert any(row.startswith("failed  dirty_tail") for row in rows)
    assert plate.load(path).verdict == verdict and plate.lint(tmp_path) == []
    assert any("dirty_tail" in fault for fault in gate_plate.faults(Path(path), "cpu"))


def test_command_json(quick, tmp_path, capfd, monkeypatch):
    _no_logits(monkeypatch)  # rows without a number
    assert cli.main(["gates", "--device", "cpu", "--runs", str(tmp_path), "--json"]) == 1
    value = plate.parse(capfd.readouterr().out)
    assert value["experiment"] == "gates" and value["verdict"].startswith("FAILED")
    row = next(row for row in value["rows"] if row["gate"] == "greedy_ids")
    assert row["measured"] is None and row["measured_reason"] and row["ok"] is False
    assert plate.lint(tmp_path) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_command_without_a_device(tmp_path, capfd):
    assert cli.main(["gates", "--device", "cuda", "--runs", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert said.startswith("decodev2: device cuda: ") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---- the kernels of this checkout ----


@pytest.mark.skipif(not (REPOSITORY / "pyproject.toml").is_file(), reason="not a checkout")
def test_a_passing_plate_of_these_cuda_kernels_is_in_runs():
    """Red after any change below csrc/ (but csrc/cpu) until the gates have passed on a card."""
    plates = plate.plate_paths(REPOSITORY / "runs" / gate_plate.EXPERIMENT)
    found = {path: gate_plate.faults(path, "cuda") for path in plates}
    if any(not why for why in found.values()):
        return
    now = card.csrc_hash(patterns=gate_plate.DEPENDS["cuda"])
    why = [line for lines in found.values() for line in lines]
    pytest.fail(
        f"no plate in runs/gates vouches for the CUDA kernel sources {now}. On a machine with a "
        "CUDA device run, in the root of the repository,\n\n"
        "    python -m decodev2 gates --device cuda\n\n"
        "and commit what it writes below runs/.\n" + "\n".join(why),
        pytrace=False,
    )


# ---- the ceiling of a CUDA card ----


def xor_of(words: torch.Tensor) -> int:
    return int(np.bitwise_xor.reduce(words.cpu().numpy()))


@needs_cuda
@pytest.mark.parametrize("quads", [1, 7, 256, 2047, 2048, 2049, 4096, 300_001])
def test_the_read_kernel_reads_every_word_once(quads):
    words = torch.empty(4 * quads, dtype=torch.int32, device="cuda").random_()
    sum = torch.tensor([12345], dtype=torch.int32, device="cuda")
    read_all = native.cuda("read_rate").read_all
    read_all(words, sum)
    assert int(sum) == 12345 ^ xor_of(words)
    read_all(words, sum)  # the second pass undoes the first
    assert int(sum) == 12345
    before = words.clone()
    for at in (0, 4 * quads // 2, 4 * quads - 1):
        words[at] ^= 1 << 20
        read_all(before, sum)
        read_all(words, sum)
        assert int(sum) == 12345 ^ 1 << 20
        sum.fill_(12345)
        words[at] ^= 1 << 20


@needs_cuda
def test_the_read_kernel_refuses_what_it_cannot_read():
    read_all = native.cuda("read_rate").read_all
    sum = torch.zeros(1, dtype=torch.int32, device="cuda")
    words = torch.zeros(64, dtype=torch.int32, device="cuda")
    for bad in (words[:6], words[1:5], words[:0], words.float(), words.cpu(), words[::2]):
        with pytest.raises(ValueError):
            read_all(bad, sum)
    with pytest.raises(ValueError):
        read_all(words, sum.cpu())


@needs_cuda
def test_the_read_rate_of_a_cuda_card():
    allocated = torch.cuda.memory_allocated()
    rate = card.measure_read_rate(1, "cuda", runs=3)
    assert set(rate) == {"gb_s", "copy_gb_s", "method", "buffer_mb", "runs"}
    assert 50 < 0.8 * rate["copy_gb_s"] < rate["gb_s"] < 20_000
    assert torch.cuda.memory_allocated() == allocated
    made = card.card("cuda", read_rate=rate)
    assert made["device"] == "cuda" and plate._card_problems(made) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
