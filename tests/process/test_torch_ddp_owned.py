"""Gradients, parameters and modules are the program's: what it does to them between steps.

Expected values are the mean of what each rank computes alone, or what torch's wrapper does.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_training import start, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))


def data(scale: float = 1.0) -> torch.Tensor:
    """This rank's."""
    return scale * torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(dist.get_rank()))


def alone(model: nn.Module, scale: float = 1.0) -> list[torch.Tensor]:
    """The mean over all ranks of what each computes alone, from zero."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(data(scale)).sum().backward()
    found = []
    for parameter in twin.parameters():
        every = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(every, parameter.grad.contiguous())
        found.append(torch.stack(every).mean(0))
    return found


def averaged(wrapped: Any, scale: float = 1.0) -> None:
    """One step, whose gradients are the mean of those of all ranks, and equal bits on all."""
    wanted = alone(wrapped.module, scale)
    wrapped(data(scale)).sum().backward()
    for parameter, mean in zip(wrapped.module.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, mean)
        every = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
        dist.all_gather(every, parameter.grad.contiguous())
        assert all(torch.equal(one, every[0]) for one in every)


# ---- gradients that are pointed elsewhere ----


def other_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data = torch.zeros_like(parameter)


def other_storage(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.set_(torch.zeros_like(parameter))


def other_format(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)
    model.zero_grad(set_to_none=False)


def shared_model(model: nn.Module) -> None:
    model.share_memory()
    model.zero_grad(set_to_none=False)


def shared_gradient(model: nn.Module) -> None:
    model[0].weight.grad.share_memory_()
    model.zero_grad(set_to_none=False)


def visited_device(model: nn.Module) -> None:
    model._apply(torch.clone)
    model.zero_grad(set_to_none=False)


def dropped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def repoint(actions: list[str], options: dict[str, Any]) -> None:
    start()
    for action in actions:
        wrapped = wrap(net(), **options)
        averaged(wrapped)
        globals()[action](wrapped.module)
        averaged(wrapped, 2.0)
        wrapped.zero_grad()
        averaged(wrapped, 3.0)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=["default", "views", "unused"],
)
def test_gradients_that_were_pointed_elsewhere_are_averaged(options: dict[str, Any]) -> None:
    actions = [other_data, other_storage, other_format, shared_model, shared_gradient]
    names = [action.__name__ for action in (*actions, visited_device, dropped)]
    run_ranks(repoint, 2, names, options)


# ---- gradients that are kept, saved and resized ----


def keep() -> None:
    start()
    wrapped = wrap(net())
    averaged(wrapped)
    weight, bias = wrapped.module[2].weight, wrapped.module[2].bias
    kept, held = weight.grad, weight.grad.clone()
    saved = io.BytesIO()
    torch.save(bias.grad, saved)
    assert torch.load(io.BytesIO(saved.getvalue())).untyped_storage().nbytes() == 8
    bias.grad.untyped_storage().resize_(0)
    wrapped.zero_grad()
    averaged(wrapped, 5.0)
    assert torch.equal(kept, held)
    first, second = wrapped.module[0], wrapped.module[0]
    first.weight.grad, second.weight.grad = second.weight.grad, first.weight.grad
    wrapped.zero_grad()
    averaged(wrapped)
    dist.destroy_process_group()


def test_gradients_that_the_program_keeps_hold_what_they_held() -> None:
    run_ranks(keep, 2)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.weight * given).sum()


def conjugate(options: dict[str, Any]) -> None:
    start()
    model = Complex()
    wrapped = wrap(model, **options)
    wrapped(torch.full((3,), 2 + 4j) * dist.get_rank()).backward()
    mean = model.weight.grad.clone()
    assert mean[0].imag
    if dist.get_rank() == 0:
        model.weight.grad = model.weight.grad.conj()
    wrapped(torch.zeros(3)).backward()
    assert torch.equal(model.weight.grad, (mean + mean.conj()) / 2)
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_a_gradient_with_a_conjugate_bit_counts_as_what_it_holds(options: dict[str, Any]) -> None:
    run_ranks(conjugate, 2, options)


def share_a_gradient(n_ranks: int) -> str:
    from shoal.errors import UsageError

    start()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapped = wrap(model)
    if dist.get_rank() < n_ranks:
        model[0].weight.grad = model[1].weight.grad = torch.zeros(3, 3)
    if dist.get_rank() >= n_ranks:  # these have their averages, and hear of it in the next pass
        wrapped(torch.ones(2, 3)).sum().backward()
    with pytest.raises(UsageError) as raised:
        wrapped(torch.ones(2, 3)).sum().backward()
    dist.destroy_process_group()
    return str(raised.value)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_two_parameters_with_one_gradient_are_named_on_every_rank(n_ranks: int) -> None:
    for said in run_ranks(share_a_gradient, 2, n_ranks):
        assert "the gradients of parameters 0.weight and 1.weight are one tensor" in said


def expand_a_gradient() -> str:
    from shoal.errors import UsageError

    start()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapped = wrap(model)
    if dist.get_rank() == 1:
        model[0].weight.register_post_accumulate_grad_hook(
            lambda weight: setattr(weight, "grad", torch.ones(1).expand(3, 3))
        )
    with pytest.raises(UsageError) as raised:
        wrapped(torch.ones(2, 3)).sum().backward()
    dist.destroy_process_group()
    return str(raised.value)


def test_an_expanded_gradient_of_one_rank_ends_the_pass_on_every_rank() -> None:
    for said in run_ranks(expand_a_gradient, 2):
        assert "the gradient of parameter 0.weight is an expanded tensor" in said


# ---- gradients that come in other ways ----


class View(nn.Module):
    """Gives a view of a tensor, on which the loss works in place: its hook never fires."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.used(given).view(-1)


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxed(View):
    def forward(self, given: torch.Tensor) -> Any:
        return Box(self.used(given))


