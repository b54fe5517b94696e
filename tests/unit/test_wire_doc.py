"""docs/wire.md shows the rules of frames that the native core keeps."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_the_frames_as_they_are() -> None:
    written = runpy.run_path(str(DOCS / "pages" / "wire.py"))
    assert (DOCS / "wire.md").read_text() == written["page"](), "run `make docs`"
