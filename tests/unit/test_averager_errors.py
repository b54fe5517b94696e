"""Errors of `Averager`: the ranks that raise, the facts named, and the state afterwards."""

import re
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from process.stage import error_of
from unit.averages import SHAPES, average_filled, averaged, check, fill
from unit.in_process import in_ranks

from shoal import Group
from shoal.average import Averager, ErrorFeedback, NotFinite, lacking
from shoal.errors import Closed, TimedOut, UsageError

A, B = ((3,), "float32"), ((2, 2), "float32")
FED = ErrorFeedback("bf16")


@pytest.mark.parametrize(
    ("odd", "what", "values"),
    [
        ({"arrays": {"a": A, "b": A}}, "'b'", ["float32[2, 2]", "float32[3]"]),
        ({"arrays": {"a": A}}, "'b'", ["float32[2, 2]", "none"]),
        ({"arrays": {"b": B, "a": A}}, "array 0", ["'a'", "'b'"]),
        ({"find_unused": True}, "find_unused", ["False", "True"]),
        ({"check_same": 3}, "check_same", ["0", "3"]),
        ({"fusion_bytes": 4096}, "fusion_bytes", ["524288", "4096"]),
        ({"wire": "bf16"}, "wire", ["None", "bf16"]),
        ({"compress": FED}, "compress", ["None", str(FED)]),
    ],
)
@in_ranks(3)
def test_differences_between_averagers_are_named_on_every_rank(
    group: Group, odd: dict[str, Any], what: str, values: list[str]
) -> None:
    options = {"arrays": {"a": A, "b": B}} | (odd if group.rank == 1 else {})
    words = f"{what} is not the same on all ranks: {values[0]} on ranks 0, 2, {values[1]} on rank 1"
    with pytest.raises(UsageError, match=re.escape(words)):
        Averager(group, options.pop("arrays"), **options)
    averager = Averager(group, {"good": A})  # the group goes on
    assert averaged(averager, {"good": group.rank})["good"][0] == 1


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({"a": ((3,), "bool")}, {}, "there is no average of 'a' bool"),
        ({"a": ((3,), "int32")}, {"weighted": True}, "'a' int32.* has no fractions to be weighted"),
        ({"a": 7}, {}, "'a' is 7; pass a shape and a dtype"),
        ({"a": A}, {"wire": "bf8"}, "bf8"),
        ({"a": A}, {"compress": "bf17"}, "unknown wire 'bf17'"),
        ({"a": A}, {"compress": 8}, "compress=8 is not a way to compress"),
        ({"a": A}, {"compress": "bf16", "wire": "bf16"}, "either wire='bf16' or compress='bf16'"),
        *(
            ({"a": A, "b": ((4,), dtype)}, {"compress": way}, f"'b' {dtype}.*would be sent in full")
            for dtype in ("float64", "float16", "bfloat16", "complex64")
            for way in ("bf16", FED)
        ),
        *(
            ({"a": A}, {"check_same": every}, "check_same must be a whole number of steps, or 0")
            for every in (-1, 1.5, "2")
        ),
    ],
)
@in_ranks(1)
def test_meaningless_arrays_and_options_are_refused(
    group: Group, arrays: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Averager(group, arrays, **options)


@pytest.mark.parametrize("names", [(), ("bias",)])
@pytest.mark.parametrize("find_unused", [False, True])
@in_ranks(2)
def test_an_ended_group_is_not_reported_as_a_fault_of_the_step(
    group: Group, find_unused: bool, names: tuple[str, ...]
) -> None:
    averager = Averager(group, SHAPES, fusion_bytes=512, find_unused=find_unused)
    averager.begin()
    for name in names:
        averager.ready(name)
    error_of(group.barrier)  # the other rank may have left it, and aborted
    group.abort("enough")
    for act in (averager.wait, averager.wait, averager.begin):
        with pytest.raises(Closed, match="enough"):
            act()


@in_ranks(2)
def test_a_rank_without_an_averager_yet_learns_of_missing_arrays_elsewhere(group: Group) -> None:
    if group.rank == 1:  # while rank 0 creates its averager
        lacking.end_group(group, "'bias' never became ready on rank 1")
        return
    with pytest.raises(UsageError, match="'bias' never became ready on rank 1"):
        Averager(group, SHAPES)


@in_ranks(3)
def test_missing_arrays_are_named_with_their_rank_on_every_rank(group: Group) -> None:
    left_out = ("weight", "bias") if group.rank == 2 else ()
    words = "'weight', 'bias' never became ready on rank 2.*find_unused=True"

    def average() -> None:  # any call may raise: rank 2 may be far ahead
        averager = Averager(group, SHAPES, fusion_bytes=512)
        average_filled(averager, 0, [name for name in SHAPES if name not in left_out])

    with pytest.raises(UsageError, match=words):
        average()


@in_ranks(2)
def test_a_deadline_names_the_missing_buffer_and_its_arrays(group: Group) -> None:
    averager = Averager(group, {"a": ((100,), "float32"), "b": ((100,), "float32")})
    averager.begin()
    averager.ready("b")
    if group.rank != 1:
        group.barrier()
        group.timeout_s = 0.1
        averager.ready("a")
        with pytest.raises(TimedOut, match=r"fusion buffer 0 of 1 \('b' to 'a'\)"):
            averager.wait()
    else:  # until the other times out
        assert error_of(group.barrier) or error_of(group.barrier)


@in_ranks(2)
def test_an_array_that_is_ready_twice_is_named_and_the_next_step_succeeds(group: Group) -> None:
    averager = Averager(group, SHAPES, fusion_bytes=512)
    averager.begin()
    fill(averager, 0)
    with pytest.raises(UsageError, match="'bias' float64\\[1000\\] was already ready in this step"):
        averager.ready("bias")
    averager.wait()
    check(averager, 0)
    averager.begin()
    if group.rank == 1:
        averager.hook("bias")()
    for name in SHAPES:
        assert averager.hook(name)(object(), 1) is None
    twice = "'bias' float64[1000] was ready twice in one step" if group.rank else "None"
    assert twice in str(error_of(averager.wait))
    average_filled(averager, 2)
    check(averager, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@in_ranks(3)
def test_a_non_finite_value_is_reported_with_source_on_every_rank(group: Group, dtype: str) -> None:
    shapes = {"a": ((40,), dtype), "b": ((5, 200), dtype), "c": ((3,), "int32")}
    averager = Averager(group, shapes, fusion_bytes=512, check_finite=True)
    for step in range(3):
        for name, array in averager.begin().items():
            array[...] = 0x3F80 if dtype == "bfloat16" and name != "c" else 1
            if step == 1 and name == "b" and group.rank == 2:
                array[3, 17] = 0x7F80 if dtype == "bfloat16" else np.inf
            averager.ready(name)
        error = error_of(averager.wait)
        assert (error is None) == (step != 1)
        if error is not None:
            assert isinstance(error, NotFinite)
            assert "element 617 of 'b' on rank 2" in str(error)
            assert (error.name, error.rank, error.element) == ("b", 2, 617)


@in_ranks(1)
def test_misuse_is_refused(group: Group) -> None:
    averager = Averager(group, SHAPES)
    with pytest.raises(UsageError, match="outside a step"):
        averager.ready("bias")
    with pytest.raises(UsageError, match="no step has begun"):
        averager.wait()
    with pytest.raises(UsageError, match="weighted=True"):
        averager.begin(3.0)
    averager.hook("bias")()  # without a step it does nothing
    averager.begin()
    averager.begin()  # the step has not begun
    for wrong in ("none", 8, -1):
        with pytest.raises(UsageError, match="there is no array"):
            averager.ready(wrong)
    averager.ready("bias")
    with pytest.raises(UsageError, match="has not ended"):
        averager.begin()
    weighted = Averager(group, SHAPES, weighted=True)
    for weight in (None, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="weight"):
            weighted.begin(weight)


@in_ranks(3)
def test_ranks_that_wait_for_an_array_get_the_reason_of_the_rank_without_it(group: Group) -> None:
    def average() -> None:  # any call may raise: a rank may be far behind
        averager = Averager(group, SHAPES, fusion_bytes=512)
        averager.begin()
        fill(averager, 0, [name for name in SHAPES if group.rank or name != "bias"])
        if group.rank == 0:
            while not lacking.is_waited_for(group, averager.open_calls):
                pass
            group.timeout_s = 0.0  # this rank ends the group after three quarters of it
            watch = lacking.StepWatch(group, averager.open_calls)
            watch.start("no bias here")
            while group.ended() is None:
                pass
        averager.wait()

    with pytest.raises(UsageError, match="no bias here"):
        average()


@in_ranks(3)
def test_differing_values_names_and_orders_are_named_everywhere_in_nth_steps(group: Group) -> None:
    averager = Averager(group, {"w": A}, check_same=2)
    same = {
        "w": np.arange(12).reshape(3, 4),
        "momentum": torch.ones(5, dtype=torch.bfloat16),
        "none": np.empty((0, 3)),
        "rate": 0.25,
        "betas": (0.9, 0.99),
        "long": [np.zeros(5000)],
    }
    differing = np.zeros(5000)
    differing[2500] = 1
    for number, (odd, words) in enumerate(
        (
            (same, ""),
            (same | {"w": np.ones((3, 4), int)}, "w is not the same on all ranks: int64[12] of h"),
            (same | {"momentum": torch.zeros(5, dtype=torch.bfloat16)}, "momentum is not the same"),
            (same | {"long": [differing]}, "long is not the same on all ranks"),
            (same | {"rate": 0.5}, "rate is not the same on all ranks: 0.25 on ranks 0, 2, 0.5 on"),
            (same | {"more": 1}, "none on ranks 0, 2, 1 on rank 1"),
            (dict(reversed(same.items())), "the order of these names is not the same"),
        ),
        1,
    ):
        for step in (2 * number - 1, 2 * number):
            averaged(averager, {"w": 0})
            error = error_of(averager.check_same, odd if group.rank == 1 else same)
            assert isinstance(error, UsageError) == bool(words and step % 2 == 0)
            assert error is None or (words in str(error) and f": in step {step} " in str(error))
    Averager(group, {"w": A}).check_same({"own": group.rank})  # without a number none is compared


@in_ranks(2)
def test_a_step_that_could_not_send_an_array_is_an_error_on_every_rank(group: Group) -> None:
    def fill(_arrays: object) -> None:
        if group.rank == 1:
            raise MemoryError

    averager = Averager(group, {"a": A}, fill=fill)
    averager.begin()
    group.barrier()  # else rank 1 might end the group before rank 0 begins
    assert isinstance(error_of(averager.ready, "a"), MemoryError) == (group.rank == 1)
    for end in (averager.send_rest, averager.wait):  # NOT values that were not averaged
        if end == averager.wait or group.rank == 1:
            with pytest.raises(UsageError, match="a step on rank 1 was interrupted"):
                end()


@in_ranks(2)
def test_a_wait_that_was_interrupted_may_be_repeated(group: Group) -> None:
    averager = Averager(group, SHAPES, fusion_bytes=512, compress=None)
    for step in range(3):
        averager.begin()
        fill(averager, step, list(SHAPES))
        if group.rank == 1 and step < 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(averager._memory, "put_back", Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    averager.wait()
            with pytest.raises(UsageError, match="the previous step has not ended"):
                averager.begin()
        averager.wait()
        check(averager, step)


@in_ranks(2)
def test_waiting_for_an_array_whose_buffer_may_not_have_left_is_refused(group: Group) -> None:
    averager = Averager(group, {"a": A, "b": A})
    for _ in range(2):
        averager.begin()["a"][...] = averager.arrays["b"][...] = group.rank
        averager.ready("a")
        with pytest.raises(UsageError, match=r"call send_rest\(\) before wait_for\('a'\)"):
            averager.wait_for("a")
        averager.ready("b")
        averager.send_rest()
        averager.wait_for("a")
        assert averager.arrays["a"].tolist() == [0.5] * 3
        averager.wait()
