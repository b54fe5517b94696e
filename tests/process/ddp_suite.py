"""Run the DDP cases of torch's wheel with a given wrapper class.

They are the methods of `DistributedTest._DistTestBase` that use DistributedDataParallel. Most ask
for GPUs, but need them only for speed: here the tensors that they put there stay in CPU memory.
"""

from __future__ import annotations

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
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

MODULE = "torch.testing._internal.distributed.distributed_test"
TIMEOUT_S = 30


def case_names() -> list[str]:
    """Return the cases whose source uses DDP."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    lines = source.splitlines()
    bases = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase"
    ]
    return [
        method.name
        for method in bases[0].body
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


def _load(backend: str, wrapper: str) -> Any:
    """Load the module of the cases, with simulated GPUs and the given wrapper."""
    os.environ["BACKEND"] = backend
    if importlib.util.find_spec("expecttest") is None:  # torch's tests want it; these cases do not
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        common.DistTestCases.backend_feature[feature].add(backend)
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
    kind: Any = torch.nn.parallel.DistributedDataParallel
    if wrapper == "shoal":
        kind = importlib.import_module("shoal.torch").DistributedDataParallel
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


def run_cases(names: list[str], directory: str, backend: str, wrapper: str) -> dict[str, str]:
    """On a rank: run these cases in turn, each in a new process group.

    Returns:
        By case, "passed", or "skipped: " or "failed: " with the reason.
    """
    os.environ["TEMP_DIR"] = directory
    for part in ("barrier", "test_dir", "init_dir"):
        os.makedirs(f"{directory}/{part}", exist_ok=True)
    cases = _load(backend, wrapper)
    bases = (cases.TestDistBackend, cases.DistributedTest._DistTestBase)
    kind = type("Case", bases, {})
    return {name: _outcome(kind, name, directory, backend) for name in names}


def _outcome(kind: Any, name: str, directory: str, backend: str) -> str:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    case = kind(name)
    case.rank, case.file_name = rank, f"{directory}/{name}"
    Path(f"{directory}/{name}-{rank}").touch()
    while not all(Path(f"{directory}/{name}-{other}").exists() for other in range(size)):
        time.sleep(0.01)  # other ranks may still be in a case that failed here, until its deadline
    torch.manual_seed(0)  # the same on all ranks
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{directory}/store-{name}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        with _OnTheCpu():
            getattr(case, name)()
        outcome = "passed"
    except (SystemExit, unittest.SkipTest) as skip:
        outcome = f"skipped: {_why_skipped(skip)}"
    except BaseException as error:  # noqa: BLE001 - an AssertionError is one
        print(f"==== {name}")  # noqa: T201 - into the rank's output
        traceback.print_exc()
        outcome = f"failed: {type(error).__name__}: {str(error).strip()}"
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return outcome


def _why_skipped(skip: BaseException) -> str:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    if isinstance(skip, SystemExit):
        return next((s.message for s in TEST_SKIPS.values() if s.exit_code == skip.code), str(skip))
    return str(skip)
