"""The experiments on whole models: cuda_model, decode_step, step_ladder and loads, on made-up rows.

What `cuda_model` does to tell ids and times runs here on the CPU, with steps in place of a graph.
"""

import functools
import types
from dataclasses import replace

import pytest
import torch

from decodev2 import gates, graph, load, native, persistent, plan, session, state, step
from decodev2.errors import DecodeError, ModelError
from decodev2.lab import bench, card, commands, experiments, figure, models, plate
from decodev2.lab.experiments import cuda_model, decode_step, loads, step_ladder
from decodev2.lab.plate import Missing

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def made(name: str, rows: list[dict], verdict: str, **params) -> plate.Plate:
    """A plate of these rows, as a file of a CUDA card would give it; `save` would take it."""
    module = experiments.get(name)
    machine = card.card("cpu") | {
        "device": "cuda", "gpu": {"name": "A Card", "driver": "1"}, "slug": "a-card",
        "read_rate": {"gb_s": 4600.0},
    }  # fmt: skip
    result = plate.Plate(
        experiment=name, title=module.TITLE, question=module.QUESTION,
        prediction=module.PREDICTION, verdict=verdict, card=machine,
        params={key: value for key, (value, _) in module.PARAMS.items()} | params,
        columns=module.COLUMNS, rows=rows, figure={"kind": "own"}, code=card.code_state(),
    )  # fmt: skip
    value = plate.clean(result)
    assert plate.problems(value) == []
    return plate.Plate(**value)


def failing(result: plate.Plate) -> list[str]:
    return [text for text, holds in experiments.get(result.experiment).claims(result) if not holds]


def even_clock(run, runs: int = 9, warmup: int = 2) -> list[float]:
    """In the place of `bench.event_times`: runs, and says that each run took 50 ms."""
    for _ in range(warmup + runs):
        run()
    return [0.05] * runs


@pytest.fixture
def as_if_cuda(monkeypatch):
    """`measure` of an experiment for CUDA runs its own code on the CPU; its clock is given."""

    def replayed(live, weights):
        return types.SimpleNamespace(replay=functools.partial(step.greedy_decode, live, weights))

    rate = {"gb_s": 4600.0, "method": "given"}
    made_card = card.card("cpu") | {"read_rate": rate}
    load_weights, allocate = load.load_weights, state.allocate_state
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(native, "build_cuda", lambda: None)
    monkeypatch.setattr(card, "measure_read_rate", lambda *a: rate)
    monkeypatch.setattr(card, "card", lambda *a, **k: made_card)
    monkeypatch.setattr(graph, "capture", replayed)
    monkeypatch.setattr(graph, "replay_of", lambda launch, device: launch)
    monkeypatch.setattr(bench, "event_times", even_clock)
    monkeypatch.setattr(load, "load_weights", lambda model, device: load_weights(model))
    monkeypatch.setattr(state, "allocate_state", lambda spec, device, n: allocate(spec, "cpu", n))
    return replayed


# ---- cuda_model ----


@pytest.fixture
def opened(random_model, monkeypatch):
    """An open session whose "graph" is the CPU's step; events are a clock that runs evenly."""
    monkeypatch.setattr(gates, "SHORT", "hi")
    monkeypatch.setattr(bench, "event_times", even_clock)
    live = session.open_session(random_model, device="cpu", max_seq=32)
    replay = functools.partial(step.greedy_decode, live.state, live.weights)
    live.graph = types.SimpleNamespace(replay=replay)
    yield live
    live.close()


def test_the_window_repeats_the_hosts_ids(opened):
    rows, noise = cuda_model.speed_rows(opened, 9, 3, 4600.0)
    host, window = rows
    assert (host["gate"], window["gate"]) == (cuda_model.HOST, cuda_model.WINDOW) and noise == 0
    assert window["tokens"] == 8 and window["ms"] == pytest.approx(50)
    assert window["tok_s"] == pytest.approx(160) and window["step_ms"] == pytest.approx(50 / 8)
    assert host["host_over_window"] == pytest.approx(host["measured"] + 1)
    assert host["floor_ms"] == pytest.approx(8 * opened.weights.bytes_per_token / 4600e9 * 1e3)
    assert host["prompt_tokens"] == len(opened.encode("hi")) and host["prompt_ms"] > 0


