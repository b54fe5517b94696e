"""The reduction servers of a lab: `shoal server` in its last hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Final

from shoal.bench.job import Failure
from shoal.lab.cluster import address_of
from shoal.lab.job import private_key, server_command

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bench.scoreboard.job import SuiteJob
    from shoal.lab import Lab

_CLOCK_HZ: Final = os.sysconf("SC_CLK_TCK")
_DRAIN_S: Final = 15.0  # a server cuts off remaining calls after 10


class LabServers:
    """A running server in each of the last hosts of a lab.

    Leaving the context kills them.

    Args:
        errors: the file of their logs.

    Attributes:
        n: the number of servers, which count from 0.
    """

    def __init__(self, spec: SuiteJob, cluster: Lab, errors: Path) -> None:
        self._cluster = cluster
        self._first, self.n = spec.n_hosts, spec.n_servers
        self._errors = errors
        self._stack = contextlib.ExitStack()
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._key_file = self._stack.enter_context(private_key())

    def __enter__(self) -> LabServers:
        for index in range(self.n):
            self.start(index)
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the workers' variables: the servers' addresses, all of them required."""
        hosts = range(self._first, self._first + self.n)
        return {
            "SHOAL_KEY_FILE": self._key_file,
            "SHOAL_SERVERS": ",".join(map(address_of, hosts)),
            "SHOAL_SERVERS_REQUIRED": str(self.n),
        }

    def start(self, index: int) -> None:
        """Start a server that is not running."""
        host = self._first + index
        own = self._cluster.environment_of(host, [host])
        with self._errors.open("a") as errors:
            process = self._cluster.popen(
                host,
                server_command(self._key_file),
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                preexec_fn=os.setpgrp,  # an interrupt at the terminal reaches the launcher alone
            )
        self._processes[index] = process

    def kill(self, index: int) -> None:
        """Kill a server and its children, as a power cut does."""
        process = self._processes.pop(index)
        process.kill()
        process.wait()

    def freeze(self, index: int) -> None:
        """Stop a server and its children, which keep their connections."""
        for pid in self._pids(index):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def drain(self, index: int) -> None:
        """Send SIGTERM to a server, and wait for its end.

        Raises:
            Failure: the server did not end in time.
        """
        process = self._processes.pop(index)
        process.terminate()
        try:
            process.wait(_DRAIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Failure(f"a server did not end within {_DRAIN_S:g} s of SIGTERM") from None

    def cpu_s(self) -> float:
        """Return the CPU seconds, user and system, of all servers and their children."""
        return sum(_cpu_s(pid) for index in self._processes for pid in self._pids(index))

    def received_bytes(self, index: int) -> int:
        """Return the bytes that the NICs of a server's host have received."""
        argv = ["cat", "/proc/net/dev"]
        text = self._cluster.run(self._first + index, argv, capture_output=True).stdout
        rows = [line.partition(":") for line in text.splitlines()[2:]]
        return sum(int(numbers.split()[0]) for name, _, numbers in rows if name.strip() != "lo")

    def all_received_bytes(self) -> int:
        """Return the bytes that the NICs of all servers' hosts have received."""
        return sum(map(self.received_bytes, range(self.n)))

    def close(self) -> None:
        """Kill all servers. Idempotent."""
        for index in list(self._processes):
            self.kill(index)
        self._stack.close()

    def _pids(self, index: int) -> list[int]:
        return self._cluster.pids(self._first + index)


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process; 0 if it has just ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            numbers = stat.read().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / _CLOCK_HZ
    return 0.0
