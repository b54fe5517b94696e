"""`shoal plan --workers --servers`: what servers would gain, and whether they pay."""

from __future__ import annotations

import re

import pytest

from shoal.cli import main

MIB = 1 << 20


def said(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if re.match(r"  +\d+  ", line)]


def test_each_number_of_servers_has_its_time_and_the_last_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = said(capsys, "--workers 8 --servers 4 --link 1Gb")
    assert out.startswith("all_reduce of 100 MiB, 8 workers, by servers\n")
    assert [row[0] for row in rows(out)] == ["0", "1", "2", "3", "4"]
    speeds = [float(row[3].rstrip("x")) for row in rows(out)]
    # 2(n-1)/n of the tensor against 2n(n-1) / (n^2 + kn - 2k) with 4 servers, and a tenth more that
    # connections lose which compete.
    assert speeds[0] == 1
    assert speeds[4] == pytest.approx((64 + 6 * 4) / 64 / 1.1, rel=0.03)
    assert speeds == sorted(speeds)
    sentence = " ".join(out.split())
    time = " ".join(rows(out)[-1][1:3])
    assert f"100 MiB over 8 workers and 4 servers take {time} where sharded" in sentence
    assert "another server would take 6.2% of the time off" in sentence


def test_one_worker_has_nothing_to_reduce(capsys: pytest.CaptureFixture[str]) -> None:
    for k in (0, 2):
        assert main(["plan", "--workers", "1", "--servers", str(k)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "one worker has nothing to reduce" in line


def test_workers_that_share_hosts_have_about_what_as_many_hosts_of_one_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone, shared = (
        said(capsys, f"--workers {n} --servers 8 --link 1Gb {more}")
        for n, more in ((8, ""), (16, "--workers-per-host 2"))
    )
    assert shared.startswith("all_reduce of 100 MiB, 16 workers on 8 hosts, by servers\n")
    speeds = [[float(row[3].rstrip("x")) for row in rows(out)] for out in (alone, shared)]
    assert speeds[1] == pytest.approx(speeds[0], rel=0.04)
    sentence = " ".join(shared.split())
    assert "along each of 2 rails 50 MiB over 8 workers and 8 servers take 872 ms" in sentence
    assert sentence.endswith("3.15 ms more pass inside hosts")
    out = " ".join(said(capsys, "--workers 8 --workers-per-host 4 --servers 2").split())
    assert "not by servers, since along each of 4 rails fewer than 3 workers" in out


def test_servers_may_have_other_links(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--workers 8 --servers 4 --link 1Gb"
    fast, slow, mixed = (
        float(rows(said(capsys, words + more))[-1][3].rstrip("x"))
        for more in ("", " --server-link 500Mb", " --server-link 2x1Gb,2x500Mb")
    )
    assert slow < mixed < fast


def test_whether_servers_pay_is_time_by_what_all_machines_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Herring (SC 2020), IV-E: servers at a tenth of a worker's price pay by the time they save."""
    words = "--workers 8 --servers 8 --link 1Gb --worker-price 31 --server-price "
    out = said(capsys, words + "3.1")
    for row in rows(out):
        n_us = float(row[1]) * {"ms": 1e3, "s": 1e6}[row[2]]
        cost = 1000 * n_us / 3600e6 * (8 * 31 + int(row[0]) * 3.1)
        assert float(row[4]) == pytest.approx(cost, rel=0.006)
    assert "servers pay: 8 of them cost least" in out
    assert "servers do not pay: 1000 steps cost least without" in said(capsys, words + "31")


def test_what_a_step_computes_besides_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--workers 8 --servers 8 --link 10Gb --worker-price 10 --server-price 2"
    assert "servers pay" in said(capsys, words)
    assert "servers do not pay" in said(capsys, words + " --compute 1s")


def test_where_servers_gain_nothing_the_reason_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fewer than 3 workers" in said(capsys, "--workers 2 --servers 2")
    out = said(capsys, "--workers 8 --servers 2 --size 4KiB")
    assert [row[4:] for row in rows(out)] == [[], ["unused"], ["unused"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers 8", "add --servers K"),
        ("--servers 8", "add --workers N"),
        ("--server-link 1Gb", "--server-link is for --workers N --servers K; add both"),
        ("--size 1MiB", "--size is for --workers N --servers K"),
        ("--workers 0 --servers 1", "--workers 0: must be 2 to 4096"),
        ("--workers 4 --servers -1", "--servers -1: must be 0 to 4096"),
        ("--workers 5000 --servers 1", "--workers 5000: must be 2 to 4096"),
        ("--workers 4 --servers 1 --hosts 4", "drop --hosts"),
        ("--workers 4 --servers 1 --ranks-per-host 2", "drop --ranks-per-host"),
        ("--workers-per-host 2", "--workers-per-host is for --workers N --servers K"),
        ("--workers 4 --servers 1 --workers-per-host 3", "equally many workers on each host"),
        (
            "--workers 8 --servers 1 --workers-per-host 3",
            "give --workers-per-host 1, 2 or 4, or --workers a multiple of 3",
        ),
        (
            "--workers 7 --servers 1 --workers-per-host 0",
            "equally many workers on each host, at least one; give --workers-per-host 1",
        ),
        (
            "--workers 4 --servers 1 --workers-per-host 4",
            "over the network; give --workers-per-host 1 or 2, or --workers 8 for two such hosts",
        ),
        ("--workers 4 --servers 1 --collective broadcast", "drop --collective"),
        ("--workers 4 --servers 1 --size 0", "--size 0: a tensor of no bytes"),
        ("--workers 4 --servers 2 --server-link fast", "cannot read the rate 'fast'"),
        ("--workers 4 --servers 2 --server-link 3x1Gb", "names 3 servers, --servers 2"),
        ("--workers 4 --servers 2 --server-link 1x1Gb,0x1Gb", "names 1 servers"),
        ("--workers 4 --servers 2 --server-link yx1Gb", "'y' is not a number of servers"),
        ("--workers 4 --servers 2 --server-link 99999x1Gb", "'99999' is not a number of servers"),
        ("--workers 4 --servers 2 --server-link 2x1Gb,", "cannot read the rate ''"),
        ("--workers 4 --servers 2 --worker-price 3", "add --server-price"),
        (
            "--workers 4 --servers 2 --worker-price 3 --server-price -1",
            "--server-price -1: a price",
        ),
        ("--workers 4 --servers 2 --worker-price x --server-price 1", "--worker-price x: a price"),
        ("--workers 4 --servers 2 --worker-price nan --server-price 1", "--worker-price nan: a"),
        ("--workers 4 --servers 2 --compute 1s", "add --worker-price and --server-price"),
        ("--workers 4 --servers 2 --wire fp4", "unknown wire 'fp4'"),
        ("--workers 4 --servers 2 --link 0Gb", "cannot read the rate '0Gb'"),
        ("--workers four --servers 2", "invalid int value: 'four'; see shoal plan --help"),
        ("--wrokers 4", "unrecognized arguments: --wrokers 4; see shoal plan --help"),
        ("--link 25Gb,20us --latency 3us", "already gives the latency; drop --latency 3us"),
        ("--link 25Gb,20us,5us --message 3us", "already gives the message; drop --message 3us"),
        ("--link 25Gb,20us,5us,1us", "write RATE,LATENCY,MESSAGE"),
    ],
)
def test_wrong_arguments_are_named(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_link_may_be_said_in_one_option_or_in_three(capsys: pytest.CaptureFixture[str]) -> None:
    one = said(capsys, "--hosts 4 --collective all_reduce --link 25Gb,20us,7us")
    three = said(
        capsys, "--hosts 4 --collective all_reduce --link 25Gb --latency 20us --message 7us"
    )
    mixed = said(capsys, "--hosts 4 --collective all_reduce --link 25Gb,20us --message 7us")
    assert one == three == mixed
    assert one != said(capsys, "--hosts 4 --collective all_reduce --link 25Gb")