def test_a_replay_that_does_nothing_is_seen(opened):
    opened.graph = types.SimpleNamespace(replay=lambda: None)
    result = types.SimpleNamespace(
        ids=[1] * 9, stop_reason="max_new_tokens", decode_s=0.1, prefill_s=0.1
    )
    opened.generate = lambda *a, **k: result
    with pytest.raises(DecodeError, match="ids differ from the host's"):
        cuda_model.speed_rows(opened, 9, 1, 4600.0)


def test_a_context_too_short_for_the_timing_is_one_line(opened):
    with pytest.raises(DecodeError, match="context full"):
        cuda_model.speed_rows(opened, 200, 1, 4600.0)


def test_cuda_model_measure(as_if_cuda, random_model, monkeypatch):
    monkeypatch.setattr(gates, "SHORT", "hi")
    gate = gates.Row("bytes grown over the replays", "tiny", cuda_model.GRAPH, 0.0, 0.0, True)
    monkeypatch.setattr(gates, "run_model", lambda folder, chr_path, replays, step: [gate])
    monkeypatch.setattr(persistent, "why_not", lambda spec: "head_dim is odd")
    open_session = session.open_session

    def with_graph(folder, chr_path, device, max_seq, step):
        live = open_session(folder, chr_path, device="cpu", max_seq=32)
        live.graph = as_if_cuda(live.state, live.weights)
        return live

    monkeypatch.setattr(session, "open_session", with_graph)
    params = {key: value for key, (value, _) in cuda_model.PARAMS.items()}
    params |= {"models": str(random_model.parent), "new_tokens": 9, "runs": 2}
    result = commands.record("cuda_model", params)
    assert plate.problems(plate.clean(result)) == []
    assert [row["gate"] for row in result.rows] == [gate.gate, cuda_model.HOST, cuda_model.WINDOW]
    assert {row["model"] for row in result.rows} == {random_model.name}
    assert result.notes[-1] == f"{random_model.name}: no persistent step, head_dim is odd."
    with pytest.raises(DecodeError, match="new_tokens of at least 2"):
        commands.record("cuda_model", params | {"new_tokens": 1})


MODELS = {"qwen2.5-coder-0.5b": (0.5, 262.4), "smollm2-135m": (0.46, 71.4)}  # ms a step, MB


def model_rows(scale: float = 1.0, over: float = 1.012, persistent: float = 0.6) -> list[dict]:
    """Rows of two models by both kinds of step, `scale` on their times, the host `over` times the
    window and one kernel `persistent` times the graph."""
    rows = []
    both = [(cuda_model.GRAPH, 1.0), (cuda_model.PERSISTENT, persistent)]
    for name, kernels, by in [(name, *kind) for name in MODELS for kind in both]:
        step_ms, size = MODELS[name]
        lengths = (("short", 47), ("long", 299))
        gate_names = [f"ids, {kind} prompt of {n}{end}" for kind, n in lengths
                      for end in ("", ", past the end")]  # fmt: skip
        if kernels == cuda_model.PERSISTENT:
            gate_names.append("64 ids beside the graph's")
        gate_names += ["50022 replays, rounds that differ", "bytes grown over the replays",
                       "allocated beyond weights and state"]  # fmt: skip
        for gate in gate_names:
            rows.append(
                dict.fromkeys(cuda_model.SPEED, Missing("a gate has no speed"))
                | {"model": name, "gate": gate, "kernels": kernels, "measured": 0.0,
                   "limit": 0.0, "ok": True, "note": ""}
            )  # fmt: skip
        for gate in (cuda_model.HOST, cuda_model.WINDOW):
            is_host = gate == cuda_model.HOST
            ms = 255 * step_ms * scale * by * (over if is_host else 1)
            nothing = Missing("the window holds decode steps only")
            rows.append({
                "model": name, "gate": gate, "kernels": kernels, "note": "",
                "measured": over - 1 if is_host else 0.0, "limit": 0.05 if is_host else 0.0,
                "ok": not is_host or over <= 1.05, "tokens": 255, "ms": ms, "ms_best": ms * 0.99,
                "ms_worst": ms * 1.02, "runs": 5, "tok_s": 255e3 / ms, "step_ms": ms / 255,
                "host_over_window": over if is_host else Missing("the window is the reference"),
                "floor_ms": 255 * size / 4600, "share": 100 * 255 * size / 4600 / ms,
                "prompt_tokens": 47 if is_host else nothing,
                "prompt_ms": 4.1 if is_host else nothing,
            })  # fmt: skip
    return rows


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["short", "long"])
def test_cuda_model_figure_claims_and_verdict(scale):
    rows = model_rows(scale)
    result = made("cuda_model", rows, cuda_model._verdict(rows))
    assert figure.png_bytes(result, plate.content_hash(result))
    assert failing(result) == []
    assert result.verdict.startswith("All 38 rows hold: qwen2.5-coder-0.5b ")
    assert "not the faster one, not as predicted. One kernel a token beats the graph. The host" in (
        result.verdict
    )
    assert "as near the window as on the old card" in result.verdict


