"""Rounds in which ranks that train alone for many steps average their changes."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypedDict

from shoal.average.agreeing import agree, difference_among, shared_by
from shoal.average.averager import Averager
from shoal.average.compress import ChunkTopK
from shoal.average.layout import FLOATS, ArraySpec
from shoal.average.ready import ReadyFlags
from shoal.codec import Codec
from shoal.dtypes import DType, Op
from shoal.errors import ShoalError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack

    from shoal.average.compress import ErrorFeedback
    from shoal.group.group import Group
    from shoal.group.work import Work

_DEFAULTS: Final = {
    "every": 0,  # refused: every program chooses it
    "fragments": 1,
    "delay": 0,
    "alpha": 0.0,
    "compress": None,
    "weighted": False,
    "quorum": None,
    "grace": 0.0,
}

# The state of a fragment may have 1 GiB, and 256 bytes more for each byte of its parameters. Outer
# optimizers keep a few numbers for each parameter, or matrices.
_STATE_PER_BYTE: Final = 256
_STATE_BYTES: Final = 1 << 30

_SAVED: Final = ("step", "n_sent", "n_done", "sent_at", "since", "units", "folded")


class Replica(Protocol):
    """One rank's local parameters, the global parameters, and the outer optimizer's state.

    The global parameters are the same on every rank. Only rounds change them, each round for one
    fragment. `places` are the NumPy arrays of an averager, by parameter name.
    """

    @property
    def outer(self) -> str:
        """The outer optimizer's arguments, as text; the same on every rank."""

    def give(self, places: Mapping[str, Any], factor: float, *, keep: bool) -> None:
        """Write (global - local) * factor to the places: this rank's contribution to a round.

        Args:
            keep: keep the local parameters until `mix`; a second call uses them again.
        """

    def step_outer(self, places: Mapping[str, Any], factor: float) -> None:
        """Step the outer optimizer with the averages * factor as gradients."""

    def mix(self, names: Iterable[str], alpha: float) -> None:
        """Move local parameters to the global parameters, after a round.

        local = alpha * local + (1 - alpha) * global. If alpha is NaN, local changes since `give`
        are kept: local = global + local - kept.
        """

    def dump(self, names: Iterable[str]) -> bytes:
        """Return the global parameters and the outer optimizer's state of a fragment."""

    def load(self, names: Iterable[str], data: bytes) -> None:
        """Load a result of `dump` from another rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything except the local parameters."""

    def outer_in(self, state: Mapping[str, Any]) -> str:
        """Return the description of the outer optimizer's arguments once `state` is loaded."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`."""


class Options(TypedDict, total=False):
    """Options of all kinds of rounds, the same on every rank; see `shoal.average.DiLoCo`."""

    every: Required[int]
    fragments: int | Sequence[Sequence[str]]
    delay: int
    alpha: float
    compress: str | ErrorFeedback | None
    weighted: bool
    quorum: int | None
    grace: float


@dataclass
class _Flight:
    """A sent round with an average that was not applied yet.

    Attributes:
        number: the number of the round, from 0; its fragment is `number % n_fragments`.
        step: this rank's step when it was sent.
        weight: the weight of this rank's values.
        total: the weight of all ranks' values, after arrival.
        has_landed: True if the average has arrived.
        factor: the factor of the average, once it was computed; the outer step may be repeated.
    """

    number: int
    step: int
    weight: float
    total: array[float]
    summing: Work | None = None
    has_landed: bool = False
    factor: float | None = None


