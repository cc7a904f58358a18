"""Figures of plates: 1200 x 700 PNGs that depend on the plate's JSON and on nothing else.

A PNG carries two facts in its metadata: the hash of the plate it was drawn from and the hash of its
own pixels. `plate.lint` compares both, so an old or a retouched figure shows. No date and no
program version go in: the same plate gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .plate import Plate

STYLE = Path(__file__).with_name("decodev2.mplstyle")
SIZE_PX = (1200, 700)
MARGIN_PX = 14  # left and right of the words around the drawing, and between them and it
VERDICT_LINES = 3
GREY, DARK = "#666666", "#222222"
NAME_EVERY_BAR = 8  # with more bars than this a series is named once
_PNG_KEYS = {"plate": "decodev2-plate", "pixels": "decodev2-pixels"}


def png_bytes(plate: Plate, plate_hash: str) -> bytes:
    """The PNG file of a plate. `plate_hash` is `plate.content_hash` of it."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image, PngImagePlugin

    with _style():
        canvas = FigureCanvasAgg(figure(plate))
        canvas.draw()
    image = Image.fromarray(np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3]))
    info = PngImagePlugin.PngInfo()
    info.add_text(_PNG_KEYS["plate"], plate_hash)
    info.add_text(_PNG_KEYS["pixels"], _pixel_hash(image))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=info, optimize=True)
    return buffer.getvalue()


def _style():
    """The style file over matplotlib's own defaults, whatever the user's settings are."""
    import matplotlib.style

    return matplotlib.style.context(["default", str(STYLE)])


def png_facts(path: Path) -> dict[str, object]:
    """{plate, pixels: the hashes in the metadata; pixels_found: the real one; size} of a PNG."""
    from PIL import Image

    with Image.open(path, formats=["PNG"]) as image:
        image.load()
        facts = {key: image.text.get(text) for key, text in _PNG_KEYS.items()}
        return facts | {"pixels_found": _pixel_hash(image.convert("RGB")), "size": image.size}


def _pixel_hash(image) -> str:
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()


