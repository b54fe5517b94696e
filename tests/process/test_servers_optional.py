"""A job goes on through faults that cost it its servers."""

import contextlib
import ctypes
import logging
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from process.ranks import free_port, run_ranks, start_ranks
from process.serving import (
    N_WORKERS,
    ServerProcess,
    await_servers,
    job_env,
    new_key,
    sums,
)
from process.stage import Lines, Stage, pretend_hosts

import shoal


class Warnings(Lines):
    """Records a rank's warnings, and whether a view failed to form."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.has_no_view = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if "did not form" in self.texts[-1]:
            self.has_no_view.set()


def take_ports_and_hold_rank_0() -> tuple[list[bool], list[str]]:
    """First no port is free for a view; then rank 0's interpreter is held."""
    pretend_hosts(1)
    stage, right = Stage.from_environment(), list[bool]()
    warnings = Warnings()
    with shoal.init(timeout_s=30.0) as group:
        pool: Any = group.pool  # type: ignore[attr-defined]
        await_servers(group, 1)
        right.append(sums(group, len(right)))
        stage.meet(group.rank, N_WORKERS, "has one server")
        if group.rank == 0:
            stage.cue("the first view stands")
            assert warnings.has_no_view.wait(30.0)
        right.append(sums(group, len(right)))
        stage.cue(f"rank {group.rank}: goes on with one server")
        await_servers(group, 2)
        if group.rank == 0:
            ctypes.PyDLL(None).usleep(1_500_000)  # keeps the interpreter
        right.append(sums(group, len(right)))
        await_servers(group, 2)
        right.append(sums(group, len(right)))
        assert pool._thread.is_alive()
        stage.meet(group.rank, N_WORKERS, "has looked at its thread")  # which ends when one leaves
    return right, warnings.texts


@contextlib.contextmanager
def taken(ports: range) -> Iterator[None]:
    """Bind every free port of these."""
    with contextlib.ExitStack() as on_exit:
        for port in ports:
            with contextlib.suppress(OSError):
                on_exit.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def test_a_missing_port_or_a_held_interpreter_does_not_end_a_job(tmp_path: Path) -> None:
    key, second = new_key(tmp_path), free_port()
    first = random.randrange(14_000, 19_000)  # `free_port` gives none of these
    ports = range(first, first + 12)
    with Stage() as stage, ServerProcess(key, host="a") as server:
        env = job_env(
            *(key, server.address, f"127.0.0.1:{second}"),
            SHOAL_PORT_RANGE=f"{ports[0]}-{ports[-1]}",
        )
        with start_ranks(take_ports_and_hold_rank_0, N_WORKERS, env={**env, **stage.env}) as ranks:
            stage.await_cue("the first view stands")
            with contextlib.ExitStack() as on_exit:
                with taken(ports):
                    on_exit.enter_context(ServerProcess(key, host="b", port=second))
                    stage.await_all(N_WORKERS, "goes on with one server")
                outcomes = ranks.wait()
    assert [outcome.error or outcome.value[0] for outcome in outcomes] == [[True] * 4] * N_WORKERS
    texts = [line for line in outcomes[0].value[1] if "did not form" in line]
    assert len(texts) == 1
    assert "cannot listen on 127.0.0.1" in texts[0]
    assert f"{ports[0]}-{ports[-1]}" in texts[0]
    assert "Widen SHOAL_PORT_RANGE" in texts[0]


def warnings_of_unused_servers(ranks_per_host: int) -> list[str]:
    pretend_hosts(ranks_per_host)
    warnings = Warnings()
    with shoal.init(timeout_s=30.0) as group:
        group.barrier()
    return [line for line in warnings.texts if "not used" in line]


def test_a_job_on_one_or_two_hosts_warns_once_that_servers_are_unused(tmp_path: Path) -> None:
    env = job_env(new_key(tmp_path), f"127.0.0.1:{free_port()}")
    for ranks_per_host, why in ((1, "two hosts no traffic"), (2, "all workers are on one host")):
        first, second = run_ranks(warnings_of_unused_servers, 2, ranks_per_host, env=env)
        assert len(first) == 1
        assert why in first[0]
        assert second == []
