"""One epoch of a process: the links to all peers, made once and shared by all groups."""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from shoal import engine, limits
from shoal.engine import RankInfo
from shoal.errors import Closed, ShoalError, UsageError
from shoal.group.work import COMPLETIONS
from shoal.plan.quantities import bytes_from, show_bytes
from shoal.rendezvous import HostMemory, Membership, Store, join, reporting_failure
from shoal.state import SOURCES, heed_signal

if TYPE_CHECKING:
    from shoal.group.work import Loan, Work

# How long the program's end waits for threads to notice that their calls have ended.
_LAST_WAIT_S: Final = 2.0


# The most that may be on its way to other hosts for calls that send to several at once, which take
# turns (native/engine/segments/turns.h). All of it may wait in front of one receiver, and the queue
# of a small switch holds 256 KiB. The least keeps a link busy whose ends share their cores.
_OUT_US: Final = 4_000
_LEAST_OUT_BYTES: Final = 192 << 10


class Member(Protocol):
    """A group, as its context needs it."""

    name: str

    @property
    def native_id(self) -> int | None:
        """Its number in the native core; None once it is closed."""

    def abandon(self, why: str) -> None:
        """Refuse every call from now on."""


class Occurrences:
    """How often each name has come. None is forgotten, since other ranks may still count it.

    Args:
        what: bears these names, for messages.
    """

    MOST: Final = 1 << 20  # names; about 100 MB

    def __init__(self, what: str) -> None:
        self._what = what
        self._n: defaultdict[Hashable, int] = defaultdict(int)

    def count(self, name: Hashable) -> int:
        """How often this name has come, this time included.

        Raises:
            UsageError: there are too many names; this one was not counted.
        """
        if len(self._n) >= self.MOST and name not in self._n:
            raise UsageError(
                f"{self.MOST} names of {self._what} have been used, which is the most that are "
                "counted; use names again"
            )
        self._n[name] += 1
        return self._n[name]


class Context:
    """One epoch: the links to all peers, and what its groups share.

    Ends once: when it is closed, when nobody holds a group of it any more, or with the program.
    """

    def __init__(
        self,
        mesh: engine.Mesh,
        rank: int,
        names: Sequence[RankInfo],
        digests: Sequence[bytes],
        epoch: int = 0,
    ) -> None:
        self._mesh: engine.Mesh | None = mesh
        self.epoch = epoch
        self.rank = rank
        self.names = names
        self.digests = digests
        self._live: deque[Loan] = deque()
        self._unheld: deque[engine.NativeGroup] = deque()
        self.groups: weakref.WeakSet[Member] = weakref.WeakSet()
        self._made = Occurrences("groups")
        self._end = weakref.finalize(self, mesh.close)
        self._end.atexit = False  # `_end_all` has more to do
        _CONTEXTS.add(self)
        SOURCES.add(self)

    @property
    def mesh(self) -> engine.Mesh | None:
        """The links; None once they are closed."""
        return self._mesh

    def register(
        self, group: Member, name: str, members: Sequence[int], native_id: int | None = None
    ) -> engine.NativeGroup:
        """The native group of a new one. All members get the same id for it, and never again.

        Args:
            native_id: that id, where the members have agreed on one; None: they all make as many
                groups of this name.
        """
        if self._mesh is None:
            raise Closed(f"group {name!r} cannot be made: its context was closed")
        if native_id is None:
            who = (name, *members)
            native_id = hash_of(*who, self._made.count(hash_of(*who)))
        self.groups.add(group)
        return self._mesh.group(native_id, members)

    def pace(self, bytes_per_us: float) -> None:
        """Say what this rank's link to other hosts carries; 0: nobody knows."""
        if self._mesh is not None and bytes_per_us:
            self._mesh.bound_out(max(_LEAST_OUT_BYTES, int(bytes_per_us * _OUT_US)))

    def let_go(self, native: engine.NativeGroup) -> None:
        """Nobody holds a group any more, nor those of before: they go once their calls have ended.

        Not with what is in flight: others may need it, though nobody here looks at it.
        """
        self._unheld.append(native)
        for _ in range(len(self._unheld)):
            try:
                one = self._unheld.popleft()
            except IndexError:  # another thread has it
                break
            if not one.drop_unheld():
                self._unheld.append(one)

    def keep(self, work: Work) -> None:
        """Keep the buffers of a call until it is done, whoever drops them: the engine uses them."""
        live, n_running = self._live, 0
        # Two that run go to the back, so that those behind a call that takes long are looked at
        # too. What is looked at is out of the queue: another thread may do the same at a time.
        while live and n_running < 2:
            try:
                oldest = live.popleft()
            except IndexError:
                break
            if not oldest[0].done():
                live.append(oldest)
                n_running += 1
        # NOT the work itself, which has a hold on its group, and that on this context: whoever
        # drops a group would leave only when Python's collector finds the cycle.
        live.append(work.lend())

    def close(self) -> None:
        """Say goodbye to all peers and end the links. Idempotent."""
        # NOT `self._end()`: finalizers do nothing once the program is ending.
        self._end.detach()
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()
            self._live.clear()  # all have ended; they would keep the descriptors of the mesh
            self._unheld.clear()  # and so would these

    def abandon(self) -> None:
        """After fork, in the child: the links are the parent's, and nothing is said on them."""
        self._end.detach()
        for group in list(self.groups):
            group.abandon("a forked child has no part in its parent's groups")


