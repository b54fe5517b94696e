"""One epoch of a process: the links to all peers, made once and shared by its groups."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal import engine, limits
from shoal.errors import Closed, ShoalError, UsageError
from shoal.group.work import COMPLETIONS
from shoal.plan.quantities import bytes_from
from shoal.plan.text import show_bytes
from shoal.rendezvous import HostMemory, Membership, Store, join, reporting_failure
from shoal.settings import monitored
from shoal.state import SOURCES, heed_settings

if TYPE_CHECKING:
    from shoal.group.calls import Calls
    from shoal.group.work import Loan
    from shoal.plan import Planner
    from shoal.state.monitor import Monitor
    from shoal.state.tally import Tally

# How long the program's end waits for threads to notice the end of their calls.
_LAST_WAIT_S: Final = 2.0
_EXIT_S: Final = 5.0  # how long a failed program may take to exit, with its links open
_STATE_S: Final = 0.1  # for the lock of the native core
_OWN_CALLS_S: Final = 12.0  # as long as closing waits for acknowledgements

# Limits the bytes in flight to other hosts of calls whose sends to several hosts take turns
# (native/engine/segments/turns.h). All of them may queue in front of one receiver, and a small
# switch queues 256 KiB. The lower bound is one turn of eight receivers: with less, busy cores
# leave links idle.
_OUT_US: Final = 4_000
_LEAST_OUT_BYTES: Final = 256 << 10


class Occurrences:
    """Counts the uses of each name of `what`. Never forgets one: other ranks may still count it."""

    MOST: Final = 1 << 20  # names; about 100 MB

    def __init__(self, what: str) -> None:
        self._what = what
        self._n: defaultdict[Hashable, int] = defaultdict(int)

    def count(self, name: Hashable) -> int:
        """Count a use; return the number of uses of this name. UsageError for too many names."""
        if len(self._n) >= self.MOST and name not in self._n:
            raise UsageError(
                f"{self.MOST} names of {self._what} have been used, which is the limit; reuse names"
            )
        self._n[name] += 1
        return self._n[name]


class Context:
    """One epoch: the links to all peers, which its groups share.

    It ends when it is closed, when no group of it is referenced any more, or with the program.
    """

    def __init__(self, mesh: engine.Mesh, membership: Membership) -> None:
        self.mesh: engine.Mesh | None = mesh  # the links; None once they are closed
        self.epoch, self.rank = membership.epoch, membership.rank
        self.names, self.digests = membership.names, membership.digests
        self.held: dict[int, list[object]] = {}  # by id: the owners of buffers of calls to post
        self._live: deque[Loan] = deque()
        self._unheld: deque[engine.NativeGroup] = deque()
        self._own: deque[engine.Call] = deque()
        self.groups: weakref.WeakSet[Calls] = weakref.WeakSet()
        self._made = Occurrences("groups")
        self.tally: Tally | None = None
        self.monitor: Monitor | None = None
        self._end = weakref.finalize(self, mesh.close)
        self._end.atexit = False  # `_end_all` has more to do
        _CONTEXTS.add(self)
        SOURCES.add(self)

    def register(
        self, group: Calls, name: str, members: Sequence[int], native_id: int | None = None
    ) -> engine.NativeGroup:
        """Make the native group of a new group, with a new id that is equal on all members.

        Without an agreed `native_id`, each member must make the same number of groups of this name.
        """
        if self.mesh is None:
            raise Closed(f"group {name!r} cannot be made: its context was closed")
        if native_id is None:
            who = (name, *members)
            native_id = hash_of(*who, self._made.count(hash_of(*who)))
        self.groups.add(group)
        return self.mesh.group(native_id, members)

    def count(self) -> Tally:
        """Return the counts of this epoch's calls; the first use starts counting."""
        if self.tally is None:
            from shoal.state.tally import Tally

            self.tally = Tally()
        return self.tally

    def pace(self, bytes_per_us: float) -> None:
        """Set the rate of this rank's link to other hosts; 0: unknown."""
        if self.mesh is not None and bytes_per_us:
            self.mesh.bound_out(max(_LEAST_OUT_BYTES, int(bytes_per_us * _OUT_US)))

    def let_go(self, native: engine.NativeGroup) -> None:
        """Drop a group that is not referenced any more, once its calls have ended.

        Calls in flight go on, since other ranks may need them.
        """
        self._unheld.append(native)
        for _ in range(len(self._unheld)):
            try:
                one = self._unheld.popleft()
            except IndexError:  # another thread has it
                break
            if not one.drop_unheld():
                self._unheld.append(one)

    def keep(self, call: engine.Call, held: list[object]) -> None:
        """Keep the buffers of a call, which are in `self.held`, alive until it is done."""
        live, n_running = self._live, 0
        # Up to two running calls go to the back, so that a long call does not hide the calls behind
        # it. They stay in the queue meanwhile: Ctrl-C would lose a call that was taken out.
        while n_running < 2:
            try:
                oldest = live[0]
            except IndexError:
                break
            if not oldest[0].done():
                live.rotate(-1)
                n_running += 1
                continue
            try:
                live.remove(oldest)
            except ValueError:  # another thread has removed it
                break
        # NOT the work itself, which refers to its group, and so to this context: a dropped group
        # would end only when Python's collector finds the cycle.
        live.append((call, held))
        self.held.pop(id(held), None)

    def await_at_close(self, call: engine.Call) -> None:
        """Make `close` wait for a call that shoal made and that no caller waits for.

        `close` waits up to 12 s for all of these calls together.
        """
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while (oldest := self._own.popleft()).done():
                pass
            self._own.append(oldest)
        self._own.append(call)

    def close(self) -> None:
        """Send goodbyes to all peers and close the links. Idempotent."""
        # Leaving with such a call in flight would end its group, and with it peers' calls that this
        # rank has completed.
        deadline = time.monotonic() + _OWN_CALLS_S
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self.mesh is not None:
                self._own.popleft().wait(max(deadline - time.monotonic(), 0.0))
        # NOT `self._end()`: finalizers do nothing once the program is ending.
        self._end.detach()
        mesh, self.mesh = self.mesh, None
        if mesh is not None:
            mesh.close()
            self._live.clear()  # all have ended; their calls would keep the mesh's descriptors
            self.held.clear()
            self._unheld.clear()
            if self.tally is not None:
                self.tally.forget()
        if self.monitor is not None:
            self.monitor.close()

    def end_with_process(self) -> bool:
        """Keep the links until the process has ended; its groups refuse calls from now on.

        A launcher blames the process that ends first. After a goodbye, ranks that wait for this one
        would raise and end before it, since Python and torch take half a second to shut down
        (docs/decisions/0093). A process that takes longer than 5 s closes its links then.

        Returns:
            False if a call is in flight, a thread is in native code or may enter it again, or none
            can be started: close the links instead.
        """
        # The thread of a pool of servers calls native code until the links are closed.
        if self.mesh is None or any(getattr(group, "pool", None) for group in self.groups):
            return False
        for group in list(self.groups):  # a daemon thread must not start a call any more
            group.abandon("its program has raised an exception")
        state = self.mesh.state(_STATE_S)
        if state is None or engine.n_waiting():
            return False
        if any(channel["n_in_flight"] for channel in (state, *state.get("more", ()))):
            return False
        try:
            self.mesh.close_after(_EXIT_S)
        except RuntimeError:
            return False
        self._end.detach()
        if self.monitor is not None:
            self.monitor.close()
        return True

    def abandon(self) -> None:
        """Drop the links in a forked child, which belong to the parent, without a message."""
        self._end.detach()
        if self.monitor is not None:
            self.monitor.close()
        for group in list(self.groups):
            group.abandon("a forked child has no part in its parent's groups")


