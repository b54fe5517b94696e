"""Residuals: what rounding took from this rank's values in one step, to be added in the next."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from shoal.average.preparing import not_finite, numpy
from shoal.dtypes import DType
from shoal.engine import round_to
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.average.compress import Scheme
    from shoal.average.layout import Layout
    from shoal.codec import Codec

_LOG: Final = logging.getLogger("shoal")
_MOST_NAMED: Final = 5
_ITEM: Final = 4  # bytes of a float32


class Feedback:
    """The residuals of one averager on one rank, a float32 for each element.

    A step adds the residuals to what it sends and makes new ones, by the rounding of `scheme`,
    which replace them when all averages have come. So a step that fails, or whose averages are not
    finite, leaves the residuals as they were: it can be repeated, and nothing is added twice.
    `n_steps` counts the steps that have ended. `factor` is what the caller has multiplied this
    step's values by; residuals are of values that nothing has multiplied.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.n_steps = 0
        self.factor = 1.0
        self._layout: Layout | None = None
        self._sent: list[int] | None = None  # buffers that have left in this step, if there is one
        # Buffers whose residuals the last step replaced; None: another has begun since.
        self._kept: list[int] | None = None

    def lay_out(self, layout: Layout, memory: Any) -> None:
        """Serve another layout of the same arrays from now on; their residuals move with them."""
        np = numpy()
        residuals = self.residuals() if self._layout is not None else {}
        self._layout, self._sent, self._kept = layout, None, None
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
        """Begin a step; one before that has not ended has changed nothing."""
        self._sent, self._kept = [], None

    def send(self, buffer: int, left_out: Collection[int] = ()) -> Codec:
        """Add the residuals to a float32 buffer that is about to leave, and round it.

        Returns the codec in which its values are exact now. Arrays in `left_out`, which no rank has
        ready, keep their residuals.
        """
        assert self._sent is not None
        np, codec = numpy(), self.scheme.codec(self.n_steps)
        values, now, new = self._values[buffer], self._now[buffer], self._new[buffer]
        parts = [self._part(buffer, index) for index in left_out]
        with np.errstate(invalid="ignore", over="ignore"):
            np.add(values, self._scaled(now, new), out=values)
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
        return codec

    def _scaled(self, residuals: Any, scratch: Any) -> Any:
        """Return residuals times `factor`, which is in most steps 1."""
        if self.factor == 1:
            return residuals
        return numpy().multiply(residuals, numpy().float32(self.factor), out=scratch)

    def end(self) -> bool:
        """End a step whose averages have come; they are the same on all ranks. Idempotent.

        Returns:
            False if the averages are not finite, on all ranks: residuals are as they were.
        """
        if self._sent is None:
            return True
        sent, self._sent, self._kept = self._sent, None, []
        self.n_steps += 1
        if all(not_finite(self._values[one], DType.FLOAT32) is None for one in sent):
            self._swap(sent)
            self._kept = sent
            return True
        return False

    def undo(self) -> None:
        """Go back to before the last step, whose averages are not used. Idempotent."""
        if self._kept is None:
            return
        self._swap(self._kept)
        self._kept = None
        self.n_steps -= 1

    def follow(self, n_steps: int) -> None:
        """Have ended as many steps as rank 0, where ranks may differ in whether the last one ended.

        A step that ended here alone is undone if no other has begun since. One that ended on rank 0
        alone has sent all its buffers here, and ends.
        """
        if self.n_steps == n_steps + 1:
            self.undo()
        elif self.n_steps == n_steps - 1:
            self.end()
        self.n_steps = n_steps

    def _swap(self, buffers: Collection[int]) -> None:
        for one in buffers:
            self._now[one], self._new[one] = self._new[one], self._now[one]

    def _part(self, buffer: int, index: int) -> slice:
        """Where an array lies in a buffer, in elements."""
        assert self._layout is not None
        whole = self._layout.buffers[buffer].extent
        part = whole.common(self._layout.places[index])
        return slice((part.offset - whole.offset) // _ITEM, (part.end - whole.offset) // _ITEM)

    # What is saved with a model.

    def residuals(self) -> dict[str, Any]:
        """A copy of the residual of each float32 array, by name."""
        np, layout = numpy(), self._layout
        assert layout is not None
        found = {}
        for index, entry in enumerate(layout.entries):
            if entry.dtype is DType.FLOAT32:
                parts = [self._now[one][self._part(one, index)] for one in self._holding(index)]
                flat = np.concatenate(parts) if parts else np.empty(0, np.float32)
                found[entry.name] = flat.reshape(entry.shape)
        return found

    def load(self, residuals: Mapping[str, Any], n_steps: int, *, strict: bool, who: str) -> None:
        """Take residuals that `residuals` returned, here or in another run, for the averager `who`.

        If they belong to other arrays: with `strict` UsageError names them, and nothing changes;
        else what fits is taken, with one line in the log about the rest.
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
        more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        what = f"{who}: these residuals are of other arrays: {'; '.join(wrong[:_MOST_NAMED])}{more}"
        if wrong and strict:
            raise UsageError(f"{what}. Load those of this model, or give strict=False")
        if wrong:
            _LOG.warning("%s. What does not fit is dropped: those residuals begin at 0", what)
        fits = {n: one for n, one in given.items() if n in held and one.shape == held[n].shape}
        for flat in self._now:
            flat.fill(0)
        self._put(fits)
        self.n_steps, self._kept = n_steps, None

    def _put(self, residuals: Mapping[str, Any]) -> None:
        assert self._layout is not None
        for index, entry in enumerate(self._layout.entries):
            if entry.name not in residuals:
                continue
            flat, first = residuals[entry.name].reshape(-1), 0
            for one in self._holding(index):
                part = self._part(one, index)
                length = part.stop - part.start
                self._now[one][part] = flat[first : first + length]
                first += length

    def _holding(self, index: int) -> list[int]:
        """The buffers that hold a part of an array, in the order of its elements."""
        assert self._layout is not None
        buffers = self._layout.buffers
        held = [one for one in self._layout.buffers_of[index] if index in buffers[one].entries]
        return sorted(held, key=lambda one: buffers[one].extent.offset)
