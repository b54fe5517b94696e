"""`shoal check` in namespaces: each fault of a network is named, with the hosts and the numbers."""

import os
import subprocess
import sys
from typing import Any

import pytest
from lab.labs import enter, env_of, needs_root
from process.ranks import run_ranks

from shoal.check.report import Findings
from shoal.check.run import check
from shoal.cli import main
from shoal.errors import ShoalError
from shoal.lab import Lab
from shoal.lab.cluster import ip

pytestmark = needs_root

N_HOSTS = 3


def check_in(namespaces: list[str], special: Any, timeout_s: float) -> Findings | str | None:
    """Return this rank's findings or its error; `special` has variables of single ranks."""
    rank = int(os.environ["RANK"])
    enter(namespaces[rank])
    os.environ |= special.get(rank, {})
    try:
        return check(timeout_s)
    except ShoalError as error:
        return str(error)


def findings_in(
    cluster: Lab, special: Any = None, timeout_s: float = 30.0, **env: str
) -> list[Any]:
    hosts = [host.namespace for host in cluster.hosts]
    env = env_of(cluster) | env
    return run_ranks(check_in, len(hosts), hosts, special or {}, timeout_s, env=env)


def of_rank_0(outcomes: list[Any]) -> Findings:
    assert isinstance(outcomes[0], Findings), outcomes
    return outcomes[0]


def problem_with(findings: Findings, *facts: str) -> str:
    """Return the one problem that names all these facts."""
    [problem] = [one for one in findings.problems() if all(fact in one for fact in facts)]
    return problem


def test_healthy_hosts_are_measured_each_way_within_their_line_rate() -> None:
    with Lab(N_HOSTS, rate_mbit=200) as cluster:
        found = of_rank_0(findings_in(cluster))
    assert not [one for one in found.problems() if "Mbit/s" not in one]  # busy cores slow a path
    assert len(found.probes) == N_HOSTS * (N_HOSTS - 1)
    for [probe] in found.probes.values():
        assert 0 < 8e-6 * probe.rate / 200 < 1.3
        assert abs(probe.ahead_s) < 1


def test_a_firewall_between_two_hosts_is_named_with_both_and_affects_no_other_path() -> None:
    with Lab(N_HOSTS, rate_mbit=None) as cluster:
        cluster.cut(2, 1)
        found = of_rank_0(findings_in(cluster))
        address = cluster.hosts[2].address
    failed = {way for way, [probe] in found.probes.items() if probe.error}
    assert failed == {(1, 2), (2, 1)}
    assert any("a firewall" in one for one in found.problems() if address in one)
    assert found.text().count("FAILS") == 2


def test_a_rank_with_another_key_gets_an_error_and_rank_0_names_the_missing_rank() -> None:
    other = {1: {"SHOAL_KEY": "another key than theirs"}}
    with Lab(N_HOSTS, rate_mbit=None) as cluster:
        outcomes = findings_in(cluster, other, timeout_s=8.0)
    assert "holds another key" in str(outcomes[1])
    assert problem_with(of_rank_0(outcomes), "rank 1 did not arrive")


def test_a_switch_that_loses_full_packets_is_distinguished_from_a_firewall() -> None:
    with Lab(N_HOSTS, rate_mbit=100) as cluster:
        for host in cluster.hosts:
            ip("-n", host.namespace, "link", "set", "eth0", "gso_max_segs", "1")
        ip("-n", cluster._switch, "link", "set", "port2-0", "mtu", "900")
        found = of_rank_0(findings_in(cluster))
    for way in ((0, 2), (1, 2)):
        [probe] = found.probes[way]
        assert probe.latency_s > 0
        assert "MTU" in probe.error


def test_a_router_with_a_smaller_mtu_is_found_between_hosts_with_equal_mtus() -> None:
    with Lab(N_HOSTS, rate_mbit=None) as cluster:
        router, to = cluster.hosts[1], cluster.hosts[2]
        for setting in ("ip_forward=1", "conf.all.send_redirects=0", "conf.eth0.send_redirects=0"):
            name, _, value = setting.partition("=")
            path = f"/proc/sys/net/ipv4/{name.replace('.', '/')}"
            cluster.run(router.index, ["sh", "-c", f"echo {value} > {path}"])
        ip("-n", router.namespace, "route", "add", f"{to.address}/32", "dev", "eth0", "mtu", "1200")
        way = (f"{to.address}/32", "via", router.address)
        ip("-n", cluster.hosts[0].namespace, "route", "add", *way)
        found = of_rank_0(findings_in(cluster))
    assert [probe.mtu for probe in found.probes[0, 2]] == [1200]
    assert [probe.mtu for probe in found.probes[2, 0]] == [1500]
    assert problem_with(found, "(rank 0) to", "(rank 2): packets have at most 1200 bytes")


def test_an_unreachable_host_is_named_with_its_other_address() -> None:
    with Lab(2, None, [None]) as cluster:
        cluster.cut(0, 1)
        found = of_rank_0(findings_in(cluster, MASTER_ADDR=cluster.hosts[0].addresses[1]))
    problem = problem_with(found, "(rank 1): no host reaches it at eth0")
    assert f"eth1 ({cluster.hosts[1].addresses[1]}" in problem


def test_a_differing_mtu_and_a_differing_setting_are_named() -> None:
    with Lab(N_HOSTS, rate_mbit=None) as cluster:
        ip("-n", cluster.hosts[1].namespace, "link", "set", "eth0", "mtu", "1400")
        found = of_rank_0(findings_in(cluster, {2: {"SHOAL_WIRE": "bf16"}}))
    assert problem_with(found, "MTU differs", "1400 on", "1500 on")
    assert problem_with(found, "SHOAL_WIRE differs", "bf16 on", "unset on")


def test_ssh_starts_a_rank_on_each_host_and_returns_report_and_code_of_rank_0() -> None:
    with Lab(2, rate_mbit=None) as cluster:
        names = [host.namespace for host in cluster.hosts]
        env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        env |= {"MASTER_ADDR": cluster.hosts[0].address, "SHOAL_SOCKET_IFNAME": "eth0"}
        ssh = ["--ssh", "sh -c 'exec ip netns exec $0 sh -c \"$1\"'"]
        command = [sys.executable, "-m", "shoal", "check", "--hosts", ",".join(names), *ssh]
        ran = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=60
        )
    assert "2 ranks on 2 hosts" in ran.stdout, ran.stderr
    assert "there is no key" in ran.stdout
    assert ran.returncode == 1


def test_a_key_without_a_file_and_a_failing_ssh_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--hosts", "a,b", "--ssh", "sh -c 'exit 255'"]) == 2
    assert "(status 255)" in capsys.readouterr().err
    monkeypatch.setenv("SHOAL_KEY", "k" * 32)
    assert main(["check", "--hosts", "a,b"]) == 2
    assert "SHOAL_KEY_FILE" in capsys.readouterr().err
