"""The experiment on the persistent step, on time lines and times made up here."""

from __future__ import annotations

import pytest
import torch

from decodev2.errors import DecodeError
from decodev2.lab import figure, plate
from decodev2.lab.experiments import persistent_step as experiment
from decodev2.lab.plate import Missing


def time_line(layers: int = 8, ctas: int = 5) -> torch.Tensor:
    """Stamp s of layer l at 2,000 l + 60 s; CTA c is c cycles later; the last attends 40 more."""
    line = torch.zeros(layers + 1, 24, ctas, dtype=torch.int64)
    for layer in range(layers + 1):
        for stamp in range(20):
            line[layer, stamp] = 2000 * layer + 60 * stamp + torch.arange(ctas)
    line[:, 4:, -1] += 40
    for k in range(4):  # inside attention
        line[:, 20 + k, -1] = line[:, 3, -1] + 20 * k
    return line


def test_phases_of_a_time_line():
    found = experiment.phases(time_line())
    assert found["x of qkv"] == {"cycles": 60.0, "cycles_least": 60.0, "cycles_most": 60.0}
    assert found["attention"] == {"cycles": 160.0, "cycles_least": 120.0, "cycles_most": 160.0}
    assert found["gate, up"]["cycles"] == 300.0
    assert found["attention: values"]["cycles"] == 20.0
    assert found["a layer"]["cycles"] == 2000.0
    assert list(found) == [*experiment.PHASES, *experiment.INSIDE, "a layer"]


def rows(scale: float = 1.0) -> list[dict]:
    out = []
    for position in (0, 100):
        for what, ms in ((experiment.STEP, 0.55), (experiment.GRAPH, 1.15)):
            ms *= scale
            row = {"position": position, "what": what, "ms": ms, "ms_best": 0.99 * ms}
            row |= {"ms_worst": 1.01 * ms, "runs": 9, "tok_s": 1e3 / ms, "floor_ms": 0.35}
            row |= {"share": 35 / ms, "difference": 0.003}
            out.append(row | dict.fromkeys(experiment._cycles(), Missing("timed")))
        for what, cycles in experiment.phases(time_line()).items():
            row = {"position": position, "what": what} | cycles
            out.append(row | dict.fromkeys(experiment.TIMED, Missing("a part")))
    return out


def made(found: list[dict]) -> plate.Plate:
    from test_model_experiments import made as made_of

    return made_of("persistent_step", found, experiment.verdict(found, 0.01))


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_figure_claims_and_verdict(scale):
    result = made(rows(scale))
    assert figure.png_bytes(result, plate.content_hash(result))
    assert all(held for _, held in experiment.claims(result))
    assert result.verdict.startswith("As predicted" if scale == 1 else "Not as predicted")
    assert "2,000 cycles at 0, 24 % of them waiting for x." in result.verdict


def test_a_slower_step_is_said():
    found = rows()
    found[0] |= {"ms": 2.0, "ms_worst": 2.1}
    assert not dict(experiment.claims(made(found)))["one kernel beats the graph, at every position"]


def test_a_verdict_of_one_way():
    found = [row for row in rows() if row["what"] == experiment.GRAPH]
    assert experiment.verdict(found, 0.0) == "graph at 0: 1.150 ms; graph at 100: 1.150 ms"
    assert [text for text, _ in experiment.claims(made(found))] == [
        "its logits are the graph's, before and after"
    ]


def test_what_cannot_be_measured_is_named():
    params = {key: value for key, (value, _) in experiment.PARAMS.items()}
    for text in ("5000", "-1", "many"):
        with pytest.raises(DecodeError, match=f"position {text} is no slot of a cache of 2048"):
            experiment.measure(params | {"positions": [text]}, lambda *_: None)
    with pytest.raises(DecodeError, match="has 2 layers, a time line needs at least 4"):
        experiment.measure(params | {"shape": "tiny-llama", "positions": ["0"]}, lambda *_: None)
    if not torch.cuda.is_available():
        with pytest.raises(DecodeError, match="persistent_step needs a CUDA device"):
            experiment.measure(params, lambda *_: None)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
