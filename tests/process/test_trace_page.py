"""The page that plays a trace, and the pages with charts, in a real headless browser."""

import functools
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from typing import Any

import pytest

from shoal.analysis.trace.page import page_of
from shoal.analysis.trace.tracer import Trace, trace
from shoal.cli import main

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
DEADLINE_S = 200

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium on the PATH, the page was not played: install chromium"
)

SIZES = (1, 2, 64)
WIDTHS = (400, 768, 1280, 1920)


@functools.cache
def sharded(size: int) -> Trace:
    return trace("all_reduce", "sharded", size, hosts=tuple(rank // 4 for rank in range(size)))


@functools.cache
def pages() -> dict[str, str]:
    ring = page_of(trace("all_reduce", "ring", 4))
    grid = page_of(trace("all_reduce", "ring_2d", 8, hosts=(0, 0, 0, 0, 1, 1, 1, 1)))
    return {
        "ring": ring,
        "wrong": ring.replace("[3,2,1,0],true]", "[3,2,1,1],true]"),
        "gather": page_of(trace("all_gather", "ring", 3)),
        "grid": f"{grid}<script>window.drawn = () => [kept, cards];</script>",
        **{f"sharded{size}": page_of(sharded(size)) for size in SIZES},
    }


PLAYED = ("ring", "wrong", "gather", "grid", *(f"sharded{size}" for size in SIZES))
CHARTS = {
    "plan": "plan --hosts 8 --ranks-per-host 4 --wire bf16",
    "nics": "simulate --all --hosts 4 --ranks-per-host 2 --bytes 4MiB",
}
# Operates the page in a frame, and returns what its reader sees.
SCRIPTS = {
    "ring": "[text('round'), rows()]",
    **{f"{name}#autoplay&speed=max": "atTheEnd()" for name in PLAYED},
    **{f"grid#width={width}": "looks()" for width in WIDTHS},
    **{f"{name}#width={width}": "[figures(), tooWide('*')]" for width in WIDTHS for name in CHARTS},
    "gather#autoplay&speed=4": "atTheEnd()",
    "ring#arrows": "KEYS.map((key) => (press(key), round()))",
    "ring#space": "[1, 2].map(() => (press(' '), byId('play').getAttribute('aria-label')))",
    "ring#buttons": "['forward', 'back'].map("
    "(name) => (byId(name).click(), [rows()[1], text('messages')]))",
    "ring#bar": "[3.5, 5, 0.9, 0.1].map((to) => (scrub(to), [round(), text('round')]))",
}
FRAMES = """<!doctype html><script>
const KEYS = ['ArrowRight', 'ArrowRight', 'ArrowLeft', 'End', 'ArrowRight', 'Home', 'ArrowLeft'];
async function play(where, script) {
  const frame = document.createElement('iframe');
  const loaded = new Promise((go) => { frame.onload = go; });
  frame.src = where.replace(/#|$/, '.html#');
  frame.width = new URLSearchParams(where.split('#')[1]).get('width') ?? 300;
  frame.height = 900;
  document.body.append(frame);
  await loaded;
  const page = frame.contentDocument;
  const byId = (name) => page.getElementById(name);
  const text = (name) => byId(name).textContent;
  const round = () => +page.body.dataset.round;
  const rows = () => [...page.querySelectorAll('tr')].map(
      (row) => [...row.cells].slice(1).map((cell) => cell.textContent));
  const press = (key) => ['keydown', 'keyup'].forEach(
      (kind) => page.body.dispatchEvent(new KeyboardEvent(kind, {key, bubbles: true})));
  const scrub = (to) => {
    byId('scrub').value = to;
    byId('scrub').dispatchEvent(new Event('input'));
  };
  const atTheEnd = async () => {
    while (!page.body.dataset.end) await new Promise((go) => setTimeout(go));
    return [rows(), text('round'), text('caption')];
  };
  // Paint from 2 px to a tenth of a card's height outside of its border.
  const paintBeside = (kept, {x, y, w, h}) => {
    const far = Math.round(h / 10);
    const [left, top] = [x - w / 2 - far, y - h / 2 - far].map(Math.round);
    const [across, down] = [w, h].map((length) => Math.round(length) + 2 * far);
    const {data} = kept.getContext('2d').getImageData(left, top, across, down);
    const isBeside = (at, length) => at < far - 2 || at >= length - far + 2;
    return data.some((alpha, i) => i % 4 === 3 && alpha && (
        isBeside((i >> 2) % across, across) || isBeside(Math.floor((i >> 2) / across), down)));
  };
  const box = (one) => one.getBoundingClientRect();
  const isWide = (one) => {
    const [inner, outer] = [box(one), box(one.parentElement)];
    return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1
        || one.clientWidth && one.scrollWidth > one.clientWidth + 1);
  };
  const tooWide = (what) => [...page.body.querySelectorAll(what)].filter(isWide).map(
      (one) => one.outerHTML);
  const figures = () => page.querySelectorAll('figure').length;
  const looks = () => {
    const [kept, cards] = frame.contentWindow.drawn();
    const screen = page.querySelector('.screen');
    return {
      cards: cards.length,
      overflowing: [
        ...cards.flatMap((card, rank) => (paintBeside(kept, card) ? [`rank ${rank}`] : [])),
        ...tooWide('*:not(.wide, .wide *, #messages, svg *)'),
        ...(screen.scrollHeight > screen.clientHeight ? ['screen'] : []),
      ],
      scrub: box(byId('scrub')).width,
    };
  };
  const shown = await eval(script);
  frame.remove();
  return shown;
}
onload = async () => {
  const shown = {};
  for (const [where, script] of Object.entries(SCRIPTS)) {
    shown[where] = await play(where, script).catch((error) => `${error}`);
  }
  fetch('/shown', {method: 'POST', body: JSON.stringify(shown)});
};
</script><body>""".replace("SCRIPTS", json.dumps(SCRIPTS))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what the pages showed, by script."""
    folder, answers = tmp_path_factory.mktemp("pages"), queue.Queue[bytes]()
    for name, text in {**pages(), "frames": FRAMES}.items():
        (folder / f"{name}.html").write_text(text)
    for name, words in CHARTS.items():
        assert main([*words.split(), "--html", str(folder / f"{name}.html")]) == 0

    class Pages(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            answers.put(self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *_what: object) -> None: ...

    handler = functools.partial(Pages, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'own'}"]
        url = f"http://127.0.0.1:{server.server_port}/frames.html"
        run = [CHROMIUM, *flags, url]
        browser = subprocess.Popen(run, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            return json.loads(answers.get(timeout=DEADLINE_S))
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()


def test_a_page_waits_at_the_start(shown: Any) -> None:
    held = [[f"{chunk}{rank}" for chunk in "abcd"] for rank in range(4)]
    assert shown["ring"] == ["start", held]


def test_the_ring_plays_to_the_tutorials_last_state(shown: Any) -> None:
    rows, round_, caption = shown["ring#autoplay&speed=max"]
    assert rows == [["a3a2a1a0", "b0b3b2b1", "c1c0c3c2", "d2d1d0d3"]] * 4
    assert round_ == "round 6 of 6"
    assert caption == "Proved: every rank ends with what all-reduce must leave."


def test_a_page_plays_to_the_end_with_messages_in_flight(shown: Any) -> None:
    rows, *_ = shown["gather#autoplay&speed=4"]
    assert [row[1:] for row in rows] == [["a0", "a1", "a2"]] * 3


@pytest.mark.parametrize("size", SIZES)
def test_small_and_large_groups_play_to_the_end(shown: Any, size: int) -> None:
    rows, _, caption = shown[f"sharded{size}#autoplay&speed=max"]
    *_, last = sharded(size).states()
    places = sharded(size).places
    assert rows == [[str(last[rank, place]) for place in places[rank]] for rank in range(size)]
    assert caption.startswith("Proved")


def test_a_page_judges_the_result_by_the_held_values(shown: Any) -> None:
    assert pages()["wrong"] != pages()["ring"]
    assert shown["wrong#autoplay&speed=max"][2].startswith("Wrong")


def test_keys_and_buttons_play_pause_and_step(shown: Any) -> None:
    assert shown["ring#arrows"] == [1, 2, 1, 6, 6, 0, 0]
    assert shown["ring#space"] == ["Pause", "Play"]
    (forward, messages), (back, _) = shown["ring#buttons"]
    assert forward == ["a1a0", "b1", "c1", "d1"]
    assert "0 \u2192 1  chunk 0 + a0" in messages
    assert back == ["a1", "b1", "c1", "d1"]


def test_the_bar_scrubs_both_ways(shown: Any) -> None:
    # While messages fly, the page shows the values before them. They land at 0.9.
    rounds = [[3, "round 4 of 6"], [5, "round 5 of 6"], [1, "round 1 of 6"], [0, "round 1 of 6"]]
    assert shown["ring#bar"] == rounds


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_its_card_or_the_page(shown: Any, width: int) -> None:
    looks = shown[f"grid#width={width}"]
    assert looks["cards"] == 8
    assert looks["overflowing"] == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CHARTS)
def test_no_chart_overflows_its_card_or_the_page(shown: Any, name: str, width: int) -> None:
    n_figures, too_wide = shown[f"{name}#width={width}"]
    assert n_figures > 12
    assert too_wide == []


def test_the_bar_is_at_least_half_as_wide_as_a_phone(shown: Any) -> None:
    assert shown["grid#width=400"]["scrub"] >= 200
