"""What tests of joins share: joins in threads, pretended hosts, and callers who are no ranks."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from process.ranks import warm_up

from shoal.rendezvous import HostMemory, JoinOptions, Membership, MemoryStore, Store, join
from shoal.rendezvous.door import Limits
from shoal.rendezvous.listener import unix_address

LONG_S = 60.0  # a join that should succeed
SHORT_S = 0.3  # a join that cannot: it lasts this long
ONE_HOST: Mapping[str, str] = {}


def hosts(*ids: str, **more: str) -> list[dict[str, str]]:
    """Environments of ranks on these pretended hosts of one machine."""
    return [{"MASTER_ADDR": "127.0.0.1", "SHOAL_HOST_ID": name, **more} for name in ids]


def options(environ: Mapping[str, str], **more: object) -> JoinOptions:
    return JoinOptions(environ=environ, **more)  # type: ignore[arg-type]


class Ground:
    """The memory of a host, as one of its ranks holds it: each writes there who it is."""

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
        """Those who have entered."""
        return [one - 1 for one in os.pread(self.fd, 256, 0)]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def join_all(
    store: Store,
    environs: Sequence[Mapping[str, str]],
    timeout_s: float = LONG_S,
    grounds: Sequence[Ground] = (),
) -> list[Membership | Exception]:
    """Join as one thread per environment; what each one returned or raised."""

    def one(rank: int) -> Membership | Exception:
        try:
            chosen = options(environs[rank])
            memory = grounds[rank].as_memory() if grounds else HostMemory()
            return join(
                store, rank, len(environs), timeout_s=timeout_s, memory=memory, options=chosen
            )
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(one, range(len(environs))))


@contextlib.contextmanager
def joined(
    store: Store,
    environs: Sequence[Mapping[str, str]],
    grounds: Sequence[Ground] = (),
) -> Iterator[list[Membership]]:
    with contextlib.ExitStack() as stack:
        for ground in grounds:
            stack.callback(ground.close)
        found = join_all(store, environs, grounds=grounds)
        for each in found:
            if isinstance(each, Exception):
                raise each
        yield [stack.enter_context(each) for each in found if isinstance(each, Membership)]


def say_who_you_are(membership: Membership) -> None:
    for peer in membership.peers:
        for fd in peer.socket_fds:
            os.write(fd, bytes([membership.rank, peer.rank]))


def check_who_is_there(membership: Membership, ground: Ground) -> None:
    for peer in membership.peers:
        assert peer.is_local == (not peer.socket_fds)
        for fd in peer.socket_fds:
            os.set_blocking(fd, True)
            assert os.read(fd, 9) == bytes([peer.rank, membership.rank])
    if membership.peers:
        local = [peer.rank for peer in membership.peers if peer.is_local]
        assert ground.ranks() == sorted([*local, membership.rank])


def n_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def no_descriptor_is_left() -> Iterator[None]:
    """Around a test, as a fixture: what it opens it closes."""
    warm_up()
    before = n_open()
    yield
    assert n_open() == before


class Noticing(MemoryStore):
    """A store that tells when a record comes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[int, dict[str, object]] = {}
        self.published = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        if key.startswith("shoal/rank/"):
            self.records[int(key.rpartition("/")[2])] = json.loads(value)
            self.published.set()


@contextlib.contextmanager
def waiting_rank_0(
    store: Noticing, size: int = 2, environ: Mapping[str, str] = ONE_HOST
) -> Iterator[tuple[Callable[[], Membership], bytes]]:
    """Rank 0, waiting for the others; gives its result and its Unix address.

    Silence is allowed for as long as the test may take, so nothing here ends by waiting it out.
    """
    patient = options(environ, limits=Limits(pending_s=LONG_S))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(join, store, 0, size, timeout_s=LONG_S, options=patient)
        assert store.published.wait(LONG_S)
        yield waiting.result, unix_address(str(store.records[0]["unix_name"]))


@contextlib.contextmanager
def callers(address: bytes, n_callers: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(n_callers)]
        for sock in made:
            sock.connect(address)
        yield made


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
