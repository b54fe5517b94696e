"""`shoal trace`: states, messages and text; `shoal draw`: the links and their weights."""

import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from programs import EVERY

from shoal.analysis.draw.drawing import draw
from shoal.analysis.prove.prover import Expression, prove
from shoal.analysis.trace.text import text_of
from shoal.analysis.trace.tracer import letter, trace
from shoal.cli import main
from shoal.errors import UsageError
from shoal.schedule import Buffer

# The output of Marek Kolodziej's tutorial on all-reduce (2019) for 4 devices: the data, then
# the state after the first and the last step of reduce-scatter and the last of all-gather.
TUTORIAL = """\
a0        b0        c0        d0
a1        b1        c1        d1
a2        b2        c2        d2
a3        b3        c3        d3
a0        b0        c0        d0d3
a1a0      b1        c1        d1
a2        b2b1      c2        d2
a3        b3        c3c2      d3
a0        b0b3b2b1  c0c3c2    d0d3
a1a0      b1        c1c0c3c2  d1d0d3
a2a1a0    b2b1      c2        d2d1d0d3
a3a2a1a0  b3b2b1    c3c2      d3
a3a2a1a0  b0b3b2b1  c1c0c3c2  d2d1d0d3
a3a2a1a0  b0b3b2b1  c1c0c3c2  d2d1d0d3
a3a2a1a0  b0b3b2b1  c1c0c3c2  d2d1d0d3
a3a2a1a0  b0b3b2b1  c1c0c3c2  d2d1d0d3
"""


def order_of(expression: Expression) -> tuple[int, ...]:
    if isinstance(expression, int):
        return (expression,)
    return order_of(expression[0]) + order_of(expression[1])


def test_the_ring_of_four_ranks_is_that_of_the_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "ring", "--ranks", "4", "--width", "80"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split()[2:] for line in printed.splitlines() if re.match(r"rank \d", line)]
    tutorial = [line.split() for line in TUTORIAL.splitlines()]
    assert [row for step in (0, 1, 3, 6) for row in rows[4 * step :][:4]] == tutorial
    sends = re.findall(r"(\d)->(\d) chunk (\d)", printed)
    assert [(int(a), int(b), int(chunk)) for a, b, chunk in sends] == [
        (rank, (rank + 1) % 4, (rank - number) % 4)
        for number in (0, 1, 2, 3, 4, 5)
        for rank in range(4)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_a_trace_agrees_with_the_proof(collective: str, name: str, size: int) -> None:
    hosts = tuple(rank // 3 for rank in range(size))
    root = size // 2
    traced = trace(collective, name, size, root=root, hosts=hosts)
    proof = prove(collective, name, size, root=root, hosts=hosts)
    assert len(traced.rounds) - 1 == proof.rounds
    sent = [(m.sender, m.receiver) for one in traced.rounds for m in one.messages]
    assert {pair: sent.count(pair) for pair in sent} == proof.n_sent
    *_, last = traced.states()
    assert {where: last[where].ranks for where in proof.expressions} == {
        where: order_of(expression) for where, expression in proof.expressions.items()
    }


def test_a_trace_has_hosts_scratch_and_chunks_lettered_like_sheet_columns() -> None:
    traced = trace("reduce_scatter", "ring", 4, hosts=(0, 0, 1, 1))
    assert traced.hosts == (0, 0, 1, 1)
    buffers = [place.buffer for place in traced.places[0]]
    assert buffers == [Buffer.INPUT] * 4 + [Buffer.OUTPUT] + [Buffer.SCRATCH] * 2
    assert [letter(chunk) for chunk in (0, 25, 26, 701, 702)] == ["a", "z", "aa", "zz", "aaa"]
    for width in (40, 80, 300):
        lines = list(text_of(trace("all_reduce", "ring", 16), width))
        assert max(map(len, lines)) <= width
    with pytest.raises(UsageError, match="0 ranks"):
        trace("all_reduce", "ring", 0)


def test_json_holds_the_full_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "ring", "--collective", "all_gather", "--ranks", "3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [data["collective"], data["algorithm"], data["ranks"]] == ["all_gather", "ring", 3]
    assert data["places"][2] == [["input", 0], ["output", 0], ["output", 1], ["output", 2]]
    held = {}
    for one in data["rounds"]:
        held.update({(rank, place): value for rank, place, value in one["writes"]})
    assert [data["values"][held[2, place]] for place in (1, 2, 3)] == [
        [0, [rank], False] for rank in range(3)
    ]
    assert data["postcondition"][2] == [[1 + rank, 0, rank, rank, False] for rank in range(3)]


def test_data_of_a_page_is_escaped(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["trace", "sharded", "--hosts", "2x2", "--html", str(out)]) == 0
    page = out.read_text()
    data = page.split('id="trace">')[1].split("</script>")[0]
    assert "<" not in data
    assert json.loads(data)["hosts"] == [0, 0, 1, 1]
    assert not re.search(r"\b(src|href)\s*=|@import|url\(", page)
    assert "default-src 'none'" in page


SVG = "{http://www.w3.org/2000/svg}"


def links(svg: ET.Element) -> list[tuple[int, int, Fraction]]:
    """Return every link named by a line's title, and the part of the buffer it carries."""
    found = []
    for title in svg.iterfind(f".//{SVG}g/{SVG}title"):
        for text in (title.text or "").split("; "):
            match = re.fullmatch(r"(?:round \d+, )?(\d+) to (\d+): (?:(\S+) of )?the buffer", text)
            assert match, text
            found.append((int(match[1]), int(match[2]), Fraction(match[3] or 1)))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_message_is_drawn(collective: str, name: str, size: int) -> None:
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


def test_drawings_go_to_output_or_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "tree", "--ranks", "8"]) == 0
    printed = capsys.readouterr().out
    assert ET.fromstring(printed).tag == f"{SVG}svg"
    assert main(["draw", "tree", "--ranks", "8", "--out", str(tmp_path / "tree.svg")]) == 0
    assert (tmp_path / "tree.svg").read_text() == printed
    assert capsys.readouterr() == ("", f"wrote {tmp_path / 'tree.svg'}\n")