class LocalSteps:
    """Runs the rounds of one rank; `count`, called after each local step, does the due work.

    Rounds have numbers, and all ranks send them in that order. So the numbers of rounds that a rank
    has sent and finished determine which rounds it misses.

    Raises:
        UsageError: options are wrong, or ranks differ in parameters or options.
        TypeError: there is no such option.
    """

    def __init__(
        self, group: Group, replica: Replica, arrays: Mapping[str, Any], **options: Unpack[Options]
    ) -> None:
        self._specs = {name: ArraySpec.of(name, given) for name, given in arrays.items()}
        self._replica = replica
        for name in options.keys() - Options.__annotations__.keys():
            raise TypeError(
                f"there is no option {name!r} of local steps: pass one of "
                f"{', '.join(Options.__annotations__)}"
            )
        given: dict[str, Any] = {**_DEFAULTS, **options}
        self._fragments = fragments_of(self._specs, given["fragments"])
        self._compared = given | {"fragments": self._fragments, "outer": replica.outer}
        self._every: int = given["every"]
        self._delay: int = given["delay"]
        self._alpha: float = given["alpha"]
        self._compress: str | ErrorFeedback | None = given["compress"]
        self._is_weighted: bool = given["weighted"]
        self._quorum: int | None = given["quorum"]
        self._grace: float = given["grace"]
        # Rounds are weighted means: by samples, or with a quorum by the number of steps.
        self._has_weights = self._is_weighted or self._quorum is not None
        self._check()
        if self._has_weights:
            self._check_range(group)
        if self._quorum is not None:
            self._alpha = math.nan  # keep steps made while an average is in flight
        n_fragments = len(self._fragments)
        self._step = self._n_sent = self._n_done = self._sent_at = 0
        self._until = 0  # send the rounds below this number at once: a `sync` has begun them
        self._since = [0.0] * n_fragments  # the weight of the steps since a fragment was sent
        # By fragment, the mean weight of its last round. Weights are divided by it when sent, so
        # that values stay near the unweighted values.
        self._units = [1.0] * n_fragments
        self._folded = 0.0
        self._flying: deque[_Flight] = deque()
        self._averagers: list[Averager] = []
        self._form(group)
        for part, names in enumerate(self._fragments):
            self._share(part, 0)
            replica.mix(names, 0.0)

    def _check(self) -> None:
        every, n_fragments = self._every, len(self._fragments)
        if every % 1 != 0 or every < 1:  # NaN too
            what = f"every must be a whole number of steps, 1 or more, got {every!r}"
        elif not 1 <= n_fragments <= every:
            what = f"fragments must be 1 to every={every}, one for a step, got {n_fragments}"
        elif not 0 <= self._delay < every:
            what = f"delay must be 0 to {every - 1} steps, less than every, got {self._delay}"
        elif not 0 <= self._alpha <= 1:
            what = f"alpha must be 0 to 1, got {self._alpha}"
        elif self._quorum is None and self._grace != 0:
            what = "grace needs a quorum: pass quorum, or leave grace out"
        elif self._quorum is not None and self._quorum < 1:
            what = f"quorum must be at least 1 rank, got {self._quorum}"
        elif not 0 <= self._grace < math.inf:
            what = f"grace must be a number of seconds, got {self._grace}"
        elif self._quorum is not None and (self._alpha or self._delay):
            what = "delay and alpha cannot be used with a quorum, which applies averages on arrival"
        elif self._has_weights and isinstance(self._compress, ChunkTopK):
            what = (
                f"{self._compress} cannot be used with weights or a quorum: values that it leaves "
                "out of one round would count in the next with another weight; use ErrorFeedback"
            )
        else:
            return
        raise UsageError(what)

    def _check_range(self, group: Group) -> None:
        """Refuse float16: products of values and weights may exceed its range.

        Later rounds divide weights by the mean of earlier ones, but the first round cannot.
        """
        halves = [str(one) for one in self._specs.values() if one.dtype is DType.FLOAT16]
        wire = group.wire if self._compress is None else self._compress
        is_rounded = any(one.dtype is DType.FLOAT32 for one in self._specs.values())
        if is_rounded and str(getattr(wire, "wire", wire)) == Codec.FP16.name:
            halves.append(f"{wire!s} between hosts")
        if halves:
            raise UsageError(
                f"{'weighted=True' if self._is_weighted else 'a quorum'} cannot be used with "
                f"float16 ({halves[0]}): products of values and weights, or numbers of steps, "
                "would exceed 65,504; use bfloat16, or leave it out"
            )

    def _form(self, group: Group) -> None:
        """Create a subgroup and averagers, so that the program's calls do not mix with rounds."""
        name = f"local steps {next(shared_by(group).names)}"
        self.group = group
        self._own = group.subgroup(range(group.size), name)
        agree(self._own, name, tuple(self._specs.values()), self._compared)
        averagers = [
            Averager(
                self._own, {name: self._specs[name] for name in names}, compress=self._compress
            )
            for names in self._fragments
        ]
        for averager in averagers:  # others would wait for the order from a rank in `sync`
            averager.keep_layout()
        for averager, before in zip(averagers, self._averagers, strict=False):
            averager.load_state_dict(before.state_dict())
        self._averagers = averagers
        self._flags: ReadyFlags | None = None
        if self._quorum is not None:
            self._flags = ReadyFlags(self._own, self._quorum, self._grace)

    # Steps.

    def count(self, weight: float | None = None) -> None:
        """Count a local step of this weight (samples or tokens), and do the work due after it.

        Raises:
            UsageError: a weight is missing, or not expected. Nothing was counted.
            ShoalError: as `Averager.wait`; the group has ended. The step was counted: `regroup`.
        """
        if self._is_weighted != (weight is not None):
            raise UsageError(f"{self._own}: a step has a weight if, and only if, weighted=True")
        if weight is not None and not 0 <= weight < math.inf:
            raise UsageError(f"{self._own}: weight must be a finite number >= 0, got {weight}")
        self._step += 1
        self._since = [one + (1.0 if weight is None else weight) for one in self._since]
        self._go_on()

    def _go_on(self) -> None:
        """Apply and send due averages; after an error, `regroup` does the rest."""
        while True:
            if self._flying and self._is_expected(self._flying[0]):
                self._take_up(self._alpha)
            elif self._n_sent - self._n_done < len(self._fragments) and self._is_due():
                self._send()
            else:
                return

    def _is_expected(self, flight: _Flight) -> bool:
        """Return True if an average must be applied now, even if this rank must wait for it."""
        if self._flags is None or flight.has_landed:
            return self._step >= flight.step + self._delay
        assert flight.summing is not None
        return flight.summing.done() and self._averager_of(flight).done()

    def _is_due(self) -> bool:
        """Return True if this rank sends the next round now."""
        if self._n_sent < self._until:
            return True
        n_fragments, every = len(self._fragments), self._every
        part = self._n_sent % n_fragments
        interval = (part + 1) * every // n_fragments - part * every // n_fragments
        is_ready = self._step >= self._sent_at + interval
        if self._flags is None:
            return is_ready
        if is_ready:
            self._flags.announce(self._n_sent)
        return self._flags.is_open(self._n_sent)

    def _send(self) -> None:
        part = self._n_sent % len(self._fragments)
        flight = _Flight(self._n_sent, self._step, self._since[part], array("d", [0.0]))
        self._post(flight)
        self._flying.append(flight)
        self._count_sent()

    def _count_sent(self) -> None:
        self._since[self._n_sent % len(self._fragments)] = 0.0
        self._n_sent += 1
        self._sent_at = self._step

    def _post(self, flight: _Flight) -> None:
        averager, part = self._averager_of(flight), flight.number % len(self._fragments)
        places = averager.begin()
        factor = flight.weight / self._units[part] if self._has_weights else 1.0
        averager.scale_feedback(factor)
        keep = self._delay > 0 or self._flags is not None
        self._replica.give(places, factor, keep=keep)
        flight.has_landed = False
        if self._has_weights:
            flight.total[0] = flight.weight
            name = f"weights of fragment {part}"
            flight.summing = self._own.all_reduce(flight.total, Op.SUM, name=name, async_op=True)
        for index in averager.layout.order:
            averager.ready(index)
        averager.send_rest()

    def _land(self, flight: _Flight) -> None:
        """Wait until the average of a round has arrived."""
        if flight.has_landed:
            return
        self._averager_of(flight).wait()
        if flight.summing is not None:
            flight.summing.wait()
            flight.summing = None
        flight.has_landed = True

    def _take_up(self, alpha: float) -> None:
        """Finish the oldest sent round."""
        flight = self._flying[0]
        self._land(flight)
        part = flight.number % len(self._fragments)
        if self._has_weights and flight.factor is None:
            total = flight.total[0]
            flight.factor = self._units[part] * self.group.size / total if total else 0.0
            self._units[part] = total / self.group.size or self._units[part]
            self._folded += total
        factor = 1.0 if flight.factor is None else flight.factor
        if factor:  # 0: all weights are 0, and there is no average
            self._replica.step_outer(self._averager_of(flight).arrays, factor)
        self._replica.mix(self._fragments[part], alpha)
        self._flying.popleft()
        self._n_done += 1

    def _averager_of(self, flight: _Flight) -> Averager:
        return self._averagers[flight.number % len(self._fragments)]

    @property
    def rounds(self) -> int:
        """The number of rounds that this rank has finished; each averages one fragment."""
        return self._n_done

    @property
    def folded(self) -> float:
        """The sum of all ranks' weights in finished rounds; 0 without weights and quorum."""
        return self._folded

    # Methods that every rank calls.

    def sync(self) -> None:
        """Run a round of all fragments now, after which all ranks have the global parameters.

        If no rank has made a step since its last round, only rounds in flight are finished. Every
        rank calls it after the same number of steps, or with a quorum after any number: at the end
        of training, before an evaluation, or before one rank saves for all.

        Raises:
            UsageError: the outer optimizers of ranks have different arguments; nothing has changed.
            ShoalError: as in a step.
        """
        counts = self._counts(self._own)
        has_steps = any(has_steps for *_, has_steps in counts)
        if has_steps:
            self._check_outer()
        self._until = max(max(n_sent, until) for _, n_sent, until, _ in counts)
        if has_steps:
            self._until += len(self._fragments)
        while self._n_sent < self._until:
            if self._n_sent - self._n_done == len(self._fragments):
                self._take_up(self._alpha)
            self._send()
        while self._flying:
            self._take_up(0.0)
        for names in self._fragments:
            self._replica.mix(names, 0.0)

    def _check_outer(self) -> None:
        given = {"the outer optimizer": self._replica.outer}
        if found := difference_among(self._own, "outer optimizer", given):
            raise UsageError(
                f"{self._own}: {found}; so the global parameters may differ already. Change its "
                "arguments by the number of rounds, not of steps: set them to the same values, and "
                "copy the model of one rank to all after sync()"
            )

    def regroup(self, group: Group) -> None:
        """Continue in another group, such as `group.shrink()`, and finish interrupted rounds.

        Every rank of the new group calls it. A round finished by any rank counts on all ranks; all
        other rounds are sent again.

        Raises:
            ShoalError: as in a step; call it again with the next group.
        """
        self._leave()
        counts = self._counts(group)
        done = [n_done for n_done, *_ in counts]
        self._until = max(until for *_, until, _ in counts)
        if self._flags is not None:  # in the new group no flag opens rounds that a rank has sent
            self._until = max(self._until, *(n_sent for _, n_sent, *_ in counts))
        self._settle(max(done))
        self._form(group)
        for number in range(min(done), max(done)):
            part = number % len(self._fragments)
            self._share(part, done.index(max(done)))
            if self._n_done == number:
                self._replica.mix(self._fragments[part], self._alpha)
                if self._n_sent == number:  # sent, and interrupted before it was counted
                    self._count_sent()
                else:
                    self._flying.popleft()
                self._n_done += 1
        for flight in self._flying:
            self._post(flight)
        self._go_on()

    def _settle(self, n_done: int) -> None:
        """Keep the residuals of rounds below this number, and undo later rounds' residuals."""
        for flight in self._flying:
            if flight.number >= n_done:
                self._averager_of(flight).undo_feedback()
            else:
                self._averager_of(flight).end_feedback()
        if self._n_sent < n_done:  # sent, and interrupted before it was counted
            self._averagers[self._n_sent % len(self._fragments)].end_feedback()

    def _counts(self, group: Group) -> list[tuple[int, int, int, int]]:
        """Return for each rank `_n_done`, `_n_sent`, `_until`, and 1 if it has unsent steps."""
        own = array("q", [self._n_done, self._n_sent, self._until, max(self._since) > 0])
        found = array("q", bytes(8 * len(own) * group.size))
        group.all_gather(found, own, name="counts of rounds")
        return list(zip(*(found[at::4] for at in range(4)), strict=True))

    def _share(self, part: int, root: int) -> None:
        """Give all ranks one rank's state after the finished rounds of a fragment."""
        is_root, own, names = self._own.rank == root, self._own, self._fragments[part]
        data = bytearray(self._replica.dump(names) if is_root else b"")
        known = array("d", [len(data), self._units[part], self._folded])
        own.broadcast(known, root, name="length of a fragment")
        most = _STATE_BYTES + _STATE_PER_BYTE * sum(self._specs[name].n_bytes for name in names)
        if not 0 <= known[0] <= most:  # NaN too
            raise ShoalError(
                f"{own}: rank {root} announced {known[0]:.17g} bytes for the state of fragment "
                f"{part}; the limit is {most}. Its memory may be damaged: look at that machine"
            )
        data = data if is_root else bytearray(int(known[0]))
        own.broadcast(data, root, name="fragment")
        if not is_root:
            self._replica.load(names, bytes(data))
            _, self._units[part], self._folded = known

    # State saved with a model.

    def state_dict(self) -> dict[str, Any]:
        """Return all state except the local parameters; waits for averages in flight.

        It changes nothing: a run that saves has the same bits as a run that does not.

        Raises:
            ShoalError: as in a step.
        """
        flying = []
        for flight in self._flying:
            self._land(flight)
            saved = {"number": flight.number, "step": flight.step, "weight": flight.weight}
            averages = copies(self._averager_of(flight).arrays)
            saved |= {"total": flight.total[0], "size": self.group.size}
            flying.append(saved | {"averages": averages})
        state = {name: copy(getattr(self, f"_{name}")) for name in _SAVED}
        rounding = [one.state_dict() for one in self._averagers]
        own = {"replica": self._replica.state_dict(), "rounding": rounding, "flying": flying}
        return state | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`; every rank calls it, after loading its local parameters.

        All ranks then have the global parameters of rank 0.

        Raises:
            UsageError: the state is not a result of `state_dict`, has other fragments, or differs
                between ranks in its rounds or the outer optimizer's arguments.
            ShoalError: as in a step.
        """
        if not {*_SAVED, "replica", "flying", "rounding"}.issubset(state or ()):
            raise UsageError(f"{self._own}: pass a result of state_dict of these local steps")
        if (n_saved := len(state["since"])) != len(self._fragments):
            raise UsageError(
                f"{self._own}: the saved state has {n_saved} fragments, but this object has "
                f"{len(self._fragments)}; create it with fragments={n_saved}"
            )
        sizes = {saved.get("size", self.group.size) for saved in state["flying"]}
        if not sizes <= {self.group.size}:
            raise UsageError(
                f"{self._own}: the saved state has averages in flight of {sizes.pop()} ranks: load "
                "it on as many, or call sync() before state_dict()"
            )
        self._leave()  # averages in flight belong to earlier steps
        self._flying.clear()
        self._form(self.group)
        outer = self._replica.outer_in(state["replica"])
        compared = {"rounds": str((state["n_done"], state["n_sent"])), "outer": outer}
        agree(self._own, "rounds", (), compared)
        self._replica.load_state_dict(state["replica"])
        for averager, rounding in zip(self._averagers, state["rounding"], strict=True):
            averager.load_state_dict(rounding)
        for name in _SAVED:
            setattr(self, f"_{name}", copy(state[name]))
        self._until = 0
        for saved in state["flying"]:
            total = array("d", [saved["total"]])
            flight = _Flight(saved["number"], saved["step"], saved["weight"], total)
            flight.has_landed = True
            for name, value in saved["averages"].items():
                self._averager_of(flight).arrays[name][...] = value
            self._flying.append(flight)
        for part in range(len(self._fragments)):
            self._share(part, 0)

    def close(self) -> None:
        """End the rounds. Averages in flight are lost: call `sync` first."""
        self._leave()

    def _leave(self) -> None:
        self._own.close()
        if self._flags is not None:
            self._flags.close()


def copies(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Copy NumPy arrays or tensors."""
    return {n: one.copy() if hasattr(one, "copy") else one.clone() for n, one in arrays.items()}


def fragments_of(
    specs: Mapping[str, ArraySpec], asked: int | Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """Return the names of each fragment's parameters.

    Args:
        asked: a number of fragments, each a run of parameters with about equal bytes; or the names.

    Raises:
        UsageError: there are fewer parameters than fragments, one has no average, or names are
            unknown, missing or repeated.
    """
    for spec in specs.values():
        if spec.dtype not in FLOATS:
            raise UsageError(f"{spec} is not a floating-point array; leave it out")
    if not isinstance(asked, int):
        given = [name for names in asked for name in names]
        if wrong := [n for n in (*specs, *given) if given.count(n) != 1 or n not in specs]:
            raise UsageError(f"fragments must name each parameter once: {wrong[0]!r} is not")
        return tuple(tuple(names) for names in asked)
    if not 1 <= asked <= len(specs):
        raise UsageError(f"{len(specs)} parameters cannot be cut into {asked} fragments")
    parts: list[list[str]] = [[]]
    total, before, n_left = sum(spec.n_bytes for spec in specs.values()), 0, len(specs)
    for name, spec in specs.items():
        is_past = (before + spec.n_bytes / 2) * asked >= total * len(parts)
        if parts[-1] and len(parts) < asked and (is_past or n_left == asked - len(parts)):
            parts.append([])
        parts[-1].append(name)
        before, n_left = before + spec.n_bytes, n_left - 1
    return tuple(map(tuple, parts))
