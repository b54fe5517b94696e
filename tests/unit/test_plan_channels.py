"""How many channels there are between hosts, which calls are cut over them, and why."""

import pytest

from shoal.errors import UsageError
from shoal.group.agreeing import agreed_channels, agreed_planner, digest_of
from shoal.plan import Planner, Settings, default_cluster
from shoal.plan.channels import (
    PoolCard,
    channels_from,
    choose_channels,
    choose_pool_channels,
    n_lanes,
)
from shoal.plan.defaults import wire_of
from shoal.plan.tuning import Tuning

ALONE = (0, 1, 2, 3)


def chosen(mbit: int, n_cores: int, hosts: tuple[int, ...] = ALONE, most: int = 8) -> int:
    return choose_channels(default_cluster(hosts, n_cores=n_cores, wire=wire_of(mbit)), most).n


def test_two_cores_have_one_channel_however_fast_the_link() -> None:
    assert [chosen(mbit, 2) for mbit in (1_000, 10_000, 100_000, 400_000)] == [1, 1, 1, 1]


def test_links_that_one_thread_keeps_busy_have_one_channel() -> None:
    assert [chosen(mbit, 64) for mbit in (1_000, 10_000)] == [1, 1]


def test_faster_links_have_more_as_far_as_there_are_cores_and_connections() -> None:
    assert [chosen(mbit, 64) for mbit in (25_000, 40_000, 100_000, 400_000)] == [2, 4, 4, 4]
    assert [chosen(100_000, n_cores) for n_cores in (1, 2, 4, 6, 8)] == [1, 1, 2, 3, 4]
    assert [chosen(100_000, 64, most=most) for most in (1, 2, 8)] == [1, 2, 4]


def test_ranks_that_share_a_host_have_one() -> None:
    assert chosen(100_000, 64, (0, 0, 0)) == chosen(100_000, 64, (0, 0, 1, 1)) == 1


@pytest.mark.parametrize(
    ("n_cores", "why"),
    [
        (2, "would keep 4 threads busy, and 2 cores of a host leave room for 1"),
        (64, "the links would keep 4 threads busy"),
    ],
)
def test_the_reason_says_what_decides(n_cores: int, why: str) -> None:
    cluster = default_cluster(ALONE, n_cores=n_cores, wire=wire_of(100_000))
    assert choose_channels(cluster).why.endswith(why)


def test_large_calls_of_ranks_that_are_alone_on_their_hosts_are_cut() -> None:
    alone, mixed = default_cluster(ALONE), default_cluster((0, 0, 1, 1))
    for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "gather"):
        assert n_lanes(collective, 25 << 20, alone, 3) == 3
        assert n_lanes(collective, 1 << 20, alone, 3) == 1
        assert n_lanes(collective, 25 << 20, mixed, 3) == 1
    # Only two ranks know how long the block between them is.
    assert n_lanes("all_to_all", 25 << 20, alone, 3) == 1


def test_a_subgroup_of_one_rank_of_each_host_is_cut_where_the_whole_is_not() -> None:
    planner = Planner(default_cluster((0, 0, 1, 1)), n_channels=2)
    assert planner.n_lanes("all_reduce", 25 << 20) == 1
    assert planner.of((0, 2)).n_lanes("all_reduce", 25 << 20) == 2


def test_the_number_of_the_environment_is_read_or_refused() -> None:
    assert [channels_from({"SHOAL_CHANNELS": text}) for text in ("", "1", "8")] == [0, 1, 8]
    assert channels_from({}) == 0
    for text in ("0", "9", "two", "-1", "1.5"):
        with pytest.raises(UsageError, match=f"SHOAL_CHANNELS='{text}' .*1 to 8"):
            channels_from({"SHOAL_CHANNELS": text})


def digests(*settings: Settings, mbit: int = 100_000, n_cores: int = 16) -> list[bytes]:
    return [digest_of(each, mbit, range(n_cores)) for each in settings]


def test_links_and_planner_have_the_same_number() -> None:
    for settings in (Settings(), Settings(channels=3), Settings(n_paths=3)):
        told = digests(settings, settings)
        n = agreed_channels(settings, ["a", "b"], told)
        assert n == agreed_planner(0, settings, ["a", "b"], told, "").n_channels
        assert n == (3 if settings.channels else 2 if settings.n_paths == 3 else 4)


def test_a_tuning_file_that_is_ignored_has_no_say_in_links_nor_planner() -> None:
    other = Tuning((0, 1, 2), 2, {}, link=wire_of(1_000))
    settings = Settings(tuning=other, refuse=False)
    told = digests(settings, settings)
    assert agreed_planner(0, settings, ["a", "b"], told, "").n_channels == 4
    assert agreed_channels(settings, ["a", "b"], told) == 4


def test_inside_a_host_there_is_one_whatever_the_environment_says() -> None:
    told = digests(Settings(channels=3), Settings(channels=3))
    assert agreed_channels(Settings(channels=3), ["a", "a"], told) == 1
    assert agreed_planner(0, Settings(channels=3), ["a", "a"], told, "").n_channels == 1


def test_what_the_planner_refuses_is_linked_by_one_channel() -> None:
    for other in (Settings(channels=3), Settings(channels=2, n_paths=5)):
        own = Settings(channels=2)
        assert agreed_channels(own, ["a", "b"], digests(own, other)) == 1
        with pytest.raises(UsageError, match="SHOAL_CHANNELS"):
            agreed_planner(0, own, ["a", "b"], digests(own, other), "")


# With servers.


def of_pool(mbit: int, asked: int = 0, cores: tuple[int, int] = (64, 64), n_paths: int = 1) -> int:
    """Of three workers and two servers; `cores`: of the least worker, and of the least server."""
    worker = PoolCard(1250.0, asked, n_paths, cores[0])
    server = PoolCard(mbit / 8, 0, 1, cores[1])
    many = (worker._replace(n_cores=96), server._replace(n_cores=96))
    return choose_pool_channels([worker, many[0], many[0], many[1], server], 3)


def test_servers_have_as_many_as_their_links_keep_busy() -> None:
    assert [of_pool(mbit) for mbit in (0, 1_000, 10_000, 25_000, 100_000)] == [1, 1, 1, 2, 4]


def test_no_more_than_the_least_server_has_cores_and_workers_can_spare() -> None:
    assert [of_pool(100_000, cores=(64, n)) for n in (1, 2, 3, 8)] == [1, 2, 3, 4]
    assert [of_pool(100_000, cores=(n, 64)) for n in (1, 2, 4, 8)] == [1, 1, 2, 4]


def test_the_environment_says_how_many_as_far_as_there_are_cores_and_connections() -> None:
    assert [of_pool(1_000, asked=asked) for asked in (1, 2, 8)] == [1, 2, 8]
    assert of_pool(100_000, asked=1) == 1
    assert of_pool(1_000, asked=8, cores=(1, 2)) == 2
    assert of_pool(1_000, asked=8, n_paths=3) == 2
