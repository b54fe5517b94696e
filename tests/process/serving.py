"""`shoal server` as a process of a test, and jobs that use it.

Ranks and servers run on one machine: each claims to be a separate host with a slow link, so that
the planner finds servers worth their messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from contract.fold_orders import folded
from process.ranks import Ranks, as_test, free_port, start_ranks
from process.stage import Stage, pretend_hosts

import shoal
from shoal.engine import Endpoint, Hello, Peer
from shoal.group.pool import protocol
from shoal.group.pool.protocol import Message, decode, expect, hello_of, send, server_key
from shoal.rendezvous.listener import listen_tcp, wait_for

if TYPE_CHECKING:
    from process.arrays import Array

N_WORKERS = 3
N_ELEMS = 4_000_003  # 15 MiB of odd length: enough for three workers to gain from one server
_SERVING = re.compile(r"serving \d+ keys? at ([^:]+):(\d+)")
_LONG_S = 30.0


def new_key(folder: Path, name: str = "job.key") -> Path:
    path = folder / name
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


class ServerProcess:
    """A server that listens at a port it chooses. Leaving the context kills it."""

    def __init__(
        self,
        *keys: Path,
        port: int = 0,
        host: str = "server",
        # Fast enough that one server reduces most of a tensor, and the workers the rest.
        link: str = "29Mb,10us,1us",
        more: Sequence[str] = (),
    ):
        env = {**os.environ, "SHOAL_LINK": link, "SHOAL_HOST_ID": host}
        argv = [sys.executable, "-m", "shoal", "server", "--listen", f"127.0.0.1:{port}", *more]
        for key in keys:
            argv += ["--key-file", str(key)]
        self.keys = keys
        self._process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env)
        self.log: list[str] = []
        self._is_serving = threading.Event()
        self.port = port
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_serving.wait(_LONG_S):
            self.__exit__()
            raise AssertionError("".join(self.log))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = _LONG_S) -> int:
        """Return its exit code."""
        return self._process.wait(timeout_s)

    def views(self) -> list[dict[str, Any]]:
        """Return its views of the job of its first key."""
        return status_of(self.keys[0], self.address)["views"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        self._reader.join()
        self._process.stderr.close()

    def _read(self) -> None:
        for line in self._process.stderr:
            self.log.append(line)
            if found := _SERVING.search(line):
                self.port = int(found[2])
                self._is_serving.set()


class Talker:
    """A job's or a server's end of the server-port protocol, stepped by hand."""

    def __init__(self, key: bytes) -> None:
        self.key, self.endpoint = key, Endpoint(self, most_queued=4 << 20)
        self.peers: list[Peer] = []
        self.messages: list[Message] = []
        self.n_lost = 0
        self.step_others: Callable[[], object] = int

    def listen(self, **options: int) -> int:
        listener = listen_tcp("127.0.0.1", (0,))
        for name, value in options.items():
            listener.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        port: int = listener.getsockname()[1]
        self.endpoint.listen(listener.detach())
        return port

    def connect(self, port: int) -> Peer:
        self.endpoint.connect("127.0.0.1", port, hello_of(self.key), server_key(self.key))
        n = len(self.peers)
        self.run_until(lambda: len(self.peers) > n)
        return self.peers[-1]

    def ask(self, message: Message) -> Any:
        """Send a message; return the reply, or None if the connection is lost."""
        n, n_lost = len(self.messages), self.n_lost
        send(self.peers[-1], message)
        self.run_until(lambda: len(self.messages) > n or self.n_lost > n_lost)
        return self.messages[n] if len(self.messages) > n else None

    def run_until(self, is_so: Callable[[], object]) -> None:
        until = time.monotonic() + _LONG_S
        while not is_so():
            assert time.monotonic() < until
            wait_for(self.endpoint, time.monotonic() + 0.02)
            self.step_others()
            self.endpoint.step(time.monotonic())

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_error: object) -> None:
        self.endpoint.close()

    def admit(self, _hello: Hello) -> bytes:
        return server_key(self.key)

    def welcome(self, peer: Peer, _hello: Hello) -> None:
        expect(peer, protocol.FROM_WORKERS)
        self.peers.append(peer)

    def reached(self, peer: Peer, _dial: int) -> None:
        expect(peer, protocol.FROM_SERVERS)
        self.peers.append(peer)

    def not_reached(self, *why: object) -> None:
        raise AssertionError(why)

    def key_differs(self, _hello: Hello) -> None: ...

    def received(self, _peer: Peer, kind: int, body: bytes, _fd: int) -> None:
        self.messages.append(decode(kind, body))

    def lost(self, _peer: Peer, _error: int, _why: str) -> None:
        self.n_lost += 1


def job_env(key: Path, *servers: str, **more: str) -> dict[str, str]:
    """Environment of a job's ranks, which call `pretend_hosts(1)` before they join."""
    own = {"SHOAL_LINK": "10Mb,10us,1us", "SHOAL_KEY_FILE": str(key)}
    return {**own, "SHOAL_SERVERS": ",".join(servers), **more}


