"""Timelines of NICs, computed by hand, and the pages of `shoal plan` and `shoal simulate`."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from unit.test_simulate import ONE_MESSAGE, THERE_AND_BACK, WIRE, cluster

from shoal.analysis.charts import timelines
from shoal.analysis.dataflow import Dataflow
from shoal.analysis.simulate.simulator import simulate
from shoal.analysis.simulate.timeline import BUSY, CORES, DATA, GRANT, OVER, Recorder, Timeline
from shoal.cli import main
from shoal.plan.cluster import Cluster
from shoal.schedule import Recv, Send, Step


def recorded(steps: list[list[Step]], n_bytes: int, where: Cluster) -> Timeline:
    flow = Dataflow(steps)
    recorder = Recorder(flow, [n_bytes] * len(flow.steps), where, 128 << 10)
    recorder.run()
    return recorder.timeline()


def busy_us(spans: Iterable[tuple[float, float, str]]) -> float:
    return sum(end_us - begin_us for begin_us, end_us, what in spans if what == BUSY)


# Rank 1 gives its value to rank 2 in its host, which forwards the sum.
IN_A_HOST: list[list[Step]] = [[Recv(0, 0), Send(2, 0)], [Recv(1, 0, fold=True), Send(3, 0)]]
THROUGH_A_HOST = [[Send(1, 0)], *IN_A_HOST, [Recv(2, 0)]]


def test_a_small_message_leaves_at_once_and_arrives_after_the_latency() -> None:
    line = recorded(ONE_MESSAGE, 1000, cluster(2))
    assert line.out == {0: [(0, 10, BUSY), (10, 60, OVER)]}
    assert line.into == {1: [(50, 60, BUSY)]}


def test_a_large_message_waits_for_its_grant() -> None:
    line = recorded(ONE_MESSAGE, 100_000, cluster(2))
    assert line.out[0][:2] == [(0, 50, GRANT), (50, 1050, BUSY)]
    assert "out: busy 91%, waits for a receiver's grant 5%, all is sent 5%" in timelines(line)[0]


def test_waits_for_cores_and_for_data_of_other_ranks_follow_one_another() -> None:
    # Each message occupies a core for 5 us at both ends.
    where = cluster(2, wire=replace(WIRE, message_us=5))
    line = recorded(THERE_AND_BACK, 1000, where)
    assert line.out[0] == [(0, 5, CORES), (5, 15, BUSY), (15, 140, OVER)]
    # It arrives at 65 us, and is received and sent by 75.
    assert line.out[1] == [(0, 65, DATA), (65, 75, CORES), (75, 85, BUSY), (85, 140, OVER)]


def test_a_wait_for_another_host_is_attributed_through_ranks_of_the_same_host() -> None:
    # 1 us of memory for the store in rank 1, its send, the fold and the send of rank 2.
    where = cluster(3, hosts=(0, 1, 1, 2), memory_us_per_byte=0.001)
    line = recorded(THROUGH_A_HOST, 1000, where)
    (_, data_us, data), (_, cores_us, cores), *_ = line.out[1]
    assert (data, cores) == (DATA, CORES)
    assert data_us == pytest.approx(61)  # 1 us to send, 10 on the wire, 50 of latency
    assert cores_us == pytest.approx(65)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "ring_2d", "sharded", "sharded[2*0|6*1]"])
def test_the_timeline_of_a_nic_adds_up_to_the_time_and_the_bytes(algorithm: str) -> None:
    where = cluster(4, 2, wire=replace(WIRE, message_us=2), memory_us_per_byte=0.0001)
    if "[" in algorithm:
        where = replace(where, hosts=tuple(range(8)))
    played = simulate("all_reduce", algorithm, where, 8 << 20, records=True)
    line = played.timeline
    assert played.time_us == simulate("all_reduce", algorithm, where, 8 << 20).time_us
    assert line.time_us == pytest.approx(played.time_us)
    for nic in played.nics:
        spans = line.out[nic.host]
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
        assert spans[-1][1] == played.time_us
        assert busy_us(spans) == pytest.approx(nic.sent * 0.01)
        assert busy_us(line.into[nic.host]) == pytest.approx(nic.received * 0.01)


def test_one_host_has_no_timeline() -> None:
    assert simulate("all_reduce", "ring", cluster(1, 2), 1 << 20, records=True).timeline is None


def page(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str) -> str:
    file = tmp_path / "page.html"
    assert main([*words.split(), "--html", str(file)]) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"wrote {file}\n")
    text = file.read_text()
    assert "http" not in text.replace("http-equiv", "")  # it loads nothing
    return text


def test_a_plan_has_bars_for_each_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --hosts 8 --ranks-per-host 4 --collective all_reduce --collective barrier"
    text = page(tmp_path, capsys, words)
    assert re.findall("<h2>(.*?)</h2>", text) == ["all_reduce", "barrier"]
    sizes = ["4 B", "64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB", "any size"]
    assert re.findall("<h3>(.*?)</h3>", text) == sizes
    assert len(re.findall("<li class=chosen>", text)) == len(sizes)
    assert main(words.split()) == 0
    (name,) = re.findall("^  and more +([^ ]+)", capsys.readouterr().out, re.MULTILINE)
    assert re.findall("<li class=chosen><span>(.*?)<", text)[sizes.index("64 MiB")] == name
    assert max(float(width) for width in re.findall(r"width:([\d.]+)%", text)) == 100


def test_a_simulation_shows_bars_and_the_nics_of_each_algorithm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "--hosts 4 --ranks-per-host 2 --bytes 1MiB"
    text = page(tmp_path, capsys, f"simulate --all {where}")
    names = re.findall("<span>([a-z_0-9/]+)</span><i>", text)
    assert re.findall("<h2>(.*?)</h2>", text) == ["Time", *names]
    assert {"ring", "tree", "ring_2d"} < {*names}
    text = page(tmp_path, capsys, f"simulate ring {where}")
    assert "host 0 and 3 more like it" in text
    assert text.count("<svg") == 2
