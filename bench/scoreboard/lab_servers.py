"""The reduction servers of a lab: `shoal server` in its last hosts, started, killed and asked."""

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
_DRAIN_S: Final = 15.0  # a server cuts off what is left after 10


class LabServers:
    """One server for each of the last hosts of a cluster; all run.

    Leaving the context kills them.

    Args:
        errors: where they write what they log.

    Attributes:
        n: how many there are; they are numbered from 0.
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
        """What workers are told: where they are, and that all of them must serve first."""
        hosts = range(self._first, self._first + self.n)
        return {
            "SHOAL_KEY_FILE": self._key_file,
            "SHOAL_SERVERS": ",".join(map(address_of, hosts)),
            "SHOAL_SERVERS_REQUIRED": str(self.n),
        }

    def start(self, index: int) -> None:
        """Start one that does not run."""
        host = self._first + index
        told = self._cluster.environment_of(host, [host])
        with self._errors.open("a") as errors:
            process = self._cluster.popen(
                host,
                server_command(self._key_file),
                env={**os.environ, **told},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                preexec_fn=os.setpgrp,  # an interrupt at the terminal reaches the launcher alone
            )
        self._processes[index] = process

    def kill(self, index: int) -> None:
        """End one at once, as a power cut does; its children die with it."""
        process = self._processes.pop(index)
        process.kill()
        process.wait()

    def freeze(self, index: int) -> None:
        """Stop one and its children; they keep their connections."""
        for pid in self._pids(index):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def drain(self, index: int) -> None:
        """Ask one to end, and wait until it has.

        Raises:
            Failure: it does not.
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
        """CPU seconds, user and system, of all that run and their children."""
        return sum(_cpu_s(pid) for index in self._processes for pid in self._pids(index))

    def received_bytes(self, index: int) -> int:
        """What the NICs of one's host have received, ever."""
        argv = ["cat", "/proc/net/dev"]
        told = self._cluster.run(self._first + index, argv, capture_output=True).stdout
        rows = [line.partition(":") for line in told.splitlines()[2:]]
        return sum(int(numbers.split()[0]) for name, _, numbers in rows if name.strip() != "lo")

    def all_received_bytes(self) -> int:
        """The same of all of them."""
        return sum(map(self.received_bytes, range(self.n)))

    def close(self) -> None:
        """Kill all of them. Idempotent."""
        for index in list(self._processes):
            self.kill(index)
        self._stack.close()

    def _pids(self, index: int) -> list[int]:
        return self._cluster.pids(self._first + index)


def _cpu_s(pid: int) -> float:
    """Of one process; nothing if it has just ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            numbers = stat.read().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / _CLOCK_HZ
    return 0.0
