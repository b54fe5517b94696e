"""shoal.accelerate against a stand-in for Accelerate's PartialState; docs/frameworks.md has the
real package, which `make test-frameworks` runs."""

import enum
import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
from unit.test_torch_frontend import default_group

from shoal.errors import Unsupported, UsageError


class DistributedType(str, enum.Enum):
    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"


def load(monkeypatch: pytest.MonkeyPatch, state: type) -> Any:
    """Import shoal.accelerate beside a fake Accelerate with this PartialState."""
    package, module = ModuleType("accelerate"), ModuleType("accelerate.state")
    package.DistributedType = DistributedType  # type: ignore[attr-defined]
    module.PartialState = state  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate", package)
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    monkeypatch.delitem(sys.modules, "shoal.accelerate", raising=False)
    importlib.import_module("shoal.accelerate")
    monkeypatch.delitem(sys.modules, "shoal.accelerate")
    return state()._prepare_backend


def partial_state(kind: DistributedType, chosen: str | None) -> type:
    """Return a PartialState that always makes one choice, unless the user names a backend."""

    class PartialState:
        def _prepare_backend(
            self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
        ) -> Any:
            return backend or chosen, kind

    return PartialState


@pytest.mark.parametrize(
    ("kind", "chosen"), [(DistributedType.MULTI_CPU, "gloo"), (DistributedType.MULTI_GPU, "nccl")]
)
def test_shoal_replaces_the_automatic_choice_and_named_backends_stay(
    kind: DistributedType, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = load(monkeypatch, partial_state(kind, chosen))
    for named, used in (("shoal", "shoal"), (None, chosen), ("mpi", "mpi")):
        assert prepare(True, False, named) == (used, kind)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(DistributedType.NO, "in this process alone"), (DistributedType.MULTI_NPU, "MULTI_NPU")],
)
def test_an_unsupported_choice_is_refused(
    kind: DistributedType, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = load(monkeypatch, partial_state(kind, None))
    with pytest.raises(UsageError, match=words):
        prepare(False, False, "shoal")


def test_a_default_group_of_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = load(monkeypatch, partial_state(DistributedType.MULTI_CPU, "gloo"))
    with default_group("gloo"), pytest.raises(UsageError, match="process group uses gloo"):
        prepare(True, False, "shoal")


class Renamed:
    def prepare_backend(self, backend: str) -> None: ...


class OtherArguments:
    def _prepare_backend(self, device: str, backend: str | None = None) -> None: ...


@pytest.mark.parametrize("state", [Renamed, OtherArguments])
def test_an_unknown_accelerate_gets_a_remedy(state: type, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = dict(vars(state))
    with pytest.raises(Unsupported, match="init_process_group"):
        load(monkeypatch, state)
    assert dict(vars(state)) == methods
