"""The port of `shoal server`: authentication, public status, and resistance to abuse."""

import os
import signal
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from process.by_hand import prove
from process.joining import is_closed
from process.serving import ServerProcess, Talker, new_key, status_of

import shoal
from shoal.engine import HANDSHAKE_MAGIC, HANDSHAKE_VERSION
from shoal.errors import ShoalError, UsageError
from shoal.group.pool.addresses import Address
from shoal.group.pool.ask import _Asking, ask
from shoal.group.pool.protocol import (
    Ask,
    Meet,
    Reserve,
    Reserved,
    Status,
    encode,
    hello_of,
    server_key,
)
from shoal.group.pool.view_mesh import Place

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
                prove(hello_of(secret), server_key(secret), exchange)
                sock.sendall(nonsense)
                assert is_closed(sock)
        for wrong in [encode(Reserved("", bytes(16))), (kind, b""), (99, b"")]:
            with talker(key) as job:
                job.connect(server.port).send(*wrong)
                job.run_until(lambda: job.n_lost)
        assert status_of(key, server.address)["views"] == []
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
