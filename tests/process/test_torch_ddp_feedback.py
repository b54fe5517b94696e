"""`compress=ErrorFeedback` of the wrapper, compared with the NumPy model of the scheme."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process.ddp_training import fail, wrap
from process.shared_ranks import Case, SharedRanks, cases_in, in_torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from unit.feedback_model import Arrays, FeedbackModel

from shoal.average import ChunkTopK, ErrorFeedback
from shoal.errors import Unsupported

SHAPES = {"first": (9, 5), "second": (333,), "third": (2, 3, 4)}
NAMES = list(SHAPES)
SIZE = 2


class Net(nn.Module):
    """Each parameter's gradient is the value passed to the forward pass for it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, wanted: Arrays) -> torch.Tensor:
        parts = [(getattr(self, n) * torch.from_numpy(g)).sum() for n, g in wanted.items()]
        return torch.stack(parts).sum()


def gradients(step: int, left_out: Sequence[Sequence[str]] = ((), ())) -> list[Arrays]:
    """Return, by rank, multiples of 1/8 that bfloat16 cannot hold and whose sums are exact."""
    return [
        {
            name: np.random.default_rng([step, rank, at]).integers(-4096, 4096, shape) / 8
            for at, (name, shape) in enumerate(SHAPES.items())
            if name not in left_out[rank]
        }
        for rank in range(SIZE)
    ]


def as_float32(given: list[Arrays]) -> list[Arrays]:
    return [{name: one.astype(np.float32) for name, one in arrays.items()} for arrays in given]


def feeding(net: nn.Module | None = None, **options: Any) -> Any:
    return wrap(net or Net(), compress=ErrorFeedback("bf16"), **options)


def backward(wrapped: Any, given: list[Arrays]) -> None:
    wrapped.zero_grad()
    wrapped(as_float32(given)[dist.get_rank()]).backward()


def check(wrapped: Any, model: FeedbackModel, given: list[Arrays]) -> None:
    """Take one step here and in the model, and compare gradients and residuals to the bit."""
    backward(wrapped, given)
    check_averages(wrapped, model.step(as_float32(given)))
    check_residuals(wrapped, model)


def check_averages(wrapped: Any, averages: Arrays) -> None:
    for name, average in averages.items():
        np.testing.assert_array_equal(getattr(wrapped.module, name).grad.numpy(), average, name)


def check_residuals(wrapped: Any, model: FeedbackModel) -> None:
    held = wrapped.feedback_state_dict()["residuals"]
    assert list(held) == NAMES
    for name, residual in model.residuals[dist.get_rank()].items():
        np.testing.assert_array_equal(held[name].numpy(), residual, name)


@pytest.mark.parametrize(
    "option", ["", "gradient_as_bucket_view", "static_graph", "find_unused_parameters"]
)
@in_torch("ranks")
def test_steps_equal_the_model(option: str) -> None:
    options = {option: True} if option else {}
    wrapped, model = feeding(**options), FeedbackModel(SIZE, SHAPES)
    for step in range(4):
        check(wrapped, model, gradients(step))


def case_no_sync_passes_accumulate_and_are_rounded_once() -> None:
    wrapped, model = feeding(), FeedbackModel(SIZE, SHAPES)
    check(wrapped, model, gradients(0))
    parts = [as_float32(gradients(step)) for step in (1, 2, 3)]
    wrapped.zero_grad()
    with wrapped.no_sync():
        for part in parts[:2]:
            wrapped(part[dist.get_rank()]).backward()
    check_residuals(wrapped, model)
    wrapped(parts[2][dist.get_rank()]).backward()
    total = [{n: sum(part[rank][n] for part in parts) for n in NAMES} for rank in range(SIZE)]
    check_averages(wrapped, model.step(total))
    check_residuals(wrapped, model)


def case_top_k_keeps_unsent_values() -> None:
    wrapped = wrap(Net(), compress=ChunkTopK(0.25))
    backward(wrapped, gradients(0))
    residuals = wrapped.feedback_state_dict()["residuals"]
    given = as_float32(gradients(0))
    for name in NAMES:
        dist.all_reduce(residuals[name])
        arrived = getattr(wrapped.module, name).grad * SIZE
        assert residuals[name].any()
        assert torch.equal(arrived + residuals[name], torch.from_numpy(sum(g[name] for g in given)))


