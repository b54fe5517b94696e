"""Run the ranks of one real group as threads of this process, which is quick. They share its
environment, descriptors and interpreter lock."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import shoal
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer

_LONG_S = 60.0


def run_in_threads(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Run function(group, *args) as each rank; return results or errors by rank."""
    results: list[Any] = [None] * size
    with contextlib.closing(TcpStoreServer("127.0.0.1", 0)) as server:

        def rank(number: int) -> None:
            store = TcpStoreClient("127.0.0.1", server.port, timeout_s=_LONG_S)
            init = functools.partial(shoal.init, timeout_s=_LONG_S)
            try:
                with contextlib.closing(store), init(store, number, size) as group:
                    results[number] = function(group, *args)
            except BaseException as error:  # noqa: BLE001 - the test checks it; pytest's too
                results[number] = error

        in_threads(*(functools.partial(rank, number) for number in range(size)))
    return results


def in_threads(*calls: Callable[[], object]) -> None:
    """Make all calls at once, each on its own thread, and wait for them."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_well(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Run like `run_in_threads`, where no rank may raise."""
    results = run_in_threads(function, size, *args)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def in_ranks(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function of a group and pytest's parameters into a test that each rank runs."""

    def make(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**parameters: Any) -> None:
            run_well(functools.partial(function, **parameters), size)

        _group, *others = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return test

    return make
