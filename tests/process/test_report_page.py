"""The page of `shoal report` in a real browser without a window."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from browser import Browser
from unit.test_bench_report import record

from shoal.cli import main

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""

pytestmark = [
    pytest.mark.skipif(
        not CHROMIUM, reason="no chromium on the PATH, the page was not shown: install chromium"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("matplotlib") is None,
        reason="NOT TESTED: pictures need matplotlib: pip install 'shoal[report]'",
    ),
]

RIGHTMOST = """
Math.max(...[...document.querySelectorAll("figure, p, dl, li, h1, svg")].map(
  (one) => one.getBoundingClientRect().right))
"""
STROKES = """
[...new Set([...document.querySelectorAll("svg path")].map((one) => getComputedStyle(one).stroke))]
"""


def test_pictures_fit_a_narrow_screen_and_take_the_colours_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(record()))
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "run.json"), "-o", str(page), "--no-png"]) == 0
    with Browser(CHROMIUM, tmp_path / "profile") as browser:
        browser.open(f"file://{page}")
        strokes = browser.run(STROKES)
        browser.run("document.body.style.width = '360px'")
        rightmost = browser.run(RIGHTMOST)
        n_loaded = browser.run("performance.getEntriesByType('resource').length")
    # Okabe and Ito's blue and vermilion: names of the style sheet that did not resolve are "none".
    assert {"rgb(0, 114, 178)", "rgb(213, 94, 0)"} <= set(strokes)
    assert 300 < rightmost <= 360
    assert n_loaded == 0
