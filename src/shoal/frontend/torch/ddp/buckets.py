"""Averages gradients with one of torch's communication hooks, bucket by bucket, on any device.

Each bucket holds whole parameters. A hook may call any collective, so it gets the buckets in the
same order on every rank. Calls in callbacks of futures have the same order too: the callbacks of a
bucket run after the pass, before the callbacks of the next bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from shoal.average.departures import words_for
from shoal.average.lacking import announce, check_alive, explaining
from shoal.frontend.torch.ddp.gradients import Gradients, dtype_of_gradient, like_gradient, place_in
from shoal.frontend.torch.ddp.parameter_hooks import not_held
from shoal.frontend.torch.work import calls_of_hook

if TYPE_CHECKING:
    from shoal.frontend.torch.work import PendingWork
    from shoal.group.group import Group

    Hook = Callable[[Any, Any], Any]


class HookedBuckets:
    """Averages gradients with a communication hook.

    Args:
        gradients: get their places in the constructor.
        process_group: torch's group, which a hook may call; `group` is the shoal group in it.
        on_full: called when all gradients of a bucket are ready.
        n_bytes: the minimum size of a bucket.
        hook: called as `hook(state, bucket)`, in a backward pass, for each bucket in turn.
    """

    is_weighted = False
    weight: float | None = None

    def __init__(
        self,
        gradients: Gradients,
        process_group: dist.ProcessGroup,
        group: Group,
        on_full: Callable[[], None],
        n_bytes: int,
        hook: Hook,
        state: object,
    ) -> None:
        self.gradients = gradients
        self._process_group = process_group
        self._group = group
        self._on_full = on_full
        self._subject = group.subjects.add(words_for(gradients.names))
        self._hook = hook
        self._state = state
        # Gradients are produced from the last parameter to the first.
        likes = [like_gradient(parameter) for parameter in reversed(gradients.parameters)]
        assigned = _compute_bucket_assignment_by_size(likes, [n_bytes])[0] if likes else []
        self._members = [[len(likes) - 1 - index for index in members] for members in assigned]
        self._bucket_of = {i: b for b, members in enumerate(self._members) for i in members}
        self._buffers, places = _laid_out(gradients.parameters, self._members)
        gradients.settle(lambda index: places[index].data)
        self.is_armed = self._is_stopped = False
        self._came = [False] * len(gradients.parameters)
        self._used: list[bool] = []  # by parameter, on any rank in the last step with `unused`
        self._keeps_used = False
        self._n_missing: list[int] = []
        self._works: list[PendingWork] = []  # of this pass
        # By bucket: its hook's future, and how many works there are up to it.
        self._futures: list[tuple[Any, int]] = []

    @property
    def sizes(self) -> list[int]:
        """The size of each bucket in bytes."""
        return [buffer.numel() * buffer.element_size() for buffer in self._buffers]

    def hooks(self) -> list[Callable[..., None]]:
        """Return a function for each parameter to call when its gradient is ready."""
        count = not_held(self.count)
        return [functools.partial(count, index) for index in range(len(self._came))]

    @property
    def has_begun(self) -> bool:
        """True if any gradient of this step is ready."""
        return any(self._came)

    def agree_to_forget(self, why: str) -> None:
        """Wait until every rank has called this, because its backward pass raised."""
        announce(self._group, "buckets, raised", why, ())
        check_alive(self._group)

    def sent(self) -> set[int]:
        """Return the parameters whose buckets were passed to the hook in this step."""
        return {index for members in self._members[: len(self._futures)] for index in members}

    def begin(self, *, again: bool = False) -> None:
        """Count gradients from now on."""
        self._came = [False] * len(self._came)
        self._n_missing = [len(members) for members in self._members]
        self._works, self._futures = [], []
        self.gradients.begin()
        self.is_armed, self._is_stopped = True, False

    def note_forward(self) -> None:
        """Do nothing: no times are recorded."""

    def reserve(self) -> None:
        """Do nothing: buckets are matched by their order."""

    def stop(self) -> None:
        """Count no gradients until `begin` or `resume`."""
        self.is_armed, self._is_stopped = False, True

    def resume(self) -> None:
        """Count gradients of this step again, if `stop` was called in it."""
        if self._is_stopped:
            self.is_armed, self._is_stopped = True, False

    def give_up(self) -> None:
        """Count no more gradients, and return them to the program."""
        self.stop()
        self.gradients.release(self.sent())

    def missing(self) -> list[int]:
        """Return the parameters whose gradients are missing since `begin`."""
        return [index for index, came in enumerate(self._came) if not came]

    def count(self, index: int, *_: object) -> None:
        """Record that the gradient of a parameter is ready."""
        if not self.is_armed:
            return
        if self._came[index]:
            raise RuntimeError(twice(self.gradients.names[index]))
        self._came[index] = True
        bucket = self._bucket_of[index]
        self._n_missing[bucket] -= 1
        if not self._n_missing[bucket]:
            self._on_full()
        while len(self._futures) < len(self._members) and not self._n_missing[len(self._futures)]:
            self._leave(len(self._futures))

    def wait_for_rest(self, why: str) -> None:
        """Do nothing: the other ranks wait until their deadline."""

    def lack(self, why: str) -> None:
        """Notify the ranks that wait for missing gradients that they will not arrive."""
        announce(self._group, "buckets", why)

    def end(self, unused: bool, factor: float = 1.0) -> None:
        """Wait for all averages, and store them times `factor` in the gradients.

        With `unused`, gradients that no rank has are unchanged.
        """
        with explaining(self._group):
            self.is_armed = False
            # The hook gets a copy of these gradients: one that no rank has stays as it is.
            missing = self.missing() if unused else []
            self.gradients.leave(missing)
            own = {index: self.gradients.parameters[index].grad for index in missing}
            while len(self._futures) < len(self._members):
                self._leave(len(self._futures))
            if unused and self._buffers and not self._keeps_used:
                self._used = self._used_anywhere()
            used = self._used if unused else []
            n_done = 0
            for number, (future, n_works) in enumerate(self._futures):
                buffer = self._buffers[number]
                for work in self._works[n_done:n_works]:
                    work.wait()
                n_done = n_works
                result = result_of(future)
                if result.shape.numel() != buffer.numel():
                    self.gradients.refuse(
                        f"the communication hook made {result.shape.numel()} elements of bucket "
                        f"{number}, which has {buffer.numel()}: return the average of the whole "
                        "bucket"
                    )
                if result.data_ptr() != buffer.data_ptr():
                    buffer.copy_(result.view(-1))
                if factor != 1.0:
                    buffer.mul_(factor)
            self._works, self._futures = [], []
            every = range(len(self._came))
            self.gradients.deliver([index for index in every if not used or used[index]])
            for index, gradient in own.items():
                if not used[index]:
                    self.gradients.parameters[index].grad = gradient

    def undo_feedback(self) -> None:
        """Do nothing: only the hook knows its state."""

    def keep_used(self) -> None:
        """Expect the gradients of the last step in all steps, on every rank."""
        self._keeps_used = True

    def _used_anywhere(self) -> list[bool]:
        used = torch.tensor(self._came, dtype=torch.uint8, device=self._buffers[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._process_group)
        return [bool(value) for value in used.tolist()]

    def _leave(self, number: int) -> None:
        members = self._members[number]
        self.gradients.bring(members)
        bucket = Bucket(
            number,
            number == len(self._members) - 1,
            self._buffers[number],
            [self.gradients.places[index] for index in members],
            [self.gradients.parameters[index] for index in members],
        )
        self._subject.step += number == 0  # the first bucket sent in a step
        with torch.no_grad(), calls_of_hook(self._subject.of(number), self._works):
            future = call_hook(self._hook, self._state, bucket, self.gradients.refuse)
        self._futures.append((future, len(self._works)))


def twice(name: str) -> str:
    """Return the error text for a gradient that came twice."""
    return (
        f"Expected to mark a variable ready only once: the gradient of parameter {name} came twice "
        "before all others had come. If several losses of one forward pass each call backward, "
        "add them up, and call backward once. If reentrant checkpoints share a parameter, give "
        "them use_reentrant=False, or the wrapper static_graph=True"
    )


def _laid_out(
    parameters: Sequence[torch.nn.Parameter], buckets: Sequence[Sequence[int]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a new buffer for each bucket, and each parameter's place in them."""
    buffers: list[torch.Tensor] = []
    places = [torch.empty(0)] * len(parameters)
    for members in buckets:
        some = parameters[members[0]]
        total = sum(parameters[index].numel() for index in members)
        buffer = torch.zeros(total, dtype=dtype_of_gradient(some), device=some.device)
        first = 0
        for index in members:
            places[index] = place_in(buffer, first, parameters[index].detach())
            first += parameters[index].numel()
        buffers.append(buffer)
    return buffers, places


