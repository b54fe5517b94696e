"""`DiLoCo` for NumPy arrays: local steps with any optimizer, rounds with an outer optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.average.local_steps import LocalSteps, Options, copies
from shoal.average.preparing import numpy
from shoal.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shoal.group.group import Group


@dataclass
class OuterSGD:
    """The outer optimizer: SGD with (Nesterov) momentum, with the defaults of the paper.

    Its momenta are NumPy arrays like the parameters, by name, and are created by the first step.
    With lr=1 and momentum=0 the global parameters are the mean of all local ones: local SGD.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    momenta: dict[str, Any] = field(default_factory=dict, repr=False)

    def step(self, name: str, parameter: Any, gradient: Any) -> None:
        """Update a parameter in place; `gradient` may be overwritten.

        Args:
            parameter, gradient: NumPy arrays of one shape and dtype.
        """
        if self.momentum:
            momentum = self.momenta.get(name)
            if momentum is None:
                momentum = self.momenta[name] = numpy().zeros_like(parameter)
            momentum *= self.momentum
            momentum += gradient
            if self.nesterov:
                gradient += momentum * self.momentum
            else:
                gradient = momentum
        parameter -= gradient * self.lr


class DiLoCo(LocalSteps):
    """Ranks train alone for many steps, then average their changes.

    ::

        diloco = DiLoCo(group, weights, OuterSGD(), every=100)
        for batch in batches:
            weights["w"] -= ...  # a local step, by any rule
            diloco.step()
        diloco.sync()

    After `every` local steps the ranks average the difference between the global parameters, which
    are the same on all ranks, and their local parameters. The outer optimizer uses this average as
    the gradient of the global parameters, and all ranks continue from the result.

    Every rank passes the same arguments, and begins with the parameters of rank 0.

    Args:
        parameters: writable NumPy arrays of a floating-point or complex dtype, by name; changed in
            place until `close`.
        outer: the outer optimizer.
        every: local steps from one round of a fragment to its next.
        fragments: the number of parts into which the parameters are cut, or the names in each
            part; one part is sent at a time. Default 1.
        delay: local steps that a rank makes before it applies an average. Default 0.
        alpha: the share of local parameters that stays when an average is applied. Default 0.
        compress: see `Averager`; not `ChunkTopK` with `weighted` or `quorum`.
        weighted: `step` takes the weight of each step. Not for float16.
        quorum: the number of ranks that must have made their steps to open a round. The others join
            with the steps made by then. None: every rank makes all its steps. Not with `delay` or
            `alpha`.
        grace: seconds that an open round waits for the other ranks; with `quorum` only. Default 0.

    Raises:
        UsageError: wrong parameters or options; or ranks differ in them.
        TypeError: there is no such option.
        ShoalError: as for every call of the group.

    Source: Douillard et al., "DiLoCo" (arXiv 2311.08105) and "Streaming DiLoCo" (arXiv 2501.18512);
    docs/decisions/0076.
    """

    def __init__(
        self,
        group: Group,
        parameters: Mapping[str, Any],
        outer: OuterSGD | None = None,
        **options: Unpack[Options],
    ) -> None:
        arrays = _Arrays(parameters, outer or OuterSGD())
        self.parameters = arrays.shared
        """The global parameters, after the last finished round of each fragment; do not write."""
        super().__init__(group, arrays, parameters, **options)

    def step(self, weight: float | None = None) -> None:
        """Count a local step, and send or apply averages that are due.

        Args:
            weight: with `weighted`, the samples or tokens of the step.

        Raises:
            UsageError: a weight is missing, not expected, negative or not finite. Nothing was
                counted.
            PeerLost: a rank is lost, and the step was counted; continue with
                `regroup(group.shrink())`.
            ShoalError: as `Averager.wait`; the group has ended, and the step was counted.
        """
        self.count(weight)


class _Arrays:
    """A `Replica` of NumPy arrays; `shared` are the global parameters."""

    def __init__(self, parameters: Mapping[str, Any], outer: OuterSGD) -> None:
        np = numpy()
        for name, one in parameters.items():
            if not (isinstance(one, np.ndarray) and one.flags.writeable):
                raise UsageError(f"{name!r} must be a writable NumPy array, got {one!r}")
        self._local = dict(parameters)
        self.shared = copies(parameters)
        self._outer = outer
        self._kept: dict[str, Any] = {}

    @property
    def outer(self) -> str:
        return repr(self._outer)

    def _typed(self, places: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """View the arrays of an averager, which holds bfloat16 as raw bits, in the true dtypes."""
        return ((name, place.view(self.shared[name].dtype)) for name, place in places.items())

    def give(self, places: Mapping[str, Any], factor: float, *, keep: bool) -> None:
        for name, place in self._typed(places):
            if keep and name not in self._kept:
                self._kept[name] = self._local[name].copy()
            numpy().subtract(self.shared[name], self._kept.get(name, self._local[name]), out=place)
            if factor == 0:
                place.fill(0)  # NOT a product: a weight of 0 must also exclude a NaN
            elif factor != 1:
                numpy().multiply(place, place.dtype.type(factor), out=place)

    def step_outer(self, places: Mapping[str, Any], factor: float) -> None:
        for name, place in self._typed(places):
            self._outer.step(name, self.shared[name], place * place.dtype.type(factor))

    def mix(self, names: Iterable[str], alpha: float) -> None:
        for name in names:
            local, shared, kept = self._local[name], self.shared[name], self._kept.pop(name, None)
            if alpha == 0:
                local[...] = shared
            elif math.isnan(alpha):
                local[...] = shared + (local - kept)
            else:
                local[...] = shared + alpha * (local - shared)

    def dump(self, names: Iterable[str]) -> bytes:
        return b"".join(part.tobytes() for name in names for part in self._parts(name))

    def load(self, names: Iterable[str], data: bytes) -> None:
        np, at = numpy(), 0
        for part in (part for name in names for part in self._parts(name)):
            part[...] = np.frombuffer(data, part.dtype, part.size, at).reshape(part.shape)
            at += part.nbytes

    def _parts(self, name: str) -> list[Any]:
        shared = self.shared[name]
        if not self._outer.momentum:
            return [shared]
        return [shared, self._outer.momenta.setdefault(name, numpy().zeros_like(shared))]

    def state_dict(self) -> dict[str, Any]:
        held = {"global": self.shared, "outer": self._outer.momenta, "kept": self._kept}
        return {name: copies(arrays) for name, arrays in held.items()}

    def outer_in(self, state: Mapping[str, Any]) -> str:
        return self.outer  # its momenta alone are saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state["global"].items():
            self.shared[name][...] = value
        self._outer.momenta, self._kept = copies(state["outer"]), copies(state["kept"])
