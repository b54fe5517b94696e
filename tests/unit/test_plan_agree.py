"""A group's choices are a function of the settings digests that its ranks publish."""

import logging
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.codec import Codec
from shoal.errors import UsageError
from shoal.group.agreeing import agreed_planner, digest_of
from shoal.plan import Planner, Settings, channels, default_cluster, reported_mbit
from shoal.plan.channels import PoolCard, channels_from, choose_channels, n_lanes
from shoal.plan.defaults import wire_of
from shoal.plan.settings import Forced
from shoal.plan.tuning import Tuning
from shoal.plan.wire import CLASSES_MBIT, class_of, link_of, link_text
from shoal.schedule import COLLECTIVES

FOUR = ["a", "b", "c", "d"]
SIZES = [1 << power for power in range(2, 29)]
TUNING = Tuning((0, 1), 2, {}, path="/t.json", digest=7)


def agreed(
    hosts: Sequence[str], settings: Any = None, mbit: Any = (), cores: Any = (), rank: int = 0
) -> Planner:
    """Return a rank's planner, by digests with these rates and cores; by default two cores."""
    own = settings or Settings()
    digests = [
        digest_of(own, mbit[r] if mbit else None, cores[r] if cores else (0, 1))
        for r in range(len(hosts))
    ]
    return agreed_planner(rank, own, hosts, digests, "group 'g'")


def table_of(planner: Planner) -> list[tuple[object, ...]]:
    """Return every choice, with its cost and reason."""
    return [(c, n, *planner.choose(c, n)) for c in COLLECTIVES for n in SIZES]


