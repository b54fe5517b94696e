"""`shoal draw`: the links and their weights, read back from the SVG."""

import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from shoal.analysis.draw.drawing import draw
from shoal.analysis.trace.tracer import trace
from shoal.cli import main
from shoal.schedule import ALGORITHMS
from shoal.schedule.tree import double_binary_tree

SVG = "{http://www.w3.org/2000/svg}"

ALL = [(collective, name) for collective, algorithms in ALGORITHMS.items() for name in algorithms]


def drawn(collective: str, name: str, size: int, hosts: tuple[int, ...] = ()) -> ET.Element:
    return ET.fromstring(draw(trace(collective, name, size, hosts=hosts)))


def links(svg: ET.Element) -> list[tuple[int, int, Fraction]]:
    """Every link that a line's title names, and the part of the buffer that goes over it."""
    found = []
    for title in svg.iterfind(f".//{SVG}g/{SVG}title"):
        for said in (title.text or "").split("; "):
            match = re.fullmatch(r"(?:round \d+, )?(\d+) to (\d+): (?:(\S+) of )?the buffer", said)
            assert match, said
            found.append((int(match[1]), int(match[2]), Fraction(match[3] or 1)))
    return found


@pytest.mark.parametrize("size", [3, 8])
def test_a_ring_is_drawn_as_a_ring(size: int) -> None:
    svg = drawn("all_reduce", "ring", size)
    right = [(rank, (rank + 1) % size) for rank in range(size)]
    # Patarasuk & Yuan: each rank sends 2(n-1)/n of the buffer.
    assert sorted(links(svg)) == sorted((a, b, Fraction(2 * (size - 1), size)) for a, b in right)


@pytest.mark.parametrize("size", [6, 7, 14, 16])
def test_the_double_tree_is_drawn_as_its_index_functions_say(size: int) -> None:
    svg = drawn("all_reduce", "tree", size)
    want = Counter[tuple[int, int, Fraction]]()
    for rank in range(size):
        for branch in double_binary_tree(rank, size):
            for child in branch.children:
                want.update([(rank, child, Fraction(1, 2)), (child, rank, Fraction(1, 2))])
    assert Counter(links(svg)) == want


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(("collective", "name"), ALL)
def test_everything_that_is_sent_is_drawn(collective: str, name: str, size: int) -> None:
    for hosts in {(), tuple(rank // 2 for rank in range(size))}:
        traced = trace(collective, name, size, hosts=hosts)
        part = Fraction(1, traced.algorithm.n_chunks(size, hosts))
        sent = Counter[tuple[int, int]]()
        for one in traced.rounds:
            for message in one.messages:
                sent[message.sender, message.receiver] += 1
        shown = Counter[tuple[int, int]]()
        for a, b, share in links(ET.fromstring(draw(traced))):
            shown[a, b] += int(share / part)
        assert shown == sent


def test_the_drawing_goes_to_the_output_or_into_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", "tree", "--ranks", "8"]) == 0
    printed = capsys.readouterr().out
    assert ET.fromstring(printed).tag == f"{SVG}svg"
    assert main(["draw", "tree", "--ranks", "8", "--out", str(tmp_path / "tree.svg")]) == 0
    assert (tmp_path / "tree.svg").read_text() == printed
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["rung"], "no algorithm 'rung' for all_reduce: there are "),
        (["ring", "--ranks", "0"], "--ranks 0"),
        (["ring", "--ranks", "129"], "a drawing shows at most 128 ranks, not 129"),
        (["ring_2d", "--hosts", "2x4", "--ranks", "9"], "--hosts 2x4 has 8 ranks"),
        (["binomial", "--collective", "broadcast", "--root", "4"], "--root 4 must be a rank"),
        (["ring", "--out", "/nowhere/ring.svg"], "cannot write /nowhere/ring.svg: No such file"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1
