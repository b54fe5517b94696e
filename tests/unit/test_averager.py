"""`Averager` over real groups, whose ranks are threads: expected values are NumPy's."""

import numpy as np
import pytest
from unit.averages import SHAPES, average_filled, averaged, check, fill, put, shuffled, values
from unit.in_process import in_ranks, run_well

from shoal import Group
from shoal.average import Averager
from shoal.errors import UsageError
from shoal.group.numbers import MOST_APART


def average_in_any_order(group: Group, fusion_bytes: int) -> tuple[int, ...]:
    averager = Averager(group, SHAPES, fusion_bytes=fusion_bytes)
    for step in range(5):
        average_filled(averager, step, shuffled(group.rank, step))
        check(averager, step)
    return averager.layout.order


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("fusion_bytes", [64, 1000, 4096, 1 << 20])
def test_averages_equal_numpys_for_another_order_on_each_rank(size: int, fusion_bytes: int) -> None:
    orders = run_well(average_in_any_order, size, fusion_bytes)
    assert orders.count(orders[0]) == size


@in_ranks(3)
def test_the_first_layout_is_reversed_and_the_second_has_the_order_of_rank_0(group: Group) -> None:
    averager = Averager(group, SHAPES, fusion_bytes=512)
    names = list(SHAPES)
    seen = [averager.layout.order]
    for step in range(3):
        average_filled(averager, step, names if group.rank == 0 else names[::-1])
        seen.append(averager.layout.order)
    upward = tuple(range(len(SHAPES)))
    assert seen == [upward[::-1], upward[::-1], upward, upward]


@in_ranks(2)
def test_an_array_from_before_a_new_layout_cannot_be_written_to(group: Group) -> None:
    averager = Averager(group, SHAPES)
    old = averager.begin()["weight"]
    fill(averager, 0)
    averager.wait()
    averager.begin()
    with pytest.raises(ValueError, match="read-only"):
        old[...] = 1


@in_ranks(3)
def test_unused_arrays_are_untouched_or_zero_if_another_rank_used_them(group: Group) -> None:
    averager = Averager(group, SHAPES, fusion_bytes=512, find_unused=True)
    names = list(SHAPES)
    unused = []
    for step in range(4):
        arrays = averager.begin()
        arrays["bias"][...] = 7
        arrays["last"][...] = 9
        left_out = ["bias", "last", *(["weight"] if group.rank == 1 else [])] if step % 2 else []
        fill(averager, step, [name for name in names if name not in left_out])
        averager.wait()
        unused.append(averager.unused)
        check(averager, step, [name for name in names if name not in (*left_out, "weight")])
        if left_out:
            given = [values("weight", rank, step) for rank in range(group.size) if rank != 1]
            np.testing.assert_allclose(arrays["weight"], sum(given) / group.size)
            assert (arrays["bias"] == 7).all()
            assert (arrays["last"] == 9).all()
        else:
            check(averager, step)
    left_out = [names.index("bias"), names.index("last")]
    assert [sorted(one) for one in unused] == [[], left_out, [], left_out]


@in_ranks(2)
def test_buffers_of_unused_arrays_are_not_sent(group: Group) -> None:
    eight = {f"{i}": ((256,), "float32") for i in range(8)}
    averager = Averager(group, eight, fusion_bytes=1024, find_unused=True)
    for used in [("1", "2", "6"), ("0",), (), tuple(eight)]:
        averager.begin()
        for name in used[group.rank :: group.size]:  # each used by only one rank
            averager.ready(name)
        averager.wait()
        for number, buffer in enumerate(averager.layout.buffers):
            holds_some = any(str(index) in used for index in buffer.entries)
            assert (averager.times[-1].posted[number] > 0) == holds_some


@in_ranks(2)
def test_a_new_layout_may_have_a_different_number_of_buffers(group: Group) -> None:
    # The last type has 64 bytes more, which are all that float64 sends.
    averager = Averager(group, {"a": ((256,), "float32"), "b": ((0,), "float64")}, fusion_bytes=512)
    counts = []
    for step in range(3):
        averager.begin()
        counts.append(len(averager.layout.buffers))
        put(averager, dict.fromkeys("ab", group.rank + step))
        averager.wait()
        assert all((array == 0.5 + step).all() for array in averager.arrays.values())
    assert counts == [2, 3, 3]


