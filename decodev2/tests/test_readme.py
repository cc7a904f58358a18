"""README.md: its tables are what plates and pages say, and no other measured number stands in it.

The committed file is checked first. The rest makes small runs folders and READMEs of its own.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import test_model_experiments
import test_peers
import test_persistent_experiment
import test_step_roofline

from decodev2 import cli
from decodev2.errors import DecodeError
from decodev2.lab import plate, readme

ROOT = Path(__file__).resolve().parents[2]
README, RUNS, PAGES = ROOT / "README.md", ROOT / "runs", ROOT / "notebooks"


# ---- the README as committed ----


def test_committed_readme():
    assert readme.problems(README, RUNS) == [], readme.REMAKE


def test_committed_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    linked = [part.split(")")[0] for part in text.split("](")[1:]]
    assert {"runs", "notebooks"} == {path.split("/")[0] for path in linked} and len(linked) > 12
    assert [path for path in linked if not (ROOT / path).is_file()] == []


# ---- a workbook of our own ----


@pytest.fixture
def folder(tmp_path):
    """README.md, runs/ (the committed plates that it shows) and notebooks/ in one folder."""
    for name in ("step_ladder", "lab_log", "decode_step", "gemv_shapes", "prefill_chunks", "loads",
                 "cpu_decode", "table_placement"):  # fmt: skip
        shutil.copytree(RUNS / name, tmp_path / "runs" / name)
    (tmp_path / "notebooks").mkdir()
    marks = "\n".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->" for name in readme.PARTS)
    (tmp_path / "README.md").write_text(f"# A title\n\n{marks}\n\nThe end.\n")
    write_page(tmp_path / "notebooks" / "02_levels.ipynb", "table_placement")
    assert readme.readme_command(tmp_path / "README.md", tmp_path / "runs", say=str) == 0
    return tmp_path


def write_page(path: Path, experiment: str) -> None:
    cells = [
        {"cell_type": "markdown", "source": "# Levels\n\n**Question.** Where?", "metadata": {}},
        {"cell_type": "code", "source": f'widgets.panel("{experiment}", made)', "metadata": {},
         "outputs": [], "execution_count": 1},
    ]  # fmt: skip
    path.write_text(json.dumps({"cells": cells, "metadata": {}}))


def newest(folder: Path, name: str) -> plate.Plate:
    return plate.load(plate.latest(folder / "runs", name))


def add(folder: Path, made: plate.Plate, **changes) -> Path:
    changed = replace(made, created="2030-01-01T00:00:00Z", **changes)
    return plate.save(changed, folder / "runs")


def problems(folder: Path) -> list[str]:
    return readme.problems(folder / "README.md", folder / "runs")


def test_what_was_written_has_no_problem_and_keeps_the_rest(folder):
    text = (folder / "README.md").read_text()
    assert problems(folder) == []
    assert text.startswith("# A title\n") and text.endswith("\n\nThe end.\n")
    made = newest(folder, "step_ladder")
    for row in made.rows:
        old = row["old_card_tok_s"]
        line = next(line for line in text.splitlines() if line.startswith(f"| {row['rung']} |"))
        rung, idea, before, here, share = (cell.strip() for cell in line.strip("|").split("|"))
        assert (rung, idea, share) == (row["rung"], row["idea"], f"{row['share']:.0f}")
        assert float(here.replace(",", "")) == pytest.approx(row["tok_s"], rel=5e-3)
        assert old is None or float(before) == old
    assert "| wrong ids |" in text  # of row 9 of the log, which gives no rate
    assert "one greedy token, qwen2.5-3b, after 100 / 2,000 tokens" in text
    assert "x as fast as bitsandbytes NF4" in text and "x llama.cpp" in text
    assert "(notebooks/02_levels.ipynb)" in text


def test_old_rates_are_those_of_the_log():
    log = {
        row["number"]: row["host_tok_s"] for row in plate.load(plate.latest(RUNS, "lab_log")).rows
    }
    for row in plate.load(plate.latest(RUNS, "step_ladder")).rows:
        if row["old_card_tok_s"] is not None:
            numbers = row["log"].split(", ")
            rates = [log[n] for n in [*numbers, *(f"{n}b" for n in numbers)] if log.get(n)]
            assert any(abs(row["old_card_tok_s"] - rate) < 0.2 for rate in rates), row["rung"]


@pytest.mark.parametrize("name", ["step_ladder", "decode_step", "loads"])
def test_a_newer_plate_makes_it_old(folder, name):
    made = newest(folder, name)
    rows = [dict(row) for row in made.rows]
    for row in rows:
        for key in ("ms", "ms_best", "ms_worst"):
            row[key] = row[key] * 1.5 if row[key] else row[key]
        row["share"] /= 1.5
        if "tok_s" in row:
            row["tok_s"] /= 1.5
    add(folder, made, rows=rows)
    (found,) = problems(folder)
    assert "a generated part is old" in found and readme.REMAKE in found
    assert readme.readme_command(folder / "README.md", folder / "runs", check=True, say=str) == 1
    assert readme.readme_command(folder / "README.md", folder / "runs", say=str) == 0
    assert problems(folder) == []


def test_plates_of_another_card_and_without_the_peer_change_nothing(folder):
    add(folder, newest(folder, "loads"), card=newest(folder, "loads").card | {"slug": "other"})
    demo = newest(folder, "cpu_decode")
    add(folder, demo, params=demo.params | {"gguf": "", "runs": 5})
    assert problems(folder) == []


def test_a_changed_digit_and_a_new_page_are_noticed(folder):
    path = folder / "README.md"
    text = path.read_text()
    rate = f"| {readme.number(newest(folder, 'step_ladder').rows[0]['tok_s'])} |"
    assert rate in text
    path.write_text(text.replace(rate, "| 999 |", 1))
    assert len(problems(folder)) == 1 and "999" in problems(folder)[0]
    path.write_text(text)
    write_page(folder / "notebooks" / "03_other.ipynb", "gemv_shapes")
    assert len(problems(folder)) == 1


def test_measured_numbers_by_hand_need_a_plate(folder):
    path = folder / "README.md"
    row = newest(folder, "gemv_shapes").rows[0]
    known = readme.number(row["us"])
    path.write_text(path.read_text() + f"\nIt takes {known} us, at 4.25 bits.\n")
    assert problems(folder) == []
    path.write_text(path.read_text() + "\nThat is 123.456 us, or 77,777 tok/s, 98.7654x as fast.\n")
    found = problems(folder)
    assert [line.split(": ", 1)[1] for line in found] == [
        "123.456 us is in no plate", "77,777 tok/s is in no plate", "98.7654x is in no plate",
    ]  # fmt: skip


def test_without_marks_or_a_ladder_it_is_one_line(folder):
    path = folder / "README.md"
    text = path.read_text()
    for broken in (text.replace("<!-- ladder: end -->", ""), text + "<!-- ladder: begin -->"):
        path.write_text(broken)
        with pytest.raises(DecodeError, match="README needs the line <!-- ladder: begin -->"):
            problems(folder)
    shutil.rmtree(folder / "runs" / "step_ladder")
    with pytest.raises(DecodeError, match="no plate of step_ladder"):
        problems(folder)


def test_what_is_not_recorded_is_left_out(folder):
    for name in ("decode_step", "gemv_shapes", "prefill_chunks", "loads", "cpu_decode", "lab_log"):
        shutil.rmtree(folder / "runs" / name)
    parts = readme.parts(folder / "runs", folder / "notebooks", folder)
    assert parts["results"].count("\n") == 1 and "lab_log" not in parts["ladder"]


# ---- plates that came later, with rows of their own experiments' tests ----


def add_made(folder: Path, module, name: str, found: list[dict], **params) -> None:
    """A plate of these rows, of the card of the folder's ladder."""
    card = newest(folder, "step_ladder").card
    result = module.made(name, found, "-", **params) if params else module.plate_of(found)
    add(folder, result, card=card)