def check_mean(weight: nn.Parameter, own: torch.Tensor) -> None:
    mean = own.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    torch.testing.assert_close(weight.grad, mean)


def come_unseen() -> None:
    start()
    given = torch.full((2, 3), 1.0 + dist.get_rank())
    for model, unwrap in ((View(), lambda out: out.mul_(2.0)), (Boxed(), lambda box: box.value)):
        wrapped = wrap(model, find_unused_parameters=True)
        for _ in range(2):
            wrapped.zero_grad()
            unwrap(wrapped(given)).sum().backward()
            factor = 2.0 if type(model) is View else 1.0
            check_mean(model.used.weight, factor * given.sum(0).expand(4, 3))
            assert model.idle.weight.grad is None
    wrapped = wrap(View(), find_unused_parameters=True)
    own = given.sum(0).expand(4, 3)
    if dist.get_rank() == 0:  # through the bare model, and through its other half
        wrapped.module.idle(given).sum().backward()
        wrapped.module(given).sum().backward()
        own = 2 * own
    wrapped(given).sum().backward()
    check_mean(wrapped.module.used.weight, own)
    check_mean(wrapped.module.idle.weight, (own / 2) * (dist.get_rank() == 0))
    dist.destroy_process_group()


def test_gradients_count_that_no_output_told_of_or_that_came_through_the_bare_model() -> None:
    run_ranks(come_unseen, 2)


class Again(Boxed):
    """Computes its parts again in the backward pass, which nothing in its output tells of."""

    def forward(self, given: torch.Tensor) -> Any:
        for part in (self.used, self.idle):
            given = checkpoint(part, given[:, :3], use_reentrant=True)
        return Box(given)


def come_in_an_inner_pass(option: str) -> None:
    from shoal.errors import UsageError

    start()
    wrapped = wrap(Again(), **{option: True})
    with pytest.raises(UsageError, match=r"of parameter idle.*use_reentrant=False"):
        wrapped(torch.ones(2, 3, requires_grad=True)).value.sum().backward()
    dist.destroy_process_group()


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_gradients_that_come_in_an_inner_pass_of_their_pass_are_refused(option: str) -> None:
    run_ranks(come_in_an_inner_pass, 2, option)


# ---- types ----


class Scaled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=dtype))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.weight.float() * given


def average_types() -> None:
    from shoal.errors import UsageError

    start()
    rank = dist.get_rank()
    half = wrap(Scaled(torch.float16))
    half(torch.full((4,), 30_000.0 * (rank + 1))).sum().backward()
    mean = torch.full((4,), 45_000.0, dtype=torch.float16)
    assert torch.equal(half.module.weight.grad, mean)  # the sum would be infinite
    wide = Scaled(torch.bfloat16)
    if hasattr(wide.weight, "grad_dtype"):
        wide.weight.grad_dtype = torch.float32
        wrapped = wrap(wide)
        value = 1 + 2**-20 * (rank + 1)  # bfloat16 would round it to 1
        wide.weight.grad = None
        (wrapped(torch.ones(4)).sum() * 0).backward()
        wide.weight.grad = torch.full((4,), value)
        wrapped(torch.zeros(4)).sum().backward()
        assert wide.weight.grad.dtype is torch.float32
        assert wide.weight.grad.tolist() == [1 + 1.5 * 2**-20] * 4
    wrapped = wrap(net())
    averaged(wrapped)
    wrapped.to(torch.bfloat16)
    wrapped.zero_grad()
    with pytest.raises(UsageError, match=r"is bfloat16.*was to be float32.*wrap `model.module`"):
        wrapped(data().bfloat16()).sum().backward()
    dist.destroy_process_group()


def test_float16_is_divided_first_and_a_gradient_has_the_type_that_it_had_when_wrapped() -> None:
    run_ranks(average_types, 2)


# ---- models that change, and copies ----


def add(model: nn.Module) -> str:
    model.late = nn.Parameter(torch.zeros(2))
    return "late"


