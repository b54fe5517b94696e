"""Error feedback of an `Averager`, compared with a NumPy model of the scheme; and top-k schemes."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from unit import feedback_model
from unit.feedback_model import Arrays, average, check, feeding, gradients, new_model
from unit.in_process import in_ranks

from shoal import Group
from shoal.average import Averager, ErrorFeedback, NotFinite
from shoal.average.compress import ChunkTopK, check_hosts
from shoal.average.feedback import Feedback
from shoal.average.layout import ArraySpec, Layout
from shoal.codec import top_k
from shoal.dtypes import DType
from shoal.errors import Unsupported, UsageError

LAYOUTS = [(codec, 2048) for codec in ("bf16", "fp16", "mxfp8", "mxint8", "mxfp4")]
LAYOUTS += itertools.product(["bf16", "mxfp4"], [64, 1 << 20])


@pytest.mark.parametrize(("codec", "fusion_bytes"), LAYOUTS)
@in_ranks(2)
def test_averages_and_residuals_equal_the_model_in_any_layout(
    group: Group, codec: str, fusion_bytes: int
) -> None:
    averager = feeding(group, fusion_bytes=fusion_bytes, compress=ErrorFeedback(codec))
    model = new_model(2, feedback_model.in_buffers(averager, codec))
    layouts = set()
    for step in range(4):
        given = gradients(2, step)
        check(averager, model, given)
        assert (averager.arrays["step"] * 2 == given[0]["step"] + given[1]["step"]).all()
        layouts.add(averager.layout.order)
    assert len(layouts) == 2  # residuals have moved
    assert any(one.any() for one in averager.state_dict()["residuals"].values())


@in_ranks(2)
def test_weights_are_applied_before_the_residual(group: Group) -> None:
    averager, model = feeding(group, weighted=True), new_model(2)
    for step, weights in enumerate([(3, 1), (0, 2), (1, 1)]):
        factors = [weight * 2 / sum(weights) for weight in weights]
        check(averager, model, gradients(2, step), weight=weights[group.rank], factors=factors)


@in_ranks(2)
def test_non_finite_steps_count_towards_the_next_comparison(group: Group) -> None:
    fed = ErrorFeedback("bf16")
    averager = Averager(group, {"w": ((4,), "float32")}, compress=fed, check_same=2)
    average(averager, {"w": np.full(4, np.nan, np.float32)})
    averager.check_same({"rank": group.rank})
    average(averager, {"w": np.ones(4, np.float32)})
    with pytest.raises(UsageError, match="in step 2 "):
        averager.check_same({"rank": group.rank})


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("check_finite", [False, True])
@pytest.mark.parametrize("codec", ["bf16", "mxfp4"])
@in_ranks(2)
def test_a_step_that_is_non_finite_on_one_rank_does_not_change_residuals(
    group: Group, codec: str, value: float, check_finite: bool
) -> None:
    averager = feeding(group, check_finite=check_finite, compress=ErrorFeedback(codec))
    model = new_model(2, feedback_model.in_buffers(averager, codec))
    check(averager, model, gradients(2, 0))
    given = gradients(2, 1)
    given[1]["weight"][3, 1, 0] = value
    if check_finite:
        with pytest.raises(NotFinite, match="'weight' on rank 1"):
            average(averager, given[group.rank])
        feedback_model.check_residuals(averager, model)
    else:
        check(averager, model, given)
    check(averager, model, gradients(2, 2))


def test_an_array_left_out_does_not_change_the_rounding_of_its_neighbour() -> None:
    both = [ArraySpec(name, (16,), DType.FLOAT32) for name in ("unused", "used")]
    layout = Layout.of(both, [0, 1], 1 << 20)
    sent = []
    for first in (0.0, 1.3):  # with and without a residual of the unused array
        memory = np.zeros(layout.n_bytes // 4, np.float32)
        fed = Feedback(ErrorFeedback("mxfp4"))
        fed.lay_out(layout, memory)
        fed.begin()
        memory[:16] = first
        fed.send(0)
        fed.end()
        assert fed.residuals()["unused"].any() == bool(first)
        fed.begin()
        memory[:16], memory[16:32] = 0, 0.03
        fed.send(0, left_out=[0])
        sent.append(memory.copy())
    assert sent[0][16:32].all()
    np.testing.assert_array_equal(sent[1], sent[0])


OTHERS: dict[str, tuple[Callable[[Arrays], Any], str]] = {
    "one less": (lambda held: held.pop("bias"), "'bias' has no residual there"),
    "one more": (lambda held: held.update(more=held["bias"]), "'more' is not averaged here"),
    "a shape": (
        lambda held: held.update(weight=held["weight"].reshape(-1)),
        r"'weight' is [342] there and [57, 3, 2] here",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
@in_ranks(1)
def test_residuals_of_other_arrays_are_refused_by_name_or_dropped_with_one_line(
    group: Group, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, what = OTHERS[case]
    averager = feeding(group)
    average(averager, gradients(1, 0)[0])
    before, state = averager.state_dict(), averager.state_dict()
    change(state["residuals"])
    with pytest.raises(UsageError, match=re.escape(what)):
        averager.load_state_dict(state)
    np.testing.assert_equal(averager.state_dict(), before)
    averager.load_state_dict(state, strict=False)
    (line,) = caplog.messages
    assert what in line
    for name, one in averager.state_dict()["residuals"].items():
        fits = what.startswith(f"'{name}'")
        np.testing.assert_array_equal(one, 0 if fits else before["residuals"][name])


@in_ranks(2)
def test_reducers_drop_residuals_when_a_state_is_loaded_in_a_step(group: Group) -> None:
    averager = feeding(group)
    for _ in range(2):
        average(averager, gradients(2, 0)[group.rank])
    averager.begin()
    averager.load_state_dict(averager.state_dict())
    assert averager._departures.subject.step == 1  # in which they drop them
    average(averager, gradients(2, 1)[group.rank])
    averager.load_state_dict(averager.state_dict())
    average(averager, gradients(2, 2)[group.rank])
    assert averager._departures.subject.step == 1


@in_ranks(1)
def test_a_state_is_refused_if_invalid_in_mid_step_and_without_feedback(group: Group) -> None:
    averager = feeding(group)
    for state in (None, 3):
        with pytest.raises(UsageError, match="takes a result of state_dict"):
            averager.load_state_dict(state)  # type: ignore[arg-type]
    averager.begin()
    averager.ready("bias")
    with pytest.raises(UsageError, match="within a step"):
        averager.load_state_dict(averager.state_dict())
    for compress in (None, "bf16"):
        plain = feeding(group, compress=compress)
        average(plain, gradients(1, 0)[0])
        assert plain.state_dict() == {}
        plain.load_state_dict({})
        with pytest.raises(UsageError, match="keeps no residuals"):
            plain.load_state_dict(averager.state_dict())


def test_feedback_of_a_codec_that_does_not_round_is_refused() -> None:
    with pytest.raises(UsageError, match="no error to feed back"):
        ErrorFeedback("identity")


def test_warm_up_falls_by_quarters_to_the_share() -> None:
    for scheme, shares in (
        (ChunkTopK(), [0.01] * 9),
        # As in Deep Gradient Compression: 25 %, 6.25 %, 1.5625 %, and then the given share.
        (ChunkTopK(0.01, warm_up=6), [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.01] * 3),
        (ChunkTopK(0.001, warm_up=4), [0.25, 0.0625, 0.015625, 0.00390625] + [0.001] * 5),
        (ChunkTopK(0.1, warm_up=7), [0.25] * 7 + [0.1] * 2),
        (ChunkTopK(0.3, warm_up=7), [0.3] * 9),
        (ChunkTopK(1.0, warm_up=7), [1.0] * 9),
    ):
        codecs = [scheme.codec(step) for step in range(9)]
        assert codecs == [top_k(share, 8) for share in shares], scheme


def test_a_share_of_a_chunk_is_at_least_one_element() -> None:
    assert [top_k(share, 8).keep for share in (1e-9, 0.01, 0.25, 1.0)] == [1, 41, 1024, 4096]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"share": 0.0}, "share must be more than 0 and at most 1"),
        ({"share": 1.5}, "share must be"),
        ({"share": "1%"}, "share must be a number, got '1%'"),
        ({"warm_up": None}, "warm_up must be a number, got None"),
        ({"share": float("nan")}, "share must be"),
        ({"bits": 4}, "bits must be 8 or 2"),
        ({"warm_up": -1}, "warm_up must be a number of steps"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        ChunkTopK(**wrong)


def test_top_k_is_refused_where_ranks_share_a_host_and_there_are_others() -> None:
    for hosts in ((0, 1, 2), (0, 0, 0), (0,)):
        check_hosts(ChunkTopK(), hosts)
    check_hosts(ErrorFeedback("bf16"), (0, 1, 1))
    with pytest.raises(Unsupported, match="ranks 1, 2 share a host"):
        check_hosts(ChunkTopK(), (0, 1, 1))
