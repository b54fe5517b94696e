"""The next forward pass begins before the last gradients are averaged.

An optimizer's step is put off: each module's parameters are stepped when the module is about to be
called, once their own averages are in. So the first layers compute while buffers of others are on
their way. Who waits for its averages has modules stepped meanwhile whose own are in: that takes no
time then. The arithmetic is that of one step for all, in the same order for each parameter.

Where the group ends before all averages are in, either nothing has been stepped and the step is
given up, or the model has a mixture: it is refused then, until another state of it is loaded.

Source: Peng et al., "ByteScheduler", SOSP 2019; Jayarajan et al., "P3", MLSys 2019.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from shoal.errors import PeerLost, ShoalError, Unsupported, UsageError
from shoal.frontend.torch.compiler import not_compiled
from shoal.frontend.torch.ddp.first_uses import FirstUses
from shoal.frontend.torch.ddp.overlap_hooks import HookedCall, KeptOverlap, StepInOverlap
from shoal.frontend.torch.ddp.pending import PendingGradient
from shoal.frontend.torch.ddp.put_off import StepInParts

if TYPE_CHECKING:
    from shoal.frontend.torch.ddp.averaged import FusedGradients

    Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

_NOTHING: Final = contextlib.nullcontext()
_ALL_STEPPED: Final = "all parameters have been stepped on this rank"

# A wrapper may be gone when its model is wrapped anew, and its model keep what it has put off.
_overlaps: Final[weakref.WeakSet[Overlap]] = weakref.WeakSet()


@not_compiled
class Overlap:
    """Steps parameters when they are needed.

    Parameters that are used before a call of the module that they belong to, or without one, are
    stepped before every forward pass; the first passes show which they are. So are those of
    compiled modules, which call no hooks of parts. What is called outside a forward pass, or in one
    that has no gradients, may use parameters in other ways: before that all are stepped.

    Args:
        module: the model.
        names: of the parameters.
    """

    def __init__(self, module: torch.nn.Module, fused: FusedGradients, names: list[str]) -> None:
        self._fused = fused
        self._names = names
        self._index = {id(p): index for index, p in enumerate(fused.gradients.parameters)}
        self._owned = {id(parameter) for parameter in module.parameters()}
        self._optimizer: torch.optim.Optimizer | None = None
        self._n_of_groups: list[int] = []  # the optimizer's parameters, when they were looked at
        self._pending = [
            PendingGradient(parameter, name)
            for parameter, name in zip(fused.gradients.parameters, names, strict=True)
        ]
        self._has_stepped = False
        self._is_open = False  # a step is on its way, or all of it is there and has not been ended
        self._on_their_way: set[int] = set()  # sent, and not yet averages
        self._step: StepInParts | None = None  # that was put off
        self._put_off: set[int] = set()  # what it steps
        self._mixed: set[int] = set()  # of these some were stepped and others will never be
        self._why: tuple[ShoalError, str] | None = None  # they will not
        self._is_in_forward = False  # in a pass that has gradients
        self._at_once: set[int] | None = None  # what no module's call announces in time
        self._parts: list[list[int]] = []  # of each module with parameters, in its order
        self._announced: set[int] = set()  # by calls of modules since they were sent
        self._called: set[int] = set()  # whose modules were called since the last pass began
        self._called_now: set[int] = set()  # in this forward pass
        self._first_uses = FirstUses(self._index, self._called_now)
        self._late: set[int] = set()  # stepped after the forward pass
        self._handles: list[Any] = []
        self._held = KeptOverlap(self)
        compiled = [part for part in module.modules() if _is_compiled(part)]
        self._compiled = {
            self._index[id(p)] for part in compiled for p in part.parameters() if self._has(p)
        }
        inside = {id(inner) for part in compiled for inner in part.modules() if inner is not part}
        for part in module.modules():
            self._attach_to(part, is_called=id(part) not in inside)
        _overlaps.add(self)

    def _attach_to(self, part: torch.nn.Module, is_called: bool) -> None:
        named = {
            name: self._index[id(parameter)]
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
            if self._has(parameter)
        }
        own = list(dict.fromkeys(named.values()))
        if is_called:  # NOT last: other hooks make weights out of parameters, as pruning does
            before = self._hook(lambda overlap, *_: overlap._before(own))
            self._handles.append(part.register_forward_pre_hook(before, prepend=True))
        if own:
            self._parts.append(own)
            saving = self._hook(lambda overlap, *_: overlap.finish())
            loading = self._hook(
                lambda overlap, _, state, prefix, *__: overlap._load(named, state, prefix)
            )
            self._handles += [
                part.register_state_dict_pre_hook(saving),  # type: ignore[no-untyped-call]
                part.register_load_state_dict_pre_hook(loading),  # type: ignore[no-untyped-call]
            ]

    def _hook(self, call: Callable[..., None]) -> HookedCall:
        return HookedCall(self._held, call)

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Put off this optimizer's steps from now on.

        Raises:
            UsageError: there is one already, or it steps parameters that are not averaged; or the
                model has been wrapped anew.
            Unsupported: its step needs all gradients at once.
        """
        if self._held() is None:
            raise UsageError("overlap: the model has been wrapped anew; ask the new wrapper")
        if self._optimizer is not None:
            raise UsageError("overlap_forward: one optimizer steps a model's parameters, not two")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise Unsupported(
                "overlap_forward: LBFGS steps all parameters at once, and computes the loss again "
                "meanwhile; take another optimizer, or wrap the model without overlap_forward"
            )
        self._check_groups(optimizer)
        self._optimizer = optimizer
        self._handles += [
            optimizer.register_state_dict_pre_hook(self._hook(lambda it, *_: it.finish())),
            optimizer.register_load_state_dict_pre_hook(self._hook(lambda it, *_: it._give_way())),
            StepInOverlap(optimizer, self._held),
        ]
        return optimizer

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Again where groups have been added."""
        n_of_groups = [len(group["params"]) for group in optimizer.param_groups]
        if n_of_groups == self._n_of_groups:
            return
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                self._check_averaged(parameter, number)
        self._n_of_groups = n_of_groups

    def _check_averaged(self, parameter: torch.Tensor, group: int) -> None:
        # What is frozen is never stepped, and the wrapper refuses to have it thawed.
        if self._has(parameter) or (id(parameter) in self._owned and not parameter.requires_grad):
            return
        whose = "is not averaged" if id(parameter) in self._owned else "is not the model's"
        raise UsageError(
            f"overlap_forward: a parameter of shape {list(parameter.shape)} in group {group} of "
            f"the optimizer {whose}; step that with another optimizer"
        )

    def detach(self) -> None:
        """The model is wrapped anew: step what can be, and leave modules and optimizer alone.

        Raises:
            UsageError: the group has ended in mid-step, and no other state was loaded since.
        """
        self._give_way()
        if self._why is not None:
            raise UsageError(f"DistributedDataParallel: {self._why[1]}") from self._why[0]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._held.end()
        self._optimizer = None
        _overlaps.discard(self)

    def has_any(self, parameters: Collection[int]) -> bool:
        """Whether it steps any of these, given their ids."""
        return not self._index.keys().isdisjoint(parameters)

    @contextlib.contextmanager
    def forward(self, is_training: bool) -> Iterator[None]:
        """Around a forward pass."""
        self._called_now.clear()
        if not is_training:
            self.finish()
        elif self._step is None:
            self.complete()
        else:
            self._need(self._at_once or ())
        self._is_in_forward = is_training
        try:
            with self._first_uses if is_training and self._at_once is None else _NOTHING:
                yield
        finally:
            self._is_in_forward = False

    def end_forward(self) -> None:
        """After it: what is left was not announced there."""
        if self._step is not None:
            self._late = set(range(len(self._names))) - self._announced
        self.finish()

    def check_attached(self) -> None:
        """A forward pass begins whose gradients are to be averaged.

        Raises:
            UsageError: no optimizer is attached.
        """
        if self._optimizer is None:
            raise UsageError(
                "overlap_forward=True puts off the optimizer's steps: give it to the wrapper, "
                "`optimizer = model.overlap(optimizer)`"
            )

    def send(self) -> None:
        """A backward pass has ended: its gradients go, and nobody waits for them here.

        Raises:
            UsageError: a parameter was used before it was stepped. Or all weights are 0: the step
                is over on every rank, as it is without overlap.
        """
        self._learn()
        self._fused.averager.send_rest()
        if not self._fused.averager.has_weight:
            self._fused.averager.wait()  # raises that, before anything is stepped
        for parameter, pending in zip(self._fused.gradients.parameters, self._pending, strict=True):
            pending.local = None
            parameter.grad = pending  # NOT shown before it is an average
        self._is_open, self._on_their_way = True, set(range(len(self._names)))
        self._held.keep(self)
        self._announced.clear()
        self._called.clear()
        self._late.clear()

    def put_off(self, closure: Callable[[], Any] | None = None) -> None:
        """Step when parameters are needed, with the hyperparameters of now.

        The first step is taken at once: it makes the optimizer's state, which is to be in the same
        order on every rank.
        """
        assert self._optimizer is not None
        if closure is not None:
            raise Unsupported("overlap_forward: a step takes no closure; it is put off")
        self._check_whole()
        self._check_groups(self._optimizer)
        is_first, self._has_stepped = not self._has_stepped, True
        gradients = [parameter.grad for parameter in self._fused.gradients.parameters]
        if any(map(_has_more, gradients)):
            self.complete()  # what a pass that is not averaged has added counts in this step
        if not self._on_their_way:
            type(self._optimizer).step(self._optimizer)
            return
        if self._step is not None:
            raise UsageError(
                "overlap_forward: a step was put off already, and uses up all gradients that there "
                "are; take one step after each backward"
            )
        self._step = StepInParts(self._optimizer)
        for index, parameter in enumerate(self._fused.gradients.parameters):
            # NOT one that the program has dropped since: it would have no step.
            if gradients[index] is self._pending[index] and id(parameter) in self._step.whole:
                self._put_off.add(index)
                parameter.grad = None
        if is_first:
            self.complete()

    def complete(self) -> None:
        """Wait for all averages, and do what was put off.

        Raises:
            ShoalError: as `Averager.wait`, and says what has been stepped.
        """
        self._check_whole()
        if not self._is_open:
            return
        has_step = self._step is not None
        self._take(sorted(self._on_their_way))
        self._close()
        try:
            self._fused.averager.wait()
        except ShoalError as error:
            if has_step:
                raise _with_more(error, _ALL_STEPPED) from error
            raise

    def finish(self) -> None:
        """Take a step that was put off. Without one parameters are whole, and nobody waits.

        Raises:
            ShoalError: as `complete`.
        """
        self._check_whole()
        if self._step is not None:
            self.complete()

    def check_stepped(self) -> None:
        """The model is being copied or pickled; that may have begun.

        Raises:
            ShoalError: a step was put off, or the model has a mixture.
        """
        self._check_whole()
        if self._step is not None and self._on_their_way:
            raise UsageError(
                "overlap_forward: a step was put off: call model.synchronize() before the model is "
                "copied or pickled"
            )

    def _check_whole(self) -> None:
        if self._why is not None:
            raise _with_more(*self._why) from self._why[0]

    def _give_way(self, loaded: Collection[int] = ()) -> None:
        """To other values of these parameters: a step that can no more be taken is forgotten."""
        if self._why is None:
            try:
                self.complete()
            except ShoalError:
                self._forget()
        self._mixed.difference_update(loaded)
        if not self._mixed:
            self._why = None
        self._let_go()

    def _load(self, named: Mapping[str, int], state: Mapping[str, Any], prefix: str) -> None:
        """These parameters of a module are about to get what a state dict has for them."""
        parameters = self._fused.gradients.parameters
        self._give_way(
            {
                index
                for name, index in named.items()
                if getattr(state.get(prefix + name), "shape", None) == parameters[index].shape
            }
        )

    def _forget(self) -> None:
        """What is on its way will never be averages."""
        for index in self._on_their_way:
            parameter = self._fused.gradients.parameters[index]
            if isinstance(parameter.grad, PendingGradient):
                parameter.grad = parameter.grad.local
        self._on_their_way.clear()
        self._close()

    def _close(self) -> None:
        """Nothing is left to be done of this step."""
        self._is_open, self._step = False, None
        self._put_off.clear()
        self._let_go()

    def _let_go(self) -> None:
        """Have the model keep this no longer, unless it has a mixture."""
        if not self._is_open and self._why is None:
            self._held.keep(None)

    def _has(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._index

    def _before(self, own: list[int]) -> None:
        """A module is about to be called that has these parameters."""
        self._called.update(own)
        self._called_now.update(own)
        if not self._on_their_way and self._why is None:
            return
        if self._step is None or not self._is_in_forward:
            self.finish()
            return
        self._need(own)

    def _need(self, indices: Collection[int]) -> None:
        self._announced.update(indices)
        self._take_others_while(indices)
        self._take(index for index in indices if index in self._on_their_way)

    def _take_others_while(self, needed: Iterable[int]) -> None:
        """As long as one of these is no average, step modules of which all are."""
        averager = self._fused.averager
        for part in self._parts:
            waited = [index for index in needed if index in self._on_their_way]
            if all(map(averager.is_in, waited)):
                return
            others = [index for index in part if index in self._on_their_way]
            if others and all(map(averager.is_in, others)):
                self._take(others)

    def _take(self, indices: Iterable[int]) -> None:
        """Wait for these averages, and step their parameters if a step was put off."""
        indices = list(dict.fromkeys(indices))
        self._wait_for(indices)
        gradients = self._fused.gradients
        stepped = [index for index in indices if index in self._put_off]
        since = [gradients.parameters[index].grad for index in stepped]  # from local passes
        for index in indices:
            parameter, place = gradients.parameters[index], gradients.places[index]
            if index in self._put_off:
                parameter.grad = place
            elif isinstance(parameter.grad, PendingGradient):
                local, parameter.grad = parameter.grad.local, place
                if local is not None:
                    place.add_(local)
        self._on_their_way.difference_update(indices)
        if self._step is None or not stepped:
            return
        self._step.take(gradients.parameters[index] for index in stepped)
        for index, gradient in zip(stepped, since, strict=True):
            gradients.parameters[index].grad = gradient

    def _wait_for(self, indices: Iterable[int]) -> None:
        try:
            for index in indices:
                self._fused.averager.wait_for(index)
        except ShoalError as error:
            if self._step is None:
                raise
            told = self._give_up(error)
            raise _with_more(error, told) from error

    def _give_up(self, why: ShoalError) -> str:
        """The rest of a step that was put off will never be taken: what that means."""
        left = sorted(self._put_off & self._on_their_way)
        n_all = len(self._put_off)
        if len(left) == n_all:
            told = "no parameter has been stepped on this rank: the step put off is given up"
        elif not left:
            told = _ALL_STEPPED
        else:
            named = ", ".join(self._names[index] for index in left[:5])
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            told = (
                f"{n_all - len(left)} of {n_all} parameters have been stepped on this rank, and "
                f"{named}{more} will not be: load a state of the model and of the optimizer from "
                "before this step, on every rank, and wrap the model anew"
            )
            self._mixed, self._why = set(self._put_off), (why, told)
        self._forget()
        return told

    def _learn(self) -> None:
        """Look at which parameters have a gradient though no call of their module announced it."""
        came = set(range(len(self._names))) - set(self._fused.missing())
        unannounced = came - self._called
        if self._at_once is None:
            self._at_once = unannounced | self._first_uses.early | self._compiled
            return
        wrong = unannounced & self._late
        if wrong - self._at_once:
            name = self._names[min(wrong - self._at_once)]
            raise UsageError(
                f"overlap_forward: parameter {name} was used without a call of its module, and "
                "before it was stepped; use it in every step, or leave overlap_forward out"
            )


def _has_more(gradient: torch.Tensor | None) -> bool:
    """Whether backward passes have added to it that are not averaged."""
    if isinstance(gradient, PendingGradient):
        return gradient.local is not None
    return gradient is not None


def _with_more(error: ShoalError, told: str) -> ShoalError:
    """An error of the same class that says this too."""
    if isinstance(error, PeerLost):
        doing = "; ".join(filter(None, (error.doing, told)))
        return PeerLost(error.rank, error.host, error.address, doing, error.reason)
    return type(error)(f"{error.args[0]}; {told}")


def _is_compiled(part: torch.nn.Module) -> bool:
    return hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None


def detach_overlaps_of(parameters: Collection[int]) -> None:
    """A model is wrapped anew, of which these are the ids of the parameters."""
    for overlap in list(_overlaps):
        if overlap.has_any(parameters):
            overlap.detach()