def await_that(is_so: Callable[[], Any], what: str) -> Any:
    """Poll until the result is true, and return it."""
    until = time.monotonic() + _LONG_S
    while time.monotonic() < until:
        found = is_so()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"in vain for {_LONG_S:g} s: {what}")


def n_servers(group: shoal.Group) -> int:
    """Return the number of servers of calls made now."""
    view = group.pool and group.pool.view
    return len(view.servers) if view else 0


def await_servers(group: shoal.Group, n: int) -> None:
    """Wait until every rank of the group has had `n` servers.

    The ranks then meet: otherwise a killed server or a leaving rank could end the
    view before a slower rank has seen it.
    """
    await_that(lambda: n_servers(group) == n, f"{n} servers for {group}")
    group.barrier()


@contextlib.contextmanager
def served_group(n: int = 1, n_local: int = 1, timeout_s: float = 30.0) -> Iterator[shoal.Group]:
    """Form the group of a job, and wait until servers take part."""
    pretend_hosts(n_local)
    with shoal.init(timeout_s=timeout_s) as group:
        await_servers(group, n)
        yield group


def noise(rank: int, number: int = 0, n_elems: int = N_ELEMS) -> Array:
    """Return values whose sum depends on the order."""
    drawn = np.random.default_rng((rank, number)).normal(size=9973).astype(np.float32)
    return np.resize(drawn, n_elems)


def wanted(number: int = 0, n_workers: int = N_WORKERS, n_elems: int = N_ELEMS) -> Array:
    """Return the sum that docs/bits.md defines."""
    return folded([noise(rank, number, n_elems) for rank in range(n_workers)])


