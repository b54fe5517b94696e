"""The next forward pass begins before the last gradients are averaged.

An optimizer's step is put off: each module's parameters are stepped when the module is about to be
called, once their own averages are in. So the first layers compute while buffers of others are on
their way. Who waits for its averages has modules stepped meanwhile whose own are in: that takes no
time then. The arithmetic is that of one step for all, in the same order for each parameter.

Source: Peng et al., "ByteScheduler", SOSP 2019; Jayarajan et al., "P3", MLSys 2019.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.errors import Unsupported, UsageError
from shoal.frontend.torch.compiler import not_compiled

if TYPE_CHECKING:
    import torch

    from shoal.frontend.torch.ddp.averaged import FusedGradients

    Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


@not_compiled
class Overlap:
    """Steps parameters when they are needed.

    Parameters that are used without a call of the module that they belong to are stepped before
    every forward pass; the first pass shows which they are.

    Args:
        module: the model.
        names: of the parameters.
    """

    def __init__(self, module: torch.nn.Module, fused: FusedGradients, names: list[str]) -> None:
        self._fused = fused
        self._names = names
        self._index = {id(p): index for index, p in enumerate(fused.gradients.parameters)}
        self._optimizer: torch.optim.Optimizer | None = None
        self._is_open = False  # a step is on its way, or all of it is there and has not been ended
        self._on_their_way: set[int] = set()  # sent, and not yet averages
        self._groups: list[dict[str, Any]] | None = None  # of a step that was put off
        self._at_once: set[int] | None = None  # what no module's call announces
        self._parts: list[list[int]] = []  # of each module with parameters, in its order
        self._announced: set[int] = set()  # by calls of modules since they were sent
        self._called: set[int] = set()  # whose modules were called since the last pass began
        self._late: set[int] = set()  # stepped after the forward pass
        for part in module.modules():
            own = [self._index[id(p)] for p in part.parameters(recurse=False) if self._has(p)]
            self._parts += [own] if own else []
            if own or part is module:
                part.register_forward_pre_hook(self._before(own, part is module))
        module.register_state_dict_pre_hook(lambda *_: self.complete())  # type: ignore[no-untyped-call]

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Put off this optimizer's steps from now on.

        Raises:
            UsageError: there is one already, or it steps parameters that are not averaged.
        """
        if self._optimizer is not None:
            raise UsageError("overlap_forward: one optimizer steps a model's parameters, not two")
        for group in optimizer.param_groups:
            if not all(self._has(parameter) for parameter in group["params"]):
                raise UsageError("overlap_forward: the optimizer steps what the model does not own")
        self._optimizer = optimizer
        optimizer.register_state_dict_pre_hook(lambda *_: self.complete())
        held = self

        def step(_optimizer: Any, closure: Callable[[], Any] | None = None) -> None:
            held.put_off(closure)

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        return optimizer

    def send(self) -> None:
        """A backward pass has ended: its gradients go, and nobody waits for them here.

        Raises:
            UsageError: no optimizer is attached, or a parameter was used before it was stepped.
        """
        if self._optimizer is None:
            raise UsageError(
                "overlap_forward=True puts off the optimizer's steps: give it to the wrapper, "
                "`optimizer = model.overlap(optimizer)`"
            )
        self._learn()
        self._fused.averager.send_rest()
        for parameter in self._fused.gradients.parameters:
            parameter.grad = None  # NOT shown before it is an average
        self._is_open, self._on_their_way = True, set(range(len(self._names)))
        self._announced.clear()
        self._called.clear()
        self._late.clear()

    def put_off(self, closure: Callable[[], Any] | None) -> None:
        """Step when parameters are needed, with the hyperparameters of now."""
        assert self._optimizer is not None
        if closure is not None:
            raise Unsupported("overlap_forward: a step takes no closure; it is put off")
        if not self._on_their_way:
            type(self._optimizer).step(self._optimizer)
            return
        self._groups = [dict(group) for group in self._optimizer.param_groups]

    def complete(self, after_forward: bool = False) -> None:
        """Wait for all averages, and do what was put off.

        Args:
            after_forward: what is left was not announced in the forward pass that has ended.

        Raises:
            ShoalError: as `Averager.wait`.
        """
        if not self._is_open:
            return
        if after_forward:
            self._late = set(range(len(self._names))) - self._announced
        self._take(sorted(self._on_their_way))
        self._fused.averager.wait()
        self._is_open, self._groups = False, None

    def _has(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._index

    def _before(self, own: list[int], is_root: bool) -> Callable[..., None]:
        def before(*_: object) -> None:
            self._called.update(own)
            if not self._on_their_way:
                return
            if self._groups is None:  # a forward pass without a step: nothing can be put off
                self.complete()
                return
            needed = [*own, *(self._at_once or ())] if is_root else own
            self._announced.update(needed)
            self._take_others_while(needed)
            self._take(index for index in needed if index in self._on_their_way)

        return before

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
        indices = list(indices)
        gradients = self._fused.gradients
        for index in indices:
            self._fused.averager.wait_for(index)
            gradients.parameters[index].grad = gradients.places[index]
        self._on_their_way.difference_update(indices)
        if self._groups is None or not indices:
            return
        assert self._optimizer is not None
        chosen = {id(gradients.parameters[index]) for index in indices}
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) in chosen]}
            for group in self._groups
        ]
        try:
            type(self._optimizer).step(self._optimizer)
        finally:
            self._optimizer.param_groups = groups
        for index in indices:
            gradients.parameters[index].grad = None

    def _learn(self) -> None:
        """Look at which parameters have a gradient though no call of their module announced it."""
        came = set(range(len(self._names))) - set(self._fused.missing())
        unannounced = came - self._called
        if self._at_once is None:
            self._at_once = unannounced
            return
        wrong = unannounced & self._late
        if wrong - self._at_once:
            name = self._names[min(wrong - self._at_once)]
            raise UsageError(
                f"overlap_forward: parameter {name} was used without a call of its module, and "
                "before it was stepped; use it in every step, or leave overlap_forward out"
            )
