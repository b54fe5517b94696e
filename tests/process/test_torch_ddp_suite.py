"""PyTorch's own DDP cases, from its wheel, pass with shoal's wrapper in place of torch's.

They are the methods of `DistributedTest._DistTestBase` that use DistributedDataParallel. Most ask
for GPUs, but need them only for speed: here the tensors that they put there stay in CPU memory.

They take two minutes: `SHOAL_SOAK=1` runs them, as `make test-soak` does. The random programs of
test_torch_ddp_fuzz.py, which always run, compare both wrappers too. The wheel has no
DistributedDataParallelTest; test_torch_ddp.py and others cover its cases.
"""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import time
import traceback
import types
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from process.ranks import run_ranks
from torch.overrides import TorchFunctionMode

_SYNC_BN: Final = "torch refuses SyncBatchNorm on the CPU, by any wrapper"
_MIXED: Final = "mixed_precision is refused; autocast does on the CPU what it is for"
_TIMES: Final = "asks for the times that torch's C++ logger takes"

_INPUTS = ["", "_2D_Input", "_Channels_Last", "_Diff_Input_Sizes_Running_Value", "_half"]
_INPUTS += ["_Diff_Input_Sizes_gradient", "_No_Affine", "_Single_Input_Per_Process"]
CANNOT_PASS: Final = {
    **{f"test_DistributedDataParallel_SyncBatchNorm{kind}": _SYNC_BN for kind in _INPUTS},
    "test_ddp_inference": _SYNC_BN,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC_BN,
    "test_sync_bn_logged": _SYNC_BN,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _MIXED,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _MIXED,
    "test_ddp_native_mixed_precision_ignored_params": _MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _MIXED,
    "test_ddp_logging_data_cpu": _TIMES,
    "test_ddp_logging_data_gpu": _TIMES,
    "test_ddp_bucket_cap_mb_list": "bucket_cap_mb_list is refused: fusion buffers are equal",
    "test_ddp_device": "asks for a GPU's number; fails with torch's wrapper on a CPU too",
    "test_ddp_hook_pickling_powerSGD": "loads what torch.load refuses, by any wrapper",
    "test_ddp_profiling_torch_profiler": "looks for the names that torch's reducer gives to ranges",
    "test_stateless_api_with_ddp": "trains other parameters on each rank alone, which is refused",
    "test_ddp_static_graph_nested_types": "wraps a model that is wrapped, which is refused",
}

# Not run: its convolution over a million pixels would take minutes of a CPU.
_TOO_LONG: Final = "test_ddp_uneven_inputs"


MODULE = "torch.testing._internal.distributed.distributed_test"
TIMEOUT_S = 30


def case_names() -> list[str]:
    """Return the cases whose source uses DDP."""
    source = Path(importlib.util.find_spec(MODULE).origin).read_text()
    lines = source.splitlines()
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    [base] = [node for node in classes if node.name == "_DistTestBase"]
    return [
        method.name
        for method in base.body
        if isinstance(method, ast.FunctionDef)
        and method.name.startswith("test_")
        and _uses_ddp(method.name, "\n".join(lines[method.lineno : method.end_lineno]))
    ]


def _uses_ddp(name: str, source: str) -> bool:
    words = ("DistributedDataParallel", "_test_ddp", "_run_reduction", "DDP(")
    return any(word in source for word in words) or "_ddp_" in name


class _OnTheCpu(TorchFunctionMode):
    """Redirects every GPU device to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "cuda":
            return args[0]
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if getattr(func, "__name__", "") == "to" and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **kwargs)


def _is_gpu(device: object) -> bool:
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or (
        isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    )


def _load() -> Any:
    """Load the module of the cases, with simulated GPUs and shoal's wrapper."""
    os.environ["BACKEND"] = "shoal"
    if importlib.util.find_spec("expecttest") is None:  # torch's tests want it; these cases do not
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        common.DistTestCases.backend_feature[feature].add("shoal")
    common.skip_if_lt_x_gpu = lambda *_, **__: lambda case: case
    common.skip_if_no_gpu = lambda case: case
    torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign]
    to = torch.nn.Module.to
    torch.nn.Module.to = (  # type: ignore[method-assign]
        lambda self, *a, **k: self if a and _is_gpu(a[0]) else to(self, *a, **k)
    )
    torch.cuda.set_device = lambda *_: None
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: dist.get_world_size() if dist.is_initialized() else 0
    kind: Any = importlib.import_module("shoal.torch").DistributedDataParallel
    methods = {"__init__": _without_devices(kind), "__module__": MODULE}
    without_devices = type("DistributedDataParallel", (kind,), methods)
    torch.nn.parallel.DistributedDataParallel = without_devices
    cases: Any = importlib.import_module(MODULE)
    cases.DistributedDataParallel = without_devices
    cases.require_backend_is_available = lambda *_: lambda case: case
    return cases


def _without_devices(kind: Any) -> Any:
    def construct(self: Any, module: Any, *args: Any, **options: Any) -> None:
        options.pop("device_ids", None)
        options.pop("output_device", None)
        kind.__init__(self, module, *args, **options)

    construct.__signature__ = inspect.signature(kind.__init__)  # type: ignore[attr-defined]
    return construct


def run_cases(names: list[str], directory: str) -> dict[str, str]:
    """On a rank: run these cases in turn, each in a new process group.

    Returns:
        By case, "passed", "skipped", or "failed: " with the reason.
    """
    os.environ["TEMP_DIR"] = directory
    for part in ("barrier", "test_dir", "init_dir"):
        os.makedirs(f"{directory}/{part}", exist_ok=True)
    cases = _load()
    bases = (cases.TestDistBackend, cases.DistributedTest._DistTestBase)
    kind = type("Case", bases, {})
    return {name: _outcome(kind, name, directory) for name in names}


def _outcome(kind: Any, name: str, directory: str) -> str:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    case = kind(name)
    case.rank, case.file_name = rank, f"{directory}/{name}"
    Path(f"{directory}/{name}-{rank}").touch()
    while not all(Path(f"{directory}/{name}-{other}").exists() for other in range(size)):
        time.sleep(0.01)  # other ranks may still be in a case that failed here, until its deadline
    torch.manual_seed(0)  # the same on all ranks
    where = {"init_method": f"file://{directory}/store-{name}", "rank": rank, "world_size": size}
    try:
        dist.init_process_group("shoal", **where, timeout=timedelta(seconds=TIMEOUT_S))
        with _OnTheCpu():
            getattr(case, name)()
        outcome = "passed"
    except (SystemExit, unittest.SkipTest):
        outcome = "skipped"
    except BaseException as error:  # noqa: BLE001 - an AssertionError is one
        print(f"==== {name}")  # noqa: T201 - into the rank's output
        traceback.print_exc()
        outcome = f"failed: {type(error).__name__}: {str(error).strip()}"
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return outcome


@pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: two minutes")
def test_only_the_listed_cases_of_torchs_own_ddp_fail(tmp_path: Path) -> None:
    names = [name for name in case_names() if name != _TOO_LONG]
    outcomes = run_ranks(run_cases, 2, names, str(tmp_path), deadline_s=570)
    every = [named for by_name in outcomes for named in by_name.items()]
    found = {name: outcome for name, outcome in every if outcome.startswith("failed")}
    assert {name: found[name] for name in found.keys() - CANNOT_PASS.keys()} == {}
    missing = CANNOT_PASS.keys() - found.keys()
    if torch.__version__.startswith("2.13"):  # other versions lack some of them
        assert missing == set()
        assert sum(outcome == "passed" for outcome in outcomes[0].values()) >= 55
