"""The page that plays a trace, in a real browser without a window."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser

from shoal.analysis.trace.page import page_of
from shoal.analysis.trace.tracer import trace

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium on the PATH, the page was not played: install chromium"
)

UNTIL_THE_END = """
new Promise((done) => {
  const look = () => document.body.dataset.end ? done() : requestAnimationFrame(look);
  look();
})
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


class Page:
    """A page in the browser, as its reader sees it."""

    def __init__(self, browser: Browser, path: Path, text: str, fragment: str = "") -> None:
        path.write_text(text)
        self._browser = browser
        browser.open(f"file://{path}#{fragment}")

    def play_to_the_end(self) -> None:
        self._browser.run(UNTIL_THE_END)

    def rows(self) -> Any:
        """What the table says that every rank holds."""
        cells = "[...row.cells].slice(1).map((cell) => cell.textContent)"
        return self._browser.run(f"[...document.querySelectorAll('tr')].map((row) => {cells})")

    def text(self, name: str) -> Any:
        return self._browser.run(f"document.getElementById('{name}').textContent")

    def round(self) -> Any:
        return self._browser.run("+document.body.dataset.round")

    def click(self, name: str) -> None:
        self._browser.run(f"document.getElementById('{name}').click()")

    def scrub(self, to: float) -> None:
        bar = "document.getElementById('scrub')"
        self._browser.run(f"{bar}.value = {to}; {bar}.dispatchEvent(new Event('input'))")


@pytest.fixture
def ring(browser: Browser, tmp_path: Path) -> Page:
    """The ring of four, waiting at its start."""
    return Page(browser, tmp_path / "page.html", page_of(trace("all_reduce", "ring", 4)))


def test_a_page_waits_at_the_start(ring: Page) -> None:
    assert ring.text("round") == "start"
    assert ring.rows() == [[f"{chunk}{rank}" for chunk in "abcd"] for rank in range(4)]


def test_the_ring_plays_to_the_tutorials_last_state(browser: Browser, tmp_path: Path) -> None:
    text = page_of(trace("all_reduce", "ring", 4))
    page = Page(browser, tmp_path / "page.html", text, "autoplay&speed=max")
    page.play_to_the_end()
    assert page.rows() == [["a3a2a1a0", "b0b3b2b1", "c1c0c3c2", "d2d1d0d3"]] * 4
    assert page.text("round") == "round 6 of 6"
    assert page.text("caption") == "Proved: every rank ends with what all-reduce must leave."


def test_it_also_plays_to_the_end_with_messages_in_flight(browser: Browser, tmp_path: Path) -> None:
    text = page_of(trace("all_gather", "ring", 3))
    page = Page(browser, tmp_path / "page.html", text, "autoplay&speed=4")
    page.play_to_the_end()
    assert [row[1:] for row in page.rows()] == [["a0", "a1", "a2"]] * 3


@pytest.mark.parametrize("size", [1, 2, 64])
def test_small_and_large_groups_play_to_the_end(
    browser: Browser, tmp_path: Path, size: int
) -> None:
    traced = trace("all_reduce", "sharded", size, hosts=tuple(r // 4 for r in range(size)))
    page = Page(browser, tmp_path / "page.html", page_of(traced), "autoplay&speed=max")
    page.play_to_the_end()
    *_, last = traced.states()
    assert page.rows() == [
        [str(last[rank, place]) for place in traced.places[rank]] for rank in range(size)
    ]
    assert page.text("caption").startswith("Proved")


def test_a_page_judges_by_what_is_held_not_by_reaching_the_end(
    browser: Browser, tmp_path: Path
) -> None:
    text = page_of(trace("all_reduce", "ring", 4))
    assert text.count("[3,2,1,0],true]") == 1
    wrong = text.replace("[3,2,1,0],true]", "[3,2,1,1],true]")
    page = Page(browser, tmp_path / "page.html", wrong, "autoplay&speed=max")
    page.play_to_the_end()
    assert page.text("caption").startswith("Wrong")


def test_the_arrow_keys_step(browser: Browser, ring: Page) -> None:
    rounds = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowLeft"):
        browser.press(key)
        rounds.append(ring.round())
    assert rounds == [1, 2, 1, 6, 6, 0, 0]


def test_the_space_bar_plays_and_pauses(browser: Browser, ring: Page) -> None:
    label = "document.getElementById('play').getAttribute('aria-label')"
    browser.press(" ")
    assert browser.run(label) == "Pause"
    browser.press(" ")
    assert browser.run(label) == "Play"


def test_the_buttons_step_back_to_what_was_held_before(ring: Page) -> None:
    ring.click("forward")
    assert ring.rows()[1] == ["a1a0", "b1", "c1", "d1"]
    assert "0 → 1  chunk 0 + a0" in ring.text("messages")
    ring.click("back")
    assert ring.rows()[1] == ["a1", "b1", "c1", "d1"]


def test_the_bar_scrubs_both_ways(ring: Page) -> None:
    rounds = []
    for to in (3.5, 5, 0.9, 0.1):
        ring.scrub(to)
        rounds.append((ring.round(), ring.text("round")))
    # While messages fly, what was held before them is shown. They have landed at 0.9.
    assert rounds == [
        (3, "round 4 of 6"),
        (5, "round 5 of 6"),
        (1, "round 1 of 6"),
        (0, "round 1 of 6"),
    ]
