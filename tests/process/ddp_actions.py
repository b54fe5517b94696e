"""Actions of a training program: the table from which random programs are drawn.

The name of an action is a sentence that its function carries out. A program is a list of actions.
Each draws from `run.source`, which is equal on all ranks, or from `run.own`, which differs by rank;
both are independent of earlier actions.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    from process.ddp_fuzz import Run

PASS: Final = "brings averaged gradients"
GRADIENT: Final = "does something to gradients, before a step or after it"
BETWEEN: Final = "comes between two steps"
ZERO: Final = "forgets gradients"
STEP: Final = "steps"


class Action(NamedTuple):
    """An action and its requirements.

    Args:
        kind: its place in a step.
        may_be_refused: an error on every rank is as acceptable as training on.
        torch: torch's own wrapper handles it; otherwise only the mean is compared.
        torch_unless: options and features with which torch's wrapper fails.
        static: it is allowed with static_graph.
    """

    call: Callable[[Run], None]
    kind: str
    may_be_refused: bool = False
    torch: bool = True
    torch_unless: tuple[str, ...] = ()
    static: bool = True


ACTIONS: Final[dict[str, Action]] = {}


def action(kind: str, **flags: Any) -> Callable[[Any], Any]:
    def add(call: Callable[[Run], None]) -> Callable[[Run], None]:
        ACTIONS[call.__name__] = Action(call, kind, **flags)
        return call

    return add


@action(PASS)
def a_pass_is_averaged(run: Run) -> None:
    run.backward(run.loss())


@action(PASS, static=False)
def gradients_are_summed_without_averaging_first(run: Run) -> None:
    with run.wrapped.no_sync():
        for _ in range(run.source.randint(0, 1)):
            run.backward(run.loss())
        loss = run.loss()
    run.backward(loss)
    run.backward(run.loss())


@action(PASS, static=False, torch_unless=("find_unused_parameters",))
def the_losses_of_two_forward_passes_are_added(run: Run) -> None:
    run.backward(run.loss() + run.loss())


@action(PASS)
def a_loss_is_scaled_and_gradients_are_scaled_back(run: Run) -> None:
    run.backward(run.loss() * 2.0**10)
    for parameter in run.dense():
        if parameter.grad is not None:
            parameter.grad.mul_(2.0**-10)


@action(PASS)
def two_losses_are_combined_by_hand(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward(run.loss())
    first = [
        p.grad.clone() if run.has_views and p.grad is not None else p.grad for p in run.dense()
    ]
    run.optimizer.zero_grad()
    run.backward(run.loss())
    for parameter, gradient in zip(run.dense(), first, strict=True):
        if gradient is not None and parameter.grad is not None:
            parameter.grad = gradient * 0.25 + parameter.grad * 0.75


@action(PASS)
def weights_move_along_the_gradient_and_back(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward(run.loss())
    moved = [(p, p.grad) for p in run.dense() if p.grad is not None and p.dtype == torch.float64]
    before = [parameter.detach().clone() for parameter, _ in moved]
    with torch.no_grad():
        for parameter, gradient in moved:
            parameter.add_(gradient, alpha=0.1)
    run.optimizer.zero_grad()
    run.backward(run.loss())
    with torch.no_grad():
        for (parameter, _), value in zip(moved, before, strict=True):
            parameter.copy_(value)


def shows_passes(run: Run) -> bool:
    """True if every backward pass reaches the output's tensors before a parameter."""
    return {"object", "penalty"}.isdisjoint(run.program.features)


@action(PASS, torch=False, static=False)
def two_backward_passes_follow_one_forward_pass(run: Run) -> None:
    loss = run.loss()
    run.backward(loss, retain_graph=True)
    if shows_passes(run):
        run.backward(loss)


@action(PASS, torch_unless=("static_graph",))
def a_derivative_is_computed_before_the_backward_pass(run: Run) -> None:
    loss = run.loss()
    if "reentrant" not in run.program.features:  # whose nested passes write gradients
        torch.autograd.grad(loss, run.dense(), retain_graph=True, allow_unused=True)
    run.backward(loss)


