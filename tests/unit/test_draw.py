"""`shoal draw`: the links, their weights and where they stand, read back from the SVG."""

import re
from collections import Counter
from fractions import Fraction
from itertools import permutations
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


def places(svg: ET.Element) -> list[tuple[int, float, float]]:
    """Every rank that is drawn, with its circle's middle."""
    circles = [one for one in svg.iter(f"{SVG}circle") if one.get("class") == "rank"]
    names = [one.text for one in svg.iter(f"{SVG}text") if (one.text or "").isdigit()]
    return [
        (int(name or ""), float(circle.get("cx", "")), float(circle.get("cy", "")))
        for name, circle in zip(names, circles, strict=True)
    ]


def boxes(svg: ET.Element) -> int:
    return len(list(svg.iter(f"{SVG}rect")))


@pytest.mark.parametrize("size", [3, 8])
def test_a_ring_is_drawn_as_a_ring(size: int) -> None:
    svg = drawn("all_reduce", "ring", size)
    right = [(rank, (rank + 1) % size) for rank in range(size)]
    # Patarasuk & Yuan: each rank sends 2(n-1)/n of the buffer.
    assert sorted(links(svg)) == sorted((a, b, Fraction(2 * (size - 1), size)) for a, b in right)
    far = {round((x * x + y * y) ** 0.5) for _, x, y in places(svg)}
    assert len(far) == 1


@pytest.mark.parametrize("size", [6, 7, 14, 16])
def test_the_double_tree_is_drawn_as_its_index_functions_say(size: int) -> None:
    svg = drawn("all_reduce", "tree", size)
    want = Counter[tuple[int, int, Fraction]]()
    for rank in range(size):
        for branch in double_binary_tree(rank, size):
            for child in branch.children:
                want.update([(rank, child, Fraction(1, 2)), (child, rank, Fraction(1, 2))])
    assert Counter(links(svg)) == want


def test_both_trees_have_a_place_for_every_rank_one_below_the_other() -> None:
    found = places(drawn("all_reduce", "tree", 8))
    column = dict[int, set[float]]()
    for rank, x, _ in found:
        column.setdefault(rank, set()).add(x)
    assert len(found) == 16
    assert sorted(column) == list(range(8))
    assert all(len(xs) == 1 for xs in column.values())


def test_no_child_stands_above_its_parent() -> None:
    svg = drawn("broadcast", "binomial", 16)
    height = {rank: y for rank, _, y in places(svg)}
    assert len(links(svg)) == 15
    assert all(height[sender] < height[receiver] for sender, receiver, _ in links(svg))


def test_sharded_ranks_stand_around_a_circle_and_all_are_linked() -> None:
    svg = drawn("all_reduce", "sharded", 5)
    # Every rank sends each peer that peer's shard, and its own shard folded.
    want = [(a, b, Fraction(2, 5)) for a, b in permutations(range(5), 2)]
    assert sorted(links(svg)) == want


def test_hosts_are_boxes_and_equal_local_ranks_stand_on_a_level() -> None:
    svg = drawn("all_reduce", "fairring", 12, hosts=tuple(rank // 4 for rank in range(12)))
    assert boxes(svg) == 3
    found = places(svg)
    for local in range(4):
        assert len({y for rank, _, y in found if rank % 4 == local}) == 1
    between = [(a, b) for a, b, _ in links(svg) if a // 4 != b // 4]
    assert all(a % 4 == b % 4 for a, b in between)
    assert len(between) == 4 * 3 * 2


def test_a_butterfly_has_its_rounds_below_each_other() -> None:
    text = draw(trace("all_reduce", "doubling", 8))
    rounds = re.findall(r"round (\d), (\d) to (\d): the buffer", text)
    assert {(int(a) ^ int(b), int(k)) for k, a, b in rounds} == {(1, 1), (2, 2), (4, 3)}


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
