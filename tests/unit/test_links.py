"""The project's pages: every link leads to a file and a heading, and docs/wire.md is current."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PAGES = [*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md"), *PROJECT.glob("bench/**/*.md")]
PAGES += PROJECT.glob("docs/*.ipynb")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of the page's headings, and the page's explicit anchors."""
    text = FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def broken(page: Path) -> Iterator[str]:
    for path, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield path
        elif anchor and anchor not in anchors(target):
            yield f"{path}#{anchor}"


def test_every_link_has_a_target() -> None:
    assert [(page, link) for page in PAGES for link in broken(page)] == []


def test_the_tutorial_is_stored_without_outputs() -> None:
    cells = json.loads((PROJECT / "docs" / "tutorial.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_page_of_the_wire_shows_the_actual_frames() -> None:
    written = runpy.run_path(str(PROJECT / "docs" / "pages" / "wire.py"))
    assert (PROJECT / "docs" / "wire.md").read_text() == written["page"](), "run `make docs`"
