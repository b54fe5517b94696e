"""`shoal.torch.DistributedDataParallel`: torch's class, with another reducer in it.

Inputs, outputs, buffers, joins, state dicts and what else torch's wrapper does stays torch's, of
whatever version is installed. What is replaced is its C++ reducer, and the logger that reads it.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import utils as torch_utils
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import distributed as torch_ddp

import shoal.frontend.torch as frontend
from shoal.average.agreeing import SameCheck, checked_interval
from shoal.errors import Unsupported, UsageError
from shoal.frontend.torch.compiler import not_compiled, not_compiled_itself
from shoal.frontend.torch.ddp.averaged import FusedGradients
from shoal.frontend.torch.ddp.buckets import HookedBuckets
from shoal.frontend.torch.ddp.gradients import Gradients
from shoal.frontend.torch.ddp.keeper import GradientKeeper
from shoal.frontend.torch.ddp.log import WrapperLog
from shoal.frontend.torch.ddp.parameter_hooks import Registrations, not_held
from shoal.frontend.torch.ddp.same_model import check_same_model, values_of
from shoal.frontend.torch.ddp.sparse import SparseGradients

if TYPE_CHECKING:
    from shoal.average import AveragingReport, ChunkTopK, ErrorFeedback
    from shoal.frontend.torch.ddp.keeper import Averaging
    from shoal.group.group import Group

__all__ = ["DistributedDataParallel"]

_Base: Final[Any] = torch.nn.parallel.DistributedDataParallel
_find_tensors: Final[Any] = torch_ddp._find_tensors
_verify_shapes: Final[Any] = torch_utils._verify_param_shape_across_processes
_sync_module_states: Final[Any] = torch_utils._sync_module_states
_TORCH_SIGNATURE: Final = inspect.signature(_Base.__init__)

# torch refuses these of its own where there is no GPU; shoal's ranks can do them.
_BF16_HOOKS: Final = ("bf16_compress_hook", "bf16_compress_wrapper_hook")

# Some may share parameters: each averages the gradients of its own backward passes.
_wrappers: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


class DistributedDataParallel(_Base):  # type: ignore[misc]  # known at run time
    """Averages a model's gradients over all ranks, in place of torch's wrapper of this name.

    Args:
        module: the model, the same on every rank; its state becomes that of rank 0.
        args, options: those of the installed torch's wrapper. `bucket_cap_mb` is the size of a
            fusion buffer; None leaves it to shoal.
        weighted: ranks count as `weigh` says, for batches of unequal lengths.
        check_finite: `backward` raises `shoal.average.NotFinite` on every rank, with the parameter
            and the rank, where a gradient was infinite or NaN before it was averaged.
        check_same: every so many steps, at the end of `backward`, parameters, buffers and what the
            method `check_same` was given are compared over all ranks; 0: never.
        wire: "bf16" has float32 travel between hosts in half the bytes, as `shoal.Group` says.
        compress: a codec, `shoal.average.ErrorFeedback` or `ChunkTopK`, as for an `Averager`.

    Raises:
        UsageError: the models of the ranks differ, or the model is wrapped already.
        Unsupported: an argument asks for what shoal does not do; says which.
        RuntimeError, ValueError: as torch's own: no parameter is trained, for one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *args: Any,
        wire: str | None = None,
        compress: str | ErrorFeedback | ChunkTopK | None = None,
        weighted: bool = False,
        check_finite: bool = False,
        check_same: int = 0,
        **options: Any,
    ) -> None:
        given = _TORCH_SIGNATURE.bind(self, module, *args, **options).arguments
        _refuse(module, given)
        self._options: dict[str, Any] = {
            "wire": wire,
            "compress": compress,
            "weighted": weighted,
            "check_finite": check_finite,
        }
        self._check_every = checked_interval(check_same)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._same: SameCheck | None = None
        self._before: FusedGradients | None = None  # of the group that `regroup` leaves
        self._steps_in_backward = False
        self._checks_models = given.get("init_sync", True)
        self._alike = {
            **self._options,
            "check_same": check_same,
            "bucket_cap_mb": given.get("bucket_cap_mb"),
            **{name: bool(given.get(name)) for name in ("find_unused_parameters", "static_graph")},
        }
        # torch 2.13 and later: this one leaves the buffers of the beginning alone.
        says_when = given.get("forward_sync_buffers") is not None
        self._syncs_buffers = says_when or given.get("broadcast_buffers") is not False
        self._fusion_mb = given.get("bucket_cap_mb")
        super().__init__(module, *args, **options)

    # A copy makes no call until it is used: it may be made on one rank alone.

    def __getstate__(self) -> Any:
        if "_is_copy" not in self.__dict__:
            return super().__getstate__()
        return {name: one for name, one in self.__dict__.items() if name != "process_group"}

    def __setstate__(self, state: Any) -> None:
        torch.nn.Module.__setstate__(self, {**state, "_is_copy": True})  # type: ignore[no-untyped-call]
        self.process_group = dist.distributed_c10d._get_default_group()

    def __getattr__(self, name: str) -> Any:
        if name in ("reducer", "logger") and self.__dict__.pop("_is_copy", False):
            try:
                super().__setstate__(self.__dict__)
            except BaseException:
                self._is_copy = True
                raise
            return self.__dict__[name]
        return super().__getattr__(name)

    def weigh(self, weight: float) -> None:
        """Set the weight of this rank's gradients of the next forward pass.

        With `weighted=True`, and then before every forward pass on every rank. Of several passes
        before a backward pass the last weight counts. Passes in `no_sync` have none: their sum has
        the weight of the pass that averages it.

        Args:
            weight: 0 or more: the number of samples or tokens, of which the loss is a mean.

        Raises:
            UsageError: the wrapper does not weigh, or this is no weight. Nothing has changed.
        """
        averaging = self.reducer.averaging
        if not self._options["weighted"] or not isinstance(averaging, FusedGradients):
            raise UsageError("weigh: wrap the model with weighted=True, without a hook")
        if not 0 <= weight < math.inf:
            raise UsageError(f"weigh: weight must be a finite number >= 0, got {weight}")
        averaging.weight = weight

    def check_same(self, *optimizers: torch.optim.Optimizer) -> None:
        """Compare the state and the hyperparameters of these optimizers too, on every rank.

        With `check_same=N`. They replace the optimizers of an earlier call.

        Raises:
            UsageError: the wrapper compares nothing.
        """
        if not self._check_every:
            raise UsageError("check_same: wrap the model with check_same=N, a number of steps")
        self._optimizers = optimizers

    def feedback_state_dict(self) -> dict[str, Any]:
        """Return what `compress` keeps on this rank: residuals by parameter, copied; or {}.

        `state_dict` leaves them out, since each rank has its own: every rank saves this beside it.
        """
        averaging = self.reducer.averaging
        if not isinstance(averaging, FusedGradients):
            return {}
        state = averaging.averager.state_dict()
        if residuals := state.get("residuals"):
            state["residuals"] = {name: torch.from_numpy(one) for name, one in residuals.items()}
        return state

    def load_feedback_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take what `feedback_state_dict` returned, as `Averager.load_state_dict` does."""
        averaging = self.reducer.averaging
        if isinstance(averaging, FusedGradients):
            averaging.averager.load_state_dict(state, strict=strict)
        elif state:
            raise UsageError(
                "DistributedDataParallel keeps no residuals: wrap the model with "
                "compress=ErrorFeedback(...), without a communication hook"
            )

    def report(self, *, alone: bool = False) -> AveragingReport:
        """Report where the time of the last steps went, as `shoal.average.Averager.report` does.

        Raises:
            Unsupported: a communication hook averages the gradients, as on a device.
            ShoalError: as for every call of the group, which has ended.
        """
        averaging = self.reducer.averaging
        if not isinstance(averaging, FusedGradients):
            raise Unsupported(
                "DistributedDataParallel: report() times shoal's own averaging of parameters on "
                "the CPU, not communication hooks; use torch.profiler for these"
            )
        return averaging.averager.report(alone=alone)

    # What torch's constructor calls.

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()
        parts = {id(part) for part in self.module.modules() if isinstance(part, _Base)}
        if any(id(other) in parts for other in _wrappers):
            raise UsageError(
                "DistributedDataParallel: a part of the model is wrapped already; its gradients "
                "would be averaged twice. Wrap the whole alone"
            )
        self._frozen = self._not_trained()
        self._registrations = Registrations(self.module)
        if self._checks_models:
            check_same_model(
                self.module,
                self._alike,
                self.process_group,
                device=parameters[0].device,
                ignored=self.parameters_to_ignore,
                has_buffers=self._syncs_buffers,
            )
        return parameters, are_sparse

    def _not_trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that require no gradient."""
        ignored = self.parameters_to_ignore
        named = self.module.named_parameters()
        return {n: p for n, p in named if not p.requires_grad and n not in ignored}

    def _ddp_init_helper(
        self,
        parameters: Sequence[torch.nn.Parameter],
        are_sparse: Sequence[bool],
        _names: object,
        static_graph: bool,
    ) -> None:
        names = self._names_of(parameters)
        dense = [index for index, sparse in enumerate(are_sparse) if not sparse]
        others = [index for index, sparse in enumerate(are_sparse) if sparse]
        if others:
            self._refuse_beside_sparse(names[others[0]])
        self.logger = WrapperLog(self, parameters, not_held(self._measured))
        self._allows_unused = self.find_unused_parameters or static_graph
        self.reducer = GradientKeeper(
            [names[index] for index in (*dense, *others)],
            self.process_group,
            self.find_unused_parameters,
            self.logger.set_error_and_log,
            not_held(self._end_step),
        )
        refuse = not_held(self.reducer.refuse)
        gradients = Gradients(
            [parameters[index] for index in dense],
            [names[index] for index in dense],
            refuse,
            as_views=self.gradient_as_bucket_view,
        )
        sparse = [parameters[index] for index in others]
        self.reducer.use(
            self._averaging(gradients), SparseGradients(sparse, self.process_group, refuse)
        )
        if self._check_every:
            self._same = SameCheck(self._group(), self._check_every)
        for other in _wrappers:
            other.reducer.share(set(map(id, parameters)), self.reducer)
        _wrappers.add(self)
        self._passing_sync_batchnorm_handle(self.module)

    def _refuse_beside_sparse(self, name: str) -> None:
        for option in ("weighted", "check_finite"):
            if self._options[option]:
                raise Unsupported(
                    f"DistributedDataParallel: {option} excludes sparse gradients, which "
                    f"parameter {name} has: leave it out, or make that Embedding with sparse=False"
                )

    def _averaging(self, gradients: Gradients) -> Averaging:
        """How dense gradients are averaged without a communication hook."""
        if any(parameter.device.type != "cpu" for parameter in gradients.parameters):
            if self._options["compress"] is None:
                return self._hooked(gradients, allreduce_hook, self.process_group)
            gradients.as_views = False  # places are in host memory, where codecs work
        if not gradients.parameters:  # all are sparse, and averaged beside this
            return self._hooked(gradients, allreduce_hook, None)
        return FusedGradients(
            gradients,
            self._group(),
            not_held(self.reducer.queue_end),
            self._before,
            fusion_bytes=None if self._fusion_mb is None else int(self._fusion_mb * (1 << 20)),
            find_unused=self._allows_unused,
            check_same=self._check_every,
            **self._options,
        )

    def _hooked(self, gradients: Gradients, hook: Any, state: object) -> Averaging:
        if any(value not in (None, False, "identity") for value in self._options.values()):
            raise Unsupported(
                "DistributedDataParallel: wire, compress, weighted and check_finite cannot be used "
                "with a communication hook; with parameters on a GPU only compress can, such as "
                'compress="bf16" in place of wire="bf16"'
            )
        on_full = not_held(self.reducer.queue_end)
        how = on_full, self.bucket_bytes_cap, hook, state
        return HookedBuckets(gradients, self.process_group, self._group(), *how)

    def _group(self) -> Group:
        return frontend.group_for("DistributedDataParallel", self.process_group)

    def _names_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[str]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [names[id(parameter)] for parameter in parameters]

    def _measured(self) -> dict[str, Any]:
        sizes = ", ".join(map(str, self.reducer.averaging.sizes))
        n_steps = self.reducer.n_steps
        return {"bucket_sizes": sizes, "rebuilt_bucket_sizes": sizes, "iteration": n_steps}

    # Forward.

    def _pre_forward(self, *inputs: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            self.reducer.forget_raised()  # NOT later: torch's own calls come next
            if self._registrations.changed:
                self._look_at_registered()
            if thawed := [name for name, one in self._frozen.items() if one.requires_grad]:
                self._refuse_unwatched(
                    thawed, "requires a gradient now on {}, and did not when the model was wrapped"
                )
        return super()._pre_forward(*inputs, **options)

    def _look_at_registered(self) -> None:
        known = set(map(id, self._trained()))
        named = self.module.named_parameters()
        new = [name for name, one in named if one.requires_grad and id(one) not in known]
        if new := [name for name in new if name not in self.parameters_to_ignore]:
            self._refuse_unwatched(new, "was registered on {} after the model was wrapped")
        self._frozen = self._not_trained()
        self._registrations.watch(self.module)

    def _refuse_unwatched(self, names: Sequence[str], what: str) -> None:
        """Refuse parameters whose gradients nobody counts.

        Args:
            what: happened to them, with a place for the rank.
        """
        rank = f"rank {dist.get_rank(self.process_group)}"
        self.reducer.refuse(
            f"parameter {', '.join(names)} {what.format(rank)}, so it would not be averaged: wrap "
            "`model.module` anew, on every rank"
        )

    def _post_forward(self, output: Any) -> Any:
        if self._delay_all_reduce_all_params:
            return super()._post_forward(output)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self.require_forward_param_sync = True
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer.prepare_for_backward(list(_find_tensors(output)))
        else:
            self.require_forward_param_sync = False
            if torch.is_grad_enabled():
                self.reducer.forget_forward()
        self._clear_grad_buffer()
        return output

    def _set_static_graph(self) -> None:
        if not self._allows_unused:
            self._allows_unused = True
            averaging = self._averaging(self.reducer.averaging.gradients)
            self.reducer.use(averaging, self.reducer.sparse)
        super()._set_static_graph()

    # Communication hooks.

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Average with one of torch's communication hooks, or one's own like them.

        It is called with a bucket that has the methods of a `torch.distributed.GradBucket`, with
        whole parameters, and returns a future of the bucket's average.

        Raises:
            TypeError, ValueError: as torch's own.
            RuntimeError: a hook is registered already.
        """
        self._check_comm_hook(hook)
        if self._comm_hooks:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        averaging = self._hooked(self.reducer.averaging.gradients, hook, state)
        self.reducer.use(averaging, self.reducer.sparse, hook, state)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        kinds: Any = torch._C._distributed_c10d.BuiltinCommHookType
        hooks = {
            kinds.ALLREDUCE: default_hooks.allreduce_hook,
            kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _check_comm_hook(self, hook: Any) -> None:
        if getattr(hook, "__name__", "") not in _BF16_HOOKS:
            super()._check_comm_hook(hook)

    # Optimizers that step in the backward pass.

    def _setup_in_backward_optimizers(self) -> None:
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self._trained()):
            # The first import of torch.distributed.optim takes 0.8 s of a core.
            from torch.distributed.optim import apply_optimizer_in_backward as torch_optimizers

            handles = torch_optimizers.param_to_optim_hook_handle_map
            for parameter in self._trained():
                # They would step before the average.
                for handle in handles.get(parameter, []):  # type: ignore[no-untyped-call]
                    handle.remove()
            self._steps_in_backward = True

    def _end_step(self, step: int, is_joined: bool) -> None:
        """Act after the averages of a step; `is_joined` if ranks may have run out of inputs."""
        if self._same is not None and not is_joined and self._same.is_due(step):
            ignored = self.parameters_to_ignore
            self._same.compare(values_of(self.module, ignored, self._optimizers), step)
        for parameter in self._trained() if self._steps_in_backward else ():
            for optimizer in getattr(parameter, "_in_backward_optimizers", []):
                optimizer.step()
                parameter.grad = None

    def _trained(self) -> Sequence[torch.nn.Parameter]:
        parameters: Sequence[torch.nn.Parameter] = self._module_parameters
        return parameters

    # Joins and other groups.

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer.match()

    def _match_unused_params_allreduce(self) -> None:
        """It has been matched with the rest."""

    def regroup(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Go on in another process group, as after `shoal.torch.shrink_group`.

        Every rank of the group calls it in the place where a rank that is new to the group wraps
        its model, with the same arguments. As there, ranks compare models, and parameters and
        buffers become those of rank 0 unless `init_sync=False`. Communication hooks, residuals,
        the order of fusion buffers and the times of steps stay.

        A backward pass that a lost rank interrupted is given up: call `zero_grad`, and repeat the
        step from its forward pass. Its gradients are no averages. Those that the pass reached are
        this rank's own; with `gradient_as_bucket_view=True` they are None where they were sent, and
        sparse ones are undefined.

        Args:
            process_group: None takes torch's default group.

        Raises:
            UsageError: the models of the ranks differ.
            Unsupported: within `join`, or with `delay_all_reduce_named_params`. Nothing changed.
            RuntimeError: as for every call of the new group; call it again with the next group.
        """
        if self._join_config.enable or self._delay_all_reduce_params:
            raise Unsupported(
                "DistributedDataParallel: regroup() goes neither within join() nor with "
                "delay_all_reduce_named_params; wrap `model.module` anew, on every rank"
            )
        keeper, former, hooks = self.reducer, self.process_group, self._comm_hooks
        keeper.give_up()
        _wrappers.discard(self)
        self.process_group = process_group or dist.distributed_c10d._get_default_group()
        if isinstance(keeper.averaging, FusedGradients):
            self._before = keeper.averaging
        try:
            self._begin_anew()
        except BaseException:
            self.reducer = keeper
            raise
        finally:
            self._before = None
        self._comm_hooks: list[tuple[Any, object]] = []
        for hook, state in hooks:
            self.register_comm_hook(self.process_group if state is former else state, hook)

    def _begin_anew(self) -> None:
        """Do what torch's constructor does from the first call of the process group on."""
        parameters, are_sparse = self._build_params_for_reducer()
        if self._checks_models:
            _verify_shapes(self.process_group, parameters)
            _sync_module_states(
                module=self.module,
                process_group=self.process_group,
                broadcast_bucket_size=self.broadcast_bucket_size,
                src=0,
                params_and_buffers_to_ignore=self.parameters_to_ignore,
                broadcast_buffers=self._syncs_buffers,
            )
        self._ddp_init_helper(parameters, are_sparse, None, self.static_graph)
        if self.static_graph:
            self.reducer._set_static_graph()
            self.logger._set_static_graph()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        raise Unsupported(
            "DistributedDataParallel: the ranks of a new process group have to meet in it: have "
            "each of them call regroup(group)"
        )


not_compiled(DistributedDataParallel)
# It calls the model, which is compiled where the whole wrapper is to be.
not_compiled_itself(DistributedDataParallel._run_ddp_forward)


def _refuse(module: torch.nn.Module, given: dict[str, Any]) -> None:
    """Refuse arguments that are not supported, before anything is done."""
    if isinstance(module, _Base):
        raise UsageError(
            "DistributedDataParallel: the model is wrapped already; its gradients would be "
            "averaged twice. Wrap `model.module`"
        )
    for name in ("mixed_precision", "bucket_cap_mb_list"):
        if given.get(name):
            raise Unsupported(
                f"DistributedDataParallel: {name} is not supported over shoal; leave it out"
            )
