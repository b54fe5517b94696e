"""A process without the job's key that disturbs a rank: `python -m bench.scoreboard.strangers`.

It holds silent connections to the rank's listener, and makes many short ones that send garbage. It
runs in a network namespace of the benchmark, against a rank of the benchmark.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from typing import Final

_GARBAGE: Final = b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n".ljust(128, b"?")
_PATIENCE_S: Final = 5.0  # for one connection to be accepted: the rank limits waiting ones


def main() -> None:
    """Hold `n_held` connections, make `n_short` others, and print the number that succeeded."""
    address, port, n_held, n_short = sys.argv[1], *map(int, sys.argv[2:])
    with contextlib.ExitStack() as held:
        for _ in range(n_held):
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((address, port))  # most wait in the listener's queue, and retry
        n_made = sum(_connect(address, port) for _ in range(n_short))
        print(n_made, flush=True)
        select.select([sys.stdin], [], [])  # the held ones stay until standard input ends


def _connect(address: str, port: int) -> bool:
    with socket.socket() as one, contextlib.suppress(OSError):
        one.settimeout(_PATIENCE_S)
        one.connect((address, port))
        one.send(_GARBAGE)
        return True
    return False


def own_listener() -> tuple[str, int]:
    """Return the address at which this process listens, for strangers in its namespace.

    Raises:
        LookupError: this process does not listen.
    """
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/net/tcp", encoding="ascii") as lines:
        for line in list(lines)[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                address, port = words[1].split(":")
                host = socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder))
                return host, int(port, 16)
    raise LookupError("this process has no listener")


if __name__ == "__main__":
    main()
