"""Learns from the first step of a static graph how often each gradient is produced in a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

Hook = Callable[..., None]


class StaticGraph:
    """Counts how often each gradient is produced in a backward pass.

    With reentrant checkpoints a gradient is produced several times, and complete at the last.
    `fail` raises an error if the graph has changed; `is_armed` is true while gradients are counted.

    Attributes:
        is_agreed: ranks have compared their gradients.
        is_known: all ranks had learned the graph by then.
    """

    def __init__(
        self,
        names: Sequence[str],
        fail: Callable[[str], NoReturn],
        is_armed: Callable[[], bool | None],
    ) -> None:
        self.is_learning = True
        self.is_agreed = self.is_known = False
        self._names = names
        self._fail = fail
        self._is_armed = is_armed
        self._hooks: list[Hook] = []
        self._counts = [0] * len(names)
        self._came: dict[int, None] = {}  # in the order of their last gradients
        self._n_left: list[int] = []

    def begin(self) -> None:
        """Begin a step."""
        if self.is_learning:
            self._counts = [0] * len(self._counts)
            self._came.clear()
        self._n_left = list(self._counts)

    def around(self, hooks: Sequence[Hook], queue_end: Callable[[], None]) -> list[Hook]:
        """Return a hook for each parameter that calls the given hook once its gradient is complete.

        Args:
            queue_end: ends the step with the pass, if no output has begun the pass.
        """
        self._hooks = list(hooks)
        if self.is_learning:
            record = functools.partial(self._record, queue_end)
            return [functools.partial(record, index) for index in range(len(hooks))]
        return [
            hook if self._counts[index] == 1 else functools.partial(self._count, index, hook)
            for index, hook in enumerate(hooks)
        ]

    @property
    def absent(self) -> list[int]:
        """The parameters that never get a gradient on this rank."""
        return [index for index, count in enumerate(self._counts) if not count]

    @property
    def has_seen_none(self) -> bool:
        """True if the learning step has produced no gradient yet."""
        return self.is_learning and not any(self._counts)

    def learn(self) -> None:
        """Keep the counts of the first pass, after its end, and call the hooks of its gradients."""
        self.is_learning = False
        for index in self._came:
            self._hooks[index]()

    def agree(self, group: dist.ProcessGroup) -> bool:
        """Return True if any rank misses a gradient; a rank without inputs misses all."""
        self.is_agreed = True
        missing = torch.tensor([int(0 in self._counts), int(self.is_learning)])
        dist.all_reduce(missing, op=dist.ReduceOp.MAX, group=group)
        self.is_known = not missing[1].item()
        return bool(missing[0].item())

    def _record(self, queue_end: Callable[[], None], index: int, *_: object) -> None:
        if self._is_armed():
            self._counts[index] += 1
            self._came.pop(index, None)
            self._came[index] = None
            queue_end()

    def _count(self, index: int, hook: Hook, *_: object) -> None:
        """Count down the gradients of a parameter, and call its hook at the last."""
        if not self._is_armed():
            return
        if not self._n_left[index]:
            n = self._counts[index]
            self._fail(
                "Your training graph has changed in this iteration, which static_graph=True rules "
                f"out: parameter {self._names[index]} has more gradients now than in the first "
                f"iteration, which had {n or 'none'}"
            )
        self._n_left[index] -= 1
        if self._n_left[index] == 0:
            hook()
