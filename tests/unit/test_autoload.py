"""`import torch` runs register(): it must be cheap, quiet and unable to fail."""

import importlib.metadata
import os
import subprocess
import sys
import types
from ast import literal_eval
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from shoal import _autoload


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Install an empty torch.distributed for the test to fill."""
    module = types.ModuleType("torch.distributed")
    torch = types.ModuleType("torch")
    torch.distributed = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    return module


def run_python(code: str, **env: str) -> str:
    """Return the output of a fresh interpreter with the same search path."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        check=True,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("cuda", "file", "visible", "devices"),
    [
        ("13.0", "/dev/nvidiactl", None, ["cpu", "cuda"]),
        ("13.0", "/dev/nvidiactl", "0,1", ["cpu", "cuda"]),
        ("13.0", "/dev/dxg", None, ["cpu", "cuda"]),
        (None, "/dev/nvidiactl", None, ["cpu"]),
        ("13.0", "", None, ["cpu"]),
        ("13.0", "/dev/nvidiactl", "", ["cpu"]),
        ("13.0", "/dev/nvidiactl", "-1", ["cpu"]),
    ],
)
def test_register_registers_once_and_serves_cuda_where_there_is_a_gpu(
    cuda: str | None,
    file: str,
    visible: str | None,
    devices: list[str],
    distributed: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(os.path, "exists", lambda path: path == file)
    sys.modules["torch"].version = types.SimpleNamespace(cuda=cuda)  # type: ignore[attr-defined]
    known, calls = ["gloo"], []

    def register_backend(name: str, _creator: object, **options: object) -> None:
        known.append(name)
        calls.append((name, options))

    backend = types.SimpleNamespace(backend_list=known, register_backend=register_backend)
    vars(distributed).update(is_available=lambda: True, Backend=backend)
    _autoload.register()
    _autoload.register()
    assert calls == [("shoal", {"extended_api": True, "devices": devices})]


def test_register_never_raises_for_any_missing_part_of_torch(
    distributed: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=RuntimeError("no"))
    backends = types.SimpleNamespace(backend_list=[])
    refusing = types.SimpleNamespace(backend_list=[], register_backend=refuse)
    available = ({"is_available": lambda: False}, {"is_available": lambda: True})
    for there in ({}, *available, {"Backend": backends}, {"Backend": refusing}):
        vars(distributed).update(there)
        _autoload.register()
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    _autoload.register()


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_the_entry_points_of_the_package_are_register(group: str) -> None:
    installed = importlib.metadata.entry_points(group=group, name="shoal")
    assert {each.load() for each in installed} == {_autoload.register}


def test_importing_shoal_loads_no_framework_and_no_native_code() -> None:
    heavy = "{'torch', 'numpy', 'jax', 'tensorflow', 'shoal._native', 'shoal.frontend'}"
    assert run_python(f"import shoal; print(sorted({heavy} & set(sys.modules)))") == "[]"


CODES = {
    "import": """
import torch.distributed as dist
del sys.modules["torch.distributed"]  # as if torch were imported later
import shoal
sys.modules["torch.distributed"] = dist
early = dist.Backend.backend_list[:]
import shoal.torch
print([early, dist.Backend.backend_list])
""",
    "look up": """
import torch.distributed as dist, contextlib
with contextlib.suppress(AssertionError, ValueError):
    dist.init_process_group("shoal", store=dist.HashStore(), rank=0, world_size=1)
print("shoal" in dist.Backend.backend_list)
if dist.is_initialized(): dist.destroy_process_group()
""",
    "wrap": """
import torch.nn.parallel.distributed
torchs = set(sys.modules)
import shoal
backends = torch.distributed.Backend.backend_list[:]
import shoal.torch
shoal.torch.DistributedDataParallel
of_torch = [m for m in set(sys.modules) - torchs if m.startswith(("torch", "sympy"))]
print([backends, of_torch])
""",
    # Collecting all objects of torch's import takes as long as loading all modules here.
    "form": """
import gc
import torch.distributed as dist

class Watch:
    def find_spec(self, name, path, target=None):
        if name.startswith(("shoal.frontend.torch.", "shoal.schedule.table")):
            collecting.append(gc.isenabled())

from shoal._autoload import register
register()
register()
backend = dist.Backend.backend_list.count("shoal"), dist.Backend.backend_capability["shoal"]
early = [name for name in sys.modules if name.startswith(("shoal.frontend", "shoal._native"))]
collecting = []
torchs = set(sys.modules)
sys.meta_path.insert(0, Watch())
dist.init_process_group("shoal", store=dist.HashStore(), rank=0, world_size=1)
loaded = sorted(set(sys.modules) - torchs)
dist.all_reduce(dist.distributed_c10d.torch.ones(1))
print([backend, early, loaded, collecting, gc.isenabled()])
dist.destroy_process_group()
""",
}


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    """Return the values that the codes print, each in a fork of a process that has only torch."""
    script = f"""
import os, torch
for code in {list(CODES.values())}:
    if os.fork() == 0:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""
    lines = run_python(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0", SHOAL_SERVERS="").splitlines()
    return dict(zip(CODES, map(literal_eval, lines), strict=True))


def test_shoals_torch_registers_the_name_and_newer_torch_finds_it_alone(printed: Any) -> None:
    early, backends = printed["import"]
    assert "shoal" not in early
    assert "shoal" in backends
    looks_it_up = hasattr(dist.Backend, "_ensure_backend_registered")  # torch >= 2.14
    assert printed["look up"] is looks_it_up


def test_shoals_wrapper_loads_no_module_that_torchs_does_not(printed: dict[str, Any]) -> None:
    """torch.distributed.optim alone takes 0.8 s of a core on every rank."""
    backends, of_torch = printed["wrap"]
    assert "shoal" in backends
    hooks = "torch.distributed.algorithms.ddp_comm_hooks"
    assert [name for name in of_torch if not name.startswith(hooks)] == []


# Modules that forming must not load on every rank: most serve the first call, others few programs.
NOT_FOR_FORMING = """
schedule.table schedule.algorithm plan.choose plan.cost plan.served plan.tuning tune analysis
average group.pool group.memory server launch cli rendezvous.environment rendezvous.store.client
rendezvous.store.server state.document state.text state.tally state.stats state.monitor
frontend.torch.gpu frontend.torch.ddp frontend.torch.hooks frontend.torch.sparse
frontend.torch.monitored_barrier frontend.torch.compare_calls frontend.torch.shrink
"""


def test_registering_loads_none_and_forming_few_modules_without_gc(printed: dict[str, Any]) -> None:
    backend, early, loaded, collecting, is_enabled = printed["form"]
    assert (backend, early) == ((1, ["cpu"]), [])
    assert len(collecting) > 5
    assert not any(collecting)
    assert is_enabled
    ours = [name for name in loaded if name.split(".")[0] == "shoal"]
    for name in NOT_FOR_FORMING.split():
        assert not [each for each in ours if f"{each}.".startswith(f"shoal.{name}.")]
    assert set(loaded) - set(ours) <= {"hmac", "resource"}
    # Each module takes a fifth to a third of a millisecond on every rank. More need a reason.
    assert len(ours) <= 76
