"""Importing this lets Hugging Face's Accelerate and Transformers take the backend "shoal".

    import shoal.accelerate

    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="shoal")]
    )
    arguments = TrainingArguments(use_cpu=True, ddp_backend="shoal")

Accelerate has no registry of backends: on CPUs it replaces every name by "gloo", and refuses
another one that the user gave. So the import replaces one function of Accelerate,
`PartialState._prepare_backend`, by one that also accepts "shoal". Without the import, call
`torch.distributed.init_process_group("shoal")` first and give Accelerate no backend.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from accelerate import DistributedType
from accelerate.state import PartialState

import shoal.torch  # noqa: F401 - registers the backend
from shoal.errors import Unsupported, UsageError, without_internals
from shoal.frontend.torch import default_group

__all__: list[str] = []


def _accepting_shoal(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    @without_internals
    def prepare_backend(
        state: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str, Any]:
        if backend != "shoal":
            unchanged: tuple[str, Any] = prepare(state, cpu, sagemaker_dp, backend)
            return unchanged
        _, distributed_type = prepare(state, cpu, sagemaker_dp, None)
        if distributed_type == DistributedType.NO:
            raise UsageError(
                "Accelerate would train in this process alone, without shoal: start the processes"
                " with torchrun or accelerate launch, and unless each has a GPU pass cpu=True"
                " (use_cpu=True to TrainingArguments)"
            )
        if distributed_type not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            raise UsageError(
                f"shoal serves CPUs and CUDA GPUs, but Accelerate chose {distributed_type.value}"
            )
        if dist.is_initialized() and default_group() is None:
            raise UsageError(
                f"torch's default process group uses {dist.get_backend()}, and Accelerate would"
                " keep it: call torch.distributed.destroy_process_group() first"
            )
        return "shoal", distributed_type

    return prepare_backend


def _install() -> None:
    known = ["self", "cpu", "sagemaker_dp", "backend"]
    prepare = getattr(PartialState, "_prepare_backend", None)
    found = list(inspect.signature(prepare).parameters) if prepare else []
    if prepare is None or found != known:
        raise Unsupported(
            "this version of Accelerate chooses its backend in a way that shoal.accelerate does not"
            ' know: call torch.distributed.init_process_group("shoal") instead, before the'
            " Accelerator is made, and give it no backend"
        )
    PartialState._prepare_backend = _accepting_shoal(prepare)


_install()