def test_cuda_model_says_what_failed():
    rows = model_rows(over=1.2)
    rows[0]["ok"] = False
    result = made("cuda_model", rows, cuda_model._verdict(rows), replays=100)
    assert len(failing(result)) == 3  # ids, the host, and too few replays for the claim
    assert result.verdict.startswith("FAILED, qwen2.5-coder-0.5b: ids, short prompt of 47;")
    assert "is not as near the window" in result.verdict
    slower = made("cuda_model", model_rows(persistent=1.1), "-")
    assert failing(slower) == ["one kernel a token beats the graph, on every model"]
    assert "does not beat the graph on every model" in cuda_model._verdict(slower.rows)
    rows = [row for row in model_rows() if "beside the graph's" not in row["gate"]]
    assert failing(made("cuda_model", rows, "-")) == [
        "one kernel a token chooses the graph's ids, up to near ties"
    ]
    faster = [row | {"step_ms": 0.1} if "qwen" in row["model"] else row for row in model_rows()]
    assert "is the faster one, as predicted" in cuda_model._verdict(faster)


@needs_cuda
def test_cuda_model_on_a_gpu(real_models):
    params = {"models": str(real_models), "only": ["smollm2-135m"], "replays": 63, "runs": 2,
              "persistent_replays": 63}  # fmt: skip
    values = {key: value for key, (value, _) in cuda_model.PARAMS.items()} | params
    result = commands.record("cuda_model", values)
    assert plate.problems(plate.clean(result)) == [] and "FAILED" not in result.verdict


# ---- decode_step ----


def step_rows(scale: float = 1.0) -> list[dict]:
    rows = []
    for index, way in enumerate(decode_step.WAYS):
        for position, ms in ((0, 1.2), (100, 1.21), (2000, 1.33)):
            ms *= scale * (1 + 0.1 * index)
            rows.append(_step_row(f"step at {position}", way, 1, ms))
    return rows + [_step_row(f"prompt of {n}", "chunks of 32", n, n * scale) for n in (48, 512)]


def _step_row(case: str, way: str, tokens: int, ms: float) -> dict:
    return {"case": case, "kernels": way, "tokens": tokens, "ms": ms, "ms_best": ms * 0.99,
            "ms_worst": ms * 1.01, "runs": 15, "tok_s": tokens / ms * 1e3, "floor_ms": 0.36,
            "share": 36 / ms}  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 0.01, 50.0], ids=["short", "tiny", "long"])
def test_decode_step_figure_claims_and_verdict(scale):
    rows = step_rows(scale)
    result = made("decode_step", rows, decode_step._verdict(rows, 0.01))
    assert figure.png_bytes(result, plate.content_hash(result))
    assert len(decode_step.claims(result)) == 5 and failing(result) == []
    assert result.verdict.startswith("As" if scale <= 1 else "Not as")
    assert "norm alone" in result.verdict and "as on the old card" in result.verdict


def test_decode_step_claims_fail_when_they_should():
    rows = step_rows()
    for row in rows:
        if row["kernels"] == "graph":
            row |= {"ms": 99.0, "ms_best": 99.0, "ms_worst": 99.0, "tok_s": 1e3 / 99}
    rows[0] |= {"ms": 4.0, "ms_best": 4.0, "ms_worst": 4.0, "tok_s": 250.0}
    verdict = decode_step._verdict(rows, 0.01)
    assert len(failing(made("decode_step", rows, verdict))) == 5
    assert "not slower, unlike the old card" in verdict


def test_decode_step_of_one_way_has_a_verdict():
    eager = [row for row in step_rows() if row["kernels"] == "eager"]
    assert decode_step._verdict(eager, 0.0).startswith(f"step at 0: {eager[0]['ms']:.3f} ms")
    prompts = [row for row in step_rows() if row["tokens"] > 1]
    assert decode_step._verdict(prompts, 0.0).startswith("prompt of 48: 48.000 ms")


