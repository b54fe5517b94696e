"""Types of the extension module that native/bind/ builds. Import `shoal.engine` instead."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Final

class Program:
    """One rank's steps with their dataflow; see native/engine/program.h."""

    @property
    def waits_for(self) -> list[list[int]]:
        """For each step, the earlier steps that it waits for, segment by segment."""

class ProgramBuilder:
    """Takes a rank's steps in order; ValueError for a peer or buffer out of range."""

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
        """Make a plan.

        Args:
            layouts: for each buffer, the offsets and the lengths of its chunks, in bytes.
            agreement: the text that must be equal on all ranks.
            by_pair: the agreement has no lengths; each pair of ranks compares its own.
            n_workers: group ranks from this one on are servers, whose results arrive in whole
                segments, on all workers or on none; 0: the group has no servers.
            segment_bytes: the length of a segment in memory, at most `SEGMENT_BYTES`, the default.
        """

    @property
    def descriptor(self) -> str: ...

    tensor_bytes: int
    """The bytes of a worker's tensor, set before the first call with servers; 0: unknown."""

class Arena:
    """This process's part of the memory that the ranks of its host share."""

    @staticmethod
    def create(n_local: int, /) -> Arena:
        """Create the memory for `n_local` ranks, and enter it as the first of them."""

    @staticmethod
    def enter(memory_fd: int, n_local: int, local: int, /) -> Arena:
        """Enter memory that another rank created, as local rank `local`; owns the descriptor."""

    @property
    def memory_fd(self) -> int:
        """The descriptor to pass to the other ranks; the arena keeps it."""

class Call:
    """One collective in flight."""

    def wait(self, timeout_s: float) -> bool: ...
    def done(self) -> bool: ...
    def succeeded(self) -> bool: ...
    @property
    def finished_ns(self) -> int:
        """The time from which the caller owns the memory, monotonic; 0: the call is in flight."""

    def source(self) -> int:
        """Return the group rank that sent the received message; -1: none was received."""

    def landed(self) -> list[tuple[int, bytes]]:
        """Return which segments of a finished call with servers hold results.

        For each chunk of DATA that a server reduces: the chunk's number and one bit per segment
        (bit s % 8 of byte s // 8). A segment whose bit is set holds the result; any other holds
        this rank's input. All bits are set if the call succeeded on any worker.

        RuntimeError: the call is in flight.
        """

    def error(self) -> tuple[Fault, int, str, str]:
        """Return the fault, the mesh rank at fault (-1: none), the event, and the call."""

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
        """Post a send to `peer` or a receive from it; peer -1: receive from any rank."""

    def notify(self, fd: int, /) -> None:
        """Write to this eventfd now, at each unreceived message, and when the group ends.

        Raises RuntimeError if the process has no file descriptor left.
        """

    def has_message(self, peer: int, tag: int, /) -> bool:
        """Return True if part of the next message with this tag from `peer` has arrived."""

    def serve(self, plan: Plan, /) -> None:
        """Take part, without a caller, in every later call that peers make with this plan.

        A call begins with the first frame from a peer, in the background, and ends with its last
        step or with the group. At most `MOST_SERVED` plans are kept; the least recently used one
        without a waiting call is dropped. If calls of all of them wait, the group ends.

        ValueError: the plan is not for a server of a group like this one.
        """

    def abort(self, why: str, /) -> None: ...
    def fail(self, fault: Fault, why: str, /) -> None:
        """End the group on every rank with this fault; `why` is a verb phrase."""

    def drop(self) -> None: ...
    def drop_unheld(self) -> bool:
        """Drop a group without references; False: it has calls in flight, try again later."""

    def error(self) -> tuple[Fault, int, str, str]: ...
    def take_state_at_deadline(self) -> dict[str, Any] | None:
        """Return, once, the `Mesh.state` from just before a deadline ended the group."""

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
        """Create links to all peers; links to other hosts connect at their first use.

        Args:
            peers: for each, its rank, True if it is on this host, and for ranks of other hosts the
                number of paths of each channel, equal at both ends, and the addresses that paths
                use in turn.
            listeners: sockets to which ranks of other hosts connect; the mesh owns them.
            dead_s: a peer that is silent for this long counts as lost, or for 2.5 times as long
                (at most 5 s, but not less than this) if its host confirms what is sent to it;
                equal on all ranks, because the interval between heartbeats follows from it.
        """

    def group(self, group_id: int, members: Sequence[int], /) -> Group: ...
    def bound_out(self, n_bytes: int) -> None:
        """Limit the bytes in flight to other hosts from calls that send to several at once."""

    def close(self) -> None: ...
    def close_after(self, seconds: float) -> None:
        """Keep the mesh, and close it after this time unless the process ends before.

        RuntimeError: no thread can be started.
        """

    def wait_finished(self, seen: int, timeout_s: float, /) -> int:
        """Make progress until more than `seen` calls have ended; return how many have."""

    def staging_peak(self) -> int: ...
    def state(self, patience_s: float, /) -> dict[str, Any] | None:
        """See native/engine/shell/state_reader.h; None if the lock is not free within the time."""