@in_ranks(3)
def test_calls_by_order_between_calls_of_a_step_match_each_other(group: Group) -> None:
    averager = Averager(group, SHAPES, fusion_bytes=512)
    for step in range(3):
        averager.begin()
        names = shuffled(group.rank, step)
        fill(averager, step, names[:4])
        for _ in range(3):  # by order, between buffers that leave in any order
            one = np.ones(1000)
            group.all_reduce(one)
            assert (one == group.size).all()
        fill(averager, step, names[4:])
        averager.wait()
        check(averager, step)


@in_ranks(1)
def test_a_cancelled_dropped_or_unsent_step_delays_no_later_call(group: Group) -> None:
    one = np.ones(1)
    averager = Averager(group, SHAPES, fusion_bytes=512, find_unused=True)
    averager.begin()
    averager.ready("bias")
    averager.wait()  # a step that skips most buffers
    averager.begin()
    averager = Averager(group, {"other": ((3,), "float32")})
    averager.begin()
    averager.ready("other")
    for _ in range(MOST_APART + 1):
        group.all_reduce(one)
    averager.wait()


@in_ranks(2)
def test_a_hook_of_an_averager_dropped_in_mid_step_does_nothing(group: Group) -> None:
    averager = Averager(group, {"one": ((3,), "float32")})
    averager.begin()
    hook = averager.hook("one")
    averager = Averager(group, {"other": ((3,), "float32")})
    averager.begin()
    hook()
    put(averager, {"other": group.rank})
    averager.wait()
    assert (averager.arrays["other"] == 0.5).all()


@in_ranks(2)
def test_the_number_of_buffers_is_limited_by_reservable_numbers(group: Group) -> None:
    averager = Averager(group, {"a": ((1 << 18,), "float32")}, fusion_bytes=64)
    assert (averaged(averager, {"a": group.rank})["a"] == 0.5).all()
    assert 900 < len(averager.layout.buffers) <= 1024


@in_ranks(3)
def test_weights_give_the_average_of_all_samples_and_0_excludes_a_rank(group: Group) -> None:
    weights = [[1, 1, 1], [32, 32, 7], [0, 5, 3], [0.25, 0, 0]]
    averager = Averager(group, SHAPES, fusion_bytes=512, weighted=True)
    for step, row in enumerate(weights):
        weight, names = row[group.rank], shuffled(group.rank, step)
        given = {n: values(n, group.rank, step) if weight else np.nan for n in names}
        averaged(averager, given, weight)
        for name in SHAPES:
            wide = np.complex128 if name == "phase" else np.float64
            terms = [w * values(name, rank, step).astype(wide) for rank, w in enumerate(row)]
            want = sum(terms) / sum(row)
            most = 2e-3 if name == "half" else 1e-6
            np.testing.assert_allclose(averager.arrays[name], want, rtol=most, atol=10 * most)


@in_ranks(3)
def test_equal_weights_give_the_bits_of_unweighted_averages(group: Group) -> None:
    averagers = [Averager(group, SHAPES, weighted=weighted) for weighted in (False, True)]
    found = []
    for averager, weight in zip(averagers, (None, 37.0), strict=True):
        given = {
            name: np.asarray(np.random.default_rng(group.rank).standard_normal(shape)).astype(dtype)
            for name, (shape, dtype) in SHAPES.items()
        }
        found.append({n: one.copy() for n, one in averaged(averager, given, weight).items()})
    for name in SHAPES:
        np.testing.assert_array_equal(found[0][name], found[1][name])


@in_ranks(2)
def test_weights_of_0_on_all_ranks_are_an_error_and_the_next_step_succeeds(group: Group) -> None:
    averager = Averager(group, {"a": ((3,), "float32")}, weighted=True)
    averager.begin(0.0)
    averager.ready("a")
    with pytest.raises(UsageError, match="weights of all ranks are 0"):
        averager.wait()
    assert (averaged(averager, {"a": 3}, 1.0)["a"] == 3).all()


@in_ranks(3)
def test_one_array_can_be_awaited_before_the_others(group: Group) -> None:
    averager = Averager(group, SHAPES, fusion_bytes=512)
    for step in range(3):
        averager.begin()
        fill(averager, step)
        averager.send_rest()
        for name in list(SHAPES)[::-1]:
            averager.wait_for(name)
            check(averager, step, [name])
        averager.wait()
        check(averager, step)
