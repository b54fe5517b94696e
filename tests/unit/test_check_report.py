"""The report of `shoal check` on the facts and measurements of ranks."""

import pytest

from shoal.check.facts import Facts, Path, decode
from shoal.check.probe import Probe
from shoal.check.report import Findings

LINE = 1e9 / 8


def facts_of(rank: int, host: str = "", **differing: object) -> Facts:
    name = host or f"host{rank}"
    path = Path(f"10.0.0.{rank + 1}", 7000, "eth0", "SHOAL_SOCKET_IFNAME=eth0", 1500)
    facts = Facts(
        rank=rank,
        host=name,
        host_id=f"id of {name}",
        paths=[path],
        token="00",
        shoal="1.0",
        python="3.12.1",
        torch="2.13.0",
        key="0123456789abcdef",
        n_files=65536,
        locked_bytes=-1,
        free_bytes=8 << 30,
        settings={},
        unused=[],
    )
    return facts._replace(**differing)  # type: ignore[arg-type]


def findings_of(*ranks: Facts, **ways: float) -> Findings:
    """Return findings for probes of 1 Gbit/s each way, except `from_0_to_1=rate`."""
    probes = {}
    hosts = Findings(list(ranks), [], {}).hosts
    for one in hosts:
        for to in hosts:
            if one is not to:
                rate = ways.get(f"from_{one.rank}_to_{to.rank}", LINE)
                probes[one.rank, to.rank] = [Probe("", 1e-4, rate, 0.0)]
    return Findings(list(ranks), [], probes)


def test_facts_survive_the_store() -> None:
    assert decode(facts_of(3).encode()) == facts_of(3)


def test_ranks_that_agree_have_no_problems() -> None:
    found = findings_of(facts_of(0), facts_of(1), facts_of(2, host="host1"))
    assert not list(found.problems())
    assert "3 ranks on 2 hosts" in found.text()
    assert "1 2" in found.text()  # the ranks of host1


def test_a_slow_cable_is_named_once_with_its_rate_and_the_others_rate() -> None:
    ways = {f"from_{a}_to_{b}": LINE / 10 for a in range(4) for b in range(4) if 3 in (a, b)}
    [problem] = findings_of(*map(facts_of, range(4)), **ways).problems()
    assert problem.startswith("host3: 100 Mbit/s at most, but others reach 1 Gbit/s")


def test_a_slow_direction_between_fast_hosts_is_named_alone() -> None:
    [problem] = findings_of(*map(facts_of, range(3)), from_0_to_2=LINE / 4).problems()
    assert problem.startswith("host0 to host2: 250 Mbit/s")


@pytest.mark.parametrize(
    ("differing", "facts"),
    [
        ({"shoal": "0.9"}, ["shoal differs", "0.9 on host1", "1.0 on host0"]),
        ({"torch": "2.11.0"}, ["torch differs", "2.11.0 on host1"]),
        ({"key": "fedcba9876543210"}, ["key differs", "SHOAL_KEY_FILE"]),
        ({"settings": {"SHOAL_WIRE": "bf16"}}, ["SHOAL_WIRE differs", "unset on host0"]),
        ({"n_files": 64}, ["host1", "64 files", "ulimit -n"]),
        ({"free_bytes": 100 << 20}, ["host1", "100 MiB"]),
    ],
)
def test_different_or_missing_facts_are_named_with_the_host_and_the_remedy(
    differing: dict[str, object], facts: list[str]
) -> None:
    [problem] = findings_of(facts_of(0), facts_of(1, **differing)).problems()
    assert all(fact in problem for fact in facts)


def test_the_remedy_for_a_host_at_loopback_is_to_name_an_interface() -> None:
    alone = Path("127.0.1.1", 7000, "lo", "the route to host0", 1500)
    [problem] = findings_of(facts_of(0), facts_of(1, paths=[alone])).problems()
    assert "127.0.1.1" in problem
    assert "SHOAL_SOCKET_IFNAME" in problem


def test_a_missing_key_is_a_problem_only_between_hosts() -> None:
    bare = {"key": "none"}
    assert not list(findings_of(facts_of(0, **bare), facts_of(1, "host0", **bare)).problems())
    [problem] = findings_of(facts_of(0, **bare), facts_of(1, **bare)).problems()
    assert "openssl rand -hex 32" in problem


def test_a_clock_ahead_of_the_others_is_named_with_its_seconds() -> None:
    found = findings_of(facts_of(0), facts_of(1))
    found.probes[0, 1] = [Probe("", 1e-4, LINE, 61.0)]
    [problem] = found.problems()
    assert problem.startswith("host1: its clock is +61.0 s")


def test_a_rank_that_ended_in_mid_check_is_named_for_each_missing_path() -> None:
    found = findings_of(facts_of(0), facts_of(1))
    del found.probes[1, 0]
    [problem] = found.problems()
    assert problem.startswith("host1 to host0: not measured")


def test_hosts_with_one_name_are_distinguished_by_their_ranks() -> None:
    twin = facts_of(1)._replace(host="host0")
    found = findings_of(facts_of(0), twin)
    found.probes[0, 1] = [Probe("no way")]
    assert "host0 (rank 0) to host0 (rank 1): no way" in list(found.problems())
