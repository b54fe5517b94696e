"""`shoal.torch.DistributedDataParallel`: torch's class, with another reducer in it.

Only the C++ reducer and the logger that reads it are replaced. Everything else (inputs, outputs,
buffers, joins, state dicts) remains the code of the installed torch.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import utils as torch_utils
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import _JoinConfig
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

_Base: Final[Any] = torch.nn.parallel.DistributedDataParallel
_find_tensors: Final[Any] = torch_ddp._find_tensors
_verify_shapes: Final[Any] = torch_utils._verify_param_shape_across_processes
_sync_module_states: Final[Any] = torch_utils._sync_module_states
_TORCH_SIGNATURE: Final = inspect.signature(_Base.__init__)

# torch refuses these hooks without a GPU; shoal supports them on the CPU.
_BF16_HOOKS: Final = ("bf16_compress_hook", "bf16_compress_wrapper_hook")

# All live wrappers. Wrappers that share parameters each average the gradients of their own passes.
_wrappers: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


class DistributedDataParallel(_Base):  # type: ignore[misc]  # known at run time
    """Averages a model's gradients over all ranks, in place of torch's wrapper of this name.

    Args:
        module: the model, the same on every rank; it gets the state of rank 0.
        args, options: the arguments of the installed torch's wrapper. `bucket_cap_mb` is the size
            of a fusion buffer; with None shoal chooses it.
        weighted: gradients are weighted by the argument of `weigh`, for batches of unequal sizes.
        check_finite: `backward` raises `shoal.average.NotFinite` on every rank, with the parameter
            and the rank, if a gradient was infinite or NaN before it was averaged.
        check_same: every N steps, at the end of `backward`, compare parameters, buffers and the
            optimizers given to the method `check_same` over all ranks; 0: never.
        wire: "bf16" sends float32 between hosts in half the bytes; see `shoal.Group`.
        compress: a codec, `shoal.average.ErrorFeedback` or `ChunkTopK`, as for an `Averager`.

    Raises:
        UsageError: the models of the ranks differ, or the model is wrapped already.
        Unsupported: shoal does not support an argument; the text names it.
        ShoalError: as for every call of the group.
        RuntimeError, ValueError: as torch's wrapper, for example if no parameter is trained.
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
        if given.get("delay_all_reduce_named_params") is not None:
            self._refuse_options("delay_all_reduce_named_params", "leave one of them out")
        self._check_every = checked_interval(check_same)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._same: SameCheck | None = None
        self._before: FusedGradients | None = None  # in the group that `regroup` leaves
        self._steps_in_backward = False
        self._checks_models = given.get("init_sync", True)
        self._alike = {
            **self._options,
            "check_same": check_same,
            "bucket_cap_mb": given.get("bucket_cap_mb"),
            **{name: bool(given.get(name)) for name in ("find_unused_parameters", "static_graph")},
        }
        # With this option of torch 2.13 and later, buffers are always synchronized at construction.
        has_option = given.get("forward_sync_buffers") is not None
        self._syncs_buffers = has_option or given.get("broadcast_buffers") is not False
        self._fusion_mb = given.get("bucket_cap_mb")
        super().__init__(module, *args, **options)

    # A copy makes no call until it is used: a single rank may make a copy.

    def __getstate__(self) -> Any:
        if "_is_copy" not in self.__dict__:
            return {**super().__getstate__(), "_same": None}  # it holds the group
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
        """Set the weight of this rank's gradients in the next forward pass.

        With `weighted=True` every rank calls it before every forward pass. The last weight before
        a backward pass counts. Do not call it for passes in `no_sync`: the sum of their gradients
        has the weight of the pass that averages it.

        Args:
            weight: 0 or more: the number of samples or tokens over which the loss is a mean.

        Raises:
            UsageError: the wrapper has no weights, or the number is out of range; nothing changed.
        """
        averaging = self.reducer.averaging
        if not self._options["weighted"] or not isinstance(averaging, FusedGradients):
            raise UsageError("weigh: wrap the model with weighted=True, without a hook")
        if not 0 <= weight < math.inf:
            raise UsageError(f"weigh: weight must be a finite number >= 0, got {weight}")
        averaging.weight = weight

    def check_same(self, *optimizers: torch.optim.Optimizer) -> None:
        """Compare the state and the hyperparameters of these optimizers too.

        Every rank calls it. The optimizers replace the optimizers of an earlier call.

        Raises:
            UsageError: the model was wrapped without check_same=N.
        """
        if not self._check_every:
            raise UsageError("check_same: wrap the model with check_same=N, a number of steps")
        self._optimizers = optimizers

    def feedback_state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state of `compress`, residuals by parameter; or {}.

        Every rank saves its own, besides the model's `state_dict`, which has no residuals.
        """
        averaging = self.reducer.averaging
        if not isinstance(averaging, FusedGradients):
            return {}
        state = averaging.averager.state_dict()
        if residuals := state.get("residuals"):
            state["residuals"] = {name: torch.from_numpy(one) for name, one in residuals.items()}
        return state

    def load_feedback_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load what `feedback_state_dict` returned; see `Averager.load_state_dict`.

        Raises:
            UsageError: as `Averager.load_state_dict`, or the wrapper keeps no residuals.
        """
        averaging = self.reducer.averaging
        if isinstance(averaging, FusedGradients):
            averaging.averager.load_state_dict(state, strict=strict)
        elif state:
            raise UsageError(
                "DistributedDataParallel keeps no residuals: wrap the model with "
                "compress=ErrorFeedback(...), without a communication hook"
            )

    def report(self, *, alone: bool = False) -> AveragingReport:
        """Report where the time of the last steps went; see `shoal.average.Averager.report`.

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

    # Methods that torch's constructor calls.

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()
        parts = {id(part) for part in self.module.modules() if isinstance(part, _Base)}
        if any(id(other) in parts for other in _wrappers):
            raise UsageError(
                "DistributedDataParallel: a part of the model is wrapped already; its gradients "
                "would be averaged twice. Wrap only the whole model"
            )
        self._registrations = Registrations(self.module, self.parameters_to_ignore)
        if self._checks_models:
            check_same_model(
                self.module,
                self._alike,
                self._group(),
                ignored=self.parameters_to_ignore,
                has_buffers=self._syncs_buffers,
            )
        return parameters, are_sparse

    def _ddp_init_helper(
        self,
        parameters: Sequence[torch.nn.Parameter],
        are_sparse: Sequence[bool],
        _names: object,
        static_graph: bool,
    ) -> None:
        if self.is_multi_device_module:
            raise Unsupported(
                "DistributedDataParallel: the model has parameters on several GPUs, whose backward "
                "passes run in several threads: train it in one process for each GPU, or with "
                "torch's own wrapper over shoal"
            )
        if getattr(self, "_use_python_reducer", False):
            raise Unsupported(
                'DistributedDataParallel: torch._dynamo.config.optimize_ddp = "python_reducer" '
                "would average every gradient a second time: leave it out, or use torch's own "
                "wrapper over shoal"
            )
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        pairs = list(zip(parameters, are_sparse, strict=True))
        dense = [parameter for parameter, is_sparse in pairs if not is_sparse]
        sparse = [parameter for parameter, is_sparse in pairs if is_sparse]
        if sparse:
            self._refuse_options(
                f"sparse gradients, which parameter {names[id(sparse[0])]} has",
                "leave it out, or create that Embedding with sparse=False",
            )
        self.logger = WrapperLog(self, parameters, not_held(self._measured))
        self._allows_unused = self.find_unused_parameters or static_graph
        self.reducer = GradientKeeper(
            [names[id(parameter)] for parameter in (*dense, *sparse)],
            self.process_group,
            self.find_unused_parameters,
            self.logger.set_error_and_log,
            not_held(self._end_step),
        )
        refuse = not_held(self.reducer.refuse)
        gradients = Gradients(
            dense,
            [names[id(parameter)] for parameter in dense],
            refuse,
            as_views=self.gradient_as_bucket_view,
        )
        self.reducer.use(
            self._averaging(gradients), SparseGradients(sparse, self.process_group, refuse)
        )
        if self._check_every:
            self._same = SameCheck(self._group(), self._check_every)
        for other in _wrappers:
            other.reducer.share(set(map(id, parameters)), self.reducer)
        _wrappers.add(self)
        self._passing_sync_batchnorm_handle(self.module)

    def _refuse_options(self, beside: str, remedy: str) -> None:
        """Refuse the options that only apply to gradients in fusion buffers."""
        for option in ("weighted", "check_finite"):
            if self._options[option]:
                raise Unsupported(
                    f"DistributedDataParallel: {option} cannot be used with {beside}: {remedy}"
                )

    def _averaging(self, gradients: Gradients) -> Averaging:
        """Return the averaging of dense gradients without a communication hook."""
        if any(parameter.device.type != "cpu" for parameter in gradients.parameters):
            if self._options["compress"] is None:
                return self._hooked(gradients, allreduce_hook, self.process_group)
            gradients.as_views = False  # gradients on a device cannot be views of host memory
        if not gradients.parameters:  # all are sparse, which `SparseGradients` averages
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
                "with communication hooks. With parameters on a GPU only compress can be used, "
                'such as compress="bf16" instead of wire="bf16"'
            )
        return HookedBuckets(
            gradients,
            self.process_group,
            self._group(),
            not_held(self.reducer.queue_end),
            self.bucket_bytes_cap,
            hook,
            state,
        )

    def _group(self) -> Group:
        return frontend.group_for("DistributedDataParallel", self.process_group)

    def _measured(self) -> dict[str, Any]:
        sizes = ", ".join(map(str, self.reducer.averaging.sizes))
        n_steps = self.reducer.n_steps
        return {"bucket_sizes": sizes, "rebuilt_bucket_sizes": sizes, "iteration": n_steps}

    # Forward.

    def _pre_forward(self, *inputs: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            self.reducer.forget_raised()  # NOT later: torch's own calls come next
            registered, thawed = self._registrations.new(self._trained())
            if registered or thawed:
                rank = f"rank {dist.get_rank(self.process_group)}"
                what = f"requires a gradient now on {rank}, but did not when the model was wrapped"
                if registered:
                    what = f"was registered on {rank} after the model was wrapped"
                self.reducer.refuse(
                    f"parameter {', '.join(registered or thawed)} {what}, so it would not be "
                    "averaged: wrap `model.module` again, on every rank"
                )
        return super()._pre_forward(*inputs, **options)

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
                self.reducer.forget_forward(list(_find_tensors(output)))
        self._clear_grad_buffer()
        return output

    def _set_static_graph(self) -> None:
        if not self._allows_unused:
            self._allows_unused = True
            if not self._comm_hooks:  # the buckets of a hook allow unused parameters anyway
                averaging = self._averaging(self.reducer.averaging.gradients)
                self.reducer.use(averaging, self.reducer.sparse)
        super()._set_static_graph()

    # Communication hooks.

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Average with one of torch's communication hooks, or another with the same signature.

        The hook gets a bucket of whole parameters, which has the methods of a
        `torch.distributed.GradBucket`, and returns a future of the bucket's average.

        Args:
            state: of this wrapper alone, if the hook keeps values by the index of the bucket.

        Raises:
            TypeError, ValueError: as torch's method.
            RuntimeError: a hook is registered already.
            UsageError: a wrapper of other parameters has this state, which is PowerSGD's.
            Unsupported: `wire`, `compress`, `weighted` or `check_finite` was given.
        """
        self._check_comm_hook(hook)
        if self._comm_hooks:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self._check_hook_state(state)
        averaging, sparse = self.reducer.averaging, self.reducer.sparse
        hooked = self._hooked(averaging.gradients, hook, state)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        sparse.hook, sparse.state = hook, state
        self.reducer.use(hooked, sparse)

    def _check_hook_state(self, state: object) -> None:
        """Refuse PowerSGD's state of a wrapper of other parameters: it has residuals by bucket."""
        if not hasattr(state, "error_dict"):
            return
        for other in _wrappers:
            is_held = any(held is state for _, held in getattr(other, "_comm_hooks", ()))
            if is_held and list(map(id, other._trained())) != list(map(id, self._trained())):
                raise UsageError(
                    f"register_comm_hook: this {type(state).__name__} holds the residuals of "
                    "another DistributedDataParallel, by bucket, and would add them to gradients "
                    "of this one: create one for each wrapper"
                )

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

    # Parameters of `delay_all_reduce_named_params`, which torch's class averages in one buffer.

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        # NOT torch's own, which drops the Work: `backward` would return before the averages.
        self._delay_grad_buffer.div_(dist.get_world_size(self.process_group))
        work = dist.all_reduce(self._delay_grad_buffer, group=self.process_group, async_op=True)
        Variable._execution_engine.queue_callback(work.wait)
        return grad

    # Optimizers that step in the backward pass.

    def _setup_in_backward_optimizers(self) -> None:
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self._trained()):
            # The first import of torch.distributed.optim takes 0.8 s of a core.
            from torch.distributed.optim import apply_optimizer_in_backward as torch_optimizers

            handles = torch_optimizers.param_to_optim_hook_handle_map
            for parameter in self._trained():
                # These hooks would step before the average.
                for handle in handles.get(parameter, []):  # type: ignore[no-untyped-call]
                    handle.remove()
            self._steps_in_backward = True

    def _end_step(self, step: int) -> None:
        """Compare models, except within a join, and step in-backward optimizers."""
        if self._same is not None and not self._join_config.enable:
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

    def join_hook(self, **options: Any) -> Any:
        """Return torch's hook for a join, after whose end the wrapper is as before the join.

        torch leaves its wrapper in the join: each forward pass makes one more call.
        """
        hook = super().join_hook(**options)
        end = hook.post_hook

        def end_join(is_last_joiner: bool) -> None:
            end(is_last_joiner)
            self._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
            self.reducer.end_join()

        hook.post_hook = end_join
        return hook

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer.match()

    def _match_unused_params_allreduce(self) -> None:
        """Do nothing: `match` has done it."""

    def regroup(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Continue in another process group, for example after `shoal.torch.shrink_group`.

        Every rank of the group calls it; a rank that is new to the group wraps its model at the
        same point, with the same arguments. As in wrapping, ranks compare models, and all get the
        parameters and buffers of rank 0 unless `init_sync=False`. Communication hooks, residuals,
        the order of fusion buffers and the times of steps are kept.

        A backward pass that a lost rank interrupted is given up: call `zero_grad`, and repeat the
        step from its forward pass. Its gradients are not averages: they are this rank's own where
        the pass reached them. With `gradient_as_bucket_view=True` gradients that were sent are
        None, and sparse gradients are undefined.

        Args:
            process_group: the new group; None is torch's default group.

        Raises:
            UsageError: the models of the ranks differ.
            Unsupported: within `join`, or with `delay_all_reduce_named_params`; nothing changed.
            RuntimeError: as for every call of the new group; call it again with the next group.
        """
        if self._join_config.enable or self._delay_all_reduce_params:
            raise Unsupported(
                "DistributedDataParallel: regroup() cannot be called within join() or with "
                "delay_all_reduce_named_params; wrap `model.module` again, on every rank"
            )
        keeper, former, hooks = self.reducer, self.process_group, self._comm_hooks
        keeper.give_up()
        _wrappers.discard(self)
        self.process_group = process_group or dist.distributed_c10d._get_default_group()
        if isinstance(keeper.averaging, FusedGradients):
            self._before = keeper.averaging
        try:
            self._begin_again()
        except BaseException:
            self.reducer, self.process_group = keeper, former
            raise
        finally:
            self._before = None
        self._comm_hooks: list[tuple[Any, object]] = []
        for hook, state in hooks:
            self.register_comm_hook(self.process_group if state is former else state, hook)

    def _begin_again(self) -> None:
        """Repeat torch's constructor from its first call of the process group."""
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
            "DistributedDataParallel: call regroup(group) on every rank of the new process group "
            "instead"
        )


not_compiled(DistributedDataParallel)
# It calls the model, which is compiled if the whole wrapper is compiled.
not_compiled_itself(DistributedDataParallel._run_ddp_forward)


def _refuse(module: torch.nn.Module, given: dict[str, Any]) -> None:
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
