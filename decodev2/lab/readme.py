"""The parts of README.md that plates and pages make: results, the ladder, the table of pages.

Each part stands between two marks, `<!-- results: begin -->` and `<!-- results: end -->`.
`decodev2 readme` writes them; `problems` says where they are not what plates and pages say, and
which measured numbers in the rest of the text are in no plate.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import DecodeError
from ..plan import CUDA_MAX_N
from ..toggles import Toggles
from . import experiments, notebooks
from . import plate as plates
from .experiments import cuda_model, peers, persistent_step, step_roofline
from .figure import number
from .plate import Plate

LADDER, LAB_LOG = "step_ladder", "lab_log"
PARTS = ("results", "ladder", "pages")
REMAKE = "write it again: decodev2 readme"


# ---- the parts ----


def parts(runs: str | Path, folder: str | Path, base: str | Path = ".") -> dict[str, str]:
    """{part: Markdown} from the plates in `runs` and the pages in `folder`; links start at `base`.

    Raises DecodeError when no ladder is recorded.
    """
    book = _Plates(Path(runs), Path(base))
    return {
        "results": results(book),
        "ladder": ladder(book),
        "pages": pages_table(Path(runs), Path(folder), Path(base)),
    }


class _Plates:
    """The newest plates, those for CUDA from the card of the newest ladder."""

    def __init__(self, runs: Path, base: Path) -> None:
        self.runs, self.base = runs, base
        newest = plates.latest(runs, LADDER)
        if newest is None:
            raise DecodeError(f"{runs}: no plate of {LADDER}; `decodev2 run {LADDER}` makes one")
        self.ladder = plates.load(newest)

    def get(self, name: str, columns: tuple[str, ...] = (), **params) -> tuple[Plate, str] | None:
        """(plate, link to it) of an experiment, or None if none has these columns and params."""
        found = []
        for path in plates.plate_paths(self.runs / name):
            made = plates.load(path)
            there = {column["name"] for column in made.columns}
            same = all(made.params.get(key) == value for key, value in params.items())
            here = made.card["slug"] == self.ladder.card["slug"]
            own = made.card["device"] != "cuda" or here or name == LAB_LOG
            if same and own and set(columns) <= there:
                found.append((made.created, path, made))
        if not found:
            return None
        _, path, made = max(found, key=lambda item: item[:2])
        return made, f"[{name}]({_link(path, self.base)})"


def _link(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()


def results(book: _Plates) -> str:
    """One line per headline, each with a link to its plate; what is not recorded is left out."""
    lines = [f"| on one {_card(book.ladder)} | | plate |", "|---|---|---|"]
    for headline in (_step, _in_one, _models, _peers, _shapes, _prompts, _sizes, _large):
        lines += [f"| {' | '.join(cells)} |" for cells in headline(book)]
    cpu = list(_cpu(book))
    if cpu:
        lines += ["", f"| on {cpu[0][0]} | | plate |", "|---|---|---|"]
        lines += [f"| {' | '.join(cells[1:])} |" for cells in cpu]
    return "\n".join(lines)


def _card(made: Plate) -> str:
    if made.card["device"] == "cuda":
        return f"{made.card['gpu']['name']} (reads {number(made.card['read_rate']['gb_s'])} GB/s)"
    cpu, rate = made.card["cpu"], made.card["read_rate"]["gb_s"]
    return f"{cpu['model']}, {cpu['threads_used']} threads (reads {number(rate)} GB/s)"


def _step(book: _Plates) -> Iterator[tuple[str, ...]]:
    if found := book.get("decode_step"):
        made, link = found
        rows = [row for row in made.rows if row["kernels"] == "graph"][1:]  # 0 says little
        positions = " / ".join(f"{int(row['case'].split()[-1]):,}" for row in rows)

        yield (
            f"one greedy token, {made.params['shape']}, after {positions} tokens",
            f"{_each(rows, 'ms', '.2f')} ms, "
            f"{_each(rows, 'tok_s', ',.0f')} tok/s, "
            f"{_each(rows, 'share', '.0f')} % of the read rate",
            link,
        )


def _in_one(book: _Plates) -> Iterator[tuple[str, ...]]:
    if found := book.get("persistent_step"):
        made, link = found
        of = {(row["position"], row["what"]): row for row in made.rows}
        known = sorted({position for position, _ in of})
        positions = [p for p in known if p] or known  # 0 says little
        steps = [of[p, persistent_step.STEP] for p in positions]
        gains = [of[p, persistent_step.GRAPH]["ms"] / of[p, persistent_step.STEP]["ms"]
                 for p in positions]  # fmt: skip
        yield (
            f"the same in one kernel, {made.params['shape']}, after "
            f"{' / '.join(f'{p:,}' for p in positions)} tokens",
            f"{_each(steps, 'ms', '.2f')} ms, {_each(steps, 'tok_s', ',.0f')} tok/s, "
            f"{_each(steps, 'share', '.0f')} % of the read rate, "
            f"{' / '.join(f'{gain:.2f}' for gain in gains)} x as fast as the graph",
            link,
        )


def _each(rows: list[dict], name: str, digits: str) -> str:
    return " / ".join(format(row[name], digits) for row in rows)


def _models(book: _Plates) -> Iterator[tuple[str, ...]]:
    if found := book.get("cuda_model", ("tok_s", "host_over_window")):
        made, link = found
        for row in made.rows:
            if row["host_over_window"] is not None:
                way = " in one kernel each" if row["kernels"] == cuda_model.PERSISTENT else ""
                yield (
                    f"{row['model']}, a real checkpoint, {row['tokens']} tokens{way}",
                    f"{row['tok_s']:,.0f} tok/s by the host's clock, "
                    f"{row['host_over_window']:.2f} x the time of the replays alone",
                    link,
                )


def _peers(book: _Plates) -> Iterator[tuple[str, ...]]:
    """A line per case: our fastest way, and what others take for the same in the same run."""
    if found := book.get("peers"):
        made, link = found
        ours = (peers.GRAPH, peers.ONE)
        for what in dict.fromkeys(row["what"] for row in made.rows):
            rows = sorted((r for r in made.rows if r["what"] == what), key=lambda r: r["ms"])
            own = [row for row in rows if row["peer"] in ours][:1]
            others = [row for row in rows if row["peer"] not in ours]
            if own and others:
                words = [f"{row['peer']} {number(row['ms'])} ms ({row['ratio']:.2f} x)"
                         for row in others]  # fmt: skip
                yield (
                    f"{what}, {made.params['shape']}, beside others in one run",
                    f"{own[0]['peer']} {number(own[0]['ms'])} ms; {', '.join(words)}",
                    link,
                )


def _sizes(book: _Plates) -> Iterator[tuple[str, ...]]:
    if found := book.get("step_roofline"):
        made, link = found
        for way in step_roofline.WAYS:
            rows = [row for row in made.rows if row["way"] == way and row["ms"] is not None]
            if rows:
                sizes = " / ".join(row["shape"].split("-")[-1].upper() for row in rows)
                yield (
                    f"one greedy token of {sizes}, "
                    f"{'a graph' if way == step_roofline.GRAPH else 'in one kernel'}",
                    f"{_each(rows, 'ms', '.2f')} ms, {_each(rows, 'tok_s', ',.0f')} tok/s, "
                    f"{_each(rows, 'share', '.0f')} % of the read rate",
                    link,
                )


def _shapes(book: _Plates) -> Iterator[tuple[str, ...]]:
    if found := book.get("gemv_shapes"):
        made, link = found
        us = {(r["shape"], r["kernel"]): r["us"] for r in made.rows if r["us"] is not None}
        peers = list(dict.fromkeys(row["kernel"] for row in made.rows))
        words = []
        for peer in ("bitsandbytes NF4", "torch int4"):
            ratios = [us[shape, kernel] / us[shape, "gemv"] for shape, kernel in us
                      if kernel == peer and peer in peers and (shape, "gemv") in us]  # fmt: skip
            if ratios:
                words.append(f"{min(ratios):.2f} to {max(ratios):.2f} x as fast as {peer}")
        rates = [r for r in made.rows if r["kernel"] == "gemv" and r["gb_s"] is not None]
        if rates:
            best = max(rates, key=lambda row: row["gb_s"])
            words.append(f"{best['gb_s']:,.0f} GB/s at best ({best['shape']})")
            count = len({row["shape"] for row in rates})
            yield f"GEMV, {count} shapes, cold weights", ", ".join(words), link


def _prompts(book: _Plates) -> Iterator[tuple[str, ...]]:
    """A prompt as a session takes it, and the best way if that is another one."""
    if found := book.get("prefill_chunks"):
        made, link = found
        usual = Toggles().prefill
        known = [row for row in made.rows if row["ms"] is not None]
        for tokens in sorted({row["tokens"] for row in known}):
            rows = sorted((r for r in known if r["tokens"] == tokens), key=lambda r: r["ms"])
            default = [
                r for r in rows if r["chunk"] == CUDA_MAX_N and r.get("kernel", usual) == usual
            ]
            words = ", ".join(dict.fromkeys(map(_in_chunks, (*default[:1], rows[0]))))
            yield f"a prompt of {tokens:,} tokens, {made.params['shape']}", words, link


def _in_chunks(row: dict) -> str:
    by = f" by {row['kernel']}" if "kernel" in row else ""  # older plates knew one kernel
    return f"{number(row['ms'])} ms in chunks of {row['chunk']}{by}"


def _large(book: _Plates) -> Iterator[tuple[str, ...]]:
    if found := book.get("loads"):
        made, link = found
        row = max(made.rows, key=lambda r: r["packed_gb"])
        yield (
            f"{row['shape']}, random weights",
            f"{row['ms']:.2f} ms a token, {row['share']:.0f} % of the read rate, "
            f"{number(row['allocated_gb'])} GB allocated",
            link,
        )


def _cpu(book: _Plates) -> Iterator[tuple[str, ...]]:
    """Of plates with the peer in the same run only: `make demo` records others."""
    recorded = [plates.load(path) for path in plates.plate_paths(book.runs / "cpu_decode")]
    for gguf in sorted({made.params["gguf"] for made in recorded} - {""}):
        made, link = book.get("cpu_decode", gguf=gguf)
        of = {row["executor"]: row for row in made.rows}
        if {"decodev2", "llama.cpp"} <= set(of):
            ours, its = of["decodev2"], of["llama.cpp"]
            megabytes = (number(row["decode_bytes_per_token"] / 1e6) for row in (ours, its))
            yield (
                _card(made).split(" (reads")[0],
                ours["model"],
                f"{ours['decode_tok_s']:,.1f} tok/s, {ours['share']:.0f} % of the read rate, "
                f"{ours['ratio_to_llama_cpp']:.2f} x llama.cpp "
                f"({' MB a token, '.join(megabytes)} there)",
                link,
            )


def ladder(book: _Plates) -> str:
    """The ladder's figure, and its rungs beside the old card's."""
    made, link = book.get(LADDER)
    log = book.get(LAB_LOG)
    results_of = {row["number"]: row["result"] for row in log[0].rows} if log else {}
    picture = re.search(r"\((.*)\)", link)[1].removesuffix(".json") + ".png"
    lines = [
        f"![{made.title}]({picture})",
        "",
        f"| rung | idea | RTX 3080 [tok/s] | {made.card['gpu']['name']} [tok/s] | "
        "share of the floor [%] |",
        "|---|---|---|---|---|",
    ]
    for row in made.rows:
        old = row["old_card_tok_s"]
        in_log = [results_of[n] for n in row["log"].split(", ") if n in results_of]
        cells = [
            row["rung"],
            row["idea"],
            f"{old:g}" if old is not None else "; ".join(in_log) or "-",
            number(row["tok_s"]),
            f"{row['share']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    shape, position = made.params["shape"], made.params["position"]
    wrong = sum(row["ids_wrong"] for row in made.rows)
    lines += [
        "",
        f"One greedy step of {shape} at position {position}, in a graph. Floor: its packed bytes "
        f"at the read rate. On a smaller model {wrong} ids of all rungs differ from the oracle's. "
        f"Plates: {link}{f', {log[1]}' if log else ''}.",
    ]
    return "\n".join(lines)


# ---- pages ----


def pages(folder: str | Path, runs: str | Path) -> list[dict[str, str]]:
    """[{page, title, question, experiment, verdict}] of the notebooks in `folder`.

    The experiment is the one whose panel the page shows, the question its own; the verdict is that
    of the plate that the page replays, cut after its first clause ("" without a plate).
    """
    out = []
    for path in sorted(Path(folder).glob("*.ipynb")):
        notebook = notebooks.load(path)
        first = notebooks.source(notebook["cells"][0])
        name = _panel_of(notebook)
        out.append({
            "page": path.name,
            "title": first.splitlines()[0].removeprefix("# "),
            "question": experiments.get(name).QUESTION if name else "",
            "experiment": name or "",
            "verdict": _first_clause(_verdict_of(name, runs)) if name else "",
        })  # fmt: skip
    return out


def _panel_of(notebook: dict) -> str | None:
    for cell in notebooks.code_cells(notebook):
        for node in ast.walk(ast.parse(notebooks.source(cell))):
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "panel"
            if called and node.args and isinstance(node.args[0], ast.Constant):
                return str(node.args[0].value)
    return None


def _verdict_of(name: str, runs: str | Path) -> str:
    made = [plates.load(path) for path in plates.plate_paths(Path(runs) / name)]
    newest = max(made, key=lambda m: (m.card["device"] == "cuda", m.created), default=None)
    return newest.verdict if newest else ""


def _first_clause(text: str) -> str:
    return re.split(r"; |\. |\.$", text, maxsplit=1)[0]


def pages_table(runs: Path, folder: Path, base: Path) -> str:
    """The pages as a Markdown table with links."""
    lines = ["| page | found, in one clause |", "|---|---|"]
    for row in pages(folder, runs):
        link = f"[{row['page'][:2]} {row['title']}]({_link(folder / row['page'], base)})"
        lines.append(f"| {link} | {row['verdict'] or '-'} |")
    return "\n".join(lines)


# ---- the file ----


def updated(text: str, new: dict[str, str]) -> str:
    """`text` with its parts replaced. Raises DecodeError for a part without its two marks."""
    for name, part in new.items():
        begin, end = _marks(name)
        if text.count(begin) != 1 or text.count(end) != 1 or text.find(begin) > text.find(end):
            raise DecodeError(f"README needs the line {begin} once, and {end} once after it")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def written_by_hand(text: str) -> str:
    """`text` without what stands between marks."""
    for name in PARTS:
        begin, end = map(re.escape, _marks(name))
        text = re.sub(f"{begin}.*?{end}", "", text, flags=re.S)
    return text


def problems(path: str | Path = "README.md", runs: str | Path = "runs") -> list[str]:
    """Where the README at `path` is not what plates and pages say, one line each."""
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    new = updated(text, _parts_of(path, runs))
    found = []
    if new != text:
        changed = [a for a, b in zip(text.splitlines(), new.splitlines(), strict=False) if a != b]
        where = f" (first: {changed[0]!r})" if changed else ""
        found.append(f"{path}: a generated part is old{where}; {REMAKE}")
    return found + [f"{path}: {line}" for line in stray_numbers(written_by_hand(text), runs)]


def _parts_of(path: Path, runs: str | Path) -> dict[str, str]:
    return parts(runs, path.parent / "notebooks", path.parent)


def stray_numbers(text: str, runs: str | Path) -> list[str]:
    """Measured numbers (with a unit) in `text` that no plate's words or rows show."""
    shown: set[str] = set()
    for path in plates.plate_paths(runs):
        made = plates.load(path)
        words = [made.title, made.question, made.prediction, made.verdict, *made.notes]
        for cell in (cell for row in made.rows for cell in row.values()):
            if isinstance(cell, int | float) and not isinstance(cell, bool):
                words.append(number(cell))
            elif cell:
                words.append(str(cell))
        for word in words:
            shown |= {n.replace(",", "").rstrip(".") for n in re.findall(r"\d[\d,.]*", word)}
    found = notebooks.MEASURED.finditer(text)
    return [f"{m[0]} is in no plate" for m in found if m[1].replace(",", "") not in shown]


# ---- what the command line calls ----


def readme_command(
    path: str | Path = "README.md",
    runs: str | Path = "runs",
    check: bool = False,
    as_json: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Write the generated parts of the README, or with `check` say what is wrong; 1 if anything."""
    path = Path(path)
    if not check:
        text = path.read_text(encoding="utf-8")
        new = updated(text, _parts_of(path, runs))
        if new != text:
            plates.write_atomic(path, new.encode())
    found = problems(path, runs)
    if as_json:
        say(json.dumps(found, indent=1))
    else:
        say("\n".join(found) if found else f"{path}: says what the plates say")
    return 1 if found else 0
