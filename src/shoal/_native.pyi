"""The face of native/bind/, for type checkers; import shoal.engine instead."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Final

class Program:
    """One rank's steps with their dataflow; see native/engine/program.h."""

    @property
    def waits_for(self) -> list[list[int]]:
        """Of each step: the earlier ones that come first, a segment at a time."""

class ProgramBuilder:
    """Takes a rank's steps in their order; ValueError for a peer or buffer that there is not."""

    @staticmethod
    def of(group_size: int, /) -> ProgramBuilder: ...
    def send(self, peer: int, chunk: int, buffer: int, /) -> None: ...
    def recv(self, peer: int, chunk: int, fold: bool, buffer: int, /) -> None: ...
    def copy(self, chunk: int, into: int, buffer: int, into_buffer: int, fold: bool, /) -> None: ...
    def finish(self, chunk: int, buffer: int, /) -> None: ...
    def done(self) -> Program: ...

class Plan:
    """A program for one size, type and operation."""

    @staticmethod
    def make(
        program: Program,
        layouts: Sequence[tuple[Sequence[int], Sequence[int]]],
        dtype: int,
        op: int,
        divisor: int,
        codec: int,
        descriptor: str,
        agreement: str,
        by_pair: bool,
        n_lanes: int = 1,
        n_workers: int = 0,
        segment_bytes: int = ...,
        rounds_own: bool = ...,
        keep: int = ...,
        scratch_first: Sequence[int] = ...,
    ) -> Plan:
        """Layouts: (offsets, lengths) in bytes of each buffer's chunks.

        `agreement` is what must be equal on all ranks; `by_pair`: lengths are not in it, and each
        two ranks compare theirs. `n_workers`: the ranks of the group from this one on are servers,
        whose results land by whole segments, and on all workers or none; 0: there are none.
        `segment_bytes`: of a segment in memory, at most `SEGMENT_BYTES`, which it is if left out.
        """

    @property
    def descriptor(self) -> str: ...

    """Of calls whose data waits to leave, those of the highest are first; set before the first."""

    tensor_bytes: int
    """That each worker brings to a call with servers; set before the first. 0: nobody knows."""

class Arena:
    """This process's part of the memory that the ranks of its host share."""

    @staticmethod
    def create(n_local: int, /) -> Arena:
        """Create that memory for `n_local` ranks, and enter it as the first of them."""

    @staticmethod
    def enter(memory_fd: int, n_local: int, local: int, /) -> Arena:
        """Enter what another has made, as the `local`-th of them; owns the descriptor."""

    @property
    def memory_fd(self) -> int:
        """To hand over, borrowed."""

class Call:
    """One collective in flight."""

    def wait(self, timeout_s: float) -> bool: ...
    def done(self) -> bool: ...
    def succeeded(self) -> bool: ...
    @property
    def finished_ns(self) -> int:
        """When it had ended and its memory was the caller's, by the monotonic clock; 0: not yet."""

    def source(self) -> int:
        """Of a message that is there: the group rank it came from; else -1."""

    def landed(self) -> list[tuple[int, bytes]]:
        """Of a call of workers and servers that is done: what its memory holds.

        Each chunk of DATA that a server reduces, and a bit for each of its segments (bit s % 8 of
        byte s // 8): set, the segment holds the result; else it holds what this rank gave. All are
        set if the call succeeded on any worker.

        RuntimeError: the call is in flight.
        """

    def error(self) -> tuple[Fault, int, str, str]:
        """Fault, mesh rank to blame (-1: none), what happened, during which call."""

class Group:
    """A subset of a mesh's ranks."""

    def post(
        self,
        plan: Plan,
        key: int,
        memory: Sequence[Sequence[int]],
        timeout_s: float,
        background: bool,
        subject: int,
        /,
    ) -> Call: ...
    def post_in_place(
        self,
        plan: Plan,
        key: int,
        address: int,
        timeout_s: float,
        background: bool,
        subject: int,
        /,
    ) -> Call: ...
    def post_message(
        self,
        plan: Plan,
        sends: bool,
        peer: int,
        tag: int,
        address: int,
        timeout_s: float,
        background: bool,
        /,
    ) -> Call:
        """A send to `peer`, or a receive from it; -1: a receive from the first rank that sends."""

    def notify(self, fd: int, /) -> None:
        """Ring this eventfd now, for each message not yet received, and when the group ends.

        Raises RuntimeError if the process has no file descriptor left.
        """

    def has_message(self, peer: int, tag: int, /) -> bool:
        """True if the next message of this tag from `peer` has come, or a part of it."""

    def serve(self, plan: Plan, /) -> None:
        """From now on calls that peers make by this plan are made here too, without a caller.

        They begin with the first frame of a peer, in the background, and end with the last step or
        with the group. At most `MOST_SERVED` plans: the one used longest ago goes.

        ValueError: the plan is not for a server of a group like this one.
        """

    def abort(self, why: str, /) -> None: ...
    def fail(self, fault: Fault, why: str, /) -> None:
        """End it on every rank by what the caller has found; `why` is a verb phrase."""

    def drop(self) -> None: ...
    def drop_unheld(self) -> bool:
        """Drop it, for nobody holds it any more; False: calls of it are in flight, try later."""

    def error(self) -> tuple[Fault, int, str, str]: ...
    def take_state_at_deadline(self) -> dict[str, Any] | None:
        """What `Mesh.state` would have returned just before a deadline ended the group; once."""

    @property
    def id(self) -> int: ...

