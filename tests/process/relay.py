"""Somebody between two ranks who changes what they say to each other.

    with Stage() as stage, Relay(stage, "client", flip(3, 70)), start_ranks(...) as ranks: ...

    def rank() -> None:                     # every rank
        with shoal.init(Detour(stage.store), rank, 2) as group: ...

Rank 0 listens, and tells rank 1 that it does so where the relay does; rank 1 connects there when it
first needs to. They meet without the relay. Faults are counted in frames of data and in bytes, so
that they come at the same place in every run.
"""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.rendezvous.record import Endpoint
from shoal.rendezvous.roster import Entry

if TYPE_CHECKING:
    from process.stage import Stage

# native/transport/handshake.cc
HANDSHAKE_BYTES = {"client": 108, "server": 72}
HEADER_BYTES = 64
DATA_BYTES = 1024  # a frame with a larger payload is one of data
_FRAME_H = Path(__file__).parents[2] / "native" / "transport" / "frame.h"
_PORT = "relay/port"

# What the frames of one direction become.
Fault = Callable[[Iterator[bytes]], Iterable[bytes]]


class Detour:
    """In a rank: its store; and rank 0 tells that it listens at the relay, and the relay where."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._encode = Entry.encode

        def encode(entry: Entry, rank: int) -> bytes:
            return self._told(entry, rank)

        Entry.encode = encode  # type: ignore[method-assign]

    def _told(self, entry: Entry, rank: int) -> bytes:
        if rank == 0:
            (place,) = entry.listens_at
            self._stage.store.set(_PORT, str(place.port).encode())
            port = int(self._stage.store.get("relay/own", 60.0))
            entry = entry._replace(listens_at=(Endpoint("127.0.0.1", port, "relay"),))
        return self._encode(entry, rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage.store, name)


class Relay:
    """Passes connections on; in the first of them the `fault` befalls what `who` says.

    `said` is what the client of the first connection said, byte for byte.
    """

    def __init__(self, stage: Stage, who: str, fault: Fault) -> None:
        self._stage = type(stage)(stage.port)  # its own: another's is busy while the test waits
        self._faults = {who: fault}
        self._listener = socket.create_server(("127.0.0.1", 0))
        stage.store.set("relay/own", str(self._listener.getsockname()[1]).encode())
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.said = bytearray()

    def target(self) -> tuple[str, int]:
        """Where rank 0 really listens."""
        return "127.0.0.1", int(self._stage.store.get(_PORT, 60.0))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self.target())
                except OSError:  # it is gone: so is the relay's end, for whoever has dialled
                    near.close()
                    continue
                self._open += [near, far]
                for who, one, other in (("client", near, far), ("server", far, near)):
                    is_first = who == "client" and not self.said
                    fault = self._faults.pop(who, None)
                    pieces = _read(one, self.said if is_first else None)
                    if fault is not None:
                        pieces = _befall(fault, pieces, HANDSHAKE_BYTES[who])
                    way = one, other, pieces
                    self._threads.append(threading.Thread(target=self._pass_on, args=way))
                    self._threads[-1].start()

    def _pass_on(self, one: socket.socket, other: socket.socket, pieces: Iterable[bytes]) -> None:
        with contextlib.suppress(OSError):
            for piece in pieces:
                other.sendall(piece)
        for sock, how in ((other, socket.SHUT_WR), (one, socket.SHUT_RD)):
            with contextlib.suppress(OSError):
                sock.shutdown(how)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_error: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for sock in (self._listener, *self._open):
            sock.close()
        self._stage.close()


def _read(sock: socket.socket, keep: bytearray | None) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while piece := sock.recv(1 << 16):
            if keep is not None:
                keep += piece
            yield piece


def _befall(fault: Fault, pieces: Iterator[bytes], n_first_bytes: int) -> Iterator[bytes]:
    """The first bytes as they are, at once; and then the frames, through the fault."""
    piece = b""
    while n_first_bytes > 0 and (piece := next(pieces, b"")):
        yield piece[:n_first_bytes]
        piece, n_first_bytes = piece[n_first_bytes:], n_first_bytes - len(piece)
    yield from fault(_frames(piece, pieces))


@functools.cache
def length_at() -> int:
    """Where in a header its payload's length stands."""
    header = _FRAME_H.read_text(encoding="utf-8").partition("struct Header {")[2]
    at = 0
    for kind, name in re.findall(r"^  (uint\d+_t|FrameType) (\w+) =", header, re.MULTILINE):
        if name == "length":
            return at
        at += 1 if kind == "FrameType" else int(kind[4:-2]) // 8
    raise AssertionError(f"{_FRAME_H} has no length")


def _frames(rest: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    held, at = bytearray(rest), length_at()
    while True:
        while len(held) >= HEADER_BYTES:
            length = int.from_bytes(held[at : at + 4], "little")
            if len(held) < HEADER_BYTES + length:
                break
            yield bytes(held[: HEADER_BYTES + length])
            del held[: HEADER_BYTES + length]
        piece = next(pieces, b"")
        if not piece:
            return
        held += piece


# ---- what befalls frames; the number counts frames of data, from 0 on


def flip(number: int, at: int, bit: int = 1) -> Fault:
    """One bit of this byte of that frame."""

    def change(frame: bytes) -> Sequence[bytes]:
        changed = bytearray(frame)
        changed[at % len(frame)] ^= bit
        return [bytes(changed)]

    return _at(number, change)


def drop(number: int) -> Fault:
    """That frame never comes."""
    return _at(number, lambda _frame: [])


def repeat(number: int) -> Fault:
    """That frame comes twice."""
    return _at(number, lambda frame: [frame, frame])


def shorten(number: int, at: int) -> Fault:
    """One byte of that frame is missing."""
    return _at(number, lambda frame: [frame[:at], frame[at + 1 :]])


def inject(number: int, what: bytes) -> Fault:
    """These bytes come before that frame."""
    return _at(number, lambda frame: [what, frame])


def cut(number: int, at: int) -> Fault:
    """The connection ends after so many bytes of that frame."""

    def cutting(frames: Iterator[bytes]) -> Iterator[bytes]:
        for count, frame in _counted(frames):
            if count == number:
                yield frame[:at]
                return
            yield frame

    return cutting


def swap(number: int) -> Fault:
    """That frame comes after the next one of data."""

    def swapping(frames: Iterator[bytes]) -> Iterator[bytes]:
        held = b""
        for count, frame in _counted(frames):
            if count == number:
                held = frame
            else:
                yield frame
                if count == number + 1 and held:
                    yield held
                    held = b""

    return swapping


def say_again(number: int, earlier: int) -> Fault:
    """Behind that frame comes one that came long before."""

    def saying(frames: Iterator[bytes]) -> Iterator[bytes]:
        kept = b""
        for count, frame in _counted(frames):
            kept = frame if count == earlier else kept
            yield frame
            if count == number:
                yield kept

    return saying


def _at(number: int, change: Callable[[bytes], Sequence[bytes]]) -> Fault:
    def changing(frames: Iterator[bytes]) -> Iterator[bytes]:
        for count, frame in _counted(frames):
            yield from change(frame) if count == number else [frame]

    return changing


def _counted(frames: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Each frame with its number; -1 for those that carry no data."""
    count = 0
    for frame in frames:
        is_data = len(frame) > HEADER_BYTES + DATA_BYTES
        yield (count if is_data else -1), frame
        count += is_data
