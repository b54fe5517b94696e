"""The number of channels between hosts, the calls split over them, and the reasons."""

import pytest

from shoal.errors import UsageError
from shoal.group.agreeing import agreed_planner, digest_of
from shoal.plan import Planner, Settings, channels, default_cluster
from shoal.plan.channels import PoolCard, channels_from, choose_channels, n_lanes
from shoal.plan.defaults import wire_of
from shoal.plan.tuning import Tuning

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
