"""Wrappers that share parameters: each averages the gradients of its own backward passes."""

import pytest
import torch
import torch.distributed as dist
from process.ddp_training import Boxed, Gradients, Wrap, gradients, randoms, run_case
from process.ddp_training import wrap as wrap_ours
from process.shared_ranks import Case, SharedRanks, cases_in
from torch import nn

import shoal


def two_heads() -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return a model with an encoder and two heads, and each head's model with that encoder."""
    torch.manual_seed(0)
    encoder, first, second = nn.Linear(6, 10), nn.Linear(10, 3), nn.Linear(10, 2)
    whole = nn.ModuleList([encoder, first, second]).double()
    return whole, nn.Sequential(encoder, first), nn.Sequential(encoder, second)


def case_models_that_share_an_encoder_train_in_turn(wrap: Wrap) -> list[Gradients]:
    whole, one, other = two_heads()
    a, b, seen = wrap(one), wrap(other), []
    is_ours = not isinstance(a.reducer, dist.Reducer)
    for number in range(6):
        if number % 2 == 0:
            whole.zero_grad(set_to_none=number % 4 == 0)
        if number == 3 and is_ours:  # torch's own wrapper then counts b's gradients as a's
            a(randoms(50))
        (a if number in (0, 1, 4) else b)(randoms(number)).pow(2).sum().backward()
        seen.append(gradients(whole))
        with a.no_sync():
            a(randoms(number + 20)).pow(2).sum().backward()
        b(randoms(number + 30)).pow(2).sum().backward()
        seen.append(gradients(one[0]))
    return seen


def case_an_old_wrapper_of_a_model_goes_on_beside_the_new_one(wrap: Wrap) -> list[Gradients]:
    net = two_heads()[1]
    old, seen = wrap(net), []
    new = wrap(net, find_unused_parameters=True)
    for number, wrapped in enumerate((old, new, new, old, old, new)):
        net.zero_grad()
        wrapped(randoms(number)).pow(2).sum().backward()
        seen.append(gradients(net))
    return seen


def case_wrappers_of_static_graphs_learn_only_from_their_own_passes(wrap: Wrap) -> list[Gradients]:
    net = two_heads()[1]
    first, seen = wrap(net), []
    is_ours = not isinstance(first.reducer, dist.Reducer)  # torch's leaves gradients local
    one, other = (wrap(net, static_graph=is_ours) for _ in range(2))
    for number, wrapped in enumerate((one, other, other, one)):
        net.zero_grad()
        wrapped(randoms(number)).pow(2).sum().backward()
        seen.append(gradients(net))
    return seen


def averaged(net: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss's derivatives, averaged over all ranks."""
    found = torch.autograd.grad(loss, list(net.parameters()))
    for one in found:
        dist.all_reduce(one)
    return [one / dist.get_world_size() for one in found]


def case_both_forward_passes_may_precede_both_backward_passes() -> None:
    whole, one, other = two_heads()
    wanted = averaged(whole, one(randoms(0)).pow(2).sum() + other(randoms(1)).pow(2).sum())
    a, b = (wrap_ours(net, weighted=True) for net in (one, other))
    for _ in range(2):
        whole.zero_grad()
        for wrapped in (a, b):
            wrapped.weigh(1)
        first, second = a(randoms(0)), b(randoms(1))
        second.pow(2).sum().backward()
        first.pow(2).sum().backward()
        torch.testing.assert_close(gradients(whole), wanted)


def case_a_buffer_filled_before_the_output_is_reached_stops_both_wrappers() -> None:
    """A parameter of one wrapper alone fills buffers before a gradient reaches its output."""
    whole, one, other = two_heads()
    one.only = nn.Parameter(torch.ones(64, dtype=torch.float64))
    a, b = wrap_ours(one), wrap_ours(other)
    loss = one(randoms(0)).pow(2).sum() + other(randoms(1)).pow(2).sum()
    wanted = averaged(whole, loss)
    for _ in range(2):
        whole.zero_grad()
        first = a(randoms(0)).pow(2).sum() + one.only.pow(2).sum()
        second = b(randoms(1)).pow(2).sum()
        first.backward()
        second.backward()
        torch.testing.assert_close(gradients(whole), wanted)


def case_no_sync_passes_do_not_average_gradients_of_the_other_wrapper() -> None:
    """Run no_sync passes before, between and after the other's passes, or in one pass."""
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        whole, one, other = two_heads()
        a, b = wrap_ours(one), wrap_ours(other, **options)
        wanted = averaged(whole[0], one(randoms(0)).pow(2).sum() + other(randoms(1)).pow(2).sum())
        for is_later, at_once in ((False, False), (True, False), (False, True), (True, True)):
            whole.zero_grad()
            second = b(randoms(1)).pow(2).sum() if is_later else None
            with a.no_sync():
                first = a(randoms(0)).pow(2).sum()
            if second is None:
                second = b(randoms(1)).pow(2).sum()
            if at_once:
                second = second + first
            else:
                local = torch.autograd.grad(first, list(one.parameters()), retain_graph=True)
                first.backward()
                torch.testing.assert_close(gradients(one), [*local], rtol=0, atol=0)
            second.backward()
            torch.testing.assert_close(gradients(whole[0]), wanted)


def case_a_backward_pass_through_both_wrappers_is_refused_with_a_parameter() -> None:
    whole, one, other = two_heads()
    a, b = wrap_ours(one), wrap_ours(other)
    with pytest.raises(shoal.UsageError, match=r"0\.weight is in two wrapped models, and one"):
        (a(randoms(0)).sum() + b(randoms(0)).sum()).backward()
    whole.zero_grad()
    wanted = averaged(whole[:2], one(randoms(0)).pow(2).sum())
    a(randoms(0)).pow(2).sum().backward()  # the refused pass leaves no trace
    torch.testing.assert_close(gradients(one), wanted)
    boxed = wrap_ours(Boxed(one))
    boxed(randoms(0))().sum().backward()
    b(randoms(0))
    with pytest.raises(shoal.UsageError, match="output of one of the two passes has no tensors"):
        boxed(randoms(0))


def case_a_no_sync_pass_without_output_tensors_is_refused_beside_another_wrapper() -> None:
    _, one, other = two_heads()
    a, _other = wrap_ours(Boxed(one)), wrap_ours(other)
    with a.no_sync(), pytest.raises(shoal.UsageError, match=r"0\.weight.* no_sync\(\) has no "):
        a(randoms(0))
    with a.no_sync(), torch.no_grad():
        a(randoms(0))


def case_a_pass_of_one_wrapper_inside_the_others_step_is_refused() -> None:
    _, one, other = two_heads()
    a, b = wrap_ours(one), wrap_ours(other)
    output = a(randoms(0))
    last = list(one.parameters())[-2:]
    torch.autograd.backward(output.sum(), inputs=last)  # the rest follows in another pass
    with pytest.raises(shoal.UsageError, match="waits for the rest: run its backward passes first"):
        b(randoms(0)).sum().backward()


@pytest.mark.parametrize("case", cases_in(globals()))
def test_wrappers_that_share_parameters(case: Case, ranks: SharedRanks) -> None:
    ranks.run(run_case, case)
