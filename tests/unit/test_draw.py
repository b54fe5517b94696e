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
