"""docs/algorithms.md and its drawings: written from the code, and up to date."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from algorithms import document, main

from shoal.schedule import ALGORITHMS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def files() -> Mapping[str, str]:
    return document()


def row_of(page: str, heading: str, algorithm: str) -> list[str]:
    """The cells of an algorithm's row in the table below a heading."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ", maxsplit=1)[0]
    match = re.search(rf"^\| \[{algorithm}\]\(#.*?\) \| (.*) \|$", section, re.MULTILINE)
    assert match
    return match[1].split(" | ")


def test_what_is_committed_is_what_the_code_says_now(files: Mapping[str, str]) -> None:
    drawn = {str(path.relative_to(DOCS)) for path in DOCS.glob("figures/algorithms/*")}
    assert drawn | {"algorithms.md"} == set(files), "run make docs"
    old = [name for name, text in files.items() if (DOCS / name).read_text() != text]
    assert old == [], "run make docs"


def test_every_algorithm_states_its_cost_needs_leaves_and_source(files: Mapping[str, str]) -> None:
    page = files["algorithms.md"]
    for collective, algorithms in ALGORITHMS.items():
        for name in algorithms:
            section = page.split(f"\n### {name} {collective.replace('_', '-')}\n")[1]
            for field in ("Cost", "Needs", "Leaves", "Source"):
                assert re.search(rf"^- {field}: \S", section.split("\n#")[0], re.MULTILINE)


def test_links_lead_to_headings_and_to_figures(files: Mapping[str, str]) -> None:
    page = files["algorithms.md"]
    headings = {
        "".join(c for c in heading.lower() if c.isalnum() or c in "-_ ").replace(" ", "-")
        for heading in re.findall(r"^### (.*)$", page, re.MULTILINE)
    }
    links = re.findall(r"\]\((.*?)\)", page)
    assert set(links) == {f"#{heading}" for heading in headings} | (set(files) - {"algorithms.md"})


def test_ring_and_tree_of_eight_take_the_tutorials_steps(files: Mapping[str, str]) -> None:
    # Kolodziej's tutorial (2019): 14 steps on a ring of 8, 6 on a tree.
    page = files["algorithms.md"]
    assert row_of(page, "All-reduce", "ring")[0].startswith("14 · ")
    assert row_of(page, "All-reduce", "tree")[0].startswith("6 · ")


def test_a_ring_of_64_sends_the_buffer_almost_twice(files: Mapping[str, str]) -> None:
    # Herring (SC 2020) works it out for 64 nodes: 196.8 MB for 100 MB.
    assert row_of(files["algorithms.md"], "All-reduce", "ring")[1].endswith(" · 1.97")


def test_figures_of_what_is_gone_are_removed(
    tmp_path: Path, files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("algorithms.document", lambda: files)
    gone, kept = tmp_path / "figures/algorithms/gone.svg", tmp_path / "figures/plot.svg"
    gone.parent.mkdir(parents=True)
    gone.write_text("")
    kept.write_text("")
    main(tmp_path)
    assert not gone.exists()
    assert kept.exists()
    assert (tmp_path / "algorithms.md").read_text() == files["algorithms.md"]
