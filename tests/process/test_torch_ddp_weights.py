"""Ranks that count by weight: what else of torch's wrapper that goes with."""

from __future__ import annotations

import importlib.util

import pytest
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_training import start, wrap
from torch import nn


def one_weight() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


def given(value: float) -> torch.Tensor:
    """An input of which the gradient is this value."""
    return torch.full((1, 1), value)


def refuse_beside_sparse() -> None:
    import shoal

    start()
    net = nn.Sequential(nn.Embedding(2, 1, sparse=True), one_weight())
    for option in ("weighted", "check_finite"):
        with pytest.raises(shoal.Unsupported, match=rf"{option} goes without .* 0\.weight has"):
            wrap(net, **{option: True})
    wrap(net)(torch.tensor([0])).sum().backward()
    dist.destroy_process_group()


def test_sparse_gradients_are_refused_where_they_would_not_be_weighed_or_looked_at() -> None:
    run_ranks(refuse_beside_sparse, 2)


def accumulate() -> None:
    start()
    rank = dist.get_rank()
    net = one_weight()
    wrapped = wrap(net, weighted=True)
    for step in range(2):  # rank 0 has 40 samples and rank 1 has 120, in two passes each
        net.zero_grad()
        with wrapped.no_sync():
            wrapped(given(4.0 * rank)).sum().backward()
        wrapped.weigh((40, 120)[rank] + step)
        output = wrapped(given(8.0)).sum()
        with wrapped.no_sync():
            wrapped(given(0.0))  # of which nothing comes back
        output.backward(retain_graph=True)
        share = (120 + step) / (160 + 2 * step)
        assert torch.allclose(net.weight.grad, given(4.0 * share + 8.0))
        net.zero_grad()
        output.backward()  # with the weight of its forward pass
        assert torch.allclose(net.weight.grad, given(8.0))
    dist.destroy_process_group()


def test_a_sum_of_passes_has_the_weight_of_the_pass_that_averages_it() -> None:
    run_ranks(accumulate, 2)


def weigh_in_no_sync() -> None:
    import shoal

    start()
    net = one_weight()
    wrapped = wrap(net, weighted=True)
    wrapped.weigh(10)
    with (
        wrapped.no_sync(),
        pytest.raises(shoal.UsageError, match=r"in no_sync\(\).*alone"),
    ):
        wrapped(given(1.0))
    wrapped.weigh(10)  # the group and the wrapper go on
    wrapped(given(4.0)).sum().backward()
    assert torch.allclose(net.weight.grad, given(4.0))
    dist.destroy_process_group()


def test_a_weight_of_a_pass_in_no_sync_is_refused() -> None:
    run_ranks(weigh_in_no_sync, 2)


def run_out_of_inputs() -> None:
    start()
    rank = dist.get_rank()
    for divides in (True, False):
        net = one_weight()
        wrapped = wrap(net, weighted=True)
        with wrapped.join(divide_by_initial_world_size=divides):
            for step in range(1 + rank):
                net.zero_grad()
                wrapped.weigh(1 + rank)
                wrapped(given(6.0 * (1 + rank))).sum().backward()
                assert torch.allclose(net.weight.grad, given(10.0 if step == 0 else 12.0))
    dist.destroy_process_group()


def test_a_rank_that_has_run_out_of_inputs_weighs_nothing() -> None:
    run_ranks(run_out_of_inputs, 2)
