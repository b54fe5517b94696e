"""The lines that speak to NCCL, with Gloo to hear them: it has the same face in torch."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist

from shoal.errors import TimedOut
from shoal.frontend.torch.gpu import nccl
from shoal.frontend.torch.gpu.local_calls import part_of
from shoal.frontend.torch.gpu.nccl import NcclCollectives

SIZE = 3


class Processor:
    """The CPU as a device with one stream, which does everything at once."""

    place = torch.device("cpu")
    never_passes = False

    def __init__(self) -> None:
        self.on_stream = 0

    def side_stream(self) -> str:
        return "the stream"

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        assert stream == "the stream"
        self.on_stream += 1
        yield
        self.on_stream -= 1

    def keep(self, tensor: torch.Tensor, stream: str) -> None:
        pass

    def record(self, stream: str) -> None:
        pass

    def has_passed(self, event: None) -> bool:
        return not self.never_passes


class Heard:
    """Gloo, which checks that it is called on the stream, and waited for there."""

    def __init__(self, backend: Any, device: Processor) -> None:
        self._backend, self._device = backend, device
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1

    def shutdown(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_single"):
            raise AttributeError(name)  # its name in a later torch
        call = getattr(self._backend, name)

        def on_stream(*args: Any) -> Any:
            assert self._device.on_stream
            return call(*args)

        return on_stream


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Heard]:
    made: list[Heard] = []
    own = threading.local()

    def backend(store: Any, rank: int, size: int, timeout_s: float) -> Heard:
        made.append(
            Heard(dist.ProcessGroupGloo(store, rank, size, timedelta(minutes=1)), own.device)
        )
        return made[-1]

    monkeypatch.setattr(nccl, "_backend", backend)
    monkeypatch.setattr(Processor, "__init__", lambda self: _begin(self, own))
    return made


def _begin(device: Processor, own: threading.local) -> None:
    device.on_stream = 0
    own.device = device


def in_threads(go: Any) -> list[Any]:
    results: list[Any] = [None] * SIZE
    store = dist.HashStore()

    def run(rank: int) -> None:
        results[rank] = go(NcclCollectives(Processor(), store, rank, SIZE, 60.0))  # type: ignore[arg-type]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("n", [3, 4, 5, 300, 302])
def test_parts_are_summed_and_gathered_where_the_calls_look_for_them(
    n: int, backends: list[Heard]
) -> None:
    total = sum(torch.arange(float(n)) * (rank + 1) for rank in range(SIZE))
    assert isinstance(total, torch.Tensor)

    def go(it: NcclCollectives) -> torch.Tensor:
        flat = torch.arange(float(n)) * (it.rank + 1)
        it.reduce_scatter("the stream", flat)
        for part in part_of(n, it.rank, SIZE):
            assert torch.equal(flat[slice(*part)], total[slice(*part)])
        for rank in {0, 1, 2} - {it.rank}:
            for part in part_of(n, rank, SIZE):
                flat[slice(*part)] = -1.0
        it.all_gather("the stream", flat)
        return flat

    for flat in in_threads(go):
        assert torch.equal(flat, total)


def test_a_first_call_that_does_not_get_through_is_aborted(
    backends: list[Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processor, "never_passes", True)
    with pytest.raises(TimedOut, match="first calls among the GPUs of this host were not through"):
        NcclCollectives(Processor(), dist.HashStore(), 0, 1, 0.01)  # type: ignore[arg-type]
    assert backends[0].aborted == 1
