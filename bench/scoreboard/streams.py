"""Measures raw TCP streams between the hosts of a cluster: the rate that a plain sender gets.

Each end of a stream is a process that runs this file, which imports little so that it starts fast.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.lab.cluster import Lab

# Half a second of 1 Gbit/s: much longer than the 1 ms in which the burst of an idle NIC passes.
STREAM_BYTES: Final = 60_000_000
# Half a second of copying by two cores, at 1 GB/s.
UNSHAPED_STREAM_BYTES: Final = 500_000_000
_PIECE_BYTES: Final = 1 << 20
_FIRST_PORT: Final = 7000
# A longer stream is stuck: the slowest sensible one, 64 MiB at 10 Mbit/s, takes 54 s.
_DEADLINE_S: Final = 90.0


class Flow(NamedTuple):
    """A stream from one host of a cluster to another, by one of their NICs."""

    source: int
    to: int
    nic: int = 0


def ring_of(n_hosts: int) -> list[Flow]:
    """Return the streams from every host to the next: each NIC is busy in both directions."""
    return [Flow(host, (host + 1) % n_hosts) for host in range(n_hosts)]


def measure_streams(cluster: Lab, flows: Sequence[Flow], n_bytes: int) -> list[float]:
    """Run all streams of `n_bytes` at once, and return the bytes per second of each.

    The receiver measures from first to last byte. Below half a second the burst at the start shows.
    """
    with contextlib.ExitStack() as stack:

        def start(host: int, *words: object) -> subprocess.Popen[str]:
            argv = [sys.executable, __file__, *map(str, words)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(cluster.popen(host, argv, **pipes))
            stack.callback(process.kill)
            return process

        receivers = [
            start(flow.to, "receive", _FIRST_PORT + index, n_bytes)
            for index, flow in enumerate(flows)
        ]
        for receiver in receivers:
            _line_of(receiver)  # wait until it listens
        senders = []
        for index, flow in enumerate(flows):
            address = cluster.hosts[flow.to].addresses[flow.nic]
            senders.append(start(flow.source, "send", address, _FIRST_PORT + index, n_bytes))
        for sender in senders:
            _line_of(sender)  # wait until it is connected
        for sender in senders:
            assert sender.stdin is not None
            sender.stdin.close()  # starts the stream
        return [float(_line_of(receiver)) for receiver in receivers]


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None  # measure_streams made it a pipe
    line = process.stdout.readline()
    if not line:
        raise ShoalError("an end of a raw stream ended early; see its standard error")
    return line


def _receive(port: int, n_bytes: int) -> float:
    piece = bytearray(_PIECE_BYTES)
    with socket.create_server(("", port)) as server:
        server.settimeout(_DEADLINE_S)
        print("listening", flush=True)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(_DEADLINE_S)
        n_first = n_received = stream.recv_into(piece)
        start_s = time.monotonic()
        while n_received < n_bytes:
            n_more = stream.recv_into(piece)
            if n_more == 0:
                raise ConnectionError(f"the stream ended after {n_received} of {n_bytes} bytes")
            n_received += n_more
        return (n_received - n_first) / (time.monotonic() - start_s)


def _send(address: str, port: int, n_bytes: int) -> None:
    piece = memoryview(bytes(_PIECE_BYTES))
    with socket.create_connection((address, port), timeout=_DEADLINE_S) as stream:
        print("connected", flush=True)
        sys.stdin.read()  # wait until the other senders are connected
        for start in range(0, n_bytes, _PIECE_BYTES):
            stream.sendall(piece[: n_bytes - start])


def _main(argv: Sequence[str]) -> None:
    match argv:
        case ["receive", port, n_bytes]:
            print(_receive(int(port), int(n_bytes)), flush=True)
        case ["send", address, port, n_bytes]:
            _send(address, int(port), int(n_bytes))
        case _:
            raise SystemExit("usage: streams.py receive PORT BYTES | send ADDRESS PORT BYTES")


if __name__ == "__main__":
    _main(sys.argv[1:])
