"""Clusters of network namespaces: they connect, keep the rate, and leave nothing behind."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.labs import needs_root

from bench.scoreboard.streams import Flow, measure_streams
from shoal.errors import UsageError
from shoal.lab import Lab
from shoal.lab.names import prefix_of, remove_stale
from shoal.plan.wire import link_of

NAMESPACES = Path("/run/netns")


def own_namespaces() -> set[str]:
    return {path.name for path in NAMESPACES.glob(f"shoal-lab-{os.getpid()}-*")}


@needs_root
@pytest.mark.parametrize("congestion", ["cubic", "reno"])
def test_both_ends_of_a_connection_use_the_labs_congestion_control(congestion: str) -> None:
    """Check it for any setting of the machine."""
    program = """
import socket, sys
meet = (sys.argv[1], 29500)
if sys.argv[2] == "accept":
    with socket.create_server(meet) as door:
        print("open", flush=True)
        end, _ = door.accept()
else:
    end = socket.create_connection(meet, 5)
print(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""
    with Lab(2, 200, congestion=congestion) as cluster:
        argv = [sys.executable, "-c", program, cluster.hosts[0].address]
        with cluster.popen(0, [*argv, "accept"], stdout=subprocess.PIPE) as door:
            assert door.stdout.readline() == "open\n"
            dialled = cluster.run(1, [*argv, "connect"], stdout=subprocess.PIPE).stdout
            assert (dialled, door.stdout.read()) == (f"{congestion}\n",) * 2


@needs_root
def test_a_congestion_control_unknown_to_the_kernel_is_refused() -> None:
    lab, before = Lab(1, congestion="nonesuch"), own_namespaces()
    known = r"no congestion control 'nonesuch'; .*\breno\b.*modprobe tcp_nonesuch"
    with pytest.raises(UsageError, match=known), lab:
        pass
    assert own_namespaces() == before


def shapers_of(cluster: Lab, host: int, nic: int = 0) -> Iterator[dict[str, float]]:
    """Return the rates of a NIC's two shapers: the host's, and the switch's."""
    switch = f"{prefix_of(cluster.name)}-switch"
    ends = (cluster.hosts[host].namespace, f"eth{nic}"), (switch, f"port{host}-{nic}")
    for namespace, port in ends:
        argv = ["tc", "-j", "-n", namespace, "qdisc", "show", "dev", port]
        shown = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
        (options,) = [each["options"] for each in json.loads(shown) if each["kind"] == "tbf"]
        yield options


def mbits_of(cluster: Lab, host: int, nic: int = 0) -> list[float]:
    return [8e-6 * options["rate"] for options in shapers_of(cluster, host, nic)]


# A stream on a busy machine may be slow: lower bounds are taken from the shapers' rates.


@needs_root
def test_a_stream_keeps_the_rate_burst_and_queue_of_the_nic_and_two_share_it() -> None:
    with Lab(2, rate_mbit=200) as cluster:
        for options in shapers_of(cluster, 0):
            longest_us = ((1 << 20) - (128 << 10)) * 8 / 200  # the queued bytes, without the burst
            assert options["burst"] == pytest.approx(128 << 10, rel=0.01)
            assert options["lat"] == pytest.approx(longest_us, rel=0.01)
        assert [*mbits_of(cluster, 0), *mbits_of(cluster, 1)] == pytest.approx(4 * [200], rel=0.01)
        (rate,) = measure_streams(cluster, [Flow(0, 1)], n_bytes=10_000_000)
        assert 0 < 8 * rate < 1.2 * 200e6
        rates = measure_streams(cluster, [Flow(0, 1), Flow(0, 1)], n_bytes=5_000_000)
    assert 8 * min(rates) < 0.8 * 200e6  # each alone would reach 191


@needs_root
def test_without_a_rate_no_nic_is_shaped() -> None:
    with Lab(2, rate_mbit=None) as cluster:
        switch = f"{prefix_of(cluster.name)}-switch"
        for place in (switch, *(host.namespace for host in cluster.hosts)):
            argv = ["tc", "-n", place, "qdisc"]
            shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
            assert "qdisc tbf" not in shown


def test_ranks_of_different_hosts_share_the_link_setting_and_not_the_nics() -> None:
    lab = Lab(4, 400, apart={1: [100, 150], 2: [50], 3: [None]})
    envs = [lab.environment_of(host, job=[0, 1, 3]) for host in range(4)]
    assert {link_of(each["SHOAL_LINK"]).us_per_byte for each in envs} == {8 / 250}
    assert [each["SHOAL_SOCKET_IFNAME"] for each in envs] == ["eth0", "eth0,eth1", "eth0", "eth0"]
    assert [each.get("SHOAL_PATHS") for each in envs] == [None, "2", None, None]
    assert "SHOAL_LINK" not in lab.environment_of(3, job=[3])
    alone = lab.environment_of(2, job=[2])
    assert link_of(alone["SHOAL_LINK"]).us_per_byte == pytest.approx(8 / 50)


@needs_root
def test_leaving_kills_processes_and_removes_namespaces_even_after_an_error() -> None:
    before = own_namespaces()
    processes = []

    def fail_while_something_runs() -> None:
        with Lab(2) as cluster:
            processes.append(cluster.popen(0, ["sleep", "1000"]))
            cluster.run(1, ["false"])

    with pytest.raises(subprocess.CalledProcessError):
        fail_while_something_runs()
    assert processes[0].wait(timeout=10) < 0  # by a signal
    assert own_namespaces() == before


@needs_root
def test_a_reused_process_number_does_not_keep_a_dead_lab() -> None:
    *start, pid, started, name = prefix_of("x").split("-")
    # The same number, but of an earlier process.
    earlier = "-".join([*start, pid, str(int(started) - 1), name, "0"])
    subprocess.run(["ip", "netns", "add", earlier], check=True)
    remove_stale()  # unless a lab started meanwhile did
    assert not (NAMESPACES / earlier).exists()


def test_senseless_clusters_are_refused() -> None:
    for make, problem in (
        (lambda: Lab(2, 0), "a NIC of host 0 at 0 Mbit/s: expected 1 to 100000"),
        (lambda: Lab(2, float("nan")), "at nan Mbit/s"),
        (lambda: Lab(2, apart={1: [1000, 1e9]}), r"host 1 at 1e\+09 Mbit/s"),
        (lambda: Lab(2, apart={1: []}), "host 1 has 0 NICs: expected 1 to 8"),
        (lambda: Lab(2, apart={2: [10]}), "host 2 of a lab of 2: they are 0 to 1"),
        (lambda: Lab(2, name="../../etc"), "lab's name .* letters.*etc'"),
    ):
        with pytest.raises(UsageError, match=problem):
            make()


@needs_root
def test_a_further_nic_has_its_own_address_and_rate() -> None:
    with Lab(2, 400, more_mbit=[100]) as cluster:
        environ = cluster.environment_of(0)
        assert environ["SHOAL_SOCKET_IFNAME"] == "eth0,eth1"
        assert environ["SHOAL_PATHS"] == "2"
        assert link_of(environ["SHOAL_LINK"]).us_per_byte == pytest.approx(8 / 500)
        assert cluster.hosts[1].addresses == ("10.77.0.2", "10.78.0.2")
        assert mbits_of(cluster, 1, nic=1) == pytest.approx([100, 100], rel=0.01)
        (rate,) = measure_streams(cluster, [Flow(0, 1, nic=1)], n_bytes=5_000_000)
    assert 0 < 8 * rate < 1.2 * 100e6


@needs_root
def test_a_host_may_have_different_rates_each_way() -> None:
    with Lab(3, 400, apart={2: [40]}) as cluster:
        rates = [rate for host in range(3) for rate in mbits_of(cluster, host)]
        there, back = (
            8 * measure_streams(cluster, [flow], n_bytes=2_000_000)[0]
            for flow in (Flow(0, 2), Flow(2, 1))
        )
    assert rates == pytest.approx([400, 400, 400, 400, 40, 40], rel=0.01)
    assert max(there, back) < 1.5 * 40e6
