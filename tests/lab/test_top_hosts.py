"""`shoal top` over hosts: only holders of the job key see the ranks of a job."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.labs import enter, env_of, needs_root
from process.ranks import start_ranks
from process.stage import Stage, stop

import shoal
from shoal.lab import Lab
from shoal.state import monitor, remote

pytestmark = needs_root

HOST_OF = [0, 0, 1]  # by rank


def wait_for_rank_2(namespaces: list[str]) -> None:
    rank = int(os.environ["RANK"])
    stage = Stage.from_environment()
    stage.cue(f"rank {rank} is here")  # connects, which a host of the cluster cannot do
    enter(namespaces[HOST_OF[rank]])
    with shoal.init() as group:
        group.barrier()
        stage.cue(f"rank {rank} is ready")
        if rank == 2:
            stage.await_cue("never")
        group.all_reduce(np.ones(100_000, np.float32))


def on_host(namespace: str, call: Callable[[], Any]) -> Any:
    """Return the result of a call on a host of the cluster."""
    results = []

    def run() -> None:
        enter(namespace)
        results.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def top(cluster: Lab, host: int, env: Mapping[str, str], *words: str) -> tuple[int, str]:
    """Return the exit code and the output of `shoal top` on a host."""
    ran = cluster.popen(
        host,
        [sys.executable, "-m", "shoal", "top", *words],
        env={"PATH": os.environ["PATH"], **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = ran.communicate(timeout=60)[0]
    return ran.returncode, output


def test_a_holder_of_the_key_sees_all_ranks_including_stopped_and_ended_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # NOT tmp_path: the path of a socket has at most 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="shoal-", dir="/tmp") as folder,
        Lab(2, rate_mbit=None) as cluster,
        Stage() as stage,
    ):
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        job, namespaces = env_of(cluster), [host.namespace for host in cluster.hosts]
        watched = {"XDG_RUNTIME_DIR": folder, "SHOAL_MONITOR": "1"}
        env = {**job, **stage.env, **watched}
        with start_ranks(wait_for_rank_2, 3, namespaces, env=env) as ranks:
            for rank in range(3):
                stage.await_cue(f"rank {rank} is ready")
            here = monitor.read_all()
            places = remote.places_of(here[0])
            assert [place.rank for place in places] == [0, 1, 2]
            assert [place.address for place in places] == [
                cluster.hosts[host].address for host in HOST_OF
            ]
            address = f"{places[0].address}:{places[0].port}"

            key = {"SHOAL_KEY": job["SHOAL_KEY"]}
            code, output = top(cluster, 1, key, address, "--json")
            assert code == 0, output
            found = json.loads(output)
            assert [one["pid"] for one in found] == [ranks.pid(rank) for rank in range(3)]
            key_file = tmp_path / "key"
            key_file.touch(0o600)
            key_file.write_text(job["SHOAL_KEY"])
            code, output = top(cluster, 1, {"SHOAL_KEY_FILE": str(key_file)}, address, "--once")
            assert code == 0, output
            assert f"3 ranks of the job at {address}" in output
            assert f", process {ranks.pid(2)}: " in output

            stop(ranks.pid(1))
            begin_s = time.monotonic()
            key_bytes = job["SHOAL_KEY"].encode()
            found = on_host(namespaces[1], lambda: remote.ask(places, key_bytes))
            assert time.monotonic() - begin_s < 2 * remote.PATIENCE_S
            assert [one.get("error") for one in found] == [None, "it does not answer", None]
            os.kill(ranks.pid(1), signal.SIGCONT)

            os.kill(ranks.pid(2), signal.SIGKILL)
            ranks.await_end(2)
            found = on_host(namespaces[1], lambda: remote.ask(places, key_bytes))
            assert found[2]["error"] == "it has ended, or its connection broke"
            ranks.wait()