# Python cannot construct torch's GradBucket, so hooks get this class instead.


class Bucket:
    """Some gradients in one flat tensor, with the methods of `torch.distributed.GradBucket`.

    `gradients` are views into `buffer`, in the shapes of the parameters. `buffer` may also be a
    sparse gradient.
    """

    def __init__(
        self,
        index: int,
        is_last: bool,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)

    def index(self) -> int:
        """Return the number of the bucket; hooks get buckets in this order."""
        return self._index

    def is_last(self) -> bool:
        """Return True for the last bucket of a backward pass."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return all gradients, flattened."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, in the shapes of the parameters."""
        return list(self._gradients)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, in the order of the gradients."""
        return list(self._parameters)


def call_hook(
    hook: Callable[[Any, Any], Any],
    state: object,
    bucket: Bucket,
    refuse: Callable[[str], NoReturn],
) -> Any:
    """Call a communication hook and return its future; if it returns none, call `refuse`."""
    future = hook(state, bucket)
    if not hasattr(future, "wait"):
        refuse(
            f"communication hook {getattr(hook, '__qualname__', hook)} returned {future!r} for "
            f"bucket {bucket.index()}: return a torch.futures.Future of the bucket's average"
        )
    return future


def result_of(future: Any) -> torch.Tensor:
    """Wait for the average in a hook's future; some hooks return it in a list."""
    result = future.wait()
    found: torch.Tensor = result[0] if isinstance(result, (list, tuple)) else result
    return found