def case_a_parameter_that_no_rank_used_keeps_its_residual() -> None:
    wrapped, model = feeding(find_unused_parameters=True), FeedbackModel(SIZE, SHAPES)
    for step, left_out in enumerate([((), ()), (["second"], ["first", "second"]), ((), ["third"])]):
        check(wrapped, model, gradients(step, left_out))


def case_clipping_after_the_average_does_not_change_residuals() -> None:
    wrapped, model = feeding(gradient_as_bucket_view=True), FeedbackModel(SIZE, SHAPES)
    for step in range(3):
        check(wrapped, model, gradients(step))
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        check_residuals(wrapped, model)


def case_a_step_skipped_by_the_gradient_scaler_does_not_change_residuals() -> None:
    wrapped, model = feeding(), FeedbackModel(SIZE, SHAPES)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        given = as_float32(gradients(step))
        if step == 1:
            given[1]["second"][7] = np.inf
        scale = np.float32(scaler.get_scale())  # 4, and 2 after the skipped step
        scaled = [{name: one * scale for name, one in arrays.items()} for arrays in given]
        before = {name: getattr(wrapped.module, name).detach().clone() for name in NAMES}
        wrapped.zero_grad()
        scaler.scale(wrapped(given[dist.get_rank()])).backward()
        averages = model.step(scaled)
        check_averages(wrapped, averages)
        check_residuals(wrapped, model)
        scaler.step(optimizer)
        scaler.update()
        for name in NAMES:
            moved = before[name].numpy() - (0 if step == 1 else averages[name] / scale)
            np.testing.assert_array_equal(getattr(wrapped.module, name).detach().numpy(), moved)


def case_a_rank_without_inputs_sends_its_residuals() -> None:
    wrapped, model = feeding(), FeedbackModel(SIZE, SHAPES)
    rank = dist.get_rank()
    with wrapped.join():
        for step in range(3 if rank == 0 else 1):
            given = as_float32(gradients(step, ((), NAMES if step else ())))
            wrapped.zero_grad()
            wrapped(given[rank]).backward()
            check_averages(wrapped, model.step(given))
    if rank:
        for step in (1, 2):
            model.step(as_float32(gradients(step, ((), NAMES))))
    check_residuals(wrapped, model)


def case_a_pass_that_raised_on_all_ranks_does_not_change_residuals() -> None:
    wrapped, model = feeding(), FeedbackModel(SIZE, SHAPES)
    for step in range(3):
        check(wrapped, model, gradients(step))
        failing = wrapped.module.first.register_hook(fail)
        with pytest.raises(ValueError, match="not this time"):
            backward(wrapped, gradients(9))  # other gradients of this pass have been sent
        failing.remove()


def case_a_saved_state_continues_bitwise_in_another_wrapper() -> None:
    wrapped, model = feeding(), FeedbackModel(SIZE, SHAPES)
    for step in range(2):
        check(wrapped, model, gradients(step))
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in NAMES]
    saved = io.BytesIO()
    torch.save(wrapped.feedback_state_dict(), saved)
    saved.seek(0)
    anew = feeding(wrapped.module)
    anew.load_feedback_state_dict(torch.load(saved, weights_only=True))
    for step in range(2, 4):
        check(anew, model, gradients(step))


def case_gradients_that_are_kept_in_float32_are_compressed() -> None:
    net = Net(torch.bfloat16)
    if not hasattr(net.first, "grad_dtype"):
        return  # torch before 2.10
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    wrapped = feeding(net)
    backward(wrapped, gradients(0))
    assert wrapped.module.first.grad.dtype is torch.float32
    assert wrapped.feedback_state_dict()["residuals"]["first"].shape == (9, 5)


def case_a_communication_hook_is_refused_beside_feedback() -> None:
    wrapped = feeding()
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"compress.*with communication hooks"):
            wrapped.register_comm_hook(None, allreduce_hook)


@pytest.mark.parametrize("case", cases_in(globals()))
def test_feedback(case: Case, ranks: SharedRanks) -> None:
    ranks.run(case)
