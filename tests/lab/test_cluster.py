"""Clusters of network namespaces: they connect, they keep the rate, and nothing stays behind."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.lab import Flow, Lab, measure_streams, ring_of
from shoal.lab.cluster import remove_stale
from shoal.plan.wire import link_of

NAMESPACES = Path("/run/netns")

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="NOT TESTED: the lab needs root, ip and tc (iproute2)",
)


def namespaces_of(pid: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"shoal-lab-{pid}-*")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    with Lab(2, rate_mbit=200) as cluster:
        yield cluster


@needs_root
def test_a_host_reaches_another_and_itself(cluster: Lab) -> None:
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=5)"
    for address in (cluster.hosts[1].address, "127.0.0.1"):
        argv = [sys.executable, "-c", connect, address]
        done = subprocess.run(cluster.command(0, argv), capture_output=True, text=True, check=False)
        # Nobody listens at port 9: a refusal is the answer of a host that is there.
        assert "ConnectionRefusedError" in done.stderr


@needs_root
def test_a_stream_keeps_the_rate_of_the_nic(cluster: Lab) -> None:
    (rate,) = measure_streams(cluster, [Flow(0, 1)], n_bytes=10_000_000)
    assert 0.5 * 200e6 < 8 * rate < 1.2 * 200e6


@needs_root
def test_two_streams_into_one_host_share_its_nic(cluster: Lab) -> None:
    rates = measure_streams(cluster, [Flow(0, 1), Flow(0, 1)], n_bytes=5_000_000)
    assert 8 * min(rates) < 0.8 * 200e6  # each alone would reach 191


@needs_root
@pytest.mark.parametrize(("rate_mbit", "n_shaped"), [(200, 4), (None, 0)])
def test_both_ends_of_every_nic_are_shaped_or_none(rate_mbit: float | None, n_shaped: int) -> None:
    with Lab(2, rate_mbit) as cluster:
        places = [host.namespace for host in cluster.hosts]
        places.append(f"{places[0].removesuffix('-0')}-switch")
        told = [
            subprocess.run(["tc", "-n", place, "qdisc"], capture_output=True, text=True, check=True)
            for place in places
        ]
        assert sum(one.stdout.count("qdisc tbf") for one in told) == n_shaped


def test_ranks_are_told_what_no_interface_reports() -> None:
    told = Lab(2, rate_mbit=200).environment
    assert link_of(told["SHOAL_LINK"]).us_per_byte == pytest.approx(8 / 200)
    assert "SHOAL_LINK" not in Lab(2, rate_mbit=None).environment


@needs_root
def test_leaving_kills_what_runs_and_leaves_no_namespace_also_after_an_error() -> None:
    before = set(namespaces_of(os.getpid()))
    processes = []

    def fail_while_something_runs() -> None:
        with Lab(2) as cluster:
            processes.append(cluster.popen(0, ["sleep", "1000"]))
            cluster.run(1, ["false"])

    with pytest.raises(subprocess.CalledProcessError):
        fail_while_something_runs()
    assert processes[0].wait(timeout=10) < 0  # by a signal
    assert set(namespaces_of(os.getpid())) == before


@needs_root
def test_what_a_dead_process_left_behind_is_removed() -> None:
    leave = "import os; from shoal.lab import Lab; Lab(1).__enter__(); os._exit(0)"
    process = subprocess.Popen([sys.executable, "-c", leave])
    process.wait(timeout=30)
    assert namespaces_of(process.pid)
    remove_stale()
    assert not namespaces_of(process.pid)


def test_without_root_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="root"), Lab(2):
        pass


@pytest.mark.parametrize(("n_hosts", "rate_mbit"), [(0, 1000), (1000, 1000), (2, 0)])
def test_senseless_clusters_are_refused(n_hosts: int, rate_mbit: float) -> None:
    with pytest.raises(UsageError, match="expected 1 to 200 hosts"):
        Lab(n_hosts, rate_mbit)


def test_in_a_ring_every_host_sends_once_and_receives_once() -> None:
    assert ring_of(3) == [Flow(0, 1), Flow(1, 2), Flow(2, 0)]


@needs_root
def test_a_further_nic_has_an_address_and_a_rate_of_its_own() -> None:
    with Lab(2, 400, more_mbit=[100]) as cluster:
        assert cluster.environment["SHOAL_SOCKET_IFNAME"] == "eth0,eth1"
        assert cluster.environment["SHOAL_PATHS"] == "2"
        assert link_of(cluster.environment["SHOAL_LINK"]).us_per_byte == pytest.approx(8 / 500)
        assert cluster.hosts[1].addresses == ("10.77.0.2", "10.78.0.2")
        (rate,) = measure_streams(cluster, [Flow(0, 1, nic=1)], n_bytes=5_000_000)
    assert 0.5 * 100e6 < 8 * rate < 1.2 * 100e6


@needs_root
def test_what_is_cut_is_silent_until_it_is_mended(cluster: Lab) -> None:
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=0.5)"
    argv = cluster.command(0, [sys.executable, "-c", connect, cluster.hosts[1].address])
    ends = []
    for change in (cluster.cut, cluster.mend):
        change(0, 1)
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        ends.append(done.stderr.splitlines()[-1].partition(":")[0])
    assert ends == ["TimeoutError", "ConnectionRefusedError"]
