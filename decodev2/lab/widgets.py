"""The panel of toggles on a page: walk a recorded plate, or measure on the machine at hand.

    widgets.panel("gemv_shapes", made, shape="q_proj")

One dropdown per entry of the experiment's TOGGLES. Table and figure are plain outputs that the
toggles update, so a saved page shows them without a kernel; only the controls need one. Where the
experiment can run (a CUDA device is there, or it runs on the CPU) a button measures the choices.
"""

from __future__ import annotations

import contextlib
import html
import io
import uuid
from dataclasses import replace

import ipywidgets
from IPython.display import display

from ..errors import BuildError, DecodeError, PlateError
from . import commands, experiments, page
from . import figure as figures
from . import plate as plates
from .plate import Plate

CHOSEN, BEST, OTHER = "#0072B2", "#009E73", "#B8B8B8"
VIEW = "application/vnd.jupyter.widget-view+json"


def panel(
    name: str, plate: Plate | None = None, compare: list[str] | None = None, **start
) -> Panel:
    """The panel of experiment `name`; the last value of a cell, or `display` it.

    `plate` is what it walks (left out: the recorded one). `start` holds a first choice for columns
    of TOGGLES. `compare` names the columns whose choices compete (left out: `page.same_work`).
    Raises DecodeError for an unknown column or choice, or where there is no plate or toggle.
    """
    module = experiments.get(name)
    if not getattr(module, "TOGGLES", None):
        raise DecodeError(f"experiment {name} has no toggles")
    live = module.DEVICE == "cpu" or page.cuda_is_there()
    if plate is None:
        try:
            plate = page.plate(name)
        except DecodeError:
            if not live:
                raise
    return Panel(name, plate, compare, start, live)