def test_no_clock_and_no_load_can_change_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a hundred runs in which every measurement differs."""
    want = table_of(agreed(FOUR))
    noise = random.Random(0)
    for clock in ("perf_counter", "monotonic", "time", "process_time", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: noise.lognormvariate(0, 3))
    monkeypatch.setattr(os, "getloadavg", lambda: (noise.lognormvariate(0, 3),) * 3)
    clusters = {agreed(FOUR, rank=run % 4).cluster for run in range(100)}
    assert len(clusters) == 1
    assert table_of(agreed(FOUR)) == want


def test_the_slowest_interface_counts_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for rates, mbit, why in (
        ([25_000] * 4, 25_000, "reported by the interface of rank 0, the slowest"),
        ([25_000, 25_000, 1_000, 40_000], 1_000, "reported by the interface of rank 2"),
        ([None] * 4, 10_000, "assumed, since the interface of rank 0 reports no rate; SHOAL_LINK"),
        ([25_000, None, 40_000, 40_000], 10_000, "assumed, since the interface of rank 1 reports"),
        ([None, 2_500, None, None], 2_500, "reported by the interface of rank 1"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "shoal"):
            one_host = agreed(["a"] * 4, mbit=rates).cluster
            assert not caplog.messages  # the group has no links between hosts
            cluster = agreed(FOUR, mbit=rates).cluster
        assert one_host == default_cluster((0,) * 4)
        assert cluster == default_cluster((0, 1, 2, 3), wire=wire_of(mbit))
        (line,) = caplog.messages
        assert line.startswith("group 'g': links between hosts are taken as ")
        assert why in line


def test_numbers_of_paths_that_differ_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Settings(n_paths=2), Settings(n_paths=1)
    for hosts, n_logged in ((("a", "b"), 1), (("a", "a"), 0)):
        caplog.clear()
        for rank, own in enumerate((ours, theirs)):
            digests = [digest_of(ours, None, (0, 1)), digest_of(theirs, None, (0, 1))]
            agreed_planner(rank, own, hosts, digests, "group 'g'")
        logged = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert len(logged) == n_logged
        assert all("SHOAL_PATHS is 2 on rank 0 and 1 on rank 1" in one for one in logged)


def test_a_given_link_precedes_a_file_and_a_file_precedes_the_interface() -> None:
    named, kept = link_of("1Gb,60us,16us"), link_of("40Gb")
    tuning = Tuning((0, 1, 2, 3), 2, {}, link=kept)
    other = Tuning((0, 1), 2, {}, link=kept)  # of another cluster: ignored completely
    for settings, wire in (
        (Settings(link=named, tuning=tuning), named),
        (Settings(tuning=tuning), kept),
        (Settings(tuning=tuning._replace(link=None)), wire_of(100_000)),
        (Settings(tuning=other, refuse=False), wire_of(100_000)),
    ):
        assert agreed(FOUR, settings, [100_000] * 4).cluster.wire == wire


def test_differing_settings_name_the_ranks_and_this_ranks_value() -> None:
    for changed, variable, value, other in (
        ({"link": link_of("1Gb")}, "SHOAL_LINK", "not set", "1Gb,"),
        ({"forced": Forced("ring", "ring")}, "SHOAL_ALGO", "not set", "ring"),
        ({"tuning": TUNING}, "the content of SHOAL_TUNING", "not set", "the content of /t.json"),
        ({"refuse": False}, "SHOAL_TUNING_MISMATCH", "refuse", "ignore"),
        ({"servers": "a:1 0"}, "SHOAL_SERVERS (or SHOAL_SERVERS_REQUIRED)", "not set", "a:1"),
        ({"channels": 2}, "SHOAL_CHANNELS", "not set", "2"),
        ({"wire": Codec.BF16}, "(SHOAL_WIRE, or init(wire=))", "identity", "bf16"),
    ):
        usual, odd = Settings(), Settings(**changed)
        digests = [digest_of(usual), digest_of(usual), digest_of(odd)]
        for rank, settings, own in ((0, usual, value), (2, odd, other)):
            with pytest.raises(UsageError) as caught:
                agreed_planner(rank, settings, ["a", "b", "c"], digests, "")
            text = str(caught.value)
            assert f"{variable} is not the same on all ranks: rank 2 differs from rank 0" in text
            assert f"(on this rank it is {own}" in text


def test_rates_are_rounded_coarsely_and_downwards() -> None:
    assert [class_of(mbit) for mbit in CLASSES_MBIT] == list(CLASSES_MBIT)
    classes = {100: 1_000, 999: 1_000, 1_001: 1_000, 20_000: 10_000, 56_000: 50_000}
    assert {mbit: class_of(mbit) for mbit in classes} == classes
    assert class_of(800_000) == 400_000
    assert [class_of(mbit) for mbit in (-1, 0, 10, 2**31 - 1, 2**32 - 1)] == [None] * 5


def test_the_rate_of_an_interface_is_read(tmp_path: Path) -> None:
    (tmp_path / "eth9").mkdir()
    for content, mbit in (("25000\n", 25_000), ("-1\n", None), ("", None), ("fast\n", None)):
        (tmp_path / "eth9" / "speed").write_text(content)
        assert reported_mbit("eth9", tmp_path) == mbit
    assert reported_mbit("eth8", tmp_path) is None  # not there
    assert reported_mbit("lo") is None  # the kernel answers EINVAL


def test_the_fictional_rate_of_a_veth_is_ignored(tmp_path: Path) -> None:
    for device, uevent, iflink, mbit in (
        (False, "INTERFACE=eth9\n", "3", None),  # a veth, which reports this for any link behind it
        (False, "DEVTYPE=vlan\nINTERFACE=eth9\n", "3", 10_000),
        (False, "INTERFACE=eth9\n", "2", 10_000),  # of a bond or a team
        (True, "INTERFACE=eth9\n", "3", 10_000),
    ):
        where = tmp_path / f"eth{device}{uevent[0]}{iflink}"
        where.mkdir()
        if device:
            (where / "device").mkdir()
        for name, text in (("speed", "10000"), ("uevent", uevent), ("iflink", iflink)):
            (where / name).write_text(text)
        (where / "ifindex").write_text("2")
        assert reported_mbit(where.name, tmp_path) == mbit


def test_a_link_is_a_rate_and_costs_of_a_message_or_is_refused_with_variable_and_example() -> None:
    links = {
        "1Gb": wire_of(1_000),
        " 2.5 Gbit/s ": wire_of(2_500),
        "3GB/s,20us": wire_of(24_000, 20.0),
        "948Mb, 62us, 16us": wire_of(948, 62.0, 16.0),
    }
    for text, link in links.items():
        assert link_of(text) == Settings.read({"SHOAL_LINK": text}).link == link
        assert link_of(link_text(link)) == link
    for text in ("fast", "1G", "1Gb,20", "1Gb,20us,5us,1us", "1Gb,", ",20us"):
        with pytest.raises(UsageError, match=r"SHOAL_LINK=.*cannot read .*write "):
            Settings.read({"SHOAL_LINK": text})


def test_the_host_with_the_fewest_cores_counts() -> None:
    for cores, n_cores in (
        ([(0, 1, 2, 3)] * 4, 4),
        ([(0,), (1,), (2,), (3,)], 2),  # bound, two ranks on each host: each has its own core
        ([(0, 1), (2, 3), (0, 1), (2, 3)], 4),
        ([(0, 1, 2, 3), (0, 1, 2, 3), (5,), (5,)], 1),
        ([(0, 1), (63, 2000)] * 2, 4),
    ):
        assert agreed("aabb", cores=cores).cluster.n_cores == n_cores


def test_a_launcher_that_binds_ranks_to_cores_changes_no_choice() -> None:
    bound = table_of(agreed("aaaabbbb", cores=[(rank % 4,) for rank in range(8)]))
    free = table_of(agreed("aaaabbbb", cores=[tuple(range(64))] * 8))
    assert [choice[:3] for choice in bound] == [choice[:3] for choice in free]


def test_the_planners_of_all_ranks_agree() -> None:
    rates, cores = [25_000, None, 50_000, 10_000], [(0,), (1, 2), (0, 1, 2), (7,)]
    assert len({agreed("abab", None, rates, cores, rank).cluster for rank in range(4)}) == 1


def test_a_digest_is_short_and_one_of_another_version_is_refused() -> None:
    assert len(digest_of(Settings(), 400_000, range(4096))) <= 255
    with pytest.raises(UsageError, match=r"rank 1 gave a settings digest of 3 bytes.*same shoal"):
        agreed_planner(0, Settings(), ["a", "b"], [digest_of(Settings()), b"abc"], "")


@pytest.mark.parametrize("rate", ["1Gb", "25Gb"])
def test_shoal_plan_shows_a_jobs_choices(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.cli import main

    assert main(["plan", "--hosts", "4", "--cores", "2", "--link", rate]) == 0
    shown = capsys.readouterr().out
    planner = agreed(FOUR, Settings(link=link_of(rate)))
    packed = "".join(shown.split())
    for collective in set(COLLECTIVES) - {"barrier"}:
        why = planner.choose(collective, SIZES[-1]).why
        assert "".join(why.split()) in packed


ALONE = (0, 1, 2, 3)


def chosen(mbit: int, n_cores: int, hosts: tuple[int, ...] = ALONE, most: int = 8) -> int:
    return choose_channels(default_cluster(hosts, n_cores=n_cores, wire=wire_of(mbit)), most).n


def test_faster_links_have_more_channels_up_to_cores_and_connections() -> None:
    rates = (1_000, 10_000, 25_000, 40_000, 100_000, 400_000)
    assert [chosen(mbit, 2) for mbit in rates] == [1] * 6
    assert [chosen(mbit, 64) for mbit in rates] == [1, 1, 2, 4, 4, 4]
    assert [chosen(100_000, n_cores) for n_cores in (1, 2, 4, 6, 8)] == [1, 1, 2, 3, 4]
    assert [chosen(100_000, 64, most=most) for most in (1, 2, 8)] == [1, 2, 4]
    # Ranks that share a host have one channel.
    assert chosen(100_000, 64, (0, 0, 0)) == chosen(100_000, 64, (0, 0, 1, 1)) == 1


def test_large_calls_of_one_rank_per_host_are_split() -> None:
    alone, mixed = default_cluster(ALONE), default_cluster((0, 0, 1, 1))
    for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "gather"):
        assert n_lanes(collective, 25 << 20, alone, 3) == 3
        assert n_lanes(collective, 1 << 20, alone, 3) == 1
        assert n_lanes(collective, 25 << 20, mixed, 3) == 1
    # Only two ranks know how long the block between them is.
    assert n_lanes("all_to_all", 25 << 20, alone, 3) == 1
    # Calls of a subgroup of one rank per host are split where those of the group are not.
    planner = Planner(mixed, n_channels=2)
    assert planner.n_lanes("all_reduce", 25 << 20) == 1
    assert planner.of((0, 2)).n_lanes("all_reduce", 25 << 20) == 2


def test_the_number_of_the_environment_is_read_or_refused() -> None:
    assert [channels_from({"SHOAL_CHANNELS": text}) for text in ("", "1", "8")] == [0, 1, 8]
    assert channels_from({}) == 0
    for text in ("0", "9", "two", "-1", "1.5"):
        with pytest.raises(UsageError, match=f"SHOAL_CHANNELS='{text}' .*1 to 8"):
            channels_from({"SHOAL_CHANNELS": text})


def digests(*settings: Settings) -> list[bytes]:
    return [digest_of(each, 100_000, range(16)) for each in settings]


def test_the_planner_has_the_number_asked_for() -> None:
    for settings, hosts, n in (
        *((Settings(), "ab", 4), (Settings(channels=3), "ab", 3), (Settings(n_paths=3), "ab", 2)),
        # An ignored tuning file has no effect.
        (Settings(tuning=Tuning((0, 1, 2), 2, {}, link=wire_of(1_000)), refuse=False), "ab", 4),
        # Inside a host there is one channel, with any environment.
        (Settings(channels=3), "aa", 1),
    ):
        published = digests(settings, settings)
        assert agreed_planner(0, settings, hosts, published, "").n_channels == n


def test_too_many_channels_are_refused() -> None:
    own, other = Settings(channels=2), Settings(channels=2, n_paths=5)
    with pytest.raises(UsageError, match="SHOAL_CHANNELS"):
        agreed_planner(0, own, ["a", "b"], digests(own, other), "")


def of_pool(mbit: int, asked: int = 0, cores: tuple[int, int] = (64, 64), n_paths: int = 1) -> int:
    """Return the channels of three workers and two servers; `cores`: of the least of each."""
    worker = PoolCard(1250.0, asked, n_paths, cores[0])
    server = PoolCard(mbit / 8, 0, 1, cores[1])
    many = (worker._replace(n_cores=96), server._replace(n_cores=96))
    return channels.choose_pool_channels([worker, many[0], many[0], many[1], server], 3)


def test_servers_have_as_many_channels_as_links_fill_and_the_least_cores_allow() -> None:
    assert [of_pool(mbit) for mbit in (0, 1_000, 10_000, 25_000, 100_000)] == [1, 1, 1, 2, 4]
    assert [of_pool(100_000, cores=(64, n)) for n in (1, 2, 3, 8)] == [1, 2, 3, 4]
    assert [of_pool(100_000, cores=(n, 64)) for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    # The environment sets the number, up to the cores and connections.
    assert [of_pool(1_000, asked=asked) for asked in (1, 2, 8)] == [1, 2, 8]
    assert of_pool(100_000, asked=1) == 1
    assert of_pool(1_000, asked=8, cores=(1, 2)) == 2
    assert of_pool(1_000, asked=8, n_paths=3) == 2