def wait_for_all(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


def check_all(works: Sequence[Any], data: Sequence[Array], first: int = 0) -> None:
    """Wait for calls numbered from `first`, and check that their bits are right."""
    wait_for_all(works)
    for number, each in enumerate(data, first):
        assert is_right(each, number), number


def check_sum(group: shoal.Group, number: int = 0, n_elems: int = N_ELEMS) -> None:
    """Make a call, and check that its bits are right."""
    data = noise(group.rank, number, n_elems)
    group.all_reduce(data)
    assert is_right(data, number), number


def is_right(data: Array, number: int = 0, n_workers: int = N_WORKERS) -> bool:
    """Return True if it has exactly the bits of that sum."""
    return data.tobytes() == wanted(number, n_workers, data.size).tobytes()


def status_of(key: Path, address: str) -> Any:
    return json.loads(status_text(key, address, "--json"))


def status_text(key: Path, *arguments: str) -> str:
    """Return what `shoal status` prints."""
    env = {**os.environ, "SHOAL_KEY_FILE": str(key)}
    argv = [sys.executable, "-m", "shoal", "status", *arguments]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def job_with_servers(
    key: Path,
    hosts: Sequence[str],
    task: Callable[..., Any],
    n_ranks: int,
    *given: Any,
    env: Mapping[str, str] | None = None,
    **how: Any,
) -> Iterator[tuple[Stage, list[ServerProcess], Ranks]]:
    """Start a server on each of these hosts, and the ranks of a job that uses them."""
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(Stage())
        # NOT ports that the kernel chooses: a connection may get one before a server is back.
        servers = [
            stack.enter_context(ServerProcess(key, port=free_port(), host=host, **how))
            for host in hosts
        ]
        whole = job_env(key, *(server.address for server in servers)) | dict(stage.env)
        ranks = start_ranks(task, n_ranks, *given, env={**whole, **(env or {})})
        yield stage, servers, stack.enter_context(ranks)


@contextlib.contextmanager
def job_with_a_server(
    folder: Path, task: Callable[..., Any], *given: Any, n_ranks: int = N_WORKERS, **how: Any
) -> Iterator[tuple[Stage, ServerProcess, Ranks]]:
    job = job_with_servers(new_key(folder), ["server"], task, n_ranks, *given, **how)
    with job as (stage, (server,), ranks):
        yield stage, server, ranks


def with_a_server(n_ranks: int = N_WORKERS, *victims: int) -> Callable[..., Callable[..., None]]:
    """Make a test of a function that the ranks of a job with a server run.

    Args:
        n_ranks: the test's parameter of this name overrides it.
        victims: ranks that kill themselves.
    """

    def run(folder: Path, function: Callable[..., Any], given: dict[str, Any]) -> list[Any]:
        n = given.get("n_ranks", n_ranks)
        with job_with_a_server(folder, function, *given.values(), n_ranks=n) as (*_, ranks):
            return ranks.survivors(*victims)

    return as_test("tmp_path", run)


def with_a_dying_server(
    n_ranks: int = N_WORKERS, *, comes_back: bool = False
) -> Callable[..., Callable[..., None]]:
    """Make a test of a function whose ranks call in `while_the_server_dies`.

    Their server is killed once rank 0 has called.

    Args:
        comes_back: another one starts once all ranks go on without it.
    """

    def run(folder: Path, function: Callable[..., Any], given: dict[str, Any]) -> list[Any]:
        job = job_with_a_server(folder, function, *given.values(), n_ranks=n_ranks)
        with job as (stage, server, ranks):
            stage.await_cue("rank 0: has called")
            server.kill()
            stage.cue("the server is dead")
            if not comes_back:
                return ranks.values()
            stage.await_all(n_ranks, "goes on without")
            with ServerProcess(*server.keys, port=server.port):
                return ranks.values()

    return as_test("tmp_path", run)


@contextlib.contextmanager
def while_the_server_dies(group: shoal.Group) -> Iterator[None]:
    """Make calls here that the last rank makes once their server is dead."""
    stage = Stage.from_environment()
    if group.rank == group.size - 1:
        stage.await_cue("the server is dead")
    yield
    if group.rank == 0:
        stage.cue("rank 0: has called")


def run_while_servers_die(
    task: Callable[[int], Any], n_ranks: int, n_calls: int, key: Path, *, every: int, seed: int
) -> list[Any]:
    """Repeatedly end one of two servers and start it again, as the ranks' calls proceed."""
    draw, job = random.Random(seed), job_with_servers(key, "ab", task, n_ranks, n_calls)
    with contextlib.ExitStack() as on_exit, job as (stage, servers, ranks):
        for turn in range(5, n_calls - 5, every):
            stage.await_cue(f"turn {turn}")
            time.sleep(draw.uniform(0.0, 0.1))
            at = draw.randrange(2)
            servers[at].send(draw.choice([signal.SIGKILL, signal.SIGTERM]))
            servers[at].wait()
            again = ServerProcess(key, port=servers[at].port, host="ab"[at])
            servers[at] = on_exit.enter_context(again)
        return ranks.values(300.0)
