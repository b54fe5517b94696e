"""Forked children take no part in their parent's groups, and do not keep them alive."""

import ctypes
import multiprocessing
import os
import warnings

import numpy as np
import pytest
from process.ranks import on_ranks
from process.stage import Stage, descriptors, error_of, pretend_hosts

import shoal

SOON_S = 2.0
LONG_S = 50.0


def sockets() -> set[str]:
    """Return open descriptors that other processes could notice: sockets, eventfds, epoll sets."""
    kinds = ("socket:", "anon_inode:")
    return {f"{fd} {name}" for fd, name in descriptors().items() if name.startswith(kinds)}


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads, rightly
        return os.fork()


@pytest.mark.parametrize("ranks_per_host", [2, 1])
@on_ranks(2)
def test_children_may_not_use_the_groups_and_do_not_affect_them(ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    outside = sockets()
    with shoal.init() as group:
        part = group.subgroup([0, 1], "part")
        data = np.ones(500_000, np.float32)
        reducing = group.all_reduce(data, async_op=True)
        pending = group.recv(np.empty(1), 1 - group.rank, work=True)
        read, write = os.pipe()
        child = fork()
        if child == 0:
            errors = [
                error_of(group.all_reduce, np.ones(3)),
                error_of(part.barrier),
                error_of(group.subgroup, [0, 1], "new"),
                error_of(pending.wait),
                error_of(group.close),
            ]
            names = [type(error).__name__ for error in errors]
            kept = sockets() - outside
            os.write(write, f"{' '.join(names)}; {len(kept)} descriptors".encode())
            os._exit(7)
        reducing.wait()
        os.close(write)
        assert data[0] == 2
        _, status = os.waitpid(child, 0)
        assert os.read(read, 1000) == b"Closed Closed Closed Closed NoneType; 0 descriptors"
        assert os.waitstatus_to_exitcode(status) == 7
        os.close(read)

        context = multiprocessing.get_context("fork")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            worker = context.Process(target=abs, args=[-1])
            worker.start()
            worker.join()
        assert worker.exitcode == 0
        group.send(np.ones(1), 1 - group.rank)
        pending.wait()
        part.all_reduce(data)
        assert data[-1] == 4


@on_ranks(2, has_stage=True)
def test_a_child_does_not_use_or_keep_the_door_of_its_parent() -> None:
    """A child tries to use the door of a member, and lives on while a newcomer joins."""
    stage = Stage.from_environment()
    if os.environ["RANK"] == "1":
        address = stage.store.get("address", LONG_S).decode()
        with shoal.init(join=address, timeout_s=LONG_S) as larger:
            larger.barrier()
            assert larger.size == 2
        return
    os.environ["WORLD_SIZE"] = "1"
    with shoal.init() as group:
        address = group.address
        child = fork()
        if child == 0:
            calls = (group.grow, group.reform, group.close)
            names = " ".join(type(error_of(call)).__name__ for call in calls)
            stage.store.close()  # its parent's
            own = Stage.from_environment()
            own.store.set("child", names.encode())
            own.await_cue("the door is closed")
            os._exit(7)
        assert stage.store.get("child", LONG_S) == b"Closed Closed NoneType"
        stage.store.set("address", address.encode())
        larger = group
        while larger.size == 1:
            larger = larger.grow()
        larger.barrier()
        larger.close()
        late = error_of(shoal.init, join=address, timeout_s=0.3)
        assert "Connection refused" in str(late)
        stage.cue("the door is closed")
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7


def sum_in_another_group(rank: int, size: int) -> int:
    stage = Stage.from_environment()
    with shoal.init(stage.store, rank, size) as group:
        data = np.ones(100_000)
        group.all_reduce(data)
    return int(data[-1])


@on_ranks(3, has_stage=True)
def test_a_child_can_form_a_new_group() -> None:
    with shoal.init() as group:
        group.barrier()
        child = fork()
        if child == 0:
            os._exit(sum_in_another_group(group.rank, group.size))
        data = np.ones(100_000)
        group.all_reduce(data)
        _, status = os.waitpid(child, 0)
        assert data[0] == 3
        assert os.waitstatus_to_exitcode(status) == 3  # the sum in the child


@on_ranks(2)
def test_a_child_copies_shared_memory_on_write_and_keeps_no_socket_of_its_parent() -> None:
    outside = sockets()
    with shoal.init() as group:
        data = shoal.empty(1 << 18)
        data[:] = 1
        group.all_reduce(data)
        # Fork like a C library, without Python's hooks.
        for forking in (fork, ctypes.PyDLL(None).fork):
            child = forking()
            if child == 0:
                saw = int(data.max())
                data[:] = 100
                is_apart = (data == 100).all() and not sockets() - outside
                os._exit(saw if is_apart else 0)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 2
            assert (data == 2).all()
        group.all_reduce(data)
        assert (data == 4).all()
