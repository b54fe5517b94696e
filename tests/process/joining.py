"""Shared code of tests of joins: joins in threads, and simulated hosts."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from process.ranks import warm_up
from process.stage import descriptors

from shoal.errors import PeerLost
from shoal.rendezvous import HostMemory, JoinOptions, Membership, MemoryStore, Store, join
from shoal.rendezvous.listener import unix_address
from shoal.rendezvous.record import Endpoint, Record, decode

if TYPE_CHECKING:
    import pytest

    from shoal.rendezvous.links import TreeLink

Environs = Sequence[Mapping[str, str]]

JOIN = importlib.import_module("shoal.rendezvous.join")  # `join` hides it
LONG_S = 60.0  # for a join that should succeed
ONE_HOST: Mapping[str, str] = {}


def hosts(*ids: str, **more: str) -> list[dict[str, str]]:
    """Environments of ranks on these simulated hosts."""
    return [{"MASTER_ADDR": "127.0.0.1", "SHOAL_HOST_ID": name, **more} for name in ids]


def options(environ: Mapping[str, str], **more: object) -> JoinOptions:
    return JoinOptions(environ=environ, **more)


def die_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a failing rank report nothing, like a killed one."""
    monkeypatch.setattr(JOIN._Join, "report_failure", lambda *_: None)


class Ground:
    """One rank's mapping of its host's memory, into which each rank writes its number."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fd = -1

    def as_memory(self) -> HostMemory:
        return HostMemory(self.make, self.enter)

    def make(self, n_local: int) -> int:
        memory = os.memfd_create("ground")
        os.truncate(memory, n_local)
        self.enter(memory, n_local, 0)
        return memory

    def enter(self, fd: int, n_local: int, local: int) -> None:
        self.close()
        self.fd = fd
        assert not os.get_inheritable(fd)
        assert os.fstat(fd).st_size == n_local
        assert os.pwrite(fd, bytes([1 + self.rank]), local) == 1

    def ranks(self) -> list[int]:
        """The ranks that have entered."""
        return [one - 1 for one in os.pread(self.fd, 256, 0)]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def in_threads(one: Callable[[int], Any], size: int) -> list[Any]:
    """Call a function with each rank, in a thread per rank; return the results."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def join_all(
    store: Store, environs: Environs, grounds: Sequence[Ground] = (), **more: object
) -> list[Membership | Exception]:
    """Join with one thread per environment and these options; return each result or error."""

    def one(rank: int) -> Membership | Exception:
        memory = grounds[rank].as_memory() if grounds else HostMemory()
        how = {"timeout_s": LONG_S, "memory": memory, "options": options(environs[rank], **more)}
        try:
            return join(store, rank, len(environs), **how)
        except Exception as error:  # noqa: BLE001 - the test checks it
            return error

    return in_threads(one, len(environs))


@contextlib.contextmanager
def joined(
    store: Store, environs: Environs, grounds: Sequence[Ground] = (), **more: object
) -> Iterator[list[Membership]]:
    with contextlib.ExitStack() as stack:
        for ground in grounds:
            stack.callback(ground.close)
        found = join_all(store, environs, grounds, **more)
        for each in found:
            if isinstance(each, Exception):
                raise each
        yield [stack.enter_context(each) for each in found]


def check_members(membership: Membership, ground: Ground) -> None:
    """Check that this host's memory holds its ranks, and that the others' addresses are known."""
    for peer in membership.peers:
        assert peer.is_local == (not peer.listens_at)
    if membership.peers:
        local = [peer.rank for peer in membership.peers if peer.is_local]
        assert ground.ranks() == sorted([*local, membership.rank])


class _AllHaveHeardError(Exception):
    """Ends the joins of all ranks."""


class Log(logging.Logger):
    """Keeps its warnings, and calls `then` after each."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__("of a test")
        self.texts: list[str] = []
        self._then = then

    def warning(self, msg: object, *args: object, **_: object) -> None:
        self.texts.append(str(msg) % args)
        self._then()


class Ear(Log):
    """Keeps one rank's warnings, and the first with these words once it has logged `least`."""

    def __init__(self, ears: list[Ear], words: str, least: int) -> None:
        super().__init__(self._listen)
        self._ears, self._words, self._least = ears, words, least
        self.text = ""  # the first with the words
        ears.append(self)

    def _listen(self) -> None:
        if self._words in self.texts[-1] and len(self.texts) >= self._least:
            self.text = self.text or self.texts[-1]
        if all(ear.text for ear in self._ears):
            raise _AllHaveHeardError


def ears_of(
    store: Store, environs: Environs, words: Mapping[int, str], least: int = 1, **how: object
) -> list[Ear]:
    """Join until each of these ranks has warned with its words."""
    ears: list[Ear] = []
    logs = {rank: Ear(ears, words[rank], least) for rank in words}

    def one(rank: int) -> None:
        chosen = options(environs[rank], warn_s=0.01, log=logs[rank], **how)
        # All but the last rank to warn fail because that one has left.
        with contextlib.suppress(_AllHaveHeardError, PeerLost):
            join(store, rank, len(environs), timeout_s=LONG_S, options=chosen)

    with ThreadPoolExecutor(len(words)) as pool:
        list(pool.map(one, words))
    return ears


def warnings_of(*given: Any, **how: Any) -> list[str]:
    """Join until each of these ranks has warned with its words; return those warnings."""
    return [ear.text for ear in ears_of(*given, **how)]


def no_descriptor_is_left() -> Iterator[None]:
    """A fixture: fail if the test leaves a descriptor open."""
    warm_up()
    before = descriptors().items()
    yield
    # NOT their number: garbage of an earlier test may be collected meanwhile.
    assert not descriptors().items() - before


def rewritten(value: bytes, **changes: object) -> bytes:
    """Return a record with some of its fields replaced."""
    return decode(value)._replace(**changes).encode()


class Noticing(MemoryStore):
    """A store that signals when a record arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[int, Record] = {}
        self.published = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        if "/rank/" in key:
            self.records[int(key.rpartition("/")[2])] = decode(value)
            self.published.set()


class Misleading(MemoryStore):
    """Publishes this port as the rank's own."""

    def __init__(self, port: int, rank: int = 0) -> None:
        super().__init__()
        self.real_port = 0
        self._key = f"/rank/{rank}"
        self._endpoint = Endpoint("127.0.0.1", port, "eth7")

    def set(self, key: str, value: bytes) -> None:
        if key.endswith(self._key) and (own := decode(value).endpoint) is not None:
            self.real_port = own.port
            value = rewritten(value, endpoint=self._endpoint)
        super().set(key, value)


@contextlib.contextmanager
def waiting_rank_0(store: Noticing) -> Iterator[tuple[Callable[[], Membership], bytes]]:
    """Start rank 0 of 2, which waits for rank 1; yield its result and its Unix address.

    The allowed silence is longer than the test, so no connection times out here.
    """
    patient = options(ONE_HOST, pending_s=LONG_S)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(join, store, 0, 2, timeout_s=LONG_S, options=patient)
        assert store.published.wait(LONG_S)
        yield waiting.result, unix_address(store.records[0].unix_name)


def shut(link: TreeLink) -> None:
    """Break this link."""
    with socket.socket(fileno=os.dup(link.peer.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
