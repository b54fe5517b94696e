"""Uses of wrappers, models and gradients that work, and those refused by name."""

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.ddp_training import Boxed, assert_averaged, inputs, mine, whole, wrap
from process.shared_ranks import Case, SharedRanks, cases_in, in_torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from shoal.errors import Unsupported, UsageError


def small() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 5, dtype=torch.float64), nn.Linear(5, 3, dtype=torch.float64))
    for seed, parameter in enumerate(net.parameters()):
        parameter.data = whole(tuple(parameter.shape), seed)
    return net


def step(wrapped: nn.Module, net: nn.Module) -> None:
    """Make one backward pass, and check its gradients against those of all inputs."""
    data, _ = inputs(0)
    net.zero_grad()
    wrapped(mine(data)).sum().backward()
    assert_averaged(net, data)


def n_hooks(net: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in net.parameters())


def case_a_dropped_wrapper_is_freed_without_the_cycle_collector() -> None:
    views, unused = {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}
    gc.collect()
    gc.disable()
    for options in ({}, views, unused, {"static_graph": True}, {"check_same": 1}, None):
        net = small()
        wrapped = wrap(net, **(options or {}))
        if options is None:
            wrapped.register_comm_hook(None, allreduce_hook)
        for _ in range(2):
            step(wrapped, net)
        reducer = wrapped.reducer
        held = [weakref.ref(one) for one in (wrapped, reducer, reducer.averaging)]
        if options is not None:
            held.append(weakref.ref(reducer.averaging.averager))
        del wrapped, reducer
        assert [one() for one in held] == [None] * len(held), options
        assert n_hooks(net) == 0
    gc.enable()


def case_the_model_of_a_copied_wrapper_can_be_wrapped_again() -> None:
    for made in (copy.deepcopy, lambda wrapped: pickle.loads(pickle.dumps(wrapped))):
        copied = made(wrap(small(), check_same=2))
        net = copied.module
        step(copied, net)
        again = wrap(net)
        step(again, net)
        step(copied, net)
        del copied
        gc.collect()
        assert n_hooks(net) == len(list(net.parameters()))
        step(again, net)


def case_scripted_models_are_trained() -> None:
    net = small()
    wrapped = wrap(torch.jit.script(net))  # type: ignore[no-untyped-call]
    for _ in range(2):
        step(wrapped, net)


def add_for_none(model: nn.Module) -> str:
    del model.absent
    model.late = nn.Parameter(torch.zeros(2))
    return "late"


def convert(model: nn.Module) -> str:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model.float().double()
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    return "0.weight, 0.bias, 1.weight, 1.bias"


def write_parameter(model: nn.Module) -> str:
    model[1]._parameters["bias"] = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    return "1.bias"


CHANGES: list[Callable[[Any], str]] = [add_for_none, convert, write_parameter]


def case_parameters_registered_after_wrapping_are_named() -> None:
    for change in CHANGES:
        net = small()
        net.register_parameter("absent", None)
        wrapped = wrap(net)
        step(wrapped, net)
        names = change(net)
        for _ in range(2):
            with pytest.raises(UsageError, match=f"parameter {names} was registered on rank"):
                wrapped(mine(inputs(0)[0]))


def case_parameters_that_change_requires_grad_are_named_and_can_be_wrapped_again() -> None:
    net = small()
    wrapped = wrap(net)
    step(wrapped, net)
    net[0].requires_grad_(False)
    given = mine(inputs(0)[0])
    wrapped(given).sum().backward()
    with pytest.raises(RuntimeError, match=r"Of these 0\.weight, 0\.bias required a gradient when"):
        wrapped(given)
    wrapped = wrap(net)  # as the error advises
    step(wrapped, net)
    net[0].requires_grad_(True)
    with torch.no_grad():
        wrapped(given)
    with pytest.raises(UsageError, match=r"parameter 0\.weight, 0\.bias requires a gradient now"):
        wrapped(given)
    step(wrap(net), net)
    unused = wrap(net, find_unused_parameters=True)
    net[1].weight.requires_grad_(False)
    step(unused, net)


def case_a_call_with_other_trained_parameters_is_refused() -> None:
    net = small()
    wrapped = wrap(net)
    given = mine(inputs(0)[0])
    values = {name: one.detach() * 2 for name, one in wrapped.named_parameters()}
    torch.func.functional_call(wrapped, values, (given,))  # they are not trained
    step(wrapped, net)
    trained = {name: one.requires_grad_() for name, one in values.items()}
    with pytest.raises(UsageError, match=r"parameter 0.weight.* was registered on rank"):
        torch.func.functional_call(wrapped, trained, (given,))