def new_lines(folder: Path, before: str) -> list[str]:
    """The lines of the results that were not there."""
    assert readme.readme_command(folder / "README.md", folder / "runs", say=str) == 0
    assert problems(folder) == []
    old = before.splitlines()
    text = (folder / "README.md").read_text()
    return [line.split("[")[0] for line in text.splitlines() if line not in old]


def test_a_step_in_one_kernel(folder):
    before = (folder / "README.md").read_text()
    found = test_persistent_experiment.rows()
    result = test_persistent_experiment.made(found)
    add(folder, result, card=newest(folder, "step_ladder").card)
    assert new_lines(folder, before) == [
        "| the same in one kernel, qwen2.5-3b, after 100 tokens | 0.55 ms, 1,818 tok/s, "
        "64 % of the read rate, 2.09 x as fast as the graph | "
    ]  # fmt: skip


def test_real_models_by_both_steps(folder):
    before = (folder / "README.md").read_text()
    add_made(folder, test_model_experiments, "cuda_model", test_model_experiments.model_rows(),
             only=[])  # fmt: skip
    lines = new_lines(folder, before)
    assert [line.split(" | ")[0] for line in lines] == [
        f"| {model}, a real checkpoint, 255 tokens{way}"
        for model in ("qwen2.5-coder-0.5b", "smollm2-135m") for way in ("", " in one kernel each")
    ]  # fmt: skip
    assert len(set(lines)) == 4 and "1,976 tok/s" in lines[0] and "3,294 tok/s" in lines[1]