class Countdown:
    """Finds which fusion buffers are full; see native/base/countdown.h.

    Results belong to the step begun by the last `begin` or `lay_out`.
    """

    paused: bool
    """True: entries are not counted."""

    def __init__(self, full: Callable[[int], object]) -> None:
        """`full` is called with the number of a buffer; it must not refer to the countdown."""

    def lay_out(self, buffers_of: Sequence[Sequence[int]], n_buffers: int) -> None:
        """Set the numbers of each entry's buffers."""

    def begin(self) -> None: ...
    def hook(self, entry: int, /) -> Callable[..., None]:
        """Return a function that counts this entry, and ignores its arguments."""

    def count(self, entry: int, /) -> None: ...
    def is_counted(self, entry: int, /) -> bool: ...
    @property
    def n_counted(self) -> int: ...
    @property
    def order(self) -> list[int]:
        """The entries in the order in which they were counted."""

    @property
    def repeated(self) -> int:
        """The first entry that was counted twice, or -1."""

    @property
    def first_ns(self) -> int:
        """The `time.monotonic_ns` of the first count; 0: no entry was counted."""

    @property
    def full_ns(self) -> list[int]:
        """The time at which each buffer was full; 0: it is not full."""

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
    """Return each frame's type, name, links, flags, sender, content and what follows it.

    Links are bits: 1 rings, 2 TCP, 4 Unix sockets.
    """

def n_waiting() -> int: ...
def note_signal(number: int, /) -> int:
    """Return an eventfd, for blocking reads, that counts this signal from now on."""

def stream_copy(to: int, source: int, n_bytes: int, /) -> None:
    """Copy between addresses, past the caches; releases the interpreter's lock."""

def wakeups() -> dict[str, int]:
    """Count the reasons why sleeping threads of this process woke; "late": without a wake-up."""

def dtypes() -> list[tuple[str, int]]:
    """Return the name and the size in bytes of each element type, by its number."""

def fold_ops() -> list[str]:
    """Return the names of the operations, by their numbers."""

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
    """The state of one end of a handshake; all but WAITING are final."""

    WAITING = 0
    DONE = 1
    STALE = 2
    KEY_DIFFERS = 3
    REFUSED = 4

class Hello:
    """A client's claim of its identity, not yet proved."""

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
        """Accept messages of this kind; a message of any other kind ends the connection."""

    def send(self, kind: int, body: bytes = b"", fd: int = -1) -> bool:
        """Queue a message and send what the socket takes. `fd` is passed along, and borrowed.

        False: the connection is lost, and `lost` is called by the next step; or it was closed.
        """

    def pause(self, is_paused: bool) -> None:
        """Stop reading, so that messages wait in the kernel, or read again."""

    def close(self) -> None:
        """Close the connection at once, and drop what is queued; idempotent."""

    def fileno(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_local(self) -> bool:
        """True for a Unix socket."""

    @property
    def n_queued(self) -> int:
        """The number of bytes that wait to be sent."""

class Endpoint:
    """Listens, connects, and exchanges messages with peers. Nothing blocks.

    Times are from `time.monotonic`. The constructor raises OSError without a free descriptor.

    Args:
        owner: only `step` calls its methods, and raises what they raise:
            admit(hello) -> bytes | Progress: the key that a caller must prove, or STALE, which is
                sent to the caller, or REFUSED, which is not
            welcome(peer, hello): a caller has proved the key
            key_differs(hello): a caller has another key
            turned_away(n_so_far, caller): no descriptor was left for a caller
            take_stranger(fd): a caller's first bytes match one of `beginnings`; they are unread
            reached(peer, dial): a dial has reached its peer
            not_reached(dial, errno, progress, was_connected): an attempt failed; the dial goes on
                until `hang_up`
            received(peer, kind, body, fd): a message; the owner of the endpoint owns `fd`, or -1
            lost(peer, errno, why): a connection broke, `why` is a verb phrase; not called after
                `Peer.close`
        pending_s: the time that a caller has to prove the key.
        dial_s: the time of one attempt to connect.
        most_queued: the bytes that may wait to be sent to one peer; more end the connection.
        patience_s: the time after which a half-sent or half-received message ends the connection.
        beginnings: first bytes of connections to pass to `take_stranger`.

    A forked child does not have the descriptors and cannot use the endpoint.
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
        """Make progress. Call it when `fileno` is readable, and at `deadline`."""

    @property
    def deadline(self) -> float: ...
    def listen(self, fd: int) -> None:
        """Accept callers at this socket, which the endpoint now owns."""

    def shut(self) -> None:
        """Accept no more callers; they wait in the kernel."""

    def hand_over(self) -> list[int]:
        """Return the listening TCP sockets, which the caller now owns."""

    def connect(self, address: str, port: int, hello: Hello, key: bytes) -> int:
        """Dial until the peer is reached, with growing pauses; return the dial's number."""

    def connect_local(self, name: str, hello: Hello, key: bytes) -> int:
        """Dial a name in the abstract namespace of Unix sockets."""

    def hang_up(self, dial: int) -> None:
        """Stop a dial; no effect once the peer was reached."""

    @property
    def n_pending(self) -> int:
        """The number of callers that have not proved the key yet."""

    @property
    def n_turned_away(self) -> int: ...
    def close(self) -> None:
        """Close everything and release the owner; idempotent."""

def pair_key(key: bytes, epoch: int, a: int, b: int, role: str = "link") -> bytes:
    """Return the key of a pair of ranks in an epoch, for one role; a and b may be swapped."""
