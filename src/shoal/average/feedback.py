"""Residuals: the rounding errors of this rank's values in one step, to be added in the next."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from shoal.average.lacking import named
from shoal.average.preparing import not_finite, numpy
from shoal.dtypes import DType
from shoal.engine import round_to
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.average.compress import Scheme
    from shoal.average.layout import Layout
    from shoal.codec import Codec

_LOG: Final = logging.getLogger("shoal")
_ITEM: Final = 4  # bytes of a float32


class Feedback:
    """The residuals of one averager on one rank, a float32 for each element.

    A step adds the residuals to the values that it sends, and computes new residuals by the
    rounding of `scheme`. They replace the old residuals when all averages have arrived. So a step
    that fails, or whose averages are not finite, leaves the residuals unchanged: it can be
    repeated, and nothing is added twice.

    Attributes:
        n_steps: the number of ended steps.
        factor: the caller's factor for this step's values; residuals belong to the unscaled values.
    """

    _layout: Layout

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.n_steps = 0
        self.factor = 1.0
        self._now: list[Any] = []
        self._sent: list[int] | None = None  # buffers sent in this step; None: no step is open
        # Buffers whose residuals the last step replaced; None: another step has begun.
        self._kept: list[int] | None = None
        self._last: list[int] | None = None  # of the step before, until this one sends a buffer
        self._left_out: list[tuple[int, slice]] = []  # parts of sent buffers that no rank has ready

    def lay_out(self, layout: Layout, memory: Any) -> None:
        """Use another layout of the same arrays; the residuals move with the arrays."""
        np = numpy()
        residuals = self.residuals() if self._now else {}
        self._layout, self._sent, self._kept, self._last = layout, None, None, None
        whole, now, new = (
            np.frombuffer(memory, np.float32, layout.n_bytes // _ITEM),
            *(np.zeros(layout.n_bytes // _ITEM, np.float32) for _ in range(2)),
        )
        self._values, self._now, self._new = (
            [flat[one.offset // _ITEM : one.end // _ITEM] for _, one, _ in layout.buffers]
            for flat in (whole, now, new)
        )
        self._put(residuals)

    def begin(self) -> None:
        """Begin a step, even if the previous step has not ended."""
        if self._kept is not None:
            self._last = self._kept
        self._sent, self._kept = [], None
        self._left_out.clear()

    def send(self, buffer: int, left_out: Collection[int] = ()) -> Codec:
        """Add the residuals to a float32 buffer before it is sent, and round it.

        Returns the codec in which its values are now exact. Arrays in `left_out`, which are ready
        on no rank, keep their residuals.
        """
        assert self._sent is not None
        self._last = None
        np, codec = numpy(), self.scheme.codec(self.n_steps)
        values, now, new = self._values[buffer], self._now[buffer], self._new[buffer]
        parts = [self._layout.part(buffer, index) for index in left_out]
        with np.errstate(invalid="ignore", over="ignore"):
            residuals = now
            if self.factor != 1:
                residuals = np.multiply(now, np.float32(self.factor), out=new)
            np.add(values, residuals, out=values)
            for part in parts:
                values[part] = 0
            new[...] = values
            round_to(codec, DType.FLOAT32, values.ctypes.data, values.size)
            np.subtract(new, values, out=new)
            if self.factor not in (0, 1):
                np.divide(new, np.float32(self.factor), out=new)
        for part in parts if self.factor else [slice(None)]:
            new[part] = now[part]
        self._sent.append(buffer)
        self._left_out += [(buffer, part) for part in parts]
        return codec

    def end(self) -> bool:
        """End a step after its averages have arrived, equal on all ranks. Idempotent.

        Returns:
            False if the averages are not finite, on all ranks; residuals are then unchanged.
        """
        if self._sent is None:
            return True
        is_finite = all(not_finite(self._values[one], DType.FLOAT32) is None for one in self._sent)
        sent, self._sent, self._kept = self._sent, None, []
        self.n_steps += 1
        if is_finite:
            for buffer, part in self._left_out:  # what reducers had kept back; no array takes it
                self._new[buffer][part] += self._values[buffer][part]
            self._swap(sent)
            self._kept = sent
        return is_finite

    def undo(self) -> None:
        """Undo the last step, because its averages are not used. Idempotent."""
        if self._kept is None:
            return
        self._swap(self._kept)
        self._kept = None
        self.n_steps -= 1

    def follow(self, n_steps: int) -> None:
        """Adopt rank 0's number of ended steps; the last step may have ended on some ranks only.

        A step that ended on this rank but not on rank 0 is undone, unless another has begun. A step
        that ended on rank 0 but not on this rank has sent all its buffers, and ends now.
        """
        if self.n_steps == n_steps + 1:
            if self._kept is None:  # the next step has begun
                self._kept, self._last = self._last, None
            self.undo()
        elif self.n_steps == n_steps - 1:
            self._left_out.clear()  # their sums may not have arrived here
            self.end()
        self.n_steps = n_steps

    def _swap(self, buffers: Collection[int]) -> None:
        for one in buffers:
            self._now[one], self._new[one] = self._new[one], self._now[one]

    def residuals(self) -> dict[str, Any]:
        """Return a copy of the residual of each float32 array, by name."""
        np, layout = numpy(), self._layout
        found = {}
        for index, entry in enumerate(layout.entries):
            if entry.dtype is DType.FLOAT32:
                parts = [
                    self._now[one][self._layout.part(one, index)] for one in self._holding(index)
                ]
                flat = np.concatenate(parts) if parts else np.empty(0, np.float32)
                found[entry.name] = flat.reshape(entry.shape)
        return found

    def load(self, residuals: Mapping[str, Any], n_steps: int, *, strict: bool, owner: str) -> None:
        """Load a result of `residuals`, from this or another run, for the averager named `owner`.

        If some belong to other arrays, `strict` raises UsageError with their names and changes
        nothing; otherwise the rest are loaded, with one line in the log.
        """
        np, held = numpy(), self.residuals()
        given = {name: np.asarray(one, np.float32) for name, one in residuals.items()}
        wrong = [f"{name!r} has no residual there" for name in held if name not in given]
        wrong += [f"{name!r} is not averaged here" for name in given if name not in held]
        wrong += [
            f"{name!r} is {list(one.shape)} there and {list(held[name].shape)} here"
            for name, one in given.items()
            if name in held and one.shape != held[name].shape
        ]
        what = f"{owner}: these residuals belong to other arrays: {named(wrong)}"
        if wrong and strict:
            raise UsageError(f"{what}. Load the residuals of this model, or pass strict=False")
        if wrong:
            _LOG.warning("%s. These residuals are dropped, and begin at 0", what)
        fits = {n: one for n, one in given.items() if n in held and one.shape == held[n].shape}
        for flat in self._now:
            flat.fill(0)
        self._put(fits)
        self.n_steps, self._kept = n_steps, None

    def _put(self, residuals: Mapping[str, Any]) -> None:
        for index, entry in enumerate(self._layout.entries):
            if entry.name not in residuals:
                continue
            flat, first = residuals[entry.name].reshape(-1), 0
            for one in self._holding(index):
                part = self._layout.part(one, index)
                length = part.stop - part.start
                self._now[one][part] = flat[first : first + length]
                first += length

    def _holding(self, index: int) -> list[int]:
        """Return the buffers that hold parts of an array, in the order of its elements."""
        buffers = self._layout.buffers
        held = [one for one in self._layout.buffers_of[index] if index in buffers[one].entries]
        return sorted(held, key=lambda one: buffers[one].extent.offset)
