"""`shoal simulate`: what it prints, and descriptions that it refuses."""

import re

import pytest

from shoal.cli import main

CLUSTER = ["--hosts", "8", "--ranks-per-host", "4", "--link", "25Gb"]


def test_a_ring_is_told_with_its_time_bandwidth_rounds_and_links(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "ring", *CLUSTER, "--bytes", "100MiB", "--stack", "1TB"]) == 0
    out = capsys.readouterr().out
    # 2 * 31/32 * 100 MiB at 25 Gbit/s take 65.0 ms.
    assert re.search(r"time +65\.\d ms", out)
    assert re.search(r"algorithm bandwidth +1\.50 GiB/s", out)
    assert re.search(r"rounds +62", out)
    assert re.search(r"busiest +the NIC out of host 0, 100%", out)
    assert re.search(r"194 MiB  32 links, such as rank 0 to rank 1", out)


def test_all_algorithms_of_a_collective_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--all", "--collective", "broadcast", *CLUSTER, "--bytes", "1MiB"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert {line.split()[0] for line in lines} == {"direct", "binomial", "chain", "scatter_gather"}
    # Direct sends it over one NIC to 28 ranks elsewhere.
    assert lines[-1].split()[0] == "direct"


def test_a_large_group_says_who_stands_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "sharded", "--hosts", "128", "--ranks-per-host", "4", "--bytes", "9MB"]
    assert main(argv) == 0
    assert "4 of 512 ranks stand for all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("ring --hosts 0", "at least one of each"),
        ("ring --hosts 2 --ranks-per-host 0", "at least one of each"),
        ("ring --hosts -2", "hosts"),
        ("ring --hosts 4,4,2 --ranks-per-host 4", "drop --ranks-per-host"),
        ("ring --hosts 2x0", "cannot read the hosts"),
        ("ring --hosts 100000", "at most"),
        ("ring --hosts 1000000000000", "more than 1000000"),
        ("ring --hosts 4 --link=-25Gb", "rate"),
        ("ring --hosts 4 --link 0Gb", "cannot read the rate"),
        ("ring --hosts 4 --link 25Gx", "cannot read the rate"),
        ("ring --hosts 4 --latency 20", "cannot read the time"),
        ("ring --hosts 4 --bytes 4Mb", "cannot read the bytes"),
        ("ring --hosts 4 --memory 0GB", "cannot read the rate"),
        ("ring --hosts 4 --cores 0", "--cores must be at least 1, got 0"),
        ("ring --hosts 4 --root 4", "root 4"),
        ("rign --hosts 4", "no algorithm 'rign'"),
        ("ring --collective broadcats --hosts 4", "no collective 'broadcats'"),
        ("--all --collective send_recv", "no collective 'send_recv' to compare"),
        ("ring --all", "name one algorithm, or ask for --all"),
        ("", "name one algorithm, or ask for --all"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], options: str, complaint: str
) -> None:
    assert main(["simulate", *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: ")
    assert complaint in error
    assert error.count("\n") == 1
