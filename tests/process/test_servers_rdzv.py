"""Servers that register in torch's store, where a job's workers find them."""

import os
import select
import signal
from pathlib import Path

import pytest
from process.ranks import start_ranks
from process.serving import (
    N_WORKERS,
    ServerProcess,
    await_servers,
    await_that,
    job_env,
    new_key,
    sums,
)
from process.stage import Stage, pretend_hosts

import shoal
from shoal.group.pool.addresses import Address, JobEndpoint
from shoal.group.pool.protocol import key_id
from shoal.group.pool.registry import leave
from shoal.rendezvous.store.torch_client import TorchStoreClient


def sum_with_a_late_server() -> bool:
    pretend_hosts(1)
    stage = Stage.from_environment()
    with shoal.init(timeout_s=30.0) as group:
        stage.cue(f"rank {group.rank}: is here")
        await_servers(group, 1)
        return sums(group)


def test_a_registered_server_is_used_and_an_unsealed_record_is_ignored(
    tmp_path: Path,
) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    key, where = new_key(tmp_path), f"127.0.0.1:{store.port}"
    folder = f"shoal/servers/job1/{key_id(key.read_bytes().strip()):016x}"
    for place, value in enumerate((b"", b"\xff\xfe", b"0" * 32 + b" 127.0.0.1:1"), 1):
        store.add(f"{folder}/n", 1)
        store.set(f"{folder}/{place}", value)
    with Stage() as stage:
        env = job_env(key, f"rdzv://{where}/job1", SHOAL_DEBUG="INFO") | dict(stage.env)
        with start_ranks(sum_with_a_late_server, N_WORKERS, env=env) as ranks:
            stage.await_all(N_WORKERS, "is here")
            more = ["--rdzv-endpoint", where, "--rdzv-id", "job1"]
            with ServerProcess(key, more=more) as server:
                outcomes = ranks.wait()
                assert store.check([f"{folder}/4"])
                server.send(signal.SIGTERM)
                assert server.wait() == 0
    assert [outcome.value for outcome in outcomes] == [True] * N_WORKERS, outcomes
    assert "127.0.0.1:1 " not in outcomes[0].output


def test_a_registrar_ends_with_its_server_even_while_it_waits_for_the_store(
    tmp_path: Path,
) -> None:
    from torch.distributed import TCPStore

    key = new_key(tmp_path)
    with ServerProcess(key, more=["--rdzv-endpoint", "127.0.0.1:1"]) as server:
        await_that(lambda: any("cannot register at" in line for line in server.log), "a warning")
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = f"shoal/servers/none/{key_id(key.read_bytes().strip()):016x}/1"
    with ServerProcess(key, more=["--rdzv-endpoint", f"127.0.0.1:{store.port}"]) as server:
        await_that(lambda: store.check([place]), "the address")
        assert store.get(place).endswith(f" {server.address}".encode())
        pid = server._process.pid
        (registrar,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        end = os.pidfd_open(int(registrar))
        server.send(signal.SIGKILL)
        await_that(lambda: select.select([end], [], [], 0)[0], "the registrar's end")
        os.close(end)


def test_the_store_protocol_is_that_of_torch() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TorchStoreClient("127.0.0.1", store.port, 20.0)
    assert client.local_host == "127.0.0.1"
    assert [client.add("n"), client.add("n")] == [1, 2]
    assert client.try_get("n") == store.get("n") == b"2"
    assert client.try_get("other") is None
    client.set("other", b"\0" * 4096)
    assert client.try_get("other") == store.get("other") == b"\0" * 4096
    endpoint = JobEndpoint("127.0.0.1", store.port, "a job")
    place = leave(client, endpoint, b"k" * 32, Address("fd00::1", 7))
    assert store.get(place).endswith(b" [fd00::1]:7")
    store.set("long", "x" * 4097)
    with pytest.raises(OSError, match="answers with 4097 bytes"):
        client.try_get("long")
    client.close()
