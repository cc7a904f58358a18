"""The panel in JupyterLab, in a real browser: toggles, Run, a wrong value, Save.

Starts a JupyterLab of its own on this machine for a copy of a small page, and drives a Chromium
that the system has. Skipped, with the reason, where one of them is missing. Screenshots are left in
the test's folder (`pytest --basetemp=FOLDER` keeps them).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

if not (shutil.which("chromium") or shutil.which("chromium-browser")):
    pytest.skip("no Chromium on this machine", allow_module_level=True)
if not all(map(importlib.util.find_spec, ("jupyterlab", "playwright", "ipywidgets", "pandas"))):
    pytest.skip("jupyterlab or playwright is not installed", allow_module_level=True)

from playwright.sync_api import Page, expect, sync_playwright
from test_page import toy_plate, use_toy

from decodev2.lab import plate

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_MS = 60_000
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
NO_NEWS = "lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"


def write_page(path: Path, experiments: Path) -> None:
    """A page of two code cells: the panel of `toy_sort`, and a value to show that all ran."""
    imports = (
        "from decodev2.lab import experiments, page, widgets\n"
        f"experiments.__path__.append({str(experiments)!r})\n"
    )
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None,
         "outputs": [], "source": source}
        for i, source in enumerate((imports + "widgets.panel('toy_sort')", "print('all ' 'ran')"))
    ]  # fmt: skip
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}}
    path.write_text(json.dumps(notebook | {"nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")


@contextlib.contextmanager
def jupyter_lab(folder: Path):
    """Address of a JupyterLab that shows `folder/pages` and keeps its own files below `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    env = os.environ | {name: str(folder / name.lower()) for name in places}
    project = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (project, os.environ.get("PYTHONPATH"))))
    settings = folder / "jupyter_config_dir" / NO_NEWS  # no question may lie over the page
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"fetchNews": "false"}), encoding="utf-8")
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder / 'pages'}",
    ]  # fmt: skip
    log = folder / "lab.log"
    with open(log, "wb") as out:
        server = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=5)
                break
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()  # it ends its kernels, too
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """(browser page with the notebook open, folder for screenshots, folder of plates)."""
    runs = use_toy(tmp_path, monkeypatch)
    plate.save(toy_plate(), runs)
    (tmp_path / "pages").mkdir()
    write_page(tmp_path / "pages" / "sort.ipynb", tmp_path / "experiments")
    with jupyter_lab(tmp_path) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        view = browser.new_page(viewport={"width": 1300, "height": 1250})
        view.set_default_timeout(PATIENCE_MS)
        view.goto(f"{address}/lab/tree/sort.ipynb")
        # JupyterLab asks for a kernel when it is told to run before it has connected to one.
        ask = view.get_by_role("button", name="Select Kernel", exact=True)
        view.add_locator_handler(ask, lambda button: button.click())
        ready = view.get_by_role("button", name=re.compile(r"\| Idle"))
        expect(ready).to_be_visible(timeout=PATIENCE_MS)
        view.screenshot(path=tmp_path / "0-loaded.png")
        view.get_by_role("menuitem", name="Run", exact=True).click()
        view.get_by_text("Run All Cells", exact=True).click()
        expect(view.get_by_text("all ran")).to_be_visible(timeout=PATIENCE_MS)
        yield view, tmp_path, runs
        browser.close()


class Shown:
    """The panel as a reader sees it."""

    def __init__(self, view: Page) -> None:
        self.view = view
        self.cell = view.locator(".jp-CodeCell").first
        self.table = self.cell.locator("table.dataframe")
        self.figure = self.cell.locator(".jp-RenderedImage img")
        self.error = self.cell.locator("[role=alert]")

    def choose(self, column: str, choice: str) -> None:
        box = self.cell.locator(".widget-dropdown").filter(has_text=column)
        box.locator("select").select_option(choice)

    def button(self, name: str):
        return self.cell.get_by_role("button", name=name)

    def chosen(self):
        """The table's row that is marked."""
        return self.table.locator("tr", has_text="chosen")

    def picture(self) -> str:
        return self.figure.get_attribute("src")

    def wait_for_new_picture(self, old: str) -> None:
        expect(self.figure).not_to_have_attribute("src", old, timeout=PATIENCE_MS)


def test_panel_in_a_browser(lab):
    view, folder, runs = lab
    shown = Shown(view)
    expect(shown.figure).to_be_visible(timeout=PATIENCE_MS)
    expect(shown.chosen()).to_contain_text("full sort")
    expect(shown.chosen()).to_contain_text("2.00")
    view.screenshot(path=folder / "1-opened.png")

    # Two toggles: table, figure and sentence follow.
    before = shown.picture()
    shown.choose("way", "heap")
    expect(shown.chosen()).to_contain_text("heap")
    shown.wait_for_new_picture(before)
    before = shown.picture()
    shown.choose("size", "20000")
    expect(shown.chosen()).to_contain_text("250")
    expect(shown.cell).to_contain_text("size 20000, heap: 250 us, the best")
    shown.wait_for_new_picture(before)
    view.screenshot(path=folder / "2-toggled.png")

    # Run measures, and table and figure become those of the new row.
    before = shown.picture()
    shown.button("Run").click()
    expect(shown.cell).to_contain_text("measured here on", timeout=PATIENCE_MS)
    shown.wait_for_new_picture(before)
    expect(shown.table.locator("tbody tr")).to_have_count(1)
    expect(shown.chosen()).to_contain_text("heap")
    expect(shown.cell).to_contain_text("heap: 250 us, the best")  # recorded, still beside it
    view.screenshot(path=folder / "3-measured.png")

    # A wrong value is said in the panel, nothing is measured, and the panel goes on.
    field = shown.cell.locator(".widget-text input")
    field.fill("many")
    field.press("Enter")
    expect(shown.error).to_have_text("parameter runs is 'many', needs a whole number")
    shown.button("Run").click()
    expect(shown.error).to_have_text("parameter runs is 'many', needs a whole number")
    expect(shown.table.locator("tbody tr")).to_have_count(1)
    view.screenshot(path=folder / "4-refused.png")
    field.fill("2")
    field.press("Enter")
    expect(shown.error).to_have_text("")
    shown.choose("way", "full sort")
    shown.button("Run").click()
    expect(shown.table.locator("tbody tr")).to_have_count(2, timeout=PATIENCE_MS)
    expect(shown.error).to_have_text("")

    # The rows become a plate.
    shown.button("Save as plate").click()
    expect(shown.cell).to_contain_text("saved ", timeout=PATIENCE_MS)
    view.screenshot(path=folder / "5-saved.png")
    made = plate.load(plate.latest(runs, "toy_sort"))
    assert [(r["size"], r["way"], r["runs"]) for r in made.rows] == [
        (20000, "heap", 3),
        (20000, "full sort", 2),
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
