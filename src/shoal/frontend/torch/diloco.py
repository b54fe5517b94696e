"""`shoal.torch.DiLoCo` and `LocalSGD`: ranks train alone for many steps, then average."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import shoal.frontend.torch as frontend
from shoal.average.local_steps import LocalSteps, Options, copies
from shoal.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from shoal.group.group import Group


class DiLoCo(LocalSteps):
    """Averages models that each rank trains alone, every `every` steps of the inner optimizer.

    ::

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with shoal.torch.DiLoCo(model, inner, outer, every=100) as diloco:
            for batch in batches:
                inner.zero_grad()
                loss_of(model(batch)).backward()
                inner.step()  # every 100th also averages
            diloco.sync()  # all ranks have the same model now

    Takes the options of `shoal.average.DiLoCo`. Steps of `inner` count until `close`, or the end of
    a `with` statement. Buffers, such as statistics of batch normalisation, are not averaged.

    Args:
        model: not wrapped by `DistributedDataParallel` over the same ranks.
        inner: the optimizer of each step.
        outer: the optimizer of the global parameters, created with the parameters of the model.
        process_group: ranks that each have a whole model; None: the default group.
        fragments: may also be modules: the parameters of each are a fragment.

    Raises:
        UsageError: wrong options; ranks differ; `outer` misses a parameter; `inner` has none.
            `inner.step` and `sync` raise it in a round if the model has other trained parameters.
        Unsupported: parameters are DTensors.
        TypeError: there is no such option.
        ShoalError: as for every call of the group. `inner.step` raises it too, after its own step:
            continue with `regroup`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        stepped = {id(one) for kind in inner.param_groups for one in kind["params"]}
        if stepped.isdisjoint(id(one) for one in trained.values()):
            raise UsageError(
                "the inner optimizer has no parameter of this model, so its steps would not train "
                "it: create it with model.parameters()"
            )
        self._model = model
        self._trained = {id(one) for one in trained.values()}
        replica = _Parameters(trained, outer)
        self.parameters = replica.shared
        """The global parameters by name, on the CPU; do not write."""
        if not isinstance(parts := options.get("fragments", 1), int):
            options["fragments"] = _names_in(parts, trained)
        super().__init__(frontend.group_for("DiLoCo", process_group), replica, trained, **options)
        self._weight: float | None = None
        self._hook = inner.register_step_post_hook(self._after_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End, and count no more steps. Averages in flight are lost: call `sync` first."""
        self._hook.remove()
        super().close()

    def weigh(self, weight: float) -> None:
        """Set the number of samples or tokens in the next step of `inner`.

        With `weighted` each step needs one, 0 or more; without it no step has one. Otherwise
        `inner.step` raises UsageError after its own step, which is then not counted.
        """
        self._weight = weight

    def _after_step(self, *_: object) -> None:
        weight, self._weight = self._weight, None
        self.count(weight)

    def _send(self) -> None:
        self._check_trained()
        super()._send()

    def _check_trained(self) -> None:
        """Refuse parameters that are trained but not averaged: ranks would drift apart."""
        named = self._model.named_parameters()
        others = [n for n, one in named if one.requires_grad and id(one) not in self._trained]
        if others:
            raise UsageError(
                f"DiLoCo: parameter {', '.join(others)} requires a gradient now, but did not, or "
                "was another tensor, when DiLoCo was created, so it would not be averaged: on "
                "every rank, close this DiLoCo and make another"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return all state except the model's and `inner`'s; `torch.load` accepts it.

        Waits for averages in flight, and changes nothing.
        """
        state = super().state_dict()
        parts = [one["residuals"] for one in state["rounding"] if one]
        for arrays in (*parts, *(flight["averages"] for flight in state["flying"])):
            arrays.update({name: torch.from_numpy(one) for name, one in arrays.items()})
        return state

    def regroup(self, group: Group | None = None) -> None:
        """Continue after `shoal.torch.shrink_group`, and finish a step that an error interrupted.

        Every rank of the new group calls it.

        Args:
            group: the new `shoal.Group`, not a process group; None is the group of torch's default
                process group.

        Raises:
            UsageError: torch's default group does not use shoal.
            ShoalError: as in a step; call it again with the next group.
        """
        super().regroup(group or frontend.group_for("DiLoCo", None))


class LocalSGD(DiLoCo):
    """Averages the parameters of all ranks once in `every` steps of an optimizer.

    It is `DiLoCo` with an outer optimizer that replaces the global parameters by the average, and
    takes the same options.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        super().__init__(model, inner, outer, process_group, **options)


class _Parameters:
    """A `Replica` of a model's parameters; `shared` are the global parameters, on the CPU."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], outer: torch.optim.Optimizer
    ) -> None:
        if not isinstance(outer, torch.optim.Optimizer):
            raise UsageError(
                f"DiLoCo: outer must be a torch optimizer of the model's parameters, got {outer!r}"
            )
        held = [one for group in outer.param_groups for one in group["params"]]
        for name, one in parameters.items():
            if hasattr(one, "to_local"):
                raise Unsupported(f"DiLoCo: parameter {name} is a DTensor; wrap the whole model")
            if not any(one is other for other in held):
                raise UsageError(f"DiLoCo: parameter {name} is not in the outer optimizer")
        self._local = dict(parameters)
        self.shared = {name: _on_cpu(one) for name, one in parameters.items()}
        self._outer = outer
        self._kept: dict[str, torch.Tensor] = {}

    @property
    def outer(self) -> str:
        return _described(self._outer, self._outer.param_groups)

    def _tensors(self, places: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """View the arrays of an averager, which holds bfloat16 as raw bits, as tensors."""
        for name, place in places.items():
            yield name, torch.from_numpy(place).view(self.shared[name].dtype)

    @torch.no_grad()
    def give(self, places: Mapping[str, Any], factor: float, *, keep: bool) -> None:
        for name, place in self._tensors(places):
            if keep and name not in self._kept:
                self._kept[name] = _on_cpu(self._local[name])
            local = self._kept.get(name, self._local[name])
            place.copy_(self.shared[name].to(local.device).sub(local))
            if factor == 0:
                place.zero_()  # NOT a product: a weight of 0 must also exclude a NaN
            elif factor != 1:
                place.mul_(factor)

    @torch.no_grad()
    def step_outer(self, places: Mapping[str, Any], factor: float) -> None:
        """Step the optimizer on the model's parameters, which temporarily hold the global ones."""
        held = [one for group in self._outer.param_groups for one in group["params"]]
        gradients = [one.grad for one in held]
        local = {name: self._local[name].clone() for name in places}
        for one in held:  # other fragments do not step, because they have no gradient
            one.grad = None
        try:
            for name, place in self._tensors(places):
                self._local[name].copy_(self.shared[name])
                self._local[name].grad = place.mul(factor).to(self._local[name].device)
            self._outer.step()
            for name in places:
                self.shared[name].copy_(self._local[name])
        finally:  # if the optimizer raises, the next step repeats this one
            for name in places:
                self._local[name].copy_(local[name])
            for one, gradient in zip(held, gradients, strict=True):
                one.grad = gradient

    @torch.no_grad()
    def mix(self, names: Iterable[str], alpha: float) -> None:
        for name in names:
            local, kept = self._local[name], self._kept.pop(name, None)
            shared = self.shared[name].to(local.device)
            if alpha == 0:
                local.copy_(shared)
            elif math.isnan(alpha):
                assert kept is not None
                local.copy_(local.sub(kept.to(local.device)).add_(shared))
            else:
                local.copy_(torch.lerp(shared, local, alpha))

    def dump(self, names: Iterable[str]) -> bytes:
        data, state = io.BytesIO(), self._outer.state
        torch.save({n: (self.shared[n], dict(state.get(self._local[n], {}))) for n in names}, data)
        return data.getvalue()

    def load(self, names: Iterable[str], data: bytes) -> None:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for name in names:
            shared, state = found[name]
            local = self._local[name]
            self.shared[name].copy_(shared)
            self._outer.state.pop(local, None)
            if state:
                self._outer.state[local] = {
                    key: value.to(local.device) if _is_like(value, local) else value
                    for key, value in state.items()
                }

    def state_dict(self) -> dict[str, Any]:
        held = {"global": copies(self.shared), "kept": copies(self._kept)}
        return held | {"outer": self._outer.state_dict()}

    def outer_in(self, state: Mapping[str, Any]) -> str:
        return _described(self._outer, state["outer"]["param_groups"])

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state["global"].items():
            self.shared[name].copy_(value)
        self._kept = copies(state["kept"])
        self._outer.load_state_dict(state["outer"])


def _described(outer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> str:
    given = [{key: one for key, one in group.items() if key != "params"} for group in groups]
    return f"{type(outer).__name__} with {', '.join(map(str, given))}"


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _is_like(value: object, parameter: torch.Tensor) -> bool:
    """True if this state of an optimizer belongs on its parameter's device."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _names_in(
    fragments: Iterable[Any], parameters: Mapping[str, torch.nn.Parameter]
) -> list[list[str]]:
    names = {id(one): name for name, one in parameters.items()}
    return [
        [names[id(one)] for one in part.parameters() if id(one) in names]
        if isinstance(part, torch.nn.Module)
        else list(part)
        for part in fragments
    ]
