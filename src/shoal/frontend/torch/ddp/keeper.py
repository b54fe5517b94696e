"""Decides when gradients are averaged, in place of torch's C++ reducer.

A backward pass begins when a gradient reaches an output of the model, and ends when autograd has
finished all work that the pass started. The gradients in between are counted, and each full buffer
is sent at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer
from torch.autograd import Variable

import shoal.frontend.torch as frontend
from shoal.average import NotFinite
from shoal.average.lacking import GO_ON
from shoal.errors import Unsupported, UsageError
from shoal.frontend.torch.compiler import not_compiled, not_inlined
from shoal.frontend.torch.ddp.parameter_hooks import ParameterHooks, not_held
from shoal.frontend.torch.ddp.passes import BackwardPass, is_nested
from shoal.frontend.torch.ddp.static_graph import StaticGraph
from shoal.frontend.torch.ddp.unfinished import Missing

if TYPE_CHECKING:
    from shoal.frontend.torch.ddp.averaged import FusedGradients
    from shoal.frontend.torch.ddp.buckets import HookedBuckets
    from shoal.frontend.torch.ddp.sparse import SparseGradients

    Averaging = FusedGradients | HookedBuckets


@not_compiled
class GradientKeeper:
    """Counts gradients, and averages them in the way set by `use`.

    Only the thread that runs the backward pass may call it.

    Args:
        names: the names of the parameters, the sparse ones last.
        find_unused: parameters may get no gradient, and which ones may differ between ranks.
        on_error: called with the reason why a step cannot end.
        on_step: called after each step with its number, and True if ranks may have run out of
            inputs in it.
    """

    averaging: Averaging
    sparse: SparseGradients

    def __init__(
        self,
        names: Sequence[str],
        group: dist.ProcessGroup,
        find_unused: bool,
        on_error: Callable[[str], None],
        on_step: Callable[[int], None],
    ) -> None:
        self.names = list(names)
        self.n_steps = 0
        self._group = group
        self._finds_unused = find_unused
        self._on_error = on_error
        self._on_step = on_step
        self._hooks = ParameterHooks()
        self._pass = BackwardPass()
        self._is_expecting = False
        self._join: tuple[Any, bool] | None = None
        self._awaited: list[Any] = []
        self._static: StaticGraph | None = None
        self._was_rebuilt = False
        self._came: set[int] = set()  # since the last average; only if hooks record gradients
        self._is_unseen = False  # no output has a hook, so the first gradient begins a pass
        self._unused: list[int] | None = None
        self._is_static = True
        self._graph_has_changed = False
        # Keepers of other wrappers, each with the name of a parameter that both average.
        self._sharing: weakref.WeakKeyDictionary[GradientKeeper, str] = weakref.WeakKeyDictionary()
        self._stopped: list[Averaging] = []  # stopped keepers, for the backward pass under way
        self._is_over = False  # another keeper has taken over
        self._shows_pass = True  # an output of the last forward pass has a hook

    # Methods that torch's wrapper calls.

    @not_inlined
    def prepare_for_forward(self) -> None:
        """Record the start of a forward pass whose gradients will be averaged."""
        self.averaging.note_forward()

    @not_inlined
    def forget_raised(self) -> None:
        """Forget a backward pass that raised; every rank calls it at the next forward pass."""
        self._check_not_over()
        if not self._pass.has_raised or self._graph_has_changed:  # other ranks know that error
            return
        why = f"a backward pass raised on rank {dist.get_rank(self._group)} before its end"
        self.averaging.agree_to_forget(why)
        # Buffers that some ranks have sent must be sent by all; their averages are not used.
        with self._zeros(self.averaging.sent()), contextlib.suppress(NotFinite, UsageError):
            self.averaging.resume()
            self._count(self.averaging.missing())
            self.averaging.end(unused=False)
        self.averaging.undo_feedback()
        self._is_expecting = False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Count gradients after a forward pass with these outputs, which will be averaged.

        Raises RuntimeError with the names if gradients of the last pass are missing.
        """
        hooked = _differentiable(outputs)
        if not hooked and not self._is_unseen:
            self._is_unseen = True
            self._attach()
        self._check_turn(shows_pass=bool(hooked))
        self._check_finished()
        self._hooks.come_last()
        self._is_expecting = True
        self._begin()
        self._hook_outputs(hooked, self._begin_pass)

    def forget_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Record the end of a forward pass with these outputs that will not be averaged."""
        if self._sharing:
            hooked = _differentiable(outputs)
            self._check_turn(shows_pass=bool(hooked))
            if not hooked:
                self.refuse(
                    f"parameter {next(iter(self._sharing.values()))} belongs to another wrapper "
                    "too, and the output of this forward pass in no_sync() has no tensors, so its "
                    "backward pass could count as the other's: return tensors from the model, or "
                    "run the forward pass in no_grad()"
                )
            self._hook_outputs(hooked, self._begin_local_pass)
        if self.averaging.weight is not None:
            self.averaging.weight = None
            self.refuse(
                "weigh() was called for a forward pass in no_sync(), whose gradients take the "
                "weight of the pass that averages them: call weigh() only before that pass"
            )
        if not self._pass.is_under_way and len(self._missing()) == len(self.names):
            self.averaging.stop()

    def _hook_outputs(
        self, outputs: Sequence[torch.Tensor], hook: Callable[[torch.Tensor], None]
    ) -> None:
        for output in outputs:
            output.register_hook(hook)  # type: ignore[no-untyped-call]
        self._hooks.note_own(len(outputs))

    def _check_reducer_finalized(self) -> None:
        self._check_finished()
        if self._is_expecting:
            self._fail_unfinished(self._missing())

    def _rebuild_buckets(self) -> bool:
        """Return True once, after the first step, which moves gradients to other places."""
        rebuilt = not self._was_rebuilt and self.n_steps > 0 and not self._finds_unused
        self._was_rebuilt = self._was_rebuilt or rebuilt
        return rebuilt

    def _push_all_rebuilt_params(self) -> None:
        pass

    def _set_forward_pass_work_handle(self, work: Any, divide_by_size: bool) -> None:
        self._join = work, divide_by_size

    def end_join(self) -> None:
        """Forget a join that has ended; its last forward pass may have had no average."""
        self._join = None

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
        """Count the ranks with a gradient, by parameter, in the last step; every rank calls it."""
        absent = set(self._unused or [])
        used = torch.tensor([int(index not in absent) for index in range(len(self.names))])
        dist.all_reduce(used, group=self._group)
        return used.int()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        pass

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        return dist.all_reduce(bucket.buffer(), group=self._group, async_op=True).get_future()

    def _remove_autograd_hooks(self) -> None:
        self._hooks.remove()

    def _reset_state(self) -> None:
        if not self._pass.has_raised:  # else `forget_raised` forgets it, on all ranks together
            self._pass.forget()
        self._is_expecting = False
        self.averaging.stop()
        self.sparse.begin()

    # How gradients are averaged.

    def use(self, averaging: Averaging, sparse: SparseGradients) -> None:
        """Average dense and sparse gradients in this way; called outside backward passes."""
        self.averaging, self.sparse = averaging, sparse
        self._attach()

    def give_up(self) -> None:
        """Give up the step under way, and average no more: another keeper takes over. Idempotent.

        Gradients of the step remain local to this rank. Views of the averager's memory become None
        if any part of them was sent.
        """
        self._is_over = True
        self._hooks.remove()
        self.averaging.give_up()
        for other in self._sharing:
            other._sharing.pop(self, None)
        self._sharing.clear()
        self._resume_others()

    def _check_not_over(self) -> None:
        if self._is_over:
            raise UsageError(
                "DistributedDataParallel: this pass began before regroup(), or regroup() has "
                "failed: call regroup() with the new group, then repeat the step from its forward "
                "pass"
            )

    def queue_end(self) -> None:
        """End the step when the backward pass under way ends."""
        self._pass.look(self._parameters)
        self._pass.queue_end(self._end_pass)

    def refuse(self, why: str) -> NoReturn:
        """Raise UsageError on this rank and on the ranks that wait for it."""
        self.averaging.lack(why)
        raise UsageError(f"DistributedDataParallel: {why}{self._go_on()}")

    def match(self) -> None:
        """Contribute zeros to the backward pass of other ranks: this rank has no more inputs."""
        with self._zeros():
            self.averaging.weight = 0.0 if self.averaging.is_weighted else None
            self._begin()
            self.averaging.reserve()
            if self._static is not None:
                self._agree_on_graph(self._static)
            if not self._finds_unused:
                self._count(self.averaging.missing())
            self._average(self._finds_unused)
        self.n_steps += 1

    @contextlib.contextmanager
    def _zeros(self, lost: Collection[int] = ()) -> Iterator[None]:
        """Contribute zeros within the context, outside a backward pass."""
        gradients = self.averaging.gradients
        with self._pass.stood_in_for(), gradients.hidden(lost), self.sparse.hidden():
            yield

    def _count(self, indices: Sequence[int]) -> None:
        """Count these gradients as if they were ready now, from the last parameter to the first."""
        hooks = [*self.averaging.hooks(), *self.sparse.hooks(lambda: None)]
        for index in reversed(indices):
            hooks[index]()

    # Wrappers that share parameters: each averages the gradients of its own backward passes. While
    # one has a backward pass, the others count nothing.

    def share(self, parameters: Collection[int], other: GradientKeeper) -> None:
        """Take turns with another keeper if both average one of these parameters.

        Args:
            parameters: the ids of the other keeper's parameters.
        """
        named = zip(self.names, self._parameters(), strict=True)
        name = next((name for name, parameter in named if id(parameter) in parameters), None)
        if name is not None:
            self.averaging.stop()  # this ends a step that has begun
            self._sharing[other] = other._sharing[self] = name

    def _check_turn(self, *, shows_pass: bool) -> None:
        """Raise if a gradient after this forward pass could belong to either wrapper's pass."""
        self._shows_pass = shows_pass
        self._resume_others()
        for other, name in self._sharing.items():
            if other.averaging.is_armed and not (shows_pass and other._shows_pass):
                self.refuse(
                    f"parameter {name} belongs to another wrapper too, which has run a forward "
                    "pass without its backward pass; the output of one of the two passes has no "
                    "tensors: run the backward pass first, or the forward pass in no_grad()"
                )

    def _begin_local_pass(self, _gradient: torch.Tensor) -> None:
        """Begin the backward pass of a forward pass in no_sync(), which is not averaged."""
        self._stop_others(may_join=True)
        Variable._execution_engine.queue_callback(self._resume_others)

    def _stop_others(self, *, may_join: bool = False) -> None:
        """Pause the counting of the other wrappers until `_resume_others`.

        Args:
            may_join: do not stop a wrapper whose own backward pass is under way. This pass, of a
                forward pass in no_sync(), only adds to its gradients.
        """
        for other, name in self._sharing.items():
            if may_join and other._pass.is_under_way:
                continue
            if other._pass.is_under_way:
                self.refuse(
                    f"parameter {name} is in two wrapped models, and one backward pass goes "
                    "through both: run a backward pass for the loss of each, or wrap one model "
                    "that contains both"
                )
            if other.averaging.is_armed:
                if other.averaging.has_begun and not other._pass.has_raised:
                    self.refuse(
                        f"parameter {name} belongs to another wrapper too, which has some of its "
                        "gradients and waits for the rest: run its backward passes first"
                    )
                other.averaging.stop()
                self._stopped.append(other.averaging)

    def _resume_others(self) -> None:
        while self._stopped:
            self._stopped.pop().resume()

    # Hooks.

    def _attach(self) -> None:
        """Count the gradient of every parameter as soon as it is ready."""
        hooks = [*self.averaging.hooks(), *self.sparse.hooks(not_held(self._end_if_armed))]
        if self._static is not None:
            hooks = self._static.around(hooks, not_held(self.queue_end))
        if self._finds_unused or self._static is not None or self._is_unseen:
            hooks = [self._noting(index, hook) for index, hook in enumerate(hooks)]
        self._hooks.put(self._parameters(), hooks)

    def _noting(self, index: int, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that records a gradient in any pass, and calls the given hook.

        If no output has a hook, the first gradient begins the pass.
        """
        note = not_held(self._note)

        def come(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # torch also calls hooks without one (`UndefinedGrad`)
                note(index)
                hook()

        return come

    def _note(self, index: int) -> None:
        self._came.add(index)
        if not self._is_armed() or self._pass.is_under_way:
            return
        if is_nested():
            self.refuse(
                f"the first gradient, of parameter {self.names[index]}, came from a backward pass "
                "within another, such as a reentrant checkpoint's, and the model's output has no "
                "tensor to show when the outer pass begins and ends: give checkpoints "
                "use_reentrant=False, or return tensors from the model"
            )
        self._begin_pass()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [*self.averaging.gradients.parameters, *self.sparse.parameters]

    def _check_attached(self, missing: Sequence[int]) -> None:
        """Refuse parameters that have lost their hooks, so that their gradients are not counted."""
        lost = self._hooks.lost(missing)
        if lost is not None:
            self.refuse(
                f"parameter {self.names[lost]} has lost its hook on rank "
                f"{dist.get_rank(self._group)}, for example by torch.utils.swap_tensors, and would "
                "not be averaged: wrap `model.module` again, on every rank"
            )

    # A backward pass.

    def _begin(self, *, again: bool = False) -> None:
        self.averaging.begin(again=again)
        self.sparse.begin()
        if self._static is not None:
            self._static.begin()

    def _begin_pass(self, _gradient: torch.Tensor | None = None) -> None:
        self._check_not_over()
        if not self._pass.is_shown:
            self._stop_others()
            self._hooks.come_last()
        if not self.averaging.is_armed:  # a second pass over one forward pass, or it was stopped
            self._begin(again=True)
        self._pass.look(self._parameters)
        # NOT in the forward pass, or in autograd.grad: one rank may run more of them than others.
        if not self._pass.is_other:
            self.averaging.reserve()
        self._pass.queue_end(self._end_pass, shown=True)

    def _is_armed(self) -> bool:
        return self.averaging.is_armed

    def _end_if_armed(self) -> None:
        if self._is_armed():
            self.queue_end()

    def _end_pass(self) -> None:
        try:
            if self._all_has_come():
                self._finish()
        finally:
            self._resume_others()

    def _all_has_come(self) -> bool:
        """Return True if the step can end, without another backward pass of the same forward."""
        static = self._static
        if static is not None and static.has_seen_none:
            return False  # autograd.grad, for tensors that are not parameters
        if static is not None and static.is_learning:
            static.learn()
            self._agree_on_graph(static)
            self._attach()
        if self._pass.is_other and len(self._missing()) == len(self.names):
            return False  # NOT below: gradients of passes in no_sync() would count as this pass's
        if self._finds_unused:
            parameters = self._parameters()
            came = [i for i in self._missing() if i in self._came]
            self._count([i for i in came if parameters[i].grad is not None])
        missing = self._missing()
        self._check_attached(missing)
        if self._pass.creates_graph and len(missing) == len(self.names):
            return False  # a pass for other gradients
        if missing and not (self._finds_unused if static is None else static.absent == missing):
            if len(missing) < len(self.names):
                self.averaging.wait_for_rest(self._described(missing).for_others())
            return False
        self._is_expecting = False
        self._is_static = self._is_static and self._unused in (None, missing)
        self._unused = missing
        return True

    def _agree_on_graph(self, static: StaticGraph) -> None:
        """Find out once if any rank misses a gradient; every rank calls it at the same place."""
        if not static.is_agreed:
            self._finds_unused = static.agree(self._group)

    def _average(self, unused: bool) -> None:
        factor = self._factor()
        self.averaging.end(unused, factor)
        if self._static is not None and self._static.is_known:
            self.averaging.keep_used()
        self.sparse.end(factor, len(self.averaging.sizes))

    def _factor(self) -> float:
        """Return the factor for averages if ranks without inputs do not count."""
        join, self._join = self._join, None
        if join is None or join[1] or self.averaging.is_weighted:  # ranks without inputs weigh 0
            return 1.0
        join[0].wait()
        return dist.get_world_size(self._group) / float(join[0].result()[0].item())

    def _finish(self) -> None:
        self._came.clear()
        self._average(self._finds_unused)
        awaited, self._awaited = self._awaited, []
        for future in awaited:
            future.wait()
        self.n_steps += 1
        self._on_step(self.n_steps)

    # Missing gradients.

    def _missing(self) -> list[int]:
        n_dense = len(self.averaging.gradients.parameters)
        absent = [n_dense + i for i, came in enumerate(self.sparse.came) if not came]
        return self.averaging.missing() + absent

    def _check_finished(self) -> None:
        if not self._is_expecting or not self.averaging.is_armed:
            return
        missing = self._missing()
        self._check_attached(missing)
        if missing and (self._graph_has_changed or len(missing) < len(self.names)):
            self._is_expecting = self._graph_has_changed = False
            self.averaging.lack(self._described(missing).for_others())
            self._fail_unfinished(missing)

    def _graph_changes(self, why: str) -> NoReturn:
        self._graph_has_changed = True
        self.averaging.lack(f"{why}, on rank {dist.get_rank(self._group)}")
        self._fail(why)

    def _fail(self, why: str) -> NoReturn:
        self._on_error(why)
        raise RuntimeError(why)

    def _fail_unfinished(self, missing: Sequence[int]) -> NoReturn:
        self._fail(self._described(missing).here(self._static is not None, self._go_on()))

    def _described(self, missing: Sequence[int]) -> Missing:
        return Missing(missing, self.names, self._parameters(), dist.get_rank(self._group))

    def _go_on(self) -> str:
        """Return the advice to add if other ranks waited for missing gradients, or ""."""
        group = frontend.group_in(self._group)
        return "" if group is None or group.ended() is None else GO_ON


def _differentiable(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs that a backward pass can reach, and the bases of outputs that are views.

    A loss that changes a view in place bypasses the view's own node.
    """
    found = {id(one): one for output in outputs for one in (output, output._base)}
    return [one for one in found.values() if one is not None and one.grad_fn is not None]


def _unsupported(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise Unsupported(
            f"DistributedDataParallel: {name} is a method of torch's C++ reducer, which this "
            "wrapper replaces; use torch's own wrapper over shoal for code that calls it"
        )

    return refuse


for _name in set(dir(Reducer)) - set(dir(GradientKeeper)):
    setattr(GradientKeeper, _name, _unsupported(_name))
