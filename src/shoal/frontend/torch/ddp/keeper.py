"""When gradients are averaged: what torch's C++ reducer is to its DistributedDataParallel.

A backward pass begins when a gradient reaches an output of the model, and ends when all that it has
set off is done. Which gradients came in between is counted, and what is full leaves at once.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

import shoal.frontend.torch as frontend
from shoal.average import NotFinite
from shoal.average.lacking import GO_ON
from shoal.errors import Unsupported, UsageError
from shoal.frontend.torch.compiler import not_compiled, not_inlined
from shoal.frontend.torch.ddp.held import not_held
from shoal.frontend.torch.ddp.joined import Joined
from shoal.frontend.torch.ddp.static_graph import StaticGraph
from shoal.frontend.torch.ddp.turns import SharedTurn
from shoal.frontend.torch.ddp.unfinished import Missing
from shoal.frontend.torch.ddp.weights import SharedWeights

if TYPE_CHECKING:
    from types import FrameType

    from shoal.frontend.torch.ddp.gradients import Gradients
    from shoal.frontend.torch.ddp.sparse import SparseGradients


class Averaging(Protocol):
    """How gradients are averaged once they are there."""

    gradients: Gradients
    on_full: Callable[[], None]
    is_weighted: bool
    begun_with: float | None  # the weight of the forward pass that is to be averaged

    @property
    def is_armed(self) -> bool:
        """Whether gradients are counted."""

    @property
    def sizes(self) -> list[int]:
        """The bytes of each buffer."""

    def hooks(self) -> list[Callable[..., None]]:
        """What each parameter calls when its gradient is there."""

    @property
    def has_begun(self) -> bool:
        """True if gradients of this step have come, or other ranks know of the step."""

    def begin(self, *, again: bool = False) -> None:
        """From now on gradients are counted."""

    def take_weight(self) -> float | None:
        """That of a forward pass whose gradients will not be averaged, if it was given one."""

    def match_weight(self) -> None:
        """Weigh 0 in the next step, where steps have weights."""

    def note_forward(self) -> None:
        """A forward pass begins whose gradients will be averaged."""

    def reserve(self) -> None:
        """A backward pass has begun, on every rank."""

    def stop(self) -> None:
        """Gradients that come are of no interest."""

    def resume(self) -> None:
        """Resume counting gradients."""

    def missing(self) -> list[int]:
        """The parameters whose gradients have not come since `begin`."""

    def wait_for_rest(self, why: str) -> None:
        """A backward pass has ended before all gradients came; another may bring the rest."""

    def lack(self, why: str) -> None:
        """What has not come will not: tell the ranks that wait for it."""

    def agree_to_forget(self, why: str) -> None:
        """Return when every rank has; a backward pass raised on all."""

    def sent(self) -> set[int]:
        """The parameters of which some element has been sent in this step."""

    def end(self, unused: bool, factor: float = 1.0) -> None:
        """Wait for all averages, multiply them, and have the gradients hold them."""


_PASSES: Final = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)


@not_compiled
class GradientKeeper:
    """Counts gradients, and has them averaged.

    Threads: that which runs the backward pass.

    Args:
        names: of the parameters, the sparse ones last.
        averaging: of the dense ones.
        find_unused: parameters may get no gradient, and not the same ones on every rank.
    """

    def __init__(
        self,
        names: Sequence[str],
        averaging: Averaging,
        sparse: SparseGradients,
        group: dist.ProcessGroup,
        find_unused: bool,
        on_error: Callable[[str], None],
    ) -> None:
        self.names = list(names)
        self.averaging = averaging
        self.n_steps = 0
        averaging.gradients.refuse = not_held(self.refuse)
        self._sparse = sparse
        self._group = group
        self._finds_unused = find_unused
        self._on_error = on_error
        self._hook: Callable[[Any, Any], Any] | None = None
        self._state: object = None
        self._handles: list[Any] = []
        self._hooked: list[int] = []  # the addresses of torch's tensors that have the hooks
        self._next_hook = -1  # the number of whichever is put next, when ours were seen to be last
        # To the end of the pass under way. A pass that raises forgets it, and it is gone.
        self._end: Callable[[], object] = _no_end
        self._creates_graph = False
        self._is_expecting = False
        self._join: Joined | None = None
        self._awaited: list[Any] = []
        self._static: StaticGraph | None = None
        self._was_rebuilt = False
        self._came: set[int] = set()  # since the last average; kept where gradients are noted
        self._is_unseen = False  # no output tells of a backward pass: the first gradient does
        self._unused: list[int] | None = None
        self._is_static = True
        self._graph_has_changed = False
        self.after_step: Callable[[], None] | None = None
        self.check_same: Callable[[int], None] | None = None  # called after each step
        self.turn = SharedTurn(not_held(self.refuse))
        self.summed = SharedWeights(not_held(self._has_sums), not_held(self.refuse))
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._attach()

    # What torch's wrapper calls.

    @not_inlined
    def prepare_for_forward(self) -> None:
        """A forward pass begins whose gradients are to be averaged."""
        self.averaging.note_forward()

    @not_inlined
    def forget_raised(self) -> None:
        """A forward pass begins, on every rank: a backward pass before that raised is over."""
        if not self.has_raised or self._graph_has_changed:  # which other ranks know already
            return
        why = f"a backward pass raised on rank {dist.get_rank(self._group)} before its end"
        self.averaging.agree_to_forget(why)
        # What has been sent on some ranks has to be sent on all; its averages are of no use.
        with self._zeros(self.averaging.sent()), contextlib.suppress(NotFinite, UsageError):
            self.averaging.resume()
            self._count(self.averaging.missing())
            self.averaging.end(unused=False)
        self._is_expecting = False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """A forward pass has ended whose gradients are to be averaged.

        Args:
            outputs: the model's tensors.

        Raises:
            RuntimeError: gradients of the backward pass before have not come; names them.
        """
        hooked = [output for output in outputs if output.grad_fn is not None]
        if not hooked and not self._is_unseen:
            self._is_unseen = True
            self._attach()
        self.turn.note_forward(is_told=bool(hooked))
        self._check_finished()
        self._come_last()
        self._is_expecting = True
        self._begin()
        for output in hooked:
            output.register_hook(self._begin_pass)  # type: ignore[no-untyped-call]
        self._next_hook += len(hooked)

    def forget_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        """A forward pass has ended whose gradients are not to be averaged."""
        self.turn.note_forward(is_told=False)
        weight = self.averaging.take_weight()
        if weight is not None:
            self.summed.note_forward(weight, outputs)
        if self._end() is None and len(self._missing()) == len(self.names):
            self.averaging.stop()

    def _check_reducer_finalized(self) -> None:
        self._check_finished()
        if self._is_expecting:
            self._fail_unfinished(self._missing())

    def _rebuild_buckets(self) -> bool:
        """Whether the places of gradients have changed after the first step; true once."""
        rebuilt = not self._was_rebuilt and self.n_steps > 0 and not self._finds_unused
        self._was_rebuilt = self._was_rebuilt or rebuilt
        return rebuilt

    def _push_all_rebuilt_params(self) -> None:
        pass

    def _set_forward_pass_work_handle(self, work: Any, divide_by_size: bool) -> None:
        self._join = Joined(work, divide_by_size)

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        self._awaited.extend(futures)

    def _set_static_graph(self) -> None:
        if self.n_steps:
            self._fail("_set_static_graph() should be called before training loop starts")
        self._static = StaticGraph(
            self.names, not_held(self._graph_changes), not_held(self._is_armed)
        )
        self._attach()

    def _ddp_graph_static(self) -> bool:
        return self._is_static

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks had a gradient of each parameter in the last step; every rank calls it."""
        absent = set(self._unused or [])
        used = torch.tensor([int(index not in absent) for index in range(len(self.names))])
        dist.all_reduce(used, group=self._group)
        return used.int()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        pass

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        return dist.all_reduce(bucket.buffer(), group=self._group, async_op=True).get_future()

    def _remove_autograd_hooks(self) -> None:
        _remove(self._handles)

    def _reset_state(self) -> None:
        if self._end() is not None:  # NOT where it is gone: that tells of a pass that raised
            self._end = _no_end
        self._is_expecting = False
        self.averaging.stop()
        self._sparse.begin()

    # Averaging.

    def use(self, averaging: Averaging, hook: Any, state: object) -> None:
        """Average in another way from now on. No backward pass is under way."""
        self.averaging = averaging
        averaging.gradients.refuse = not_held(self.refuse)
        self._hook, self._state = hook, state
        self._attach()

    def refuse(self, why: str) -> NoReturn:
        """Go no further with this model; the ranks that do hear why.

        Raises:
            UsageError: always.
        """
        self.averaging.lack(why)
        raise UsageError(f"DistributedDataParallel: {why}{self._go_on()}")

    def shared_with(self, parameters: set[int]) -> str | None:
        """The name of the first parameter with one of these ids; None: it averages none."""
        named = zip(self.names, self._parameters(), strict=True)
        found = (name for name, parameter in named if id(parameter) in parameters)
        return next(found, None)

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass is under way."""
        return self._end() is not None

    def match(self) -> None:
        """Take part in a backward pass of the others with zeros: this rank has no more inputs."""
        with self._zeros():
            self.averaging.match_weight()
            self._begin()
            self.averaging.reserve()
            if self._static is not None:
                self._agree_on_graph(self._static)
            if not self._finds_unused:
                self._count(self.averaging.missing())
            self._average(self._finds_unused)

    @contextlib.contextmanager
    def _zeros(self, lost: Collection[int] = ()) -> Iterator[None]:
        """Contribute zeros meanwhile, outside a backward pass."""
        self._end = lambda: self  # there is no pass that could end
        try:
            with self.averaging.gradients.hidden(lost), self._sparse.hidden():
                yield
        finally:
            self._end = _no_end

    def _count(self, indices: Sequence[int]) -> None:
        """Have these gradients counted as if they came now."""
        hooks = [*self.averaging.hooks(), *self._sparse.hooks(_no_end)]
        for index in indices:
            hooks[index]()

    def _attach(self) -> None:
        """Have every parameter tell when its gradient is there."""
        self._remove_autograd_hooks()
        self.averaging.on_full = not_held(self._queue_end)
        hooks = [*self.averaging.hooks(), *self._sparse.hooks(not_held(self._end_if_armed))]
        if self._static is not None:
            hooks = self._static.around(hooks, not_held(self._queue_end))
        if self._finds_unused or self._static is not None or self._is_unseen:
            hooks = [self._noting(index, hook) for index, hook in enumerate(hooks)]
        self._handles += [
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for parameter, hook in zip(self._parameters(), hooks, strict=True)
        ]
        self._hooked = [parameter._cdata for parameter in self._parameters()]

    def _noting(self, index: int, hook: Callable[..., None]) -> Callable[..., None]:
        """A hook that notes what comes in any pass, and passes on what is to be averaged.

        Where outputs tell nothing, the first gradient tells that a pass has begun.
        """
        note = not_held(self._note)

        def come(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # torch calls hooks for none, too (`UndefinedGrad`)
                note(index)
                hook()

        return come

    def _note(self, index: int) -> None:
        self._came.add(index)
        if not self._is_armed() or self._end() is not None:
            return
        if _is_nested():
            self.refuse(
                f"a backward pass within another, as of a reentrant checkpoint, brought the first "
                f"gradient, of parameter {self.names[index]}: no tensor was found in the model's "
                "output that tells when the outer pass begins and ends; give checkpoints "
                "use_reentrant=False, or have the model return tensors"
            )
        self._begin_pass()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [*self.averaging.gradients.parameters, *self._sparse.parameters]

    def _come_last(self) -> None:
        """Be told of each gradient after hooks that others have put there since: they change it."""
        if self._next_hook == RemovableHandle.next_id:
            return  # nobody has put a hook anywhere
        self._next_hook = RemovableHandle.next_id
        for parameter, handle in zip(self._parameters(), self._handles, strict=False):
            hooks: Any = parameter._post_accumulate_grad_hooks
            if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # NOT move_to_end: C++ would not see it

    def _check_attached(self, missing: Sequence[int]) -> None:
        """Refuse parameters that cannot tell of a gradient any more: it would not be missed."""
        parameters = self._parameters()
        for index in missing if self._handles else ():
            parameter, hooked = parameters[index], self._hooked[index]
            hooks: Any = parameter._post_accumulate_grad_hooks or ()
            if hooked != parameter._cdata or self._handles[index].id not in hooks:
                self.refuse(
                    f"parameter {self.names[index]} has lost its hook on rank "
                    f"{dist.get_rank(self._group)}, as by torch.utils.swap_tensors, and would "
                    "not be averaged: wrap `model.module` anew, on every rank"
                )

    def _begin(self, *, again: bool = False) -> None:
        self.averaging.begin(again=again)
        self._sparse.begin()
        if self._static is not None:
            self._static.begin()

    def _begin_pass(self, _gradient: torch.Tensor | None = None) -> None:
        if self._end() is None:
            self.turn.begin()
            self._come_last()
        if not self.averaging.is_armed:  # another over one forward pass, or one that was paused
            self._begin(again=True)
        for keeper in (self, *self.turn.others):
            keeper.summed.check(self.averaging.begun_with)
        # NOT with the forward pass: a rank may make one more, which nothing comes back from.
        self.averaging.reserve()
        self._queue_end()

    def _queue_end(self) -> None:
        """Have the pass end when all that it has set off is done."""
        if self._end() is None:
            end = functools.partial(self._end_pass)
            self._end = weakref.ref(end)
            self._creates_graph = torch.is_grad_enabled()
            Variable._execution_engine.queue_callback(end)

    def _is_armed(self) -> bool:
        return self.averaging.is_armed

    def _end_if_armed(self) -> None:
        if self._is_armed():
            self._queue_end()

    def _end_pass(self) -> None:
        try:
            if self._all_has_come():
                self._finish(self._finds_unused)
        finally:
            self._end = _no_end  # NOT before: what leaves last would queue another end
            self.turn.end()

    @property
    def has_raised(self) -> bool:
        """Whether the last backward pass raised in its middle: then its end is gone."""
        return self._end is not _no_end and self._end() is None

    def _all_has_come(self) -> bool:
        """Whether the step can end; if not, the rest comes in another pass over its forward."""
        static = self._static
        if static is not None and static.has_seen_none:
            return False  # autograd.grad, for what is no parameter
        if static is not None and static.is_learning:
            static.learn()
            self._agree_on_graph(static)
            self._attach()
        if self._finds_unused:
            parameters = self._parameters()
            came = [i for i in self._missing() if i in self._came]
            self._count([i for i in came if parameters[i].grad is not None])
        missing = self._missing()
        self._check_attached(missing)
        if self._creates_graph and len(missing) == len(self.names):
            return False  # autograd.grad, for a loss that is made of what it returns
        if missing and not (self._finds_unused if static is None else static.absent == missing):
            if len(missing) < len(self.names):
                self.averaging.wait_for_rest(self._told(missing).for_others())
            return False
        self._is_expecting = False
        self._is_static = self._is_static and self._unused in (None, missing)
        self._unused = missing
        return True

    def _agree_on_graph(self, static: StaticGraph) -> None:
        """Learn whether any rank lacks a gradient, once; every rank calls it at the same place."""
        if not static.is_agreed:
            self._finds_unused = static.agree(self._group)

    def _average(self, unused: bool) -> None:
        join, self._join = self._join, None
        size, is_weighted = dist.get_world_size(self._group), self.averaging.is_weighted
        factor = join.factor(size, is_weighted=is_weighted) if join is not None else 1.0
        self.averaging.end(unused, factor)
        self._sparse.end(factor, self._hook, self._state)

    def _finish(self, unused: bool) -> None:
        for keeper in (self, *self.turn.others):
            keeper.summed.clear()
        self._came.clear()
        may_stand_still = self._join is not None  # ranks that have run out of inputs do
        self._average(unused)
        awaited, self._awaited = self._awaited, []
        for future in awaited:
            future.wait()
        self.n_steps += 1
        if self.check_same is not None and not may_stand_still:
            self.check_same(self.n_steps)
        if self.after_step is not None:
            self.after_step()

    def _has_sums(self) -> bool:
        """Whether there are gradients to which those of a pass are added."""
        found = (parameter.grad for parameter in self._parameters())
        return any(one is not None and bool(one.any()) for one in found)

    def _missing(self) -> list[int]:
        n_dense = len(self.averaging.gradients.parameters)
        absent = [n_dense + i for i, came in enumerate(self._sparse.came) if not came]
        return self.averaging.missing() + absent

    def _check_finished(self) -> None:
        if not self._is_expecting or not self.averaging.is_armed:
            return
        missing = self._missing()
        self._check_attached(missing)
        if missing and (self._graph_has_changed or len(missing) < len(self.names)):
            self._is_expecting = self._graph_has_changed = False
            self.averaging.lack(self._told(missing).for_others())
            self._fail_unfinished(missing)

    def _graph_changes(self, why: str) -> NoReturn:
        self._graph_has_changed = True
        self.averaging.lack(f"{why}, on rank {dist.get_rank(self._group)}")
        self._fail(why)

    def _fail(self, why: str) -> NoReturn:
        self._on_error(why)
        raise RuntimeError(why)

    def _fail_unfinished(self, missing: Sequence[int]) -> NoReturn:
        self._fail(self._told(missing).here(self._static is not None, self._go_on()))

    def _told(self, missing: Sequence[int]) -> Missing:
        return Missing(missing, self.names, self._parameters(), dist.get_rank(self._group))

    def _go_on(self) -> str:
        """What to do first where other ranks have waited for what is missing."""
        group = frontend.group_in(self._group)
        return "" if group is None or group.ended() is None else GO_ON


def _unsupported(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise Unsupported(
            f"DistributedDataParallel: {name} is a method of torch's C++ reducer, which this "
            "wrapper replaces; use torch's own wrapper over shoal for what calls it"
        )

    return refuse


for _name in set(dir(Reducer)) - set(dir(GradientKeeper)):
    setattr(GradientKeeper, _name, _unsupported(_name))


def _no_end() -> None:
    """The end of no pass."""


def _is_nested() -> bool:
    """Whether the backward pass under way was called in another one; their end is not the same."""
    n_passes = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        n_passes += frame.f_code in _PASSES
        frame = frame.f_back
    return n_passes > 1


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