@action(PASS)
def hooks_scale_gradients_before_they_are_averaged(run: Run) -> None:
    def scale(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(1.0 if run.rank else 0.5)

    run.optimizer.zero_grad()
    parameters = run.dense()
    n_early = len(parameters) // 2 if shows_passes(run) else len(parameters)
    handles = [one.register_post_accumulate_grad_hook(scale) for one in parameters[:n_early]]
    loss = run.loss()
    handles += [one.register_post_accumulate_grad_hook(scale) for one in parameters[n_early:]]
    run.backward(loss)
    for handle in handles:
        handle.remove()


@action(PASS, static=False)
def the_model_is_evaluated_and_a_pass_is_averaged(run: Run) -> None:
    with torch.no_grad():
        run.loss()
    run.backward(run.loss())


@action(PASS, torch=False, static=False)
def a_pass_raises_on_every_rank_and_another_is_averaged(run: Run) -> None:
    def fail(_gradient: torch.Tensor) -> None:
        raise ArithmeticError

    order = run.own.sample(range(3), 3)
    handle = run.net.layers[0].weight.register_hook(fail)
    try:
        run.loss(order=order).backward()
    except ArithmeticError:
        pass
    else:
        raise AssertionError("the pass was to raise")
    handle.remove()
    run.optimizer.zero_grad(set_to_none=run.source.random() < 0.5)
    run.backward(run.loss())


# Torch's own wrapper hangs in a join here, or averages other values.
_TORCH_JOINS_UNLESS: Final = ("find_unused_parameters", "static_graph", "sparse", "widened")


@action(PASS, torch_unless=_TORCH_JOINS_UNLESS)
def inputs_run_out_on_some_ranks_before_others(run: Run) -> None:
    divides = run.source.random() < 0.5
    n_inputs, later = run.own.randint(0, 2), run.later_seeds()
    with run.wrapped.join(divide_by_initial_world_size=divides):
        _train(run, n_inputs)
    _begin_again(run, later)


@action(PASS, torch_unless=_TORCH_JOINS_UNLESS)
def inputs_run_out_and_every_rank_stops(run: Run) -> None:
    n_inputs, later = run.own.randint(0, 2), run.later_seeds()
    if run.is_oracle:
        _train(run, run.wrapped.least(n_inputs))
    else:
        try:
            with run.wrapped.join(throw_on_early_termination=True):
                _train(run, n_inputs)
        except RuntimeError as error:
            if "exhausted" not in str(error):
                raise
    _begin_again(run, later)


def _train(run: Run, n_inputs: int) -> None:
    for _ in range(n_inputs):
        run.optimizer.zero_grad()
        run.backward(run.loss())
        run.optimizer.step()


def _begin_again(run: Run, later: tuple[float, float]) -> None:
    """Reset everything that differs by rank after a join: optimizer state, gradients, draws."""
    run.source.seed(later[0])
    run.own.seed(later[1])
    run.make_optimizer()
    run.optimizer.zero_grad()
    run.backward(run.loss())


@action(PASS, may_be_refused=True, torch=False, static=False)
def one_rank_leaves_a_layer_out(run: Run) -> None:
    leaves_out = run.rank == run.source.randrange(run.size)
    run.backward(run.loss(order=[0] if leaves_out else [0, 1, 2]))


@action(PASS, may_be_refused=True, torch=False, static=False)
def one_rank_goes_back_through_two_models_in_another_order(run: Run) -> None:
    other = run.another()
    passes = [(run, run.loss()), (other, run.loss(other.wrapped))]
    if run.rank == run.source.randrange(run.size) and not run.is_oracle:
        passes.reverse()
    for one, loss in passes:
        one.backward(loss)


@action(STEP)
def the_optimizer_steps(run: Run) -> None:
    run.optimizer.step()
    run.is_averaged = False


@action(ZERO)
def gradients_are_set_to_none(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=True)


@action(ZERO)
def gradients_are_zeroed_in_place(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


@action(ZERO)
def gradients_are_deleted(run: Run) -> None:
    for parameter in run.parameters():
        del parameter.grad


@action(GRADIENT, torch_unless=("gradient_as_bucket_view",))
def a_gradients_data_is_replaced(run: Run) -> None:
    for parameter in run.with_gradients():
        parameter.grad.data = parameter.grad.clone() * run.factor()


@action(GRADIENT)
def a_gradient_is_another_tensor(run: Run) -> None:
    for parameter in run.with_gradients():
        parameter.grad = parameter.grad.clone() * run.factor()


@action(GRADIENT)
def a_gradient_has_other_strides(run: Run) -> None:
    for parameter in run.with_gradients():
        if parameter.dim() == 2:
            parameter.grad = parameter.grad.t().clone(memory_format=torch.contiguous_format).t()


@action(GRADIENT)
def gradients_are_views_of_one_tensor_of_the_program(run: Run) -> None:
    chosen = [p for p in run.with_gradients() if p.grad.dtype == torch.float64]
    if chosen:
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in chosen])
        parts = flat.split([parameter.numel() for parameter in chosen])
        for parameter, part in zip(chosen, parts, strict=True):
            parameter.grad = part.view(parameter.shape)


@action(GRADIENT, torch=False)  # channels_last changes the order of elements
def the_model_becomes_channels_last(run: Run) -> None:
    run.net.to(memory_format=torch.channels_last)


