"""The report of `shoal check` on the facts and measurements of ranks."""

import itertools
from typing import Any

import pytest

from shoal.check.facts import Facts, Path, gather
from shoal.check.probe import Probe
from shoal.check.report import Findings

LINE = 1e9 / 8
LOOPBACK = Path("127.0.1.1", 7000, "lo", "the route to host0", 1500)


def facts_of(rank: int, host: str = "", **differing: object) -> Facts:
    name = host or f"host{rank}"
    path = Path(f"10.0.0.{rank + 1}", 7000, "eth0", "SHOAL_SOCKET_IFNAME=eth0", 1500)
    facts: dict[str, Any] = {"host_id": f"id of {name}", "paths": [path], "token": "00"}
    facts |= {"key": "0123456789abcdef", "shoal": "1.0", "python": "3.12.1", "torch": "2.13.0"}
    facts |= {"settings": {}, "unused": [], "n_files": 65536, "locked_bytes": -1}
    facts |= {"free_bytes": 8 << 30, **differing}
    return Facts(rank, name, **facts)


def findings_of(*ranks: Facts) -> Findings:
    """Return findings for probes of 1 Gbit/s each way."""
    hosts = [host.rank for host in Findings(list(ranks), [], {}).hosts]
    probes = {way: [Probe("", 1e-4, LINE, 0.0)] for way in itertools.permutations(hosts, 2)}
    return Findings(list(ranks), [], probes)


def test_ranks_that_agree_have_no_problems() -> None:
    found = findings_of(facts_of(0), facts_of(1), facts_of(2, host="host1"))
    assert not list(found.problems())
    assert "3 ranks on 2 hosts" in found.text()
    assert "1 2" in found.text()  # the ranks of host1


TENTH = Probe("", 1e-4, LINE / 10, 0.0)
OF_RANK_3 = {way: TENTH for way in itertools.permutations(range(4), 2) if 3 in way}


def test_a_problem_of_a_host_or_a_path_is_named_once_with_its_numbers() -> None:
    for n_hosts, probes, problem in (
        (4, OF_RANK_3, "host3: 100 Mbit/s at most, but others reach 1 Gbit/s"),
        (3, {(0, 2): Probe("", 1e-4, LINE / 4, 0.0)}, "host0 to host2: 250 Mbit/s"),
        (2, {(0, 1): Probe("", 1e-4, LINE, 61.0)}, "host1: its clock is +61.0 s"),
        (2, {(1, 0): None}, "host1 to host0: not measured"),  # its rank ended in mid-check
    ):
        found = findings_of(*map(facts_of, range(n_hosts)))
        for way, probe in probes.items():
            if probe is None:
                del found.probes[way]
            else:
                found.probes[way] = [probe]
        texts = list(found.problems())
        assert len(texts) == 1, problem
        assert texts[0].startswith(problem)


def test_different_or_missing_facts_are_named_with_the_host_and_the_remedy() -> None:
    for differing, facts in (
        ({"shoal": "0.9"}, ["shoal differs", "0.9 on host1", "1.0 on host0"]),
        ({"torch": "2.11.0"}, ["torch differs", "2.11.0 on host1"]),
        ({"key": "fedcba9876543210"}, ["key differs", "SHOAL_KEY_FILE"]),
        ({"settings": {"SHOAL_WIRE": "bf16"}}, ["SHOAL_WIRE differs", "unset on host0"]),
        ({"n_files": 64}, ["host1", "64 files", "ulimit -n"]),
        ({"free_bytes": 100 << 20}, ["host1", "100 MiB"]),
        ({"paths": [LOOPBACK]}, ["host1", "127.0.1.1", "SHOAL_SOCKET_IFNAME"]),
    ):
        problems = list(findings_of(facts_of(0), facts_of(1, **differing)).problems())
        assert len(problems) == 1, facts
        assert all(fact in problems[0] for fact in facts), (facts, problems)


def test_settings_that_a_job_lets_differ_and_keys_are_no_facts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SHOAL_PATHS", "SHOAL_PORT_RANGE", "SHOAL_ISA", "SHOAL_DUMP", "SHOAL_WIRE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SHOAL_KEY", "of 16 bytes and more")
    settings = gather(0, [], "token").settings
    assert settings["SHOAL_WIRE"] == "1"
    assert settings.keys().isdisjoint({"SHOAL_PATHS", "SHOAL_PORT_RANGE", "SHOAL_ISA", "SHOAL_KEY"})


def test_a_missing_key_is_a_problem_only_between_hosts() -> None:
    bare = {"key": "none"}
    assert not list(findings_of(facts_of(0, **bare), facts_of(1, "host0", **bare)).problems())
    [problem] = findings_of(facts_of(0, **bare), facts_of(1, **bare)).problems()
    assert "openssl rand -hex 32" in problem


def test_hosts_with_one_name_are_distinguished_by_their_ranks() -> None:
    twin = facts_of(1)._replace(host="host0")
    found = findings_of(facts_of(0), twin)
    found.probes[0, 1] = [Probe("no way")]
    assert "host0 (rank 0) to host0 (rank 1): no way" in list(found.problems())