class Mesh:
    """The process's end of one epoch."""

    @staticmethod
    def create(
        rank: int,
        names: Sequence[str],
        epoch: int,
        job_key: bytes,
        arena: Arena,
        peers: Sequence[tuple[int, bool, int, Sequence[tuple[str, int]]]],
        n_channels: int,
        staging_bytes: int,
        spin_us: float,
        backstop_s: float,
        listeners: Sequence[int],
        resume_s: float,
        dead_s: float,
    ) -> Mesh:
        """The links with all peers; links to other hosts connect at their first use.

        Peers: rank, whether it is of this host; and of those of other hosts how many paths each
        channel has to it, and where it listens, by path (and round again where there are fewer).

        Owns the listeners, by which ranks of other hosts connect. Both ends of a pair name as many
        paths. A peer that is silent for `dead_s` counts as lost; all have the same, or who speaks
        seldom is lost to who expects more.
        """

    def group(self, group_id: int, members: Sequence[int], /) -> Group: ...
    def bound_out(self, n_bytes: int) -> None:
        """How much may be on its way to other hosts of calls that send to several at once."""

    def close(self) -> None: ...
    def wait_finished(self, seen: int, timeout_s: float, /) -> int:
        """Drive until another call than the first `seen` has ended; how many have by now."""

    def staging_peak(self) -> int: ...
    def state(self, patience_s: float, /) -> dict[str, Any] | None:
        """See native/engine/shell/state_reader.h; None if the lock cannot be had in that time."""

class Countdown:
    """Which fusion buffers are full; see native/base/countdown.h.

    It is `paused` or counts. Its results are those of the step that `begin` or `lay_out` began.
    """

    paused: bool

    def __init__(self, full: Callable[[int], object]) -> None:
        """`full` is called with the number of a buffer; it must not refer to the countdown."""

    def lay_out(self, buffers_of: Sequence[Sequence[int]], n_buffers: int) -> None:
        """By entry: the numbers of its buffers."""

    def begin(self) -> None: ...
    def hook(self, entry: int, /) -> Callable[..., None]:
        """A function that counts this entry, whatever its arguments; raises what `full` raises."""

    def count(self, entry: int, /) -> None: ...
    def is_counted(self, entry: int, /) -> bool: ...
    @property
    def n_counted(self) -> int: ...
    @property
    def order(self) -> list[int]:
        """The entries, as they were counted."""

    @property
    def repeated(self) -> int:
        """The first entry that was counted twice; -1: none."""

    @property
    def first_ns(self) -> int:
        """When the first entry was counted, by `time.monotonic_ns`; 0: none was."""

    @property
    def full_ns(self) -> list[int]:
        """When each buffer was full; 0: it is not."""

def address_of(view: memoryview, /) -> int: ...
def allocate(n_bytes: int, /) -> int: ...
def release(address: int, /) -> None: ...
def can_fold(dtype: int, op: int, /) -> bool: ...
def can_encode(codec: int, dtype: int, op: int, /) -> bool: ...
def encoded_bytes(codec: int, keep: int, n_elems: int, /) -> int:
    """Return the bytes of float32 elements on the wire; 0 if there is no such narrow codec."""

def round_to(
    codec: int, keep: int, dtype: int, address: int, n_elems: int, seed: int, first: int, /
) -> None:
    """See `shoal.engine.round_to`."""

def fold_isa() -> str: ...
def frame_rules() -> list[tuple[int, str, int, int, str, str, str]]:
    """Of each frame: type, name, links and flags as bits, who sends it, what it says, what follows.

    Links: 1 rings, 2 TCP, 4 Unix sockets.
    """

def n_waiting() -> int: ...
def note_signal(number: int, /) -> int:
    """An eventfd that counts this signal from now on, for blocking reads."""

def stream_copy(to: int, source: int, n_bytes: int, /) -> None:
    """Copy between addresses, past the caches; releases the interpreter's lock."""

def wakeups() -> dict[str, int]:
    """Why the sleepers of this process woke; "late": for work that nobody had announced."""

def dtypes() -> list[tuple[str, int]]:
    """Of each element type, by its number: its name and how many bytes it has."""

def fold_ops() -> list[str]:
    """The names of the operations, by their numbers."""

N_CODECS: Final[int]
N_BUFFERS: Final[int]