def test_peers_in_one_run(folder):
    before = (folder / "README.md").read_text()
    add_made(folder, test_peers, "peers", test_peers.rows())
    lines = new_lines(folder, before)
    assert lines[0] == (
        "| step at 100, qwen2.5-3b, beside others in one run | decodev2 in one kernel 0.741 ms; "
        "torch int4 products alone 1.33 ms (1.80 x), bitsandbytes NF4 products alone 2.38 ms "
        "(3.21 x), llama.cpp 2.50 ms (3.37 x) | "
    )
    assert [line.split(", ")[0] for line in lines[1:]] == [
        "| prompt of 48", "| prompt of 512", "| prompt of 2040"
    ]  # fmt: skip
    assert "| decodev2 4.10 ms; llama.cpp 9.50 ms (2.32 x) |" in lines[1]


def test_steps_of_all_sizes(folder):
    before = (folder / "README.md").read_text()
    add_made(folder, test_step_roofline, "step_roofline", test_step_roofline.rows())
    graph, one = new_lines(folder, before)
    shapes = "0.5B / 1.5B / 3B / 7B / 14B / 32B"
    assert graph.startswith(f"| one greedy token of {shapes}, a graph | 0.55 / 0.79 / 1.18 / ")
    assert one.startswith(f"| one greedy token of {shapes}, in one kernel | 0.21 / 0.36 / 0.60 / ")
    assert " tok/s, 28 / " in one


def test_pages_by_their_panels(folder):
    (row,) = readme.pages(folder / "notebooks", folder / "runs")
    made = newest(folder, "table_placement")
    assert row["title"] == "Levels" and row["question"].endswith("?")
    assert made.verdict.startswith(row["verdict"]) and 20 < len(row["verdict"]) < len(made.verdict)
    shutil.rmtree(folder / "runs" / "table_placement")
    (row,) = readme.pages(folder / "notebooks", folder / "runs")
    assert row["verdict"] == ""


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("Passed, 16 rows; a 2.1 us", "Passed, 16 rows"),
        ("It takes 2.1 us. Then", "It takes 2.1 us"),
        ("One sentence.", "One sentence"),
        ("", ""),
    ],
)
def test_first_clause(text, clause):
    assert readme._first_clause(text) == clause


def test_readme_command_line(folder, capsys):
    path, runs = str(folder / "README.md"), str(folder / "runs")
    assert cli.main(["readme", path, "--check", "--runs", runs]) == 0
    assert capsys.readouterr().out.endswith("says what the plates say\n")
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\n1.23456 ms\n")
    assert cli.main(["readme", path, "--check", "--json", "--runs", runs]) == 1
    assert "1.23456 ms is in no plate" in json.loads(capsys.readouterr().out)[0]
    assert cli.main(["readme", str(folder / "none.md"), "--runs", runs]) == 2
    assert "none.md" in capsys.readouterr().err


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
