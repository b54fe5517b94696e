"""Classes bear plain English or the words of docs/architecture.md, and files are short."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import shoal

ROOT = Path(shoal.__file__).parent
PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "architecture.md"
WRITTEN: Final = {".py", ".h", ".cc", ".md", ".js", ".css", ".html", ".pyi"}

# Words that any programmer knows, torch's and TCP's among them. A new word belongs into the table
# of docs/architecture.md, unless it is as plain as these.
_PLAIN: Final = """
acceptor advertised agreement algorithm asking at attempt backend barrier below bench benchmark
block blocks bootstrap branch buffers caller calls case channels choice client closed cluster codec
comparison connect connections connector context contract contribution copy cost counted counts cube
cut d dataflow deadline description doubt drawing dump endpoint ends entry error event execution
failure faster filled finish finished forced goal held in info interface internal job join lab
latency launch layout library limits line lines links load local lost measured meeting member
members membership memory message messages monitored namespace nic occurrences on op operations
options origin out output owner pair parser part pending picture placement planner point pool pools
process proof record recv reducer rereading result role root round row running sample section send
best call chart column element figures joined kind known limit name progress range served server
settings shape shares shoal simulation size source spec stand store sweep symbols symmetric table
taken task tcp tensor timed times told torch trace traffic tree tuning type unpacker unsupported
usage value values verdict warnings way weights windows within work worker
"""
PLAIN: Final = set(_PLAIN.split())


def public_classes() -> Iterator[str]:
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name


def glossary() -> set[str]:
    """The words in the first column of the first table of the page, in the singular and plural."""
    table = PAGE.read_text().split("## The words")[1].split("\n## ")[0]
    first = " ".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE))
    words = set(re.findall(r"[a-z]+", first))
    return words | {word + "s" for word in words}


def test_every_public_class_is_named_in_plain_english_or_stands_in_the_glossary() -> None:
    unknown = {
        word.lower()
        for name in public_classes()
        for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name)
    } - (PLAIN | glossary())
    assert unknown == set()


def test_no_word_is_kept_that_no_class_bears() -> None:
    used = {
        word.lower()
        for name in public_classes()
        for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name)
    }
    assert PLAIN - used == set()


def test_no_two_public_classes_share_a_name() -> None:
    assert [name for name, n in Counter(public_classes()).items() if n > 1] == []


@pytest.mark.parametrize("room", ["src", "native", "tests", "docs", "examples"])
def test_no_file_is_longer_than_500_lines(room: str) -> None:
    files = [path for path in (PROJECT / room).rglob("*") if path.suffix in WRITTEN]
    assert files
    assert [path.name for path in files if len(path.read_text().splitlines()) > 500] == []
