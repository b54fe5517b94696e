"""A NumPy model of error feedback, for all ranks at once, and averagers compared with it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import wires
from unit.averages import put

from shoal import Group
from shoal.average import Averager, ErrorFeedback

Arrays = dict[str, Any]
Rounding = Callable[[Arrays], Arrays]


def to_bf16(arrays: Arrays) -> Arrays:
    """Round each value to bfloat16."""
    return {name: wires.rounded("bf16", one) for name, one in arrays.items()}


def in_buffers(averager: Averager, codec: str) -> Callable[[Arrays], Arrays]:
    """Return a function that rounds arrays at their places in fusion buffers, zeros between."""

    def rounding(arrays: Arrays) -> Arrays:
        layout = averager.layout
        whole = np.zeros(layout.n_bytes // 4, np.float32)
        places = {
            entry.name: slice(place.offset // 4, place.end // 4)
            for entry, place in zip(layout.entries, layout.places, strict=True)
        }
        for name, one in arrays.items():
            whole[places[name]] = one.ravel()
        for _, extent, _ in layout.buffers:
            part = slice(extent.offset // 4, extent.end // 4)
            whole[part] = wires.rounded(codec, whole[part])
        return {name: whole[places[name]].reshape(one.shape) for name, one in arrays.items()}

    return rounding


class FeedbackModel:
    """The residuals of all ranks, whose values `rounding` rounds, and the averages of each step."""

    def __init__(
        self, size: int, shapes: Mapping[str, tuple[int, ...]], rounding: Rounding = to_bf16
    ) -> None:
        self.shapes, self.rounding = shapes, rounding
        zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.residuals = [dict(zeros) for _ in range(size)]

    def step(self, given: list[Arrays], factors: list[float] | None = None) -> Arrays:
        """Return the averages of arrays that some rank gives, each multiplied by its factor."""
        names = [name for name in self.shapes if any(name in arrays for arrays in given)]
        sent, after = [], []
        for rank, arrays in enumerate(given):
            before = self.residuals[rank]
            factor = np.float32(1 if factors is None else factors[rank])
            whole = {n: arrays.get(n, np.float32(0)) * factor + before[n] for n in names}
            sent.append(self.rounding(whole))
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                lost = {name: whole[name] - sent[-1][name] for name in names}
            after.append({**before, **lost})
        averages = {n: sum(one[n] for one in sent) / np.float32(len(given)) for n in names}
        if all(np.isfinite(average).all() for average in averages.values()):
            self.residuals = after
        return averages


SHAPES: dict[str, Any] = {
    "embedding": ((300, 11), "float32"),
    "step": ((7,), "int32"),
    "weight": ((57, 3, 2), "float32"),
    "nothing": ((0, 4), "float32"),
    "bias": ((1000,), "float32"),
    "last": ((), "float32"),
}
FLOATS = [name for name, (_, dtype) in SHAPES.items() if dtype == "float32"]


def gradient(name: str, rank: int, step: int) -> Any:
    """Return multiples of 1/8 that bfloat16 cannot hold; sums over steps and ranks are exact."""
    shape, dtype = SHAPES[name]
    source = np.random.default_rng([sum(map(ord, name)), rank, step])
    drawn = source.integers(-4096, 4096, shape)
    return np.asarray(drawn * 2 if dtype == "int32" else drawn / 8).astype(dtype)


def new_model(size: int, rounding: Rounding = to_bf16) -> FeedbackModel:
    return FeedbackModel(size, {name: SHAPES[name][0] for name in FLOATS}, rounding)


def gradients(size: int, step: int) -> list[Arrays]:
    return [{name: gradient(name, rank, step) for name in SHAPES} for rank in range(size)]


def send(averager: Averager, given: Arrays, **begin: Any) -> Arrays:
    """Begin a step and make its arrays ready, in this rank's order."""
    arrays = averager.begin(**begin)
    names = [name for name in given if name in arrays]
    np.random.default_rng(averager.group.rank).shuffle(names)
    put(averager, {name: given[name] for name in names})
    return arrays


def average(averager: Averager, given: Arrays, **begin: Any) -> Arrays:
    """Make one step, in this rank's order."""
    arrays = send(averager, given, **begin)
    averager.wait()
    return arrays


def check(averager: Averager, model: FeedbackModel, given: list[Arrays], **begin: Any) -> None:
    """Take one step here and in the model, and compare averages and residuals to the bit."""
    factors = begin.pop("factors", None)
    arrays = average(averager, given[averager.group.rank], **begin)
    for name, wanted in model.step(given, factors).items():
        np.testing.assert_array_equal(arrays[name], wanted, err_msg=name)
    check_residuals(averager, model)


def check_residuals(averager: Averager, model: FeedbackModel) -> None:
    held = averager.state_dict()["residuals"]
    assert list(held) == FLOATS
    for name, residual in model.residuals[averager.group.rank].items():
        np.testing.assert_array_equal(held[name], residual, err_msg=name)


def feeding(group: Group, **options: Any) -> Averager:
    """Arrays span buffers, and buffers hold several arrays."""
    options = {"compress": ErrorFeedback("bf16"), "fusion_bytes": 2048, **options}
    weighted = options.get("weighted")
    shapes = {name: SHAPES[name] for name in (FLOATS if weighted else SHAPES)}
    return Averager(group, shapes, **options)