def add_module(model: nn.Module) -> str:
    model.add_module("more", nn.Linear(2, 2))
    return "more.weight, more.bias"


def assign(model: nn.Module) -> str:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return "0.weight, 0.bias, 2.weight, 2.bias"


def write(model: nn.Module) -> str:
    for part in model:
        part._parameters.update((n, nn.Parameter(p.detach())) for n, p in part.named_parameters())
    return "0.weight, 0.bias, 2.weight, 2.bias"


def convert(model: nn.Module) -> str:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model.double().float()
    return "0.weight, 0.bias, 2.weight, 2.bias"


def write_module(model: nn.Module) -> str:
    model._modules["2"] = nn.Linear(12, 2)
    return "2.weight, 2.bias"


def add_for_none(model: nn.Module) -> str:
    del model.absent
    return add(model)


@pytest.mark.parametrize(
    "change", [add, add_module, assign, write, convert, write_module, add_for_none]
)
def test_parameters_registered_after_wrapping_are_named(change: Callable[[nn.Module], str]) -> None:
    run_ranks(register, 2, change.__name__)


def register(change: str) -> None:
    from shoal.errors import UsageError

    start()
    model = net()
    model.register_parameter("absent", None)
    wrapped = wrap(model)
    averaged(wrapped)
    names = globals()[change](wrapped.module)
    for _ in range(2):
        with pytest.raises(UsageError, match=f"parameter {names} was registered on rank"):
            wrapped(data())
    dist.destroy_process_group()


def copy_on_one_rank() -> None:
    start()
    wrapped = wrap(net())
    averaged(wrapped)
    if dist.get_rank() == 0:
        again = copy.deepcopy(copy.deepcopy(wrapped))
        assert pickle.loads(pickle.dumps(again)).module[2].bias.shape == (2,)
        mean = torch.optim.swa_utils.AveragedModel(wrapped)
        mean.update_parameters(wrapped)
        with torch.no_grad():
            assert torch.equal(mean(data()), wrapped(data()))
    wrapped.zero_grad()
    averaged(wrapped)
    used = pickle.loads(pickle.dumps(wrapped))  # on every rank
    used.zero_grad()
    averaged(used)
    dist.destroy_process_group()


def test_a_copy_makes_no_call_until_it_is_used() -> None:
    run_ranks(copy_on_one_rank, 2)


def ask_for_what_torchs_reducer_has() -> None:
    from shoal.errors import Unsupported

    start()
    wrapped = wrap(net())
    for name in ("_set_sparse_metadata", "_run_comm_hook"):
        with pytest.raises(Unsupported, match=name):
            getattr(wrapped.reducer, name)(None)
    dist.destroy_process_group()


def test_methods_of_torchs_reducer_that_are_not_there_are_refused_by_name() -> None:
    run_ranks(ask_for_what_torchs_reducer_has, 1)


# ---- passes that raise, and ranks without inputs ----


class Order(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, given: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for at in order:
            given = self.layers[at](given)
        return given


def fail(_: torch.Tensor) -> None:
    raise ArithmeticError


def raise_in_other_orders(options: dict[str, Any]) -> None:
    start()
    orders = [(2, 0, 1), (1, 0, 2), (1, 2, 0)]  # the last raises before anything has come
    model = Order()
    wrapped = wrap(model, bucket_cap_mb=64 / (1 << 20), **options)
    given = torch.full((2, 4), 1.0 + dist.get_rank())
    wrapped(given, (0, 1, 2)).sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    with model.layers[0].weight.register_hook(fail), pytest.raises(ArithmeticError):
        wrapped(given, orders[dist.get_rank()]).sum().backward()
    model.zero_grad()
    wrapped(given, (0, 1, 2)).sum().backward()
    for parameter, mean in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, mean)
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_a_pass_that_raised_is_forgotten_whatever_ranks_had_sent(options: dict[str, Any]) -> None:
    run_ranks(raise_in_other_orders, 3, options)


def join_without_any_input(by_all: bool, options: dict[str, Any]) -> None:
    start()
    wrapped = wrap(net(), **options)
    n_steps = 3 * dist.get_rank()  # rank 0 has none
    with wrapped.join(divide_by_initial_world_size=by_all):
        for _ in range(n_steps):
            wrapped.zero_grad()
            wrapped(data()).sum().backward()
    own = torch.cat([p.grad.flatten() for p in wrapped.parameters()]) if n_steps else None
    twin = copy.deepcopy(wrapped.module)
    twin.zero_grad()
    twin(data()).sum().backward()
    if own is not None:
        mean = torch.cat([p.grad.flatten() for p in twin.parameters()])
        torch.testing.assert_close(own, mean / 2 if by_all else mean)
    wrapped.zero_grad()
    averaged(wrapped)  # both have inputs again
    dist.destroy_process_group()


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "static_graph": True},
    ],
)
def test_a_rank_without_any_input_joins(options: dict[str, Any], by_all: bool) -> None:
    run_ranks(join_without_any_input, 2, by_all, options)
