"""Training by torch's DistributedDataParallel or shoal's: the steps of one rank, and its losses."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from bench.scoreboard.training_models import MODELS

if TYPE_CHECKING:
    from shoal.average import Averager

_N_BATCHES: Final = 16


class Variant(NamedTuple):
    """One way to train.

    Args:
        wrapper: torch's or shoal's DistributedDataParallel.
        over: the backend of torch's wrapper.
        bucket_mb: the size of a bucket or fusion buffer; None: the wrapper's choice.
        wire: the wire of shoal's wrapper.
        compress: the codec of its error feedback, or "top-k"; empty: none.
        sync_every: the passes from one average to the next; 0: nothing is averaged.
        forward_s, backward_s: the times of the model "paced".
        keeps: True: zero_grad() sets gradients to zero instead of dropping them.
        n_batches: the number of batches, which repeat.
    """

    model: str
    wrapper: str = "shoal"
    over: str = "shoal"
    bucket_mb: float | None = None
    wire: str | None = None
    compress: str = ""
    sync_every: int = 1
    forward_s: float = 0.0
    backward_s: float = 0.0
    keeps: bool = False
    n_batches: int = _N_BATCHES


class TrainingSteps(NamedTuple):
    """The times and losses of this rank's steps.

    Args:
        window_s: by step, the time from the first full fusion buffer to the last.
    """

    times_s: list[float]
    forward_s: list[float]
    backward_s: list[float]
    losses: list[float]
    window_s: float


class RankTrainings:
    """The trainings of a rank, made at first use, equally on every rank."""

    def __init__(self) -> None:
        self._trainings: dict[Variant, Training] = {}
        self._groups: dict[str, list[Any]] = {"shoal": [dist.group.WORLD]}

    def train(self, variant: Variant, n_steps: int, n_warmup: int) -> TrainingSteps:
        """Continue a training for some steps; the first ones are not timed."""
        if variant not in self._trainings:
            self._trainings[variant] = Training(variant, self.group(variant.over))
        return self._trainings[variant].take(n_steps, n_warmup)

    def group(self, backend: str) -> Any:
        """Return a process group of all ranks with a backend; the default group is shoal's."""
        return self.groups(backend, 1)[0]

    def groups(self, backend: str, n: int) -> list[Any]:
        """Return n process groups of all ranks with a backend."""
        made = self._groups.setdefault(backend, [])
        while len(made) < n:
            made.append(dist.new_group(backend=backend))
        return made[:n]

    def clear(self) -> None:
        """Forget the trainings."""
        self._trainings.clear()


class Training:
    """A wrapped model, its optimizer and batches; weights and batches are equal in all variants."""

    def __init__(self, variant: Variant, group: Any) -> None:
        self._variant = variant
        times_s = (variant.forward_s, variant.backward_s)
        torch.manual_seed(0)
        self._made = MODELS[variant.model](*(times_s if variant.model == "paced" else ()))
        self.model = wrap(self._made.module, variant, group)
        self._optimizer = self._made.optimizer(self.model.parameters())
        numbers = torch.Generator().manual_seed(1 + dist.get_rank())
        self._batches = [self._made.batch(numbers) for _ in range(variant.n_batches)]
        self._n_taken = 0

    def take(self, n_steps: int, n_warmup: int) -> TrainingSteps:
        """Take steps in a row. NO barrier between them, since it would prevent overlap.

        The first step of a training makes the optimizer's state, and does not count.
        """
        dist.barrier()
        if self._n_taken == 0:
            self.step()
        taken = [self.step() for _ in range(n_warmup + n_steps)][n_warmup:]
        times_s, forward_s, backward_s, losses = map(list, zip(*taken, strict=True))
        window_s = self._window_s(n_steps)
        return TrainingSteps(times_s, forward_s, backward_s, losses, window_s)

    def step(self) -> tuple[float, float, float, float]:
        """Return the seconds of a step, of its forward and backward pass, and its loss."""
        every = self._variant.sync_every
        batch = self._batches[self._n_taken % len(self._batches)]
        self._n_taken += 1
        averages = every > 0 and self._n_taken % every == 0
        begin_s = time.perf_counter()
        with contextlib.nullcontext() if averages else self.model.no_sync():
            loss = self._made.loss(self.model, batch)
            forward_s = time.perf_counter() - begin_s
            if every == 0 or (self._n_taken - 1) % every == 0:
                self._optimizer.zero_grad(set_to_none=not self._variant.keeps)
            loss.backward()  # type: ignore[no-untyped-call]  # torch
        backward_s = time.perf_counter() - begin_s - forward_s
        if averages or every == 0:
            self._optimizer.step()
        return time.perf_counter() - begin_s, forward_s, backward_s, loss.item()

    def _window_s(self, n_steps: int) -> float:
        """See TrainingSteps; 0 if torch's wrapper averages, or nothing was averaged."""
        if self._variant.wrapper == "torch":
            return 0.0
        averager: Averager = self.model.reducer.averaging.averager
        windows_s = [(max(one.full) - min(one.full)) / 1e9 for one in averager.times]
        return statistics.median(windows_s[-n_steps:]) if windows_s else 0.0


def wrap(module: nn.Module, variant: Variant, group: Any, **more: Any) -> Any:
    """Return the model in the wrapper of a variant, made with `more` arguments."""
    if variant.bucket_mb is not None:
        more["bucket_cap_mb"] = variant.bucket_mb
    if variant.wrapper == "torch":
        return nn.parallel.DistributedDataParallel(module, process_group=group, **more)
    import shoal.torch  # NOT above: the time of forming the group includes loading it

    if variant.compress == "top-k":
        more["compress"] = shoal.average.ChunkTopK()
    elif variant.compress:
        more["compress"] = shoal.average.ErrorFeedback(variant.compress)
    return shoal.torch.DistributedDataParallel(
        module, process_group=group, wire=variant.wire, **more
    )