SEGMENT_BYTES: Final[int]
STAGING_BYTES: Final[int]
SPIN_US: Final[int]
BACKSTOP_MS: Final[int]
RESUME_S: Final[int]
DEAD_S: Final[int]
EAGER_BYTES: Final[int]
LOOK_AHEAD: Final[int]
MOST_CONNECTIONS: Final[int]
CALLS_REMEMBERED: Final[int]
FIRST_NAMED_KEY: Final[int]
LAST_FINISHED: Final[int]
MOST_SERVED: Final[int]

class Fault(enum.Enum):
    """What went wrong; see native/base/error.h."""

    NONE = 0
    PEER_LOST = 1
    TIMED_OUT = 2
    MISMATCH = 3
    CLOSED = 4
    RESOURCE = 5
    INTERNAL = 6

HANDSHAKE_MAGIC: Final[bytes]
HANDSHAKE_VERSION: Final[int]
N_NONCE_BYTES: Final[int]

class Progress(enum.Enum):
    """How far one end of a handshake has come; all but WAITING are final."""

    WAITING = 0
    DONE = 1
    STALE = 2
    KEY_DIFFERS = 3
    REFUSED = 4

class Hello:
    """What a client says it is, before it has proved anything."""

    def __init__(self, epoch: int, rank: int, to_rank: int, path: int = 0) -> None: ...
    @property
    def epoch(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def to_rank(self) -> int: ...
    @property
    def path(self) -> int: ...

class Peer:
    """A connection that has proved a key: small sealed messages, in order. See peer.h."""

    def expect(self, kind: int, most_bytes: int, takes_fd: bool = False) -> None:
        """Take messages of this kind; any other ends the connection."""

    def send(self, kind: int, body: bytes = b"", fd: int = -1) -> bool:
        """Queue a message and send what the socket takes. `fd` is passed along, and borrowed.

        False: the connection is lost, and `lost` is called by the next step; or it was closed.
        """

    def pause(self, is_paused: bool) -> None:
        """Leave what comes in the kernel for now, or read it again."""

    def close(self) -> None:
        """Close the connection at once, and drop what is queued; idempotent."""

    def fileno(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_local(self) -> bool:
        """Whether it is a Unix socket."""

    @property
    def n_queued(self) -> int:
        """Bytes that wait to be sent."""

class Endpoint:
    """Listens, connects, and exchanges messages with peers. Nothing blocks.

    Times are those of `time.monotonic`. Without a descriptor it raises OSError.

    Args:
        owner: its methods are called by `step` alone, which raises what they raise:
            admit(hello) -> bytes | Progress: the key that a caller must prove, or STALE (which is
                sent), or REFUSED (which is not)
            welcome(peer, hello): a caller has proved it
            key_differs(hello): a caller lacks it
            turned_away(n_so_far, caller): no descriptor was left for a caller
            take_stranger(fd): a caller's first bytes are one of `beginnings`; nothing was read
            reached(peer, dial), not_reached(dial, errno, progress, was_connected): of `connect`,
                which goes on until `hang_up`
            received(peer, kind, body, fd): `fd` is the owner's, or -1
            lost(peer, errno, why): a verb phrase; not called for a peer that was closed here
        pending_s: for a caller's proof.
        dial_s: for one attempt to connect.
        most_queued: bytes that may wait to be sent to one peer; more end the connection.
        patience_s: a connection is lost whose message stops half way, in either direction.

    A forked child has none of its descriptors, and cannot use it.
    """

    def __init__(
        self,
        owner: object,
        *,
        pending_s: float = 2.0,
        dial_s: float = 5.0,
        most_queued: int = 1048576,
        patience_s: float = ...,
        beginnings: Sequence[bytes] = (),
    ) -> None: ...
    def fileno(self) -> int: ...
    def step(self, now: float) -> None:
        """Do what is due. Call it when `fileno` is readable, and at `deadline`."""

    @property
    def deadline(self) -> float: ...
    def listen(self, fd: int) -> None:
        """Accept callers at this socket, which the endpoint owns from here on."""

    def shut(self) -> None:
        """Accept nobody from here on: callers wait in the kernel."""

    def hand_over(self) -> list[int]:
        """Return the listening TCP sockets, which the caller owns from here on."""

    def connect(self, address: str, port: int, hello: Hello, key: bytes) -> int:
        """Dial until the peer is reached, with growing pauses; returns the number of the dial."""

    def connect_local(self, name: str, hello: Hello, key: bytes) -> int:
        """Dial a name in the abstract namespace of Unix sockets."""

    def hang_up(self, dial: int) -> None:
        """Dial no more; nothing, if the peer was reached."""

    @property
    def n_pending(self) -> int:
        """The number of callers that have not proved themselves yet."""

    @property
    def n_turned_away(self) -> int: ...
    def close(self) -> None:
        """Close everything, and let go of the owner; idempotent."""

def pair_key(key: bytes, epoch: int, a: int, b: int, role: str = "link") -> bytes:
    """The key of one pair of ranks in one epoch, for one use; the order of a and b is free."""
