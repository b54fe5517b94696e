"""What tests of joins share: joins in threads, pretended hosts, and callers who are no ranks."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from process.ranks import warm_up

from shoal.rendezvous import JoinOptions, Membership, MemoryStore, Store, join
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


def join_all(
    store: Store,
    environs: Sequence[Mapping[str, str]],
    timeout_s: float = LONG_S,
    fds: Callable[[int], Sequence[int]] = lambda _: (),
) -> list[Membership | Exception]:
    """Join as one thread per environment; what each one returned or raised."""

    def one(rank: int) -> Membership | Exception:
        try:
            chosen = options(environs[rank])
            return join(
                store, rank, len(environs), timeout_s=timeout_s, local_fds=fds, options=chosen
            )
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(one, range(len(environs))))


@contextlib.contextmanager
def joined(
    store: Store,
    environs: Sequence[Mapping[str, str]],
    fds: Callable[[int], Sequence[int]] = lambda _: (),
) -> Iterator[list[Membership]]:
    with contextlib.ExitStack() as stack:
        found = join_all(store, environs, fds=fds)
        for each in found:
            if isinstance(each, Exception):
                raise each
        yield [stack.enter_context(each) for each in found if isinstance(each, Membership)]


def say_who_you_are(membership: Membership) -> None:
    for peer in membership.peers:
        os.write(peer.socket_fd, bytes([membership.rank, peer.rank]))


def check_who_is_there(membership: Membership) -> None:
    for peer in membership.peers:
        os.set_blocking(peer.socket_fd, True)
        assert os.read(peer.socket_fd, 9) == bytes([peer.rank, membership.rank])


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