_CONTEXTS: Final[weakref.WeakSet[Context]] = weakref.WeakSet()


_CHILD_HAS_FAILED: Final = threading.Event()


def _note_failure_of_child() -> None:
    """Note that the function of a multiprocessing child ends with an error or an exit status.

    multiprocessing calls this while the exception is under way, and handles it itself: by the end
    of the program there is no trace of it.
    """
    error = sys.exc_info()[1]
    if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
        _CHILD_HAS_FAILED.set()


if "multiprocessing.util" in sys.modules:  # as in every such child
    sys.modules["multiprocessing.util"].Finalize(None, _note_failure_of_child, exitpriority=0)


def _has_failed() -> bool:
    """True if an exception that nobody caught ends the program."""
    is_interactive = hasattr(sys, "ps1")  # then the error may be an earlier line's
    return _CHILD_HAS_FAILED.is_set() or (hasattr(sys, "last_value") and not is_interactive)


@atexit.register
def _end_all() -> None:
    """Close all contexts before the interpreter shuts down, and let threads leave native code."""
    for context in list(_CONTEXTS):
        if not (_has_failed() and context.end_with_process()):
            context.close()
    COMPLETIONS.finish()
    _await_threads()
    if engine.n_waiting():
        for context in list(_CONTEXTS):
            context.close()
        _await_threads()


def _await_threads() -> None:
    """Let threads leave native code: Python would kill them there, and abort the process."""
    deadline = time.monotonic() + _LAST_WAIT_S
    pause = threading.Event()  # never set: a wait lets other threads run
    while engine.n_waiting() and time.monotonic() < deadline:
        pause.wait(0.001)