class Panel:
    """One panel: its controls, the plate it walks (`base`), and the plate of its live rows."""

    def __init__(self, name, base, compare, start, live) -> None:
        self.name, self.base, self.scratch = name, base, None
        self.module = experiments.get(name)
        there = {column["name"] for column in base.columns} if base else {*self.module.TOGGLES}
        self.toggles = {  # a plate that is older than a toggle lacks its column
            column: param for column, (param, _) in self.module.TOGGLES.items() if column in there
        }
        for given in [*(compare or ()), *start]:
            if given not in self.toggles:
                raise page.no_such(f"{name}: toggle", given, self.toggles)
        # From the recorded plate if there is one: a few live rows do not show what is one work.
        self.compare = page.same_work(base, self.toggles) if base and not compare else compare
        self.boxes = {}
        rows = base.rows if base else []
        value_of = page.main_column(base)[0] if base else ""
        known = [row for row in rows if row[value_of] is not None and page.agrees(row, start)]
        first = next(iter(known + rows), {}) | start
        for column in self.toggles:
            choices = self.module.TOGGLES[column][1]
            there = {str(row[column]) for row in rows}
            options = {str(c): c for c in choices if live or str(c) in there}
            value = str(first.get(column, next(iter(options), None)))
            if value not in options:
                raise page.no_such(f"{name}: {column}", value, options)
            self.boxes[column] = ipywidgets.Dropdown(
                options=[*options.items()], value=options[value], description=column
            )
            self.boxes[column].observe(lambda _: self._attempt(lambda: None), "value")
        self._outputs = [uuid.uuid4().hex for _ in range(2)]  # display ids of table and figure
        self._shown = False
        self._make_controls(live)
        self._refresh()

    def _make_controls(self, live: bool) -> None:
        default = self.module.PARAMS.get("runs", (1, ""))[0]
        self.runs = ipywidgets.Text(str(default), description="runs", continuous_update=False)
        self.runs.observe(lambda _: self._attempt(self._params), "value")
        self.run = ipywidgets.Button(description="Run", button_style="primary", icon="play")
        self.run.on_click(lambda _: self._attempt(self._measure))
        self.save = ipywidgets.Button(description="Save as plate", icon="save", disabled=True)
        self.save.on_click(lambda _: self._attempt(self._save))
        self.status, self.error, self.said = (ipywidgets.HTML() for _ in range(3))
        self.bar = ipywidgets.IntProgress(layout={"visibility": "hidden"})
        runs = [self.runs] if "runs" in self.module.PARAMS else []
        wrap = ipywidgets.Layout(flex_flow="row wrap")
        rows = [ipywidgets.HBox([*self.boxes.values()], layout=wrap)]
        if live:
            rows.append(ipywidgets.HBox([*runs, self.run, self.save, self.bar], layout=wrap))
        self.box = ipywidgets.VBox([*rows, self.said, self.status, self.error])

    def _ipython_display_(self) -> None:
        # The view alone: a text like "VBox(children=...)" would be compared on each run of a page.
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        display({VIEW: view}, raw=True)
        self._show(update=False)
        self._shown = True

    # ---- what the choices mean ----

    @property
    def plate(self) -> Plate | None:
        """The rows at hand: those measured here once there are any, else the recorded ones."""
        return self.scratch or self.base

    @property
    def choices(self) -> dict[str, object]:
        """The chosen value of each toggle's column."""
        return {column: box.value for column, box in self.boxes.items()}

    def view(self) -> Plate:
        """`page.contest` of the rows at hand and the choices."""
        return page.contest(self.plate, self.choices, self.compare)

    # ---- what is shown ----

    def _refresh(self) -> None:
        lines = ["Nothing is recorded yet: press Run."]
        if self.plate:
            made, where = self.view(), "measured here" if self.scratch else "recorded"
            lines = [*made.verdict.split("\n"), f"rows that compete: {len(made.rows)}; {where} on "
                     f"{page.machine(made)}, {made.created[:10]}"]  # fmt: skip
            if self.scratch and self.base:
                recorded = page.contest(self.base, self.choices, self.compare)
                lines.append(f"recorded on {page.machine(recorded)}: {recorded.verdict}")
        self.status.value = "<br>".join(html.escape(line) for line in lines)
        if self._shown:
            self._show(update=True)

    def _show(self, update: bool) -> None:
        for bundle, at in zip((self.table(), self.figure()), self._outputs, strict=True):
            display(bundle, raw=True, display_id=at, update=update)

    def table(self) -> dict[str, str]:
        """The rows that compete with the chosen one, as text/html and text/plain."""
        if not self.plate:
            return {"text/plain": "no rows yet"}
        made = self.view()
        names = [c["name"] for c in made.columns if c["unit"] or c["name"] in ("choices", "is")]
        shown = page.table(made, [n for n in names if n not in self.toggles and n != "runs"])
        parts = shown._repr_html_().split("<tr>\n")  # one per row; the header has a style
        for at, row in enumerate(made.rows, 1):
            if "chosen" in row["is"]:
                parts[at] = parts[at].replace("<td>", '<td style="background:#D6E9F8;color:#222">')
        return {"text/html": "<tr>\n".join(parts), "text/plain": repr(shown)}

    def figure(self) -> dict[str, str]:
        """The same rows as bars, the chosen and the best one in colour, as image/png."""
        if not self.plate:
            return {"text/plain": "no figure yet"}
        made = self.view()
        fig = figures.figure(replace(made, verdict=made.verdict.replace("\n", "; ")))
        measured = [row for row in made.rows if row[made.figure["value"]] is not None]
        for bar, row in zip(fig.axes[0].patches, measured, strict=False):
            bar.set_color(CHOSEN if "chosen" in row["is"] else BEST if row["is"] else OTHER)
        return {"image/png": page.png(fig), "text/plain": f"Figure: {made.verdict}"}

    # ---- measuring ----

    def _attempt(self, action) -> None:
        """Do what a control asks for; whatever goes wrong stands in the panel's error line."""
        message = ""
        try:
            action()
        except (DecodeError, BuildError) as error:
            message = str(error)
        except (Exception, KeyboardInterrupt) as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.error.value = f'<b role="alert" style="color:#B00020">{html.escape(message)}</b>'
        self._refresh()

    @contextlib.contextmanager
    def _busy(self):
        """While it measures or saves nothing can be chosen or pressed.

        Not the field `runs`: a browser puts a field that is disabled back to the value the kernel
        knows, so what is being typed there would be lost.
        """
        controls = [*self.boxes.values(), self.run, self.save]
        before = [control.disabled for control in controls]
        for control in controls:
            control.disabled = True
        try:
            yield
        finally:
            for control, was in zip(controls, before, strict=True):
                control.disabled = was

    def _params(self) -> dict:
        """Parameters of a run: the recorded plate's, with the choices and the field `runs`."""
        texts = [f"runs={self.runs.value}"] if "runs" in self.module.PARAMS else []
        values = commands.parse_params(self.module.PARAMS, texts, self.name)
        if values.get("runs", 1) < 1:
            raise DecodeError(f"parameter runs is {values['runs']}, needs at least 1")
        recorded = self.base.params if self.base else {}
        values |= {key: recorded[key] for key in values if key in recorded and key != "runs"}
        return values | {self.toggles[column]: [value] for column, value in self.choices.items()}

    def _measure(self) -> None:
        def progress(done: int, total: int, text: str) -> None:
            self.bar.max, self.bar.value = max(total, 1), done
            said.write(f"{done}/{total} {text}")

        params, said = self._params(), _Line(self.said)
        progress(0, 1, "starts")
        self.bar.layout.visibility = "visible"
        try:
            with self._busy(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                made = plates.clean(commands.record(self.name, params, progress))
        finally:
            self.bar.layout.visibility = "hidden"
        if found := plates.problems(made):
            raise PlateError(f"refused: {found[0]}")
        self._add(Plate(**made))
        self.said.value = ""

    def _add(self, new: Plate) -> None:
        """Append the rows of one more run; a change of the code starts a new scratch plate."""
        old = self.scratch
        if old and (old.code, old.columns) == (new.code, new.columns):
            best = max(old, new, key=lambda made: made.card["read_rate"]["gb_s"] or 0)
            params = new.params | {
                param: sorted({*old.params[param], *new.params[param]}, key=str)
                for param in self.toggles.values()
            }
            new = replace(new, rows=old.rows + new.rows, card=best.card, params=params)
        self.scratch = replace(new, notes=["measured from the panel of a page, choice by choice"])
        self.save.disabled = False

    def _save(self) -> None:
        """Save the scratch plate as `decodev2 run` does: checked, drawn and indexed."""
        verdict = self.view().verdict.replace("\n", "; ")
        made = replace(self.scratch, verdict=f"{len(self.scratch.rows)} rows. {verdict}.")
        with self._busy():
            try:
                figures.figure(made)
            except Exception:  # the experiment's own may need rows that were not measured
                name, _, _ = page.main_column(made)
                bars = {"kind": "bars", "value": name, "label": min(self.toggles)}
                made = replace(made, figure=bars)
            path = plates.save(made, page.runs_dir())
            plates.draw(path)
            plates.index(page.runs_dir())
        self.said.value = f"saved {html.escape(path.name)}"


class _Line(io.TextIOBase):
    """A stream whose last line is shown: a build says there that it takes a minute."""

    def __init__(self, shown: ipywidgets.HTML) -> None:
        self._shown = shown

    def write(self, text: str) -> int:
        if text.strip():
            self._shown.value = html.escape(text.strip().splitlines()[-1])
        return len(text)