@action(GRADIENT, torch_unless=("gradient_as_bucket_view",))
def the_model_visits_another_device(run: Run) -> None:
    run.net._apply(torch.clone)


@action(GRADIENT)
def gradients_are_kept_by_reference(run: Run) -> None:
    run.kept += [p.grad for p in run.dense() if p.grad is not None]


@action(GRADIENT)
def some_gradients_are_dropped(run: Run) -> None:
    for parameter in run.with_gradients():
        parameter.grad = None


@action(GRADIENT)
def gradients_are_clipped_by_norm(run: Run) -> None:
    # torch cannot scale a list that holds a conjugated tensor; a view is never conjugated.
    nn.utils.clip_grad_norm_([p for p in run.dense() if not p.is_complex()], 0.5)


@action(GRADIENT)
def gradients_are_clipped_by_value(run: Run) -> None:
    real = [p for p in run.dense() if p.grad is not None and not p.is_complex()]
    if real:
        nn.utils.clip_grad_value_(real, 0.125)


@action(BETWEEN)
def a_hook_doubles_a_gradient(run: Run) -> None:
    parameter = run.source.choice(run.dense())
    if run.acts_here():
        parameter.register_hook(lambda gradient: gradient * 2)


# torch's own wrapper counts these gradients as used in the next pass, even when dropped in between.
# It then raises on one rank alone that they are undefined, and the other ranks hang.
@action(BETWEEN, static=False, torch_unless=("find_unused_parameters",))
def one_rank_makes_a_pass_through_the_bare_module(run: Run) -> None:
    loss = run.loss(run.net)
    if run.rank == run.source.randrange(run.size):
        loss.backward()


@action(BETWEEN, static=False, torch_unless=("find_unused_parameters",))
def every_rank_makes_a_pass_through_the_bare_module(run: Run) -> None:
    run.loss(run.net).backward()


@action(BETWEEN)
def weights_are_clamped_in_place(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.parameters():
            if not parameter.is_complex():
                parameter.clamp_(-0.25, 0.25)


@action(BETWEEN)
def a_weights_data_is_replaced(run: Run) -> None:
    parameter = run.source.choice(run.dense())
    parameter.data = parameter.data.clone() * 0.5


@action(BETWEEN)
def weights_are_loaded_from_a_state_dict(run: Run) -> None:
    state = run.wrapped.state_dict()
    halves = {name: t / 2 if t.is_floating_point() else t for name, t in state.items()}
    run.wrapped.load_state_dict(halves)


@action(BETWEEN, may_be_refused=True, torch=False)
def parameters_are_replaced_by_a_state_dict(run: Run) -> None:
    state = {name: tensor.clone() for name, tensor in run.net.state_dict().items()}
    run.net.load_state_dict(state, assign=True)
    run.make_optimizer()


@action(BETWEEN)
def the_optimizer_is_loaded_from_a_state_dict(run: Run) -> None:
    state = copy.deepcopy(run.optimizer.state_dict())
    run.make_optimizer()
    run.optimizer.load_state_dict(state)


@action(BETWEEN, torch=False)
def one_rank_copies_the_wrapper(run: Run) -> None:
    if run.rank == run.source.randrange(run.size):
        copy.deepcopy(run.wrapped)


@action(BETWEEN, torch=False)
def one_rank_pickles_and_unpickles_the_wrapper(run: Run) -> None:
    if run.rank == run.source.randrange(run.size):
        pickle.loads(pickle.dumps(run.wrapped))


@action(BETWEEN, torch=False)
def one_rank_keeps_an_average_of_the_wrapper(run: Run) -> None:
    if run.rank == run.source.randrange(run.size):
        average = AveragedModel(run.wrapped)
        average.update_parameters(run.wrapped)


@action(BETWEEN, torch=False)
def every_rank_trains_a_copy_of_the_wrapper(run: Run) -> None:
    run.wrapped = copy.deepcopy(run.wrapped)
    run.net = run.wrapped.module
    run.make_optimizer()


@action(BETWEEN)
def the_model_is_wrapped_anew(run: Run) -> None:
    run.wrap()


@action(BETWEEN, may_be_refused=True, torch=False)
def a_trained_parameter_is_frozen(run: Run) -> None:
    run.net.layers[0].bias.requires_grad_(False)
    run.optimizer.zero_grad()
    run.make_optimizer()


@action(BETWEEN, may_be_refused=True, torch=False)
def a_frozen_parameter_is_trained(run: Run) -> None:
    run.net.layers[1].requires_grad_(True)
    run.make_optimizer()


@action(BETWEEN, may_be_refused=True, torch=False)
def the_model_is_converted_to_another_dtype(run: Run) -> None:
    run.optimizer.zero_grad()
    run.net._apply(lambda t: t.float() if t.dtype == torch.float64 else t)
    run.make_optimizer()