def case_parameters_without_their_hooks_are_named() -> None:
    given = mine(inputs(0)[0])
    for is_boxed, unused in itertools.product((False, True), (False, True)):
        model = Boxed(small()) if is_boxed else small()
        wrapped = wrap(model, find_unused_parameters=unused)
        if is_boxed:  # only the next forward pass can notice this one
            wrapped(given)
        for parameter in model.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        with pytest.raises(UsageError, match=r"0\.weight has lost its hook on rank"):
            wrapped(given).sum().backward()


def case_a_model_converted_to_another_dtype_is_refused() -> None:
    net = small()
    wrapped = wrap(net)
    step(wrapped, net)
    wrapped.to(torch.bfloat16)
    wrapped.zero_grad()
    with pytest.raises(UsageError, match=r"is bfloat16.*but was float64.*wrap `model.module`"):
        wrapped(mine(inputs(0)[0]).bfloat16()).sum().backward()


@pytest.mark.parametrize("n_ranks", [1, 2])
@in_torch("ranks")
def test_two_parameters_that_share_a_gradient_are_named_on_every_rank(n_ranks: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapped = wrap(model)
    if dist.get_rank() < n_ranks:
        model[0].weight.grad = model[1].weight.grad = torch.zeros(3, 3)
    else:  # this rank has its averages, and gets the error in the next pass
        wrapped(torch.ones(2, 3)).sum().backward()
    with pytest.raises(UsageError, match=r"parameters 0\.weight and 1\.weight are one tensor"):
        wrapped(torch.ones(2, 3)).sum().backward()


def case_an_expanded_gradient_of_one_rank_ends_the_pass_on_every_rank() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapped = wrap(model)
    if dist.get_rank() == 1:
        model[0].weight.register_post_accumulate_grad_hook(
            lambda weight: setattr(weight, "grad", torch.ones(1).expand(3, 3))
        )
    with pytest.raises(UsageError, match=r"gradient of parameter 0\.weight is an expanded tensor"):
        wrapped(torch.ones(2, 3)).sum().backward()


class Again(nn.Module):
    """Recomputes its parts in the backward pass, which its output does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, given: torch.Tensor) -> Any:
        for part in (self.used, self.idle):
            given = checkpoint(part, given, use_reentrant=True)
        return lambda: given


def case_gradients_computed_in_a_nested_pass_are_refused() -> None:
    for option in ("find_unused_parameters", "static_graph"):
        wrapped = wrap(Again(), **{option: True})
        output = wrapped(torch.ones(2, 3, requires_grad=True))()
        with pytest.raises(UsageError, match=r"of parameter idle.*use_reentrant=False"):
            output.sum().backward()


def case_sparse_or_delayed_gradients_are_refused_with_weights_or_checks() -> None:
    sparse = nn.Sequential(nn.Embedding(2, 1, sparse=True), nn.Linear(1, 1))
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    delayed: dict[str, Any] = {"delay_all_reduce_named_params": [("1.weight", net[1].weight)]}
    delayed["param_to_hook_all_reduce"] = net[0].weight
    for option in ("weighted", "check_finite"):
        with pytest.raises(Unsupported, match=rf"{option} cannot be used with .* 0\.weight has"):
            wrap(sparse, **{option: True})
        with pytest.raises(Unsupported, match=f"{option} cannot be used with delay_all_reduce_na"):
            wrap(net, **{option: True}, **delayed)
    wrap(sparse)(torch.tensor([0])).sum().backward()


def case_a_weight_of_a_pass_in_no_sync_is_refused() -> None:
    net = nn.Linear(1, 1, bias=False)
    wrapped = wrap(net, weighted=True)
    wrapped.weigh(10)
    with wrapped.no_sync():
        with pytest.raises(UsageError, match=r"in no_sync\(\).*only before that pass"):
            wrapped(torch.ones(1, 1))
        wrapped(torch.ones(1, 1))  # that weight is dropped
    with pytest.raises(UsageError, match=r"call model\.weigh\(n\) before it"):
        wrapped(torch.ones(1, 1))
    wrapped.weigh(10)  # the group and the wrapper go on
    wrapped(torch.full((1, 1), 4.0)).sum().backward()
    assert net.weight.grad.item() == 4.0


def case_a_sum_of_passes_has_the_weight_of_the_pass_that_averages_it() -> None:
    rank, net = dist.get_rank(), nn.Linear(1, 1, bias=False)

    def passed(value: float) -> torch.Tensor:
        """Return a loss whose gradient is this value."""
        return wrapped(torch.full((1, 1), value)).sum()  # type: ignore[no-any-return]

    wrapped = wrap(net, weighted=True)
    for number in range(2):  # rank 0 has 40 samples and rank 1 has 120, in two passes each
        net.zero_grad()
        with wrapped.no_sync():
            passed(4.0 * rank).backward()
        wrapped.weigh((40, 120)[rank] + number)
        loss = passed(8.0)
        with wrapped.no_sync():
            passed(0.0)  # this forward pass has no backward pass
        loss.backward(retain_graph=True)
        share = (120 + number) / (160 + 2 * number)
        assert net.weight.grad.item() == pytest.approx(4.0 * share + 8.0)
        net.zero_grad()
        loss.backward()  # with the weight of its forward pass
        assert net.weight.grad.item() == pytest.approx(8.0)


def case_a_rank_without_further_inputs_has_weight_zero() -> None:
    rank = dist.get_rank()
    for divides in (True, False):
        net = nn.Linear(1, 1, bias=False)
        wrapped = wrap(net, weighted=True)
        with wrapped.join(divide_by_initial_world_size=divides):
            for number in range(1 + rank):
                net.zero_grad()
                wrapped.weigh(1 + rank)
                wrapped(torch.full((1, 1), 6.0 * (1 + rank))).sum().backward()
                assert net.weight.grad.item() == (10.0 if number == 0 else 12.0)


def case_gradients_from_the_bare_model_count_on_the_rank_that_has_them() -> None:
    rank, given = dist.get_rank(), mine(inputs(0)[0])
    net = nn.ModuleDict({"used": nn.Linear(6, 3), "idle": nn.Linear(6, 3)}).double()
    net.forward = lambda data: net["used"](data).view(-1)  # type: ignore[method-assign]
    wrapped = wrap(net, find_unused_parameters=True)
    own = given.sum(0).expand(3, 6)
    if rank == 0:
        net["idle"](given).sum().backward()
        net(given).sum().backward()
    wrapped(given).mul_(1.0).sum().backward()
    for layer, factor in (("used", 2 - rank), ("idle", 1 - rank)):
        mean = own * factor
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        torch.testing.assert_close(net[layer].weight.grad, mean)


def first_element(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer()[:1])
    return done


def averages_nothing(state, bucket):  # torch looks at annotations, if there are any
    """Return no future."""


def case_a_hook_that_returns_another_length_or_no_future_is_refused() -> None:
    sparse = nn.Embedding(2, 6, sparse=True)
    for net, hook, words in (
        (small(), first_element, r"hook made 1 elements of bucket 0, which has \d+"),
        (small(), averages_nothing, r"averages_nothing returned None .*0.*torch\.futures\.Future"),
        (sparse, averages_nothing, r"averages_nothing returned None .*0.*torch\.futures\.Future"),
    ):
        wrapped = wrap(net)
        wrapped.register_comm_hook(None, hook)
        given = torch.tensor([1]) if net is sparse else inputs(0)[0]
        with pytest.raises(UsageError, match=words):
            wrapped(given).sum().backward()


def case_missing_methods_of_torchs_reducer_are_refused_by_name() -> None:
    wrapped = wrap(small())
    for name in ("_set_sparse_metadata", "_run_comm_hook"):
        with pytest.raises(Unsupported, match=name):
            getattr(wrapped.reducer, name)(None)


def case_wrappers_of_other_parameters_may_not_share_the_state_of_power_sgd() -> None:
    net, other, state = small(), small(), powerSGD_hook.PowerSGDState(None)
    first = wrap(net)
    first.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    again, refused = wrap(net), wrap(other)
    again.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # it goes on with the same buckets
    with pytest.raises(UsageError, match="this PowerSGDState holds the residuals of another"):
        refused.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    refused.register_comm_hook(None, allreduce_hook)
    step(refused, other)
    step(again, net)


@pytest.mark.parametrize("case", cases_in(globals()))
def test_wrapper(case: Case, ranks: SharedRanks) -> None:
    ranks.run(case)
