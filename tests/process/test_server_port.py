"""The port of `shoal server`: authentication, public status, and resistance to abuse."""

import os
import select
import signal
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from process import serving
from process.by_hand import prove
from process.joining import is_closed
from process.serving import N_WORKERS, ServerProcess, Talker, await_that, job_env, new_key
from process.stage import Stage, on_stage, pretend_hosts

import shoal
from shoal.engine import HANDSHAKE_MAGIC, HANDSHAKE_VERSION
from shoal.errors import ShoalError, UsageError
from shoal.group.pool import protocol
from shoal.group.pool.addresses import Address, JobEndpoint
from shoal.group.pool.ask import _Asking, ask
from shoal.group.pool.protocol import Ask, Meet, Reserve, Reserved, Status, encode, hello_of
from shoal.group.pool.registry import leave
from shoal.group.pool.view_mesh import Place
from shoal.rendezvous.store.torch_client import TorchStoreClient

N_FLOODERS = 100


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def talker(key: Path) -> Talker:
    return Talker(key.read_bytes().strip())


def http(port: int, request: bytes) -> bytes:
    with connect(port) as sock:
        sock.sendall(request)
        answer = b""
        while data := sock.recv(65536):
            answer += data
        return answer


def test_a_server_under_abuse_still_serves_holders_of_a_key(tmp_path: Path) -> None:
    key, other = new_key(tmp_path), new_key(tmp_path, "other")
    with ServerProcess(key) as server:
        where = Address("127.0.0.1", server.port)
        # Anyone may read its status, which holds no secrets.
        assert b" 200 OK\r\n" in http(server.port, b"GET /healthz HTTP/1.1\r\n\r\n")
        assert http(server.port, b"GET /readyz HTTP/1.0\r\n\r\n").endswith(b"ready\n")
        metrics = http(server.port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"shoal_server_jobs" in metrics or b"501" in metrics.split(b"\r\n")[0]
        assert b" 400 " in http(server.port, b"GET /" + b"x" * 5000)
        # Strangers are closed: senders of garbage, silent ones, and a hundred at a time.
        with connect(server.port) as stranger:
            stranger.sendall(b"\x16\x03\x01" + os.urandom(200))
            assert is_closed(stranger)
        flood = [connect(server.port) for _ in range(N_FLOODERS)]
        with pytest.raises(UsageError, match="does not have our job key"):
            ask(where, {"SHOAL_KEY_FILE": str(other)})
        assert all(map(is_closed, flood))
        for sock in flood:
            sock.close()
        # A holder of the key that sends garbage is closed: at once, or when it stops half way.
        kind, body = encode(Meet(1, 3, 3, 4, b"a roster"))
        head = struct.pack("<8sHH", HANDSHAKE_MAGIC, HANDSHAKE_VERSION, kind)
        for nonsense in (
            bytes(16),
            head + struct.pack("<I", (2 << 20) + 100),  # too long
            head + struct.pack("<I", len(body)) + body + bytes(32),  # not sealed
            head,
        ):
            with connect(server.port) as sock:

                def exchange(message: bytes, n_bytes: int) -> bytes:
                    sock.sendall(message)
                    return sock.recv(n_bytes, socket.MSG_WAITALL)

                secret = key.read_bytes().strip()
                prove(hello_of(secret), protocol.server_key(secret), exchange)
                sock.sendall(nonsense)
                assert is_closed(sock)
        for wrong in [encode(Reserved("", bytes(16))), (kind, b""), (99, b"")]:
            with talker(key) as job:
                job.connect(server.port).send(*wrong)
                job.run_until(lambda: job.n_lost)
        assert server.views() == []
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    with pytest.raises(ShoalError, match="cannot be reached"):
        ask(where, {"SHOAL_KEY_FILE": str(key)})


def test_requests_that_cannot_be_served_are_refused_with_a_reason(tmp_path: Path) -> None:
    keys = [new_key(tmp_path, name) for name in ("one", "two")]
    reserve = Reserve(shoal.__version__, "job", 3)
    silent = [Place(f"rank {rank}", "127.0.0.1", {}) for rank in range(4)]
    roster = b"".join(place.entry.encode(rank) for rank, place in enumerate(silent))
    with ServerProcess(*keys, more=["--max-jobs", "1", "--no-http"]) as server:
        with talker(keys[0]) as one, talker(keys[1]) as two:
            for job in (one, two):
                job.connect(server.port)
            assert one.ask(Meet(1, 3, 3, 4, b"no roster")).refused == "nothing was reserved"
            taken = one.ask(reserve)
            assert taken.refused == ""
            assert one.ask(reserve).server == taken.server
            refused = two.ask(reserve._replace(version="0.0.1")).refused
            version = shoal.__version__
            assert f"it runs shoal {version}, and the workers 0.0.1: install the same" in refused
            refused = two.ask(reserve).refused
            assert refused == "it serves 1 job, the limit of --max-jobs"
            # A child whose workers do not answer ends by itself, without effect on others.
            assert one.ask(Meet(1, 3, 3, 4, roster)).refused == ""
            assert '"n_jobs": 1' in one.ask(Ask()).text
        with connect(server.port) as stranger:  # --no-http
            stranger.sendall(b"GET /healthz HTTP/1.1\r\n\r\n" + bytes(99))
            assert is_closed(stranger)
    for place in silent:
        place.close()


def test_another_program_at_the_address_is_recognised_as_no_server(tmp_path: Path) -> None:
    environ = {"SHOAL_KEY_FILE": str(new_key(tmp_path))}
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_one() -> None:
            sock, _ = listener.accept()
            sock.recv(4096)
            sock.close()

        thread = threading.Thread(target=close_one)
        thread.start()
        with pytest.raises(ShoalError, match="is not a shoal server, or runs another version"):
            ask(Address("127.0.0.1", listener.getsockname()[1]), environ)
        thread.join()


@pytest.mark.parametrize("text", ["[" * 60_000, "1" * 60_000, "no JSON"])
def test_an_unreadable_answer_is_an_error_with_the_servers_address(text: str) -> None:
    asking = _Asking(Address("there", 7077), 1)
    with pytest.raises(ShoalError, match="server there:7077 sent an answer that cannot be read"):
        asking.received(SimpleNamespace(), *encode(Status(text)), -1)


# Servers that register in torch's store, where a job's workers find them.


def sum_with_a_late_server() -> None:
    pretend_hosts(1)
    stage = Stage.from_environment()
    with shoal.init(timeout_s=30.0) as group:
        stage.cue(f"rank {group.rank}: is here")
        serving.await_servers(group, 1)
        serving.check_sum(group)


def test_a_registered_server_is_used_and_an_unsealed_record_is_ignored(tmp_path: Path) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    key, where = new_key(tmp_path), f"127.0.0.1:{store.port}"
    folder = f"shoal/servers/job1/{protocol.key_id(key.read_bytes().strip()):016x}"
    for place, value in enumerate((b"", b"\xff\xfe", b"0" * 32 + b" 127.0.0.1:1"), 1):
        store.add(f"{folder}/n", 1)
        store.set(f"{folder}/{place}", value)
    env = job_env(key, f"rdzv://{where}/job1", SHOAL_DEBUG="INFO")
    with on_stage(sum_with_a_late_server, N_WORKERS, env=env) as (stage, ranks):
        stage.await_all(N_WORKERS, "is here")
        with ServerProcess(key, more=["--rdzv-endpoint", where, "--rdzv-id", "job1"]) as server:
            printed, *_ = ranks.outputs()
            assert store.check([f"{folder}/4"])
            server.send(signal.SIGTERM)
            assert server.wait() == 0
    assert "127.0.0.1:1 " not in printed


def test_a_registrar_ends_with_its_server_even_while_it_waits_for_the_store(tmp_path: Path) -> None:
    from torch.distributed import TCPStore

    key = new_key(tmp_path)
    with ServerProcess(key, more=["--rdzv-endpoint", "127.0.0.1:1"]) as server:
        await_that(lambda: any("cannot register at" in line for line in server.log), "a warning")
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = f"shoal/servers/none/{protocol.key_id(key.read_bytes().strip()):016x}/1"
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
