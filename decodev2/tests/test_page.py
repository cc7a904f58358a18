"""What the pages of the workbook call: plates in both modes, tables, figures, claims, verdicts."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

if importlib.util.find_spec("pandas") is None:
    pytest.skip("pandas is not installed (the lab extra brings it)", allow_module_level=True)

from decodev2.errors import DecodeError
from decodev2.lab import card, experiments, page, plate
from decodev2.lab.plate import Measured, Missing

# An experiment that runs anywhere in no time. Other test files write it into a folder too.
TOY = '''\
"""Two ways to the ten smallest of n numbers."""

import heapq
import random
import time

from decodev2.errors import DecodeError
from decodev2.lab import bench, card
from decodev2.lab.plate import Measured

TITLE = "The ten smallest of n numbers, two ways"
QUESTION = "Does a heap beat a full sort?"
PREDICTION = "The heap reads each number once, so it is faster."
PARAMS = {
    "sizes": ([], "how many numbers, separated by commas; both if left out"),
    "ways": ([], "ways, separated by commas; both if left out"),
    "runs": (3, "timed calls"),
    "pause": (0.0, "seconds before each row"),
}
WAYS = {"full sort": lambda x: sorted(x)[:10], "heap": lambda x: heapq.nsmallest(10, x)}
TOGGLES = {"size": ("sizes", (500, 20000)), "way": ("ways", tuple(WAYS))}
DEPENDS = ("cpu/**/*",)
DEVICE = "cpu"
COLUMNS = [
    {"name": "size", "unit": "1"},
    {"name": "way", "unit": ""},
    {"name": "us", "unit": "us"},
    {"name": "us_best", "unit": "us"},
    {"name": "us_worst", "unit": "us"},
    {"name": "runs", "unit": "runs"},
    {"name": "floor_us", "unit": "us"},
]


def measure(params, progress):
    print("compiling nothing (about 0 s, once) ...")
    cases = [(int(s), w) for s in params["sizes"] or (500, 20000) for w in params["ways"] or WAYS]
    rows = []
    for size, way in cases:
        if way not in WAYS:
            raise DecodeError(f"way {way!r} is unknown")
        progress(len(rows), len(cases), f"{way} of {size}")
        time.sleep(params["pause"])
        x = random.Random(0).choices(range(10**9), k=size)
        s = bench.stats([t * 1e6 for t in bench.repeat(lambda: WAYS[way](x), params["runs"])])
        rows.append({"size": size, "way": way, "us": s.median, "us_best": s.best,
                     "us_worst": s.worst, "runs": s.runs, "floor_us": size * 1e-3})
    verdict = f"{rows[0]['way']} of {rows[0]['size']}: {rows[0]['us']:.1f} us."
    rate = {"gb_s": 40.0, "method": "given"}
    return Measured(COLUMNS, rows, verdict, {"kind": "own"}, card=card.card("cpu", 1, rate))


def draw(plate, fig):
    ax = fig.subplots()
    for way in WAYS:
        rows = [r for r in plate.rows if r["way"] == way and r["us"]]
        ax.plot([row["size"] for row in rows], [row["us"] for row in rows], "o-")
        for row in rows[-1:]:
            ax.annotate(way, (row["size"], row["us"]))


def claims(plate):
    return [("every way was timed at every size", len(plate.rows) == 4)]
'''


def write_toy(folder: Path) -> Path:
    """Write the experiment `toy_sort` into a folder of its own below `folder`."""
    place = folder / "experiments"
    place.mkdir(exist_ok=True)
    (place / "toy_sort.py").write_text(TOY, encoding="utf-8")
    return place


def use_toy(folder: Path, monkeypatch) -> Path:
    """Make `toy_sort` an experiment until the test ends; returns the folder its plates go to."""
    monkeypatch.setattr(experiments, "__path__", [*experiments.__path__, str(write_toy(folder))])
    monkeypatch.delitem(sys.modules, f"{experiments.__name__}.toy_sort", raising=False)
    monkeypatch.setenv("DECODEV2_RUNS", str(folder / "runs"))
    return folder / "runs"


def toy_plate(**changes) -> plate.Plate:
    """A plate of the toy with round numbers, not measured."""
    module = experiments.get("toy_sort")
    rows = [
        {"size": size, "way": way, "us": us, "us_best": 0.9 * us, "us_worst": 1.1 * us, "runs": 3,
         "floor_us": size * 1e-3}
        for size, way, us in (
            (500, "full sort", 40.0), (500, "heap", 20.0),
            (20000, "full sort", 2000.0), (20000, "heap", 250.0),
        )
    ]  # fmt: skip
    made = plate.Plate(
        experiment="toy_sort",
        title=module.TITLE,
        question=module.QUESTION,
        prediction=module.PREDICTION,
        verdict="The heap wins, 20.0 us against 40.0 us.",
        card=card.card("cpu", 1, {"gb_s": 40.0, "method": "given"}),
        params=page.complete("toy_sort", {}),
        columns=module.COLUMNS,
        rows=rows,
        code=card.code_state(module.DEPENDS),
        figure={"kind": "own"},
        created="2026-01-02T03:04:05Z",
    )
    return plate.Plate(**plate.clean(replace(made, **changes)))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return use_toy(tmp_path, monkeypatch)


@pytest.fixture
def shown(monkeypatch):
    """What `display` is given, as a list."""
    import IPython.display

    given = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **_: given.append(data))
    return given


# ---- replay ----


def on_cuda(made: plate.Plate) -> plate.Plate:
    gpu = {"name": "Some GPU", "driver": "1"}
    return replace(made, card=made.card | {"device": "cuda", "gpu": gpu, "slug": "some-gpu"})


def test_replay_takes_the_newest(runs):
    for day in ("01", "03", "02"):
        plate.save(toy_plate(created=f"2026-01-{day}T00:00:00Z"), runs)
    assert page.plate("toy_sort").created.startswith("2026-01-03")


def test_replay_prefers_a_cuda_card_then_the_parameters_given(runs, capsys):
    old = toy_plate(created="2026-01-01T00:00:00Z")
    plate.save(on_cuda(old), runs)
    plate.save(replace(old, created="2026-02-01T00:00:00Z"), runs)
    assert page.plate("toy_sort").card["slug"] == "some-gpu"
    many = old.params | {"runs": 9}
    plate.save(on_cuda(replace(old, params=many, created="2025-01-01T00:00:00Z")), runs)
    assert page.plate("toy_sort", runs=9).params["runs"] == 9
    assert capsys.readouterr().out == ""


def test_replay_says_which_parameters_the_plate_has(runs, capsys):
    plate.save(toy_plate(), runs)
    page.plate("toy_sort", "replay", runs=5, ways=("heap",), pause=0)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "replay: this plate was measured with runs = 3",
        "replay: this plate was measured with ways = []",
    ]


def test_a_folder_of_ones_own_is_filled_up_with_the_checkouts_plates(runs):
    assert page.runs_dir() == runs and not runs.exists()
    assert page.plate("gemv_shapes").experiment == "gemv_shapes"


def test_without_the_variable_plates_lie_in_the_checkout(monkeypatch):
    monkeypatch.delenv("DECODEV2_RUNS", raising=False)
    assert page.runs_dir() == Path(page.__file__).resolve().parents[2] / "runs"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: page.plate("toy_sort", "relay"), "MODE is 'relay', needs 'replay' or 'measure'"),
        (lambda: page.plate("toy_sort", "replay", run=3), "'run' does not exist; did you mean"),
        (lambda: page.plate("toy_sort", "measure", run=3), "'run' does not exist; did you mean"),
        (lambda: page.plate("toy_sort", "replay", runs="3"), "runs is '3', needs a whole number"),
        (lambda: page.plate("toy_sort", "measure", runs=True), "is True, needs a whole number"),
        (lambda: page.plate("toy_sort", "measure", ways="heap"), "is 'heap', needs a list"),
        (lambda: page.plate("toy_sort"), "no plate of toy_sort is recorded; MODE = 'measure'"),
        (lambda: page.plate("toy_sorts"), "did you mean toy_sort?"),
        (lambda: page.old_card(1, 99), "'99' does not exist; there are 1, 3b"),
    ],
)
def test_errors_are_one_line(runs, call, said):
    log = toy_plate(experiment="lab_log")
    columns = [{"name": "number", "unit": ""}, {"name": "tok_s", "unit": "tok/s"}]
    rows = [{"number": n, "tok_s": rate} for n, rate in (("1", 30.6), ("3b", None))]
    rows[1]["tok_s_reason"] = "slower, no number in the log"
    plate.save(replace(log, columns=columns, rows=rows, figure=None), runs)
    with pytest.raises(DecodeError) as caught:
        call()
    assert said in str(caught.value) and "\n" not in str(caught.value)


# ---- measure ----


def test_measure_saves_draws_and_indexes(runs):
    made = page.plate("toy_sort", "measure", sizes=[500], runs=2)
    assert [row["way"] for row in made.rows] == ["full sort", "heap"]
    assert made.rows[0]["runs"] == 2 and made.params["sizes"] == [500]
    assert len(plate.plate_paths(runs)) == 1 and plate.lint(runs) == []
    assert page.plate("toy_sort") == made  # the very plate that replay shows from now on


def test_measure_gives_plain_values(runs, monkeypatch):
    module = experiments.get("toy_sort")
    measured = module.measure(page.complete("toy_sort", {"sizes": [500]}), lambda *_: None)
    measured.rows[0]["us"] = Missing("the clock did not work")
    monkeypatch.setattr(module, "measure", lambda *_: Measured(**vars(measured)))
    row = page.plate("toy_sort", "measure").rows[0]
    assert row["us"] is None and row["us_reason"] == "the clock did not work"


def test_measure_of_a_cuda_experiment_without_one(runs, monkeypatch):
    monkeypatch.setattr(experiments.get("toy_sort"), "DEVICE", "cuda")
    monkeypatch.setattr(page, "cuda_is_there", lambda: False)
    with pytest.raises(DecodeError, match="toy_sort needs a CUDA device and torch finds none"):
        page.plate("toy_sort", "measure")
    assert not runs.exists()


# ---- tables ----


@pytest.mark.parametrize(
    ("name", "unit", "said"),
    [
        ("us", "us", "time [us]"),
        ("us_best", "us", "best [us]"),
        ("floor_ms", "ms", "floor [ms]"),
        ("gb_s", "GB/s", "rate [GB/s]"),
        ("decode_tok_s_worst", "tok/s", "decode worst [tok/s]"),
        ("runs", "runs", "runs"),
        ("new_tokens", "tokens", "new tokens"),
        ("share", "%", "share [%]"),
        ("error_after", "1", "error after"),
        ("status", "", "status"),
        ("buses", "us", "buses [us]"),
    ],
)
def test_header(name, unit, said):
    assert page.header(name, unit) == said


def test_table_picks_sorts_and_rounds(runs):
    made = toy_plate()
    made.rows[1] |= {"us": None, "us_reason": "lost"}
    table = page.table(made, ["way", "us"], where={"size": [500, 20000]}, sort="-us")
    assert table.columns.tolist() == ["way", "time [us]"]
    assert table["time [us]"].tolist() == ["2,000", "250", "40.0", "-"]
    assert page.table(made, ["us"], where={"way": "heap"}, sort="us").values.tolist() == [
        ["250"],
        ["-"],
    ]
    assert page.table(made).shape == (4, 7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"columns": ["wey"]}, "column 'wey' does not exist; did you mean 'way'?"),
        ({"where": {"sise": 500}}, "column 'sise' does not exist; did you mean 'size'?"),
        ({"where": {"size": 5000}}, "size 5000 does not exist; did you mean '500'?"),
        ({"where": {"way": ["heap", "bogo"]}}, "way 'bogo' does not exist; there are full sort"),
        ({"sort": "-uz"}, "column 'uz' does not exist"),
    ],
)
def test_table_refuses_what_is_not_there(runs, arguments, said):
    with pytest.raises(DecodeError, match="exist") as caught:
        page.table(toy_plate(), **arguments)
    assert said in str(caught.value)


def test_table_is_shown_in_full_and_always_alike(runs):
    import pandas

    long = "a claim " * 40
    table = page.Table({"claim": [long] * 100, "n": range(100)})
    with pandas.option_context("display.max_colwidth", 5, "display.max_rows", 3):
        text, markup = repr(table), table._repr_html_()
    assert text.count(long.strip()) == markup.count(long.strip()) == 100
    assert (text, markup) == (repr(table), table._repr_html_())
    assert "<style" not in markup and "id=" not in markup


# ---- figure, claims, verdict, the old card ----


def test_figure_is_shown_at_1200_by_700(runs, shown):
    import matplotlib
    from PIL import Image

    fig = page.draw(toy_plate())
    with matplotlib.rc_context({"font.size": 3, "savefig.dpi": 20}):
        fig._ipython_display_()
    page.draw(toy_plate())._ipython_display_()
    data = base64.b64decode(shown[0]["image/png"])
    assert Image.open(io.BytesIO(data)).size == (1200, 700)
    assert len(data) < 60_000
    assert shown[0]["text/plain"] == "Figure: The ten smallest of n numbers, two ways"
    assert shown[0] == shown[1]  # whatever the user's settings of matplotlib are
    with pytest.raises(DecodeError, match="has no figure"):
        page.draw(toy_plate(figure=None))


def test_claims(runs, monkeypatch):
    table = page.claims(toy_plate())
    assert table.values.tolist() == [["every way was timed at every size", True]]
    assert page.claims(toy_plate(rows=toy_plate().rows[:2]))["holds"].tolist() == [False]
    monkeypatch.delattr(experiments.get("toy_sort"), "claims")
    with pytest.raises(DecodeError, match="toy_sort makes no claims"):
        page.claims(toy_plate())


def test_verdict_names_prediction_finding_card_date_and_plate(runs, shown):
    made = on_cuda(toy_plate())
    path = plate.save(made, runs)
    page.verdict(made)
    for text in (shown[0]["text/markdown"], shown[0]["text/plain"]):
        for part in (made.prediction, made.verdict, "Some GPU", "2026-01-02", path.name):
            assert part in text


def test_old_card_rows_by_number(runs):
    columns = [{"name": "number", "unit": ""}, {"name": "tok_s", "unit": "tok/s"}]
    rows = [{"number": n, "tok_s": rate} for n, rate in (("1", 30.6), ("2", 34.0), ("3b", 99.0))]
    made = toy_plate(experiment="lab_log", columns=columns, rows=rows, figure=None)
    plate.save(made, runs)
    assert page.old_card("3b", 1).values.tolist() == [["3b", "99.0"], ["1", "30.6"]]
    assert page.old_card().shape == (3, 2)


# ---- rows beside each other ----


def test_key_columns_are_no_more_than_needed(runs):
    assert page.key_columns(toy_plate()) == ["way", "size"]
    assert page.key_columns(toy_plate(), ["size"]) == ["size", "way"]
    twice = toy_plate()
    assert page.key_columns(replace(twice, rows=twice.rows * 2)) == ["way", "size"]


def test_contest_holds_what_changes_the_floor(runs):
    made = page.contest(toy_plate(), {"size": 20000, "way": "full sort"})
    assert [(r["choices"], r["is"], r["to_best"]) for r in made.rows] == [
        ("full sort", "chosen", 8.0),
        ("heap", "best", 1.0),
    ]
    assert made.verdict == "size 20000, full sort: 2,000 us, 8.00 x the best"
    assert plate.problems(plate.clean(made)) == []
    both = page.contest(toy_plate(), {"size": 20000, "way": "heap"}, ["size"])
    assert [r["choices"] for r in both.rows] == ["size 500", "size 20000"]
    assert [r["to_best"] for r in both.rows] == [1.0, 12.5]


def test_contest_of_rates_and_missing_values(runs):
    made = toy_plate()
    made.rows[3] |= {"us": None, "us_reason": "not installed"}
    lost = page.contest(made, {"size": "20000", "way": "heap"})
    assert lost.verdict == "size 20000, heap: not installed"
    assert [r["is"] for r in lost.rows] == ["best", "chosen"]
    rates = replace(
        made,
        columns=[{"name": "way", "unit": ""}, {"name": "tok_s", "unit": "tok/s"}],
        rows=[{"way": "a", "tok_s": 10.0}, {"way": "b", "tok_s": 40.0}],
    )
    assert page.contest(rates, {"way": "a"}).verdict == "a: 10.0 tok/s, 4.00 x the best"
    assert page.contest(rates, {"way": "c"}).verdict == "no row has these choices"
    plain = replace(rates, columns=[{"name": "way", "unit": ""}, {"name": "wrong", "unit": "1"}],
                    rows=[{"way": "a", "wrong": 0}, {"way": "b", "wrong": 3}])  # fmt: skip
    assert page.contest(plain, {"way": "a"}).verdict == "a: 0"
    assert plate.problems(plate.clean(page.contest(plain, {"way": "b"}))) == []


def test_contest_of_choices_that_are_all_other_work_compares_shares(runs):
    columns = [*toy_plate().columns, {"name": "share", "unit": "%"}]
    rows = [r | {"share": s} for r, s in zip(toy_plate().rows, (1.0, 2.5, 1.0, 8.0), strict=True)]
    made = toy_plate(columns=columns, rows=[r for r in rows if r["way"] == "heap"])
    one = page.contest(made, {"size": 500})
    assert one.verdict == "size 500: 2.50 %, 3.20 x the best"


def test_rows_that_do_not_show_the_same_work_do_not_compete(runs):
    rows = toy_plate().rows
    made = page.contest(toy_plate(rows=[rows[1], rows[2]]), {"size": 20000, "way": "full sort"})
    assert [(r["choices"], r["is"]) for r in made.rows] == [
        ("size 20000, full sort", "chosen, best")
    ]
    assert page.same_work(toy_plate(), ["size", "way"]) == ["way"]
    assert page.same_work(toy_plate(rows=rows[:1]), ["size", "way"]) == []
    columns = [*toy_plate().columns, {"name": "tokens", "unit": "tokens"}]  # more than the floor
    prompt = toy_plate(columns=columns, rows=[row | {"tokens": 7} for row in rows])
    assert page.same_work(prompt, ["size", "way"]) == ["size", "way"]


def test_contest_is_among_rows_that_agree_in_every_other_column(runs):
    made = toy_plate()
    alone = page.contest(made, {"way": "full sort"})
    assert [(r["choices"], r["is"]) for r in alone.rows] == [
        ("full sort, size 500", "chosen"),
        ("heap, size 500", "best"),
        ("full sort, size 20000", "chosen"),
        ("heap, size 20000", "best"),
    ]


@pytest.mark.parametrize("name", experiments.names())
def test_toggles_of_each_experiment_fit_its_parameters(name):
    module = experiments.get(name)
    for column, (param, choices) in getattr(module, "TOGGLES", {}).items():
        assert isinstance(module.PARAMS[param][0], list), f"{param} takes one choice, not a list"
        assert column in {c["name"] for c in module.COLUMNS}
        assert len({str(choice) for choice in choices}) == len(choices) > 1
        json.dumps(choices)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