def figure(plate: Plate) -> Figure:
    """The matplotlib Figure of a plate: title, what was found, the drawing, the card below.

    The drawing is the experiment's own `draw(plate, fig)` for {"kind": "own"}, else `bars`. It may
    have any number of axes: the words are set first, and the axes share the rectangle they leave.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _style():
        fig = Figure()
        canvas = FigureCanvasAgg(fig)
        _words_around(fig, plate)
        if plate.figure["kind"] == "own":
            from . import experiments

            experiments.get(plate.experiment).draw(plate, fig)
        else:
            bars(plate, fig)
        canvas.draw()  # ticks and their texts are made, in this style, when drawn
    return fig


def _words_around(fig: Figure, plate: Plate) -> None:
    """Title and verdict at the top, the card at the bottom; axes are laid out between them."""
    width, height = SIZE_PX
    left, gap = MARGIN_PX / width, MARGIN_PX / height

    def place(text, words: str, lines: int | None = None):
        """Wrap the words, and take the text out of the layout: its place is given."""
        font, renderer = text.get_fontproperties(), fig.canvas.get_renderer()

        def wide(line: str) -> float:
            return renderer.get_text_width_height_descent(line, font, False)[0]

        text.set_text("\n".join(fitted(words, wide, width - 2 * MARGIN_PX, lines)))
        text.set_in_layout(False)
        return text.get_window_extent().transformed(fig.transFigure.inverted())

    title = place(fig.suptitle("", x=left, y=1 - gap, ha="left", va="top"), plate.title)
    found = fig.text(left, title.y0 - 0.6 * gap, "", va="top", color=GREY)
    found = place(found, plate.verdict, VERDICT_LINES)
    below = fig.supxlabel(
        "", x=left, y=0.6 * gap, ha="left", va="bottom", fontsize=10.5, color=GREY
    )
    below = place(below, _footer(plate), 1)
    fig.get_layout_engine().set(rect=(0, below.y1, 1, found.y0 - 0.5 * gap - below.y1))


def fitted(text: str, wide, room: float, lines: int | None = None) -> list[str]:
    """`text` in lines that are at most `room` wide, `wide(line)` being the width of one.

    What would need more than `lines` is cut after a sentence or a clause (";"), or after a word if
    the first one is too long, and ends with "…".
    """
    words = [word for word in text.replace("\n", " ").split(" ") if word]
    whole = _wrapped(words, wide, room)
    if lines is None or len(whole) <= lines:
        return whole
    most = sum(line.count(" ") + 1 for line in whole[:lines])  # words that have room
    clauses = [n for n in range(most, 0, -1) if words[n - 1].endswith((".", ";"))]
    for n in [*clauses, *range(most, 0, -1)]:
        cut = _wrapped([*words[: n - 1], words[n - 1].rstrip(";,"), "…"], wide, room)
        if len(cut) <= lines:
            return cut
    return whole[:lines]


def _wrapped(words: list[str], wide, room: float) -> list[str]:
    lines = words[:1] or [""]
    for word in words[1:]:
        longer = f"{lines[-1]} {word}"
        if wide(longer) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _footer(plate: Plate) -> str:
    card, rate = plate.card, plate.card["read_rate"]["gb_s"]
    if card["device"] == "cuda":
        machine = f"{card['gpu']['name']}, driver {card['gpu'].get('driver') or 'unknown'}"
    else:
        machine = f"{card['cpu']['model']}, {card['cpu']['threads_used']} threads"
    parts = [machine, f"reads {rate:.1f} GB/s" if rate else "read rate not measured"]
    commit = (plate.code["commit"] or "no commit")[:9] + (
        " + changes" if plate.code["dirty"] else ""
    )
    between = "\u00a0\u00a0 | \u00a0\u00a0"  # a line may break at the plain spaces
    return between.join([*parts, plate.created[:10], commit, plate.experiment])


# ---- horizontal bars, from the plate's `figure` block ----

_BARS_KEYS = {
    "kind": "bars",
    "value": "column of the bar lengths",
    "label": "text column: the series (one bar each within a group)",
    "group": "text column: rows that stand together; may be absent",
    "low": "column: lower end of the whisker; may be absent",
    "high": "column: upper end of the whisker; may be absent",
    "mark": "column: per-row limit, a tick across the bar; may be absent",
    "mark_text": "what the tick is",
    "floor": "number: one line across all bars; may be absent",
    "floor_text": "what the line is",
    "also": "columns printed after the value; may be absent",
    "axis": "what the axis shows, without its unit; may be absent",
    "scale": "'linear' (default) or 'log'",
}


def bars_problems(block: dict, columns: list[dict]) -> list[str]:
    """What is wrong with a `figure` block, given the plate's columns."""
    if block.get("kind") != "bars":
        return [f"kind is {block.get('kind')!r}, needs 'bars' or 'own'"]
    units = {column["name"]: column["unit"] for column in columns}
    found = [f"{key} is no key of a bars figure" for key in block if key not in _BARS_KEYS]
    found += [f"{key} is missing" for key in ("value", "label") if key not in block]
    wanted = [(key, block[key]) for key in ("value", "low", "high", "mark") if key in block]
    for key, name in wanted:
        if not units.get(name):
            found.append(f"{key} names {name!r}, which is no numeric column")
    for key in ("label", "group"):
        if key in block and block[key] not in units:
            found.append(f"{key} names {block[key]!r}, which is no column")
    found += [
        f"also names {name!r}, no column" for name in block.get("also", ()) if name not in units
    ]
    if ("low" in block) != ("high" in block):
        found.append("low and high go together")
    if block.get("scale", "linear") not in ("linear", "log"):
        found.append(f"scale is {block['scale']!r}, needs 'linear' or 'log'")
    if "floor" in block and not isinstance(block["floor"], int | float):
        found.append(f"floor is {block['floor']!r}, needs a number")
    return found


def bars(plate: Plate, fig: Figure) -> None:
    """Horizontal bars, one per row, grouped and coloured as `plate.figure` says."""
    import matplotlib

    block, units = plate.figure, {c["name"]: c["unit"] for c in plate.columns}
    ax = fig.subplots()
    rows = plate.rows
    series = list(dict.fromkeys(row[block["label"]] for row in rows))
    groups = (
        list(dict.fromkeys(row[block["group"]] for row in rows)) if "group" in block else [None]
    )
    # By value, not as "C0": that name is looked up when drawn, in whatever style is then active.
    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    colours = {name: cycle[i % len(cycle)] for i, name in enumerate(series)}
    if len(groups) == 1:  # names stand on the axis; a second code by colour would say nothing
        colours = dict.fromkeys(series, colours[series[0]])
    if block.get("scale") == "log":
        ax.set_xscale("log")

    places = _places(rows, block, groups)
    numeric = [row[block[key]] for row in rows for key in ("value", "high", "mark") if key in block]
    longest = max([n for n in numeric if n is not None] + [block.get("floor", 0)], default=0) or 1
    named = set()  # in a long list a series is named where it first comes; its colour goes on
    for row, y in zip(rows, places, strict=True):
        name = row[block["label"]]
        show = len(groups) > 1 and (len(rows) <= NAME_EVERY_BAR or name not in named)
        named.add(name)
        _bar(ax, row, y, block, units, colours[name], longest, str(name) if show else "")
    if "floor" in block:
        _floor(ax, block, longest)
    _axes(ax, block, units, rows, places, groups, longest)