def _after_fork_in_child() -> None:
    # The native core has closed the links already: it is notified of every fork, also by C code.
    COMPLETIONS.forget_threads()
    for context in list(_CONTEXTS):
        context.abandon()
    _CONTEXTS.clear()
    SOURCES.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Tuning(NamedTuple):
    staging_bytes: int
    spin_us: int
    backstop_ms: int
    resume_s: int
    monitored: bool

    @classmethod
    def read(cls) -> _Tuning:
        """Read the settings; UsageError if one is wrong, or SHOAL_ISA cannot run here."""
        _check_isa()
        return cls(
            _staging_bytes(),
            _integer("SHOAL_SPIN_US", limits.SPIN_US, 0, 10**9),
            _integer("SHOAL_BACKSTOP_MS", limits.BACKSTOP_MS, 1, 10**9),
            _integer("SHOAL_RESUME_S", limits.RESUME_S, 0, 10**6),
            monitored(os.environ),
        )


def meet(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    digest: bytes,
    agree: Callable[[Membership], Planner],
) -> tuple[Context, Planner]:
    """Meet all ranks through `store` and connect to them; raises what `group.form` does.

    Every rank gets all ranks' `digest` as `Membership.digests`. `agree` makes the planner from
    these, which has the number of channels; if it raises, it must do so on all ranks.
    """
    with reporting_failure(store, rank, size):
        tuning = _Tuning.read()
        heed_settings()
    arenas: list[engine.Arena] = []

    # NOT two arenas at a time: both may have the same memory.
    def make(n_local: int) -> int:
        arenas.clear()
        arenas.append(engine.Arena.create(n_local))
        return arenas[0].memory_fd

    def enter(memory_fd: int, n_local: int, local: int) -> None:
        arenas.clear()
        arenas.append(engine.Arena.enter(memory_fd, n_local, local))

    try:
        with _as_shoal_error(rank):
            membership = join(
                *(store, rank, size),
                timeout_s=timeout_s,
                memory=HostMemory(make, enter),
                digest=digest,
            )
            if not arenas:
                make(1)  # no rank of this host shares it
            with membership:
                planner = agree(membership)
                return _context_of(membership, arenas[0], planner.n_channels, tuning), planner
    finally:
        arenas.clear()  # a caller that keeps the error keeps this frame


def connect(membership: Membership, n_channels: int, dead_s: float) -> Context:
    """Connect to known ranks, each alone on its host, through `membership`'s listeners.

    A peer counts as lost if it is silent for `dead_s`, equal on all ranks, or if its lost
    connections are not back by then. If its host confirms what is sent, its process has 2.5 times
    as long. ShoalError if no memory or descriptor is left.
    """
    heed_settings()
    with _as_shoal_error(membership.rank):
        arena = engine.Arena.create(1)
        return _context_of(membership, arena, n_channels, _Tuning.read(), dead_s)


@contextlib.contextmanager
def _as_shoal_error(rank: int) -> Iterator[None]:
    """Raise errors of the native core's set-up as a `ShoalError`."""
    try:
        yield
    except ShoalError:
        raise
    except (MemoryError, RuntimeError) as error:
        raise ShoalError(f"rank {rank} cannot join: {error}") from error


def _context_of(
    membership: Membership,
    arena: engine.Arena,
    n_channels: int,
    tuning: _Tuning,
    dead_s: float | None = None,
) -> Context:
    mesh = engine.Mesh.create(
        rank=membership.rank,
        names=[f"rank {other} ({rank_info})" for other, rank_info in enumerate(membership.names)],
        epoch=membership.epoch,
        job_key=membership.job_key,
        arena=arena,
        peers=membership.peers,
        n_channels=n_channels,
        listeners=list(membership.take()),
        resume_s=float(tuning.resume_s) if dead_s is None else min(tuning.resume_s, dead_s),
        dead_s=float(limits.DEAD_S) if dead_s is None else dead_s,
        staging_bytes=tuning.staging_bytes,
        spin_us=float(tuning.spin_us),
        backstop_s=tuning.backstop_ms / 1e3,
    )
    context = Context(mesh, membership)
    if tuning.monitored:
        from shoal.state.monitor import serve

        context.count()
        context.monitor = serve(context)
    return context


def _check_isa() -> None:
    wanted, here = os.environ.get("SHOAL_ISA"), engine.fold_isa()
    if wanted not in (None, here):
        raise UsageError(
            f"SHOAL_ISA={wanted!r} cannot run here: this processor runs {here}; known are "
            "baseline, avx2 and avx512"
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
            f"{name}={text!r} is not an integer from {least} to {most}; the default is {default}"
        )
    return int(text)


def hash_of(*parts: object) -> int:
    """Return a hash of 64 bits that is equal in every process."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
