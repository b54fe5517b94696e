"""The project's pages: every link leads somewhere, and what the code or torch says is current."""

import inspect
import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from algorithms import document

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"
PAGES = [*PROJECT.glob("*.md"), *DOCS.glob("**/*.md"), *PROJECT.glob("bench/**/*.md")]
PAGES += DOCS.glob("*.ipynb")
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


def test_the_page_of_the_wire_shows_the_actual_frames() -> None:
    written = runpy.run_path(str(DOCS / "pages" / "wire.py"))
    assert (DOCS / "wire.md").read_text() == written["page"](), "run `make docs`"


def test_the_pages_of_algorithms_match_the_code() -> None:
    files = document()
    drawn = {str(path.relative_to(DOCS)) for path in DOCS.glob("figures/algorithms/*")}
    assert drawn | {"algorithms.md"} == set(files), "run make docs"
    old = [name for name, text in files.items() if (DOCS / name).read_text() != text]
    assert old == [], "run make docs"


# The versions of torch that added functions of the table, after 2.11.
SINCE = {"record_comm": (2, 12), "all_gather_single": (2, 13), "reduce_scatter_single": (2, 13)}
SINCE |= dict.fromkeys(
    ("gather_into_tensor", "gather_single", "get_backend_impl", "set_timeout"), (2, 14)
)
ROW = re.compile(r"^\| `(\w+)` \| [\w' ]+ \| .*\|$", re.MULTILINE)


def listed() -> list[str]:
    """Return the functions of the table and the lists."""
    text = (DOCS / "torch.md").read_text()
    page = text[text.index("## Functions") : text.index("## Layers")]
    names = ROW.findall(page)
    for start in ("**Works without remarks:**", "**torch's own**"):
        names += re.findall(r"`(\w+)`", page[page.index(start) :].partition(".")[0])
    assert len(set(names)) == len(names), "a function is named twice"
    return names


def test_the_page_of_torch_lists_exactly_its_functions() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading some attributes warns
        there = {
            name
            for name in dir(dist)
            if not name.startswith("_") and inspect.isfunction(getattr(dist, name))
        }
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert there == {name for name in listed() if SINCE.get(name, (2, 11)) <= version}
