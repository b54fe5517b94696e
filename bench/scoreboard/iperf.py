"""The rate of iperf3 between two hosts of a lab, in both directions at once."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, Final

from bench.scoreboard.measures import sent_by_ring
from shoal.bench.job import Failure

if TYPE_CHECKING:
    from bench.scoreboard.case import Case
    from bench.scoreboard.pools import WorkerPools
    from shoal.lab import Lab

_SECONDS: Final = 2  # two slow starts are a small part of it
_DEADLINE_S: Final = 30.0


def iperf_time(pools: WorkerPools, case: Case) -> float:
    """Return the seconds of 2M(n-1)/n bytes each way at the rate of `iperf3 --bidir`."""
    rate = _measure_bidir(pools.cluster(case))
    return sent_by_ring(case) / rate


def _measure_bidir(cluster: Lab) -> float:
    """Return the bytes per second of one direction, the mean of both.

    Raises:
        Failure: iperf3 is not installed, or failed.
    """
    if shutil.which("iperf3") is None:
        raise Failure("iperf3 is not installed, so the rate of the network is unknown")
    with cluster.popen(0, ["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None  # it is a pipe
            while "listening" not in (line := server.stdout.readline()):
                if not line:
                    raise Failure("iperf3 -s ended before it listened")
            argv = ["iperf3", "-c", cluster.hosts[0].address, "--bidir", "-J", "-t", str(_SECONDS)]
            text = cluster.run(1, argv, capture_output=True, timeout=_DEADLINE_S).stdout
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise Failure(f"iperf3 --bidir: {error}") from error
        finally:
            server.kill()
    return rate_of(json.loads(text))


def rate_of(report: dict[str, Any]) -> float:
    """Return the bytes per second of one direction from iperf3's report."""
    end = report["end"]
    both = (end["sum_received"], end["sum_received_bidir_reverse"])
    return sum(float(one["bits_per_second"]) for one in both) / 2 / 8
