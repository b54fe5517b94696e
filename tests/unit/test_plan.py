"""The planner: a cheapest algorithm, the same for everyone, with a reason."""

import pytest

from shoal.errors import UsageError
from shoal.plan import Topology, choose
from shoal.plan.choose import COSTS, forced_algorithm
from shoal.schedule import ALGORITHMS

ONE_HOST = Topology((0, 0, 0, 0))
FOUR_HOSTS = Topology((0, 1, 2, 3))


def test_every_algorithm_with_a_cost_exists() -> None:
    for collective, costs in COSTS.items():
        assert set(costs) <= set(ALGORITHMS[collective])


def test_small_messages_go_directly_and_large_ones_are_sharded_in_one_host() -> None:
    assert choose("all_reduce", 4, ONE_HOST).name == "direct"
    assert choose("all_reduce", 25 << 20, ONE_HOST).name == "sharded"
    assert choose("all_reduce", 25 << 20, Topology((0, 0))).name == "sharded"


def test_large_messages_between_hosts_take_the_ring() -> None:
    assert choose("all_reduce", 25 << 20, FOUR_HOSTS).name == "ring"


def test_a_choice_names_every_cost_and_the_numbers_it_comes_from() -> None:
    choice = choose("all_reduce", 1 << 20, ONE_HOST)
    assert choice.why.startswith("1048576 B over 4 ranks in one host: direct ")
    for name in COSTS["all_reduce"]:
        assert f"{name} " in choice.why


@pytest.mark.parametrize("collective", sorted(COSTS))
def test_the_choice_is_the_cheapest_and_costs_grow_with_size(collective: str) -> None:
    for topology in (ONE_HOST, FOUR_HOSTS):
        costs = [choose(collective, n_bytes, topology).cost_us for n_bytes in (4, 1 << 16, 1 << 26)]
        assert costs == sorted(costs)


def test_a_forced_algorithm_wins_where_the_collective_has_it() -> None:
    assert choose("all_reduce", 4, ONE_HOST, "ring") == choose("all_reduce", 4, ONE_HOST, "ring")
    assert choose("all_reduce", 4, ONE_HOST, "ring").why == "SHOAL_ALGO=ring"
    assert choose("broadcast", 4, ONE_HOST, "ring").name in COSTS["broadcast"]


def test_an_unknown_forced_algorithm_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"SHOAL_ALGO='rign'.*chain, direct, .*ring, sharded"):
        forced_algorithm({"SHOAL_ALGO": "rign"})
    assert forced_algorithm({}) == ""
