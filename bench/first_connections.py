"""Time first connections to a rank while a process without the job's key sends it HELLOs.

    python bench/first_connections.py [forged HELLOs per second [connections of the forger]]

Ranks on separate simulated hosts connect to rank 1 in turn, each for the first time. The forger
knows the epoch, as any reader of the rendezvous store does, and keeps its connections open.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from typing import Final

from scoreboard.strangers import own_listener

import shoal
from shoal.engine import HANDSHAKE_MAGIC, HANDSHAKE_VERSION
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer

_N_RANKS: Final = 12
_FIRST: Final = 5  # the lower ranks have connected to rank 1 before the forger starts
_TARGET: Final = 1
_HELLO: Final = 1  # the kind of a caller's first message
_N_ROUNDS: Final = 3
_LONG_S: Final = 60.0
_RATE: Final = 1000
_N_HELD: Final = 3000  # open connections of the forger, each for longer than a proof may take


def rank(port: int, number: int) -> None:
    """Run one rank: connect to rank 1 in turn, and store the time."""
    store = TcpStoreClient("127.0.0.1", port, timeout_s=_LONG_S)
    with shoal.init(store, number, _N_RANKS) as group:
        byte = bytearray(1)
        for other in range(_TARGET + 1, _N_RANKS):
            if number == _TARGET and other == _FIRST:
                host, at = own_listener()
                store.set("target", f"{host} {at} {group._context.epoch}".encode())
            if other >= _FIRST:
                store.get(f"go {other}", _LONG_S)
            if number == other:
                start = time.perf_counter()
                group.send(byte, _TARGET)
                group.recv(byte, _TARGET)
                store.set(f"took {other}", str(time.perf_counter() - start).encode())
            elif number == _TARGET:
                group.recv(byte, other)
                group.send(byte, other)
        store.get("end", _LONG_S)


def forge(port: int, per_s: int, n_held: int) -> None:
    """Send HELLOs as another rank of the job, with a different key, until killed."""
    store = TcpStoreClient("127.0.0.1", port, timeout_s=_LONG_S)
    host, at, epoch = store.get("target", _LONG_S).decode().split()
    held: deque[socket.socket] = deque(maxlen=n_held)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_held + 100, n_held + 100))
    begun, n = time.monotonic(), 0
    while True:
        time.sleep(max(0.0, begun + n / per_s - time.monotonic()))
        n += 1
        if len(held) == n_held:
            held.popleft().close()
        with contextlib.suppress(OSError):
            one = socket.create_connection((host, int(at)), 0.5)
            held.append(one)
            ids = int(epoch), 2 + n % 3, _TARGET, 0
            head = HANDSHAKE_MAGIC, HANDSHAKE_VERSION, _HELLO
            one.send(struct.pack("<8sHHQIII", *head, *ids) + bytes(32))  # a nonce, and no MAC
        if n == 3 * per_s:  # by now the forger fills all places of unproven connections, if it can
            store.set("forging", f"{n / (time.monotonic() - begun):.0f}".encode())


def measure(per_s: int, n_held: int) -> tuple[list[float], str]:
    """Return the seconds of each first connection of a job, and the forged HELLOs per second."""
    server = TcpStoreServer("127.0.0.1", 0)
    store = TcpStoreClient("127.0.0.1", server.port, timeout_s=_LONG_S)
    key = {**os.environ, "SHOAL_KEY": os.urandom(32).hex()}
    me = [sys.executable, __file__, "-", str(server.port)]
    with contextlib.ExitStack() as running:
        ranks = [
            subprocess.Popen([*me, "rank", str(n)], env={**key, "SHOAL_HOST_ID": str(n)})
            for n in range(_N_RANKS)
        ]
        for one in ranks:
            running.callback(one.kill)
        store.get("target", _LONG_S)
        rate = "0"
        if per_s:
            forger = subprocess.Popen([*me, "forge", str(per_s), str(n_held)])
            running.callback(forger.kill)
            rate = store.get("forging", _LONG_S).decode()
        times_s = []
        for number in range(_FIRST, _N_RANKS):
            store.set(f"go {number}", b"")
            times_s.append(float(store.get(f"took {number}", _LONG_S)))
        store.set("end", b"")
        for one in ranks:
            one.wait(_LONG_S)
    store.close()
    server.close()
    return times_s, rate


def main() -> None:
    """Measure with and without a forger, and print the times."""
    if sys.argv[1:2] == ["-"]:
        role, numbers = sys.argv[3], map(int, [sys.argv[2], *sys.argv[4:]])
        (rank if role == "rank" else forge)(*numbers)
        return
    wanted = [*map(int, sys.argv[1:])]
    per_s, n_held = (wanted + [_RATE, _N_HELD][len(wanted) :])[:2]
    for each in (0, per_s):
        rounds = [measure(each, n_held) for _ in range(_N_ROUNDS)]
        times_ms = [1e3 * took for times_s, _ in rounds for took in times_s]
        rates = ", ".join(rate for _, rate in rounds)
        print(
            f"{rates} forged HELLOs/s: {len(times_ms)} connections, median "
            f"{statistics.median(times_ms):.1f} ms, mean {statistics.mean(times_ms):.1f} ms, "
            f"longest {max(times_ms):.0f} ms"
        )


if __name__ == "__main__":
    main()