_CONTEXTS: Final[weakref.WeakSet[Context]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all worlds while the interpreter is whole, and let all threads out of native code."""
    for context in list(_CONTEXTS):
        context.close()
    COMPLETIONS.finish()
    deadline = time.monotonic() + _LAST_WAIT_S
    pause = threading.Event()  # waited on only for its timeout, which lets the others run
    while engine.n_waiting() and time.monotonic() < deadline:
        pause.wait(0.001)


def _after_fork_in_child() -> None:
    # The native core has closed the links already: it hears of every fork, also of C libraries'.
    COMPLETIONS.forget_threads()
    for context in list(_CONTEXTS):
        context.abandon()
    _CONTEXTS.clear()
    SOURCES.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def meet(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    digest: bytes = b"",
    channels: Callable[[Sequence[str], Sequence[bytes]], int] = lambda _hosts, _digests: 1,
    dead_s: float | None = None,
) -> Context:
    """Meet all ranks through `store` and link up with them; `group.form` says what it raises.

    `digest` is for all ranks to read: `Context.digests` holds them by rank. `channels` says by the
    hosts and the digests of all ranks how many channels there are between hosts; it raises
    nothing. A peer that is silent for `dead_s`, the same on all, counts as lost, and so does one
    whose lost connections do not come back in that time; None: the usual.
    """
    with reporting_failure(store, rank, size):
        _check_isa()
        heed_signal()
        staging_bytes = _staging_bytes()
        spin_us = _integer("SHOAL_SPIN_US", limits.SPIN_US, 0, 10**9)
        backstop_ms = _integer("SHOAL_BACKSTOP_MS", limits.BACKSTOP_MS, 1, 10**9)
        resume_s = float(_integer("SHOAL_RESUME_S", limits.RESUME_S, 0, 10**6))
    if dead_s is not None:
        resume_s = min(resume_s, dead_s)
    arenas: list[engine.Arena] = []

    # NOT two at a time: our part of the memory may be the same as before.
    def make(n_local: int) -> int:
        arenas.clear()
        arenas.append(engine.Arena.create(n_local))
        return arenas[0].memory_fd

    def enter(memory_fd: int, n_local: int, local: int) -> None:
        arenas.clear()
        arenas.append(engine.Arena.enter(memory_fd, n_local, local))

    try:
        membership = join(
            *(store, rank, size),
            timeout_s=timeout_s,
            memory=HostMemory(make, enter),
            digest=digest,
        )
        if not arenas:
            make(1)  # alone: nobody to share it with
        rank_infos = _rank_infos(membership)
        n_channels = channels([info.host_id for info in rank_infos], membership.digests)
        mesh = engine.Mesh.create(
            rank=rank,
            names=[f"rank {other} ({rank_info})" for other, rank_info in enumerate(rank_infos)],
            epoch=membership.epoch,
            job_key=membership.job_key,
            arena=arenas[0],
            peers=_places(membership),
            n_channels=n_channels,
            listeners=list(membership.take()),
            resume_s=resume_s,
            dead_s=float(limits.DEAD_S) if dead_s is None else dead_s,
            staging_bytes=staging_bytes,
            spin_us=float(spin_us),
            backstop_s=backstop_ms / 1e3,
        )
    except ShoalError:
        raise
    except (MemoryError, RuntimeError) as error:  # the native core's two at set-up
        raise ShoalError(f"rank {rank} cannot join: {error}") from error
    finally:
        arenas.clear()  # NOT left to whoever keeps the error, and with it this frame
    return Context(mesh, rank, rank_infos, membership.digests, membership.epoch)


_PeerPlace = tuple[int, bool, int, list[tuple[str, int]]]


def _places(membership: Membership) -> list[_PeerPlace]:
    """Where the mesh finds each peer, and how many paths lead there: as many as the lower says."""
    found: list[_PeerPlace] = []
    for peer in membership.peers:
        lower = peer.listens_at if peer.rank < membership.rank else membership.listens_at
        n_paths = 0 if peer.is_local else len(lower)
        found.append((peer.rank, peer.is_local, n_paths, list(peer.listens_at)))
    return found


def _rank_infos(membership: Membership) -> list[RankInfo]:
    """Where each rank is."""
    rank_infos = {
        peer.rank: RankInfo(peer.host_label, "" if peer.is_local else peer.address, peer.host_id)
        for peer in membership.peers
    }
    rank_infos[membership.rank] = RankInfo(socket.gethostname(), "", membership.host_id)
    ids = membership.process_ids
    return [
        rank_infos[rank]._replace(process_id=ids[rank].hex()) for rank in range(membership.size)
    ]


def _check_isa() -> None:
    wanted, here = os.environ.get("SHOAL_ISA"), engine.fold_isa()
    if wanted not in (None, here):
        raise UsageError(
            f"SHOAL_ISA={wanted!r} cannot run here, where {here} does: known are baseline, avx2 "
            "and avx512, as far as the processor has them"
        )


def _staging_bytes() -> int:
    otherwise = f"it is {show_bytes(limits.STAGING_BYTES)}"
    asked = bytes_from(os.environ, "SHOAL_STAGING_BYTES", 8 << 20, 1 << 40, otherwise)
    return limits.STAGING_BYTES if asked is None else asked


def _integer(name: str, default: int, least: int, most: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise UsageError(
            f"{name}={text!r} is no integer from {least} to {most}; the default is {default}"
        )
    return int(text)


def hash_of(*parts: object) -> int:
    """64 bits that are the same in every process."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