def _floor(ax, block: dict, longest: float) -> None:
    ax.axvline(block["floor"], color=DARK, linewidth=1.5, zorder=1.5)
    left = block.get("scale") == "log" or block["floor"] < longest / 2
    ax.annotate(
        block.get("floor_text", "floor"), (block["floor"], 1), (0, 3),
        xycoords=("data", "axes fraction"), textcoords="offset points",
        ha="left" if left else "right", fontsize=11.5,
    )  # fmt: skip


def _places(rows: list[dict], block: dict, groups: list) -> list[float]:
    """y of each row: groups from the top in order of appearance, a gap of one bar between them."""
    place, y = {}, 0.0
    for group in groups:
        members = [i for i, row in enumerate(rows) if group is None or row[block["group"]] == group]
        for i in members:
            place[i] = y
            y += 1.0
        y += 0.7
    return [place[i] for i in range(len(rows))]


def _bar(ax, row, y, block, units, colour, longest, name: str) -> None:
    value = row[block["value"]]
    if value is None:
        reason = row.get(f"{block['value']}_reason", "not measured")
        ax.annotate(
            f"{row[block['label']]}: {reason}", (0, y), (6, 0),
            xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
            fontsize=11.5, color=GREY, style="italic",
        )  # fmt: skip
        return
    if block.get("scale") == "log":  # a bar's length means nothing without a zero
        ax.plot(value, y, "o", color=colour, markersize=13)
    else:
        ax.barh(y, value, height=0.82, color=colour)
    end = value
    if block.get("low") and None not in (row[block["low"]], row[block["high"]]):
        low, high = sorted((row[block["low"]], row[block["high"]]))
        ax.plot([low, high], [y, y], color=DARK, linewidth=1.6, solid_capstyle="butt")
        end = max(end, high)
    cells = [_cell(row[n], units[n]) for n in (block["value"], *block.get("also", ()))]
    text = "  ".join([*([name] if name else []), ", ".join(cells)])
    if block.get("mark") and row[block["mark"]] is not None:
        mark = row[block["mark"]]
        ax.plot([mark, mark], [y - 0.45, y + 0.45], color=DARK, linewidth=2.5)
        # The text would run across the tick: it starts behind it then. One character takes about
        # 0.011 of the longest bar at this size.
        if end <= mark < end + 0.011 * longest * (len(text) + 2):
            end = mark
    ax.annotate(
        text, (end, y), (10 if block.get("scale") == "log" else 6, 0), textcoords="offset points",
        va="center", fontsize=11.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8}, zorder=3,
    )  # fmt: skip


def _axes(ax, block, units, rows, places, groups, longest) -> None:
    from matplotlib import ticker

    unit = units[block["value"]]
    what = block.get("axis", block["value"].replace("_", " "))
    label = what if unit == "1" else f"{what} [{unit}]"
    also = [f"{n.replace('_', ' ')} [{units[n]}]" for n in block.get("also", ())]
    label += f", then {', '.join(also)}" if also else ""
    if "mark" in block:
        label += f"      ┃ = {block.get('mark_text', block['mark'])}"
    ax.set_xlabel(label, loc="left")
    if block.get("scale") != "log":
        ax.set_xlim(0, longest * 1.32)  # room for the text after the longest bar
    else:
        low, high = ax.get_xlim()
        ax.set_xlim(low, high * (high / low) ** 0.3)
        ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.6g}"))
        ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.set_ylim(max(places) + 0.75, -0.75)
    if len(groups) > 1:
        at = [
            sum(own) / len(own)
            for group in groups
            if (
                own := [
                    y for row, y in zip(rows, places, strict=True) if row[block["group"]] == group
                ]
            )
        ]
        ax.set_yticks(at, [str(group) for group in groups], weight="bold")
    else:
        ax.set_yticks(places, [str(row[block["label"]]) for row in rows])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _cell(value, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return str(value)
    return number(value) if unit in ("1", "") else f"{number(value)} {unit}".replace(" %", "%")


def number(value: float) -> str:
    """Three significant digits for people: 1,234 / 56.7 / 0.0892 / 3.1e-06."""
    if value == 0 or isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")