def test_decode_step_cases_and_ways_by_name():
    assert decode_step.parse_case("step at 100", 2048) == ("step at", 100)
    assert decode_step._way("norm alone") == decode_step._way("graph, norm alone")
    for text in ("step at 2048", "prompt of 0", "prompt of 2049", "step at -1", "48", ""):
        with pytest.raises(DecodeError, match="is unknown; needs"):
            decode_step.parse_case(text, 2048)
    params = {key: value for key, (value, _) in decode_step.PARAMS.items()}
    for changed in ({"cases": ["nonsense"]}, {"kernels": ["nonsense"]}):
        with pytest.raises(DecodeError, match="'nonsense' is unknown"):
            decode_step.measure(params | changed, lambda *_: None)


def test_decode_step_measure(as_if_cuda, monkeypatch):
    shapes = {"tiny": replace(plan.TINY_LLAMA, max_seq=16)}
    monkeypatch.setattr(plan, "named_spec", shapes.__getitem__)
    params = {key: value for key, (value, _) in decode_step.PARAMS.items()}
    params |= {"shape": "tiny", "max_seq": 16, "chunk": 4, "runs": 2}
    params |= {"cases": ["step at 3", "step at 9", "prompt of 7"], "kernels": ["graph", "eager"]}
    result = commands.record("decode_step", params)
    assert plate.problems(plate.clean(result)) == []
    assert [(row["case"], row["kernels"]) for row in result.rows] == [
        ("step at 3", "graph"), ("step at 9", "graph"), ("step at 3", "eager"),
        ("step at 9", "eager"), ("prompt of 7", "chunks of 4"),
    ]  # fmt: skip
    prompt = result.rows[-1]
    assert prompt["floor_ms"] == pytest.approx(2 * result.rows[0]["floor_ms"])  # two passes
    assert prompt["tok_s"] == pytest.approx(7 / 0.05)
    assert any("graph at 3" in note for note in result.notes)
    only = commands.record("decode_step", params | {"cases": ["prompt of 7"]})
    assert only.figure is None and len(only.rows) == 1


@needs_cuda
def test_decode_step_on_a_gpu():
    params = {key: value for key, (value, _) in decode_step.PARAMS.items()}
    params |= {"shape": "qwen2.5-0.5b", "cases": ["step at 5", "prompt of 9"], "runs": 3}
    result = commands.record("decode_step", params | {"kernels": ["graph", "eager"]})
    assert plate.problems(plate.clean(result)) == [] and len(result.rows) == 3


# ---- step_ladder ----


def ladder_rows(rates: dict[str, float], scale: float = 1.0) -> list[dict]:
    """A row for each rung of `rates` [tok/s]."""
    weights = types.SimpleNamespace(bytes_per_token=1.64e9 * scale, layers=[])
    rows = []
    for name, rate in rates.items():
        rung = step_ladder.RUNGS[name]
        times = [scale / rate] * 9
        rows.append({"rung": name} | step_ladder._row(rung, weights, times, 0, 4660.0))
    return rows


RATES = {name: 80.0 + 50 * index for index, name in enumerate(step_ladder.RUNGS)}
RATES |= {"lut_constant": 79.0, "split_k": 233.0, "one_warp": 226.0, "flash": 367.0, "fused": 301.0,
          "rms_inside": 331.0}  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 40.0], ids=["short", "long"])
@pytest.mark.parametrize("with_one", [True, False], ids=["one kernel", "graphs"])
def test_step_ladder_figure_claims_and_verdict(scale, with_one):
    rates = {k: v for k, v in RATES.items() if with_one or k != step_ladder.ONE}
    rows = ladder_rows(rates, scale)
    result = made("step_ladder", rows, step_ladder._verdict(rows, 0.01))
    result = replace(result, params={"position": 100})
    assert figure.png_bytes(result, plate.content_hash(result))
    assert failing(result) == [] and len(step_ladder.claims(result)) == 6 + with_one
    assert ("one kernel for a token against a graph: faster" in result.verdict) == with_one
    texts = [text for text, _ in step_ladder.claims(result)]
    assert ("programmatic launch is the fastest rung" in texts) != with_one


def test_step_ladder_claims_fail_when_they_should():
    rates = RATES | {"one_kernel": 500.0, "panels_pdl": 600.0}
    result = made("step_ladder", ladder_rows(rates), "-")
    assert failing(result) == [
        "programmatic launch is the fastest graph", "one kernel for a token beats every graph"
    ]  # fmt: skip


