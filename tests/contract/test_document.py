"""docs/algorithms.md and its drawings are generated from the code, and up to date."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from algorithms import document, main

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def files() -> Mapping[str, str]:
    return document()


def test_the_committed_pages_match_the_code(files: Mapping[str, str]) -> None:
    drawn = {str(path.relative_to(DOCS)) for path in DOCS.glob("figures/algorithms/*")}
    assert drawn | {"algorithms.md"} == set(files), "run make docs"
    old = [name for name, text in files.items() if (DOCS / name).read_text() != text]
    assert old == [], "run make docs"


def test_figures_of_removed_algorithms_are_removed(
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
