"""Connections without the job's key are closed, and the job is not affected."""

import contextlib
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from process.joining import is_closed
from process.ranks import free_port, on_ranks
from process.stage import Stage, descriptors, on_stage, pretend_hosts

import shoal
from shoal.rendezvous.store.client import TcpStoreClient

LONG_S = 60.0


def listening() -> list[str]:
    mine = {target[len("socket:[") : -1] for target in descriptors().values()}
    found = []
    tables = ("tcp", 9, 3, "0A"), ("tcp6", 9, 3, "0A"), ("unix", 6, 3, "00010000")
    for name, inode, column, state in tables:
        if not os.path.exists(f"/proc/net/{name}"):
            continue
        with open(f"/proc/net/{name}", encoding="utf-8") as table:
            rows = [line.split() for line in table][1:]
        found += [" ".join(row) for row in rows if row[inode] in mine and row[column] == state]
    return found


def strangers(address: tuple[str, int]) -> Iterator[socket.socket]:
    """Connect silently, send garbage, begin a valid handshake, or hang up."""
    words = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(65536)]
    words += [b"shoal/rv", b"shoal/rv\x02\0\x01\0"]
    for turn in range(200):
        sock = socket.create_connection(address, timeout=LONG_S)
        try:
            sock.sendall(words[turn % len(words)])
        except OSError:  # it was closed meanwhile
            sock.close()
            continue
        if turn % 7 == 0:
            sock.close()
        else:
            yield sock


def use_store_among_strangers() -> float:
    """Rank 1 joins only after strangers have filled the rendezvous port."""
    stage = Stage.from_environment()
    if os.environ["RANK"] == "1":
        stage.await_cue("the strangers are in")
    with shoal.init() as group:
        data = np.ones(3)
        group.all_reduce(data)
        return float(data[0])


def test_ranks_meet_while_strangers_fill_the_rendezvous_port() -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        env = {"MASTER_PORT": str(port)}
        with on_stage(use_store_among_strangers, 2, env=env) as (stage, ranks):
            TcpStoreClient("127.0.0.1", port, timeout_s=LONG_S).close()  # rank 0 listens
            held = [stack.enter_context(sock) for sock in strangers(("127.0.0.1", port))]
            stage.cue("the strangers are in")
            found = ranks.values(30)
        assert all(is_closed(sock) for sock in held)
    assert found == [2.0, 2.0]


@pytest.mark.parametrize("ranks_per_host", [3, 1])
@on_ranks(3)
def test_ranks_listen_only_across_hosts_and_until_the_group_closes(ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        assert len(listening()) == (ranks_per_host == 1)
        group.barrier()
    assert listening() == []