def test_the_last_rung_runs_where_one_kernel_can(monkeypatch):
    reasons = {}
    monkeypatch.setattr(step_ladder.persistent, "why_not", lambda spec, *_: reasons.get(spec.name))
    spec = plan.named_spec("qwen2.5-3b")
    assert step_ladder._that_run([], spec) == (list(step_ladder.RUNGS), [])
    for name in (spec.name, plan.MEDIUM_LLAMA.name):
        reasons = {name: "the device is sm_86"}
        names, (note,) = step_ladder._that_run([], spec)
        assert names == [rung for rung in step_ladder.RUNGS if rung != "one_kernel"]
        assert note == "one_kernel is left out: no persistent step, the device is sm_86"
        assert step_ladder._that_run(["panels"], spec) == (["panels"], [])
        with pytest.raises(DecodeError, match="one_kernel: no persistent step, the device is"):
            step_ladder._that_run(["panels", "one_kernel"], spec)


def test_a_rung_steps_as_it_says(monkeypatch):
    """By the kernels of the step, or by one kernel that is checked."""
    events = []
    for name in ("greedy_decode", "check"):
        monkeypatch.setattr(step_ladder.persistent, name, lambda one, n=name: events.append(n))
    monkeypatch.setattr(step_ladder.persistent, "prepare", lambda live, weights: "one")
    monkeypatch.setattr(step_ladder.step, "greedy_decode", lambda *_: events.append("step"))
    for name in ("panels_pdl", "one_kernel"):
        for each in step_ladder._step(step_ladder.RUNGS[name], None, None):
            each()
    assert events == ["step", "greedy_decode", "check"]


@needs_cuda
def test_step_ladder_on_a_gpu():
    params = {key: value for key, (value, _) in step_ladder.PARAMS.items()}
    rungs = ["panels_pdl"]
    if step_ladder.persistent.why_not(plan.named_spec("qwen2.5-0.5b")) is None:
        rungs.append("one_kernel")
    result = commands.record("step_ladder", params | {"shape": "qwen2.5-0.5b", "rungs": rungs})
    assert plate.problems(plate.clean(result)) == []
    assert [row["ids_wrong"] for row in result.rows] == [0] * len(rungs)


# ---- loads ----


def load_rows(scale: float = 1.0) -> list[dict]:
    rows = []
    for name, size in zip(loads.SHAPES, (1.6, 4.0, 7.8, 10.6, 17.4), strict=True):
        size *= scale
        rows.append({
            "shape": name, "packed_gb": size, "state_gb": 0.03 * size, "excess": 0.2,
            "allocated_gb": 1.032 * size, "peak_gb": 1.1 * size, "load_s": size / 5,
            "ids_that_differ": 0, "distinct_ids": 20, "ms": size / 2, "ms_best": size / 2.1,
            "ms_worst": size / 1.9, "runs": 9, "floor_ms": size / 4.6, "share": 43.5,
        })  # fmt: skip
    return rows


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["short", "long"])
def test_loads_figure_and_claims(scale):
    result = made("loads", load_rows(scale), loads._verdict(load_rows(scale)))
    assert figure.png_bytes(result, plate.content_hash(result)) and failing(result) == []
    for change in ({"excess": 5.1}, {"ids_that_differ": 1}):
        rows = load_rows(scale)
        rows[2] |= change
        assert len(failing(made("loads", rows, loads._verdict(rows)))) == 1
        assert loads._verdict(rows).startswith("Not as predicted")


# ---- where models are ----


def test_models_of_the_checkout_are_found_from_a_folder_below(tmp_path, monkeypatch, random_model):
    models_folder, below = random_model.parent, tmp_path / "notebooks"
    below.mkdir()
    monkeypatch.chdir(below)
    monkeypatch.setattr(card, "PROJECT", models_folder.parent)
    (found,) = models.find(models_folder.name)
    assert found.folder == random_model
    with pytest.raises(ModelError, match="elsewhere: no packed model"):
        models.find("elsewhere")


# ---- toggles ----


@pytest.mark.parametrize("name", ["cuda_model", "decode_step", "loads"])
def test_toggles_are_columns_and_values_of_the_rows(name):
    module = experiments.get(name)
    rows = {"cuda_model": model_rows, "decode_step": step_rows, "loads": load_rows}[name]()
    for column, (param, choices) in module.TOGGLES.items():
        assert isinstance(module.PARAMS[param][0], list)
        assert set(choices) <= {row[column] for row in rows}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
