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
acceptor address advertised agreed agreement algorithm array ask asked asking at attempt averager
averaging backend barrier below bench benchmark best block blocks bootstrap branch breakdown bucket
buckets buffers call caller calls card case channels chart choice client closed cluster codec column
commands comparison connect connection connections connector context contract contribution control
copy correction cost counted counts cube cuda cut d data dataflow deadline departures description
device distributed doubt drawing drift dump element end endpoint ends entry error event execution
extent failure faster figures filled finish finished finite first flight follower forced form frames
fused goal gone gradient gradients graph health held hook hooked http in info interface internal job
join joined keeper kept key kind known lab latency launch layout leader least leaving left library
limit limits line lines links load local log lost measured meet meeting member members membership
memory message messages misplaced missing model monitored name namespace nccl nic not note notices
numbers occurrences on op operations options order origin other out output overlap owner pace pair
parallel parser part parts pauses pending picture piece placement planner point pool pooled pools
preparation process progress proof range record recv reducer registry repair rereading resent
reserve reserved result role root round row running sample section seen send served server servers
settings settlement shape shared shares shoal simulation size source sparse spec stage staged stages
staging stand standing started static status store strangers sweep symbols symmetric table taken
tally task tcp tensor timed times told torch trace traffic trained training trainings tree tuning
turn type unmet unpacker unsupported usage uses value values variant verdict warnings watch way
weights window windows wish within work worker wrapper
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
