"""The data that `_get_ddp_logging_data` of torch's wrapper returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class WrapperLog:
    """Takes the place of torch's `Logger`.

    Args:
        measured: returns the entries that change from step to step.
    """

    def __init__(
        self,
        wrapper: Any,
        parameters: Sequence[torch.Tensor],
        measured: Callable[[], dict[str, Any]],
    ) -> None:
        group = wrapper.process_group
        modules = list(wrapper.module.modules())
        self._measured = measured
        self._data: dict[str, str | int] = {
            "module_name": type(wrapper.module).__name__,
            "backend_name": dist.get_backend(group),
            "device_ids": ", ".join(map(str, wrapper.device_ids or [])),
            "dtypes": ", ".join(sorted({str(parameter.dtype)[6:] for parameter in parameters})),
            "world_size": dist.get_world_size(group),
            "rank": dist.get_rank(group),
            "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
            "broadcast_buffers": int(wrapper.broadcast_buffers),
            "bucket_cap_bytes": wrapper.bucket_bytes_cap,
            "find_unused_parameters": int(wrapper.find_unused_parameters),
            "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
            "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in modules)),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        }

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing: times are recorded with each step."""

    def set_error_and_log(self, message: str) -> None:
        """Record why a step failed."""
        self._data |= {"error": message, "has_error": 1}

    def _set_comm_hook_name(self, name: str) -> None:
        self._data["comm_hook"] = name

    def _set_static_graph(self) -> None:
        self._data["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self._data["join_uneven_inputs"] = 1

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        data = self._data | self._measured()
        words = {name: value for name, value in data.items() if isinstance(value, str)}
        numbers = {name: value for name, value in data.items() if name not in words}
        return SimpleNamespace(strs_map=words, ints_map=numbers)
