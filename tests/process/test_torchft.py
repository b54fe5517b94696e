"""ProcessGroupShoal as torchft's Manager uses it; the example runs the Manager itself."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from process.ranks import Outcome, Ranks, on_ranks, on_survivors, start_ranks
from process.stage import Stage, die

pytest.importorskip("torchft", reason="needs torchft: `make test-frameworks` has it")

import torch
import torch.distributed as dist
import torchft
from torch.distributed import distributed_c10d as c10d
from torchft.checkpointing.pg_transport import PGTransport
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.process_group import ProcessGroupWrapper

from shoal.errors import Closed, PeerLost, TimedOut, Unsupported, UsageError
from shoal.rendezvous.door import Door
from shoal.rendezvous.store.client import TcpStoreClient

TIMEOUT = timedelta(seconds=20)
# torch's TCPStore looks up each caller's name, which takes 5 s where a name server is slow.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def address() -> Iterator[str]:
    """Return the address of a store that outlives the ranks, in torchft's form."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{store.port}"
    del store


def rank_of() -> int:
    return int(os.environ["RANK"])


def group_of(timeout: timedelta = TIMEOUT) -> Any:
    from shoal.torch.torchft import ProcessGroupShoal

    return ProcessGroupShoal(timeout)


def configure(group: Any, address: str, quorum: int, size: int, rank: int | None = None) -> None:
    own = rank_of() if rank is None else rank
    group.configure(f"{address}/torchft/{quorum}/0", f"replica_{own}", own, size, quorum, 0, 1)


def total(group: Any, rank: int, n: int = 1000) -> float:
    """Return the sum of a call to which every rank contributes its number plus one."""
    tensor = torch.full((n,), rank + 1.0)
    group.allreduce([tensor], dist.ReduceOp.SUM).wait()
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


@on_ranks(3)
def test_every_call_of_torchft_gives_the_result_of_numpy(address: str) -> None:
    rank, size = rank_of(), 3
    group = group_of()
    configure(group, address, 1, size)
    assert (group.size(), group.getBackendName()) == (size, "torchft-shoal")
    own = np.arange(6, dtype=np.float32) + 10 * rank
    every = [np.arange(6, dtype=np.float32) + 10 * each for each in range(size)]

    def given() -> torch.Tensor:
        return torch.from_numpy(own.copy())

    tensor = given()
    opts = dist.AllreduceOptions()
    opts.reduceOp = dist.ReduceOp.AVG
    assert group.allreduce([tensor], opts).get_future().wait()[0] is tensor
    np.testing.assert_array_equal(tensor, np.mean(every, axis=0))
    tensor = given()
    group.allreduce_coalesced([tensor], c10d.AllreduceCoalescedOptions()).wait()
    np.testing.assert_array_equal(tensor, np.sum(every, axis=0))
    parts = [torch.empty(6) for _ in range(size)]
    group.allgather([parts], [given()], c10d.AllgatherOptions()).wait()
    np.testing.assert_array_equal(torch.stack(parts), every)
    whole = torch.empty(6 * size)
    group.allgather_into_tensor_coalesced([whole], [given()], c10d.AllgatherOptions()).wait()
    np.testing.assert_array_equal(whole, np.concatenate(every))
    tensor = given()
    group.broadcast_one(tensor, root=1).wait()
    np.testing.assert_array_equal(tensor, every[1])
    tensor = torch.empty(2)
    group.reduce_scatter([tensor], [list(given().split(2))], c10d.ReduceScatterOptions()).wait()
    np.testing.assert_array_equal(tensor, np.split(np.sum(every, axis=0), size)[rank])
    tensor = torch.empty(2)
    opts = c10d.ReduceScatterOptions()
    group.reduce_scatter_tensor_coalesced([tensor], [given()], opts).wait()
    np.testing.assert_array_equal(tensor, np.split(np.sum(every, axis=0), size)[rank])
    tensor = torch.empty(6)
    group.alltoall_base(tensor, given(), [], [], c10d.AllToAllOptions()).wait()
    np.testing.assert_array_equal(
        tensor, np.concatenate([np.split(each, size)[rank] for each in every])
    )
    if rank == 0:
        group.send([given()], 2, 7).wait()
    elif rank == 2:
        tensor = torch.empty(6)
        group.recv([tensor], 0, 7).wait()
        np.testing.assert_array_equal(tensor, every[0])
    group.barrier().wait()
    group.shutdown()


@on_ranks(2)
def test_fifty_more_groups_leave_no_descriptor_and_no_thread(address: str) -> None:
    def n_open() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    group, rank, before = group_of(), rank_of(), (0, 0)
    for quorum in range(60):
        configure(group, address, quorum // 2, 2)  # each prefix twice
        pending = group.allreduce([torch.ones(300_000)], dist.ReduceOp.SUM)
        assert total(group, rank) == 3
        pending.wait()
        if quorum == 9:
            before = n_open()
    assert n_open() == before


@on_survivors(3, 2)
def test_survivors_of_a_killed_replica_form_the_next_group(address: str) -> None:
    rank, group = rank_of(), group_of()
    configure(group, address, 1, 3)
    assert total(group, rank) == 6
    if rank == 2:
        die()
    pending = group.allreduce([torch.ones(1_000_000)], dist.ReduceOp.SUM)
    with pytest.raises(PeerLost, match=r"rank 2 .*; discard this step, .*forms the next group"):
        pending.wait()
    assert "; shrink the group" in str(PeerLost(2))  # of other groups of this process
    with pytest.raises(RuntimeError, match="rank 2"):
        pending.get_future().wait()
    configure(group, address, 2, 2)
    assert total(group, rank) == 3


@pytest.mark.parametrize("how", ["abort", "shutdown"])
@on_ranks(2, has_stage=True)
def test_another_thread_ends_a_group_whose_call_is_pending(address: str, how: str) -> None:
    """Rank 0's other thread ends the group while rank 0 waits for a call of rank 1."""
    stage, rank, group = Stage.from_environment(), rank_of(), group_of()
    configure(group, address, 1, 2)
    if rank == 0:
        pending = group.allreduce([torch.ones(1_000_000)], dist.ReduceOp.SUM)
        threading.Timer(0.2, getattr(group, how)).start()
        with pytest.raises(Closed):
            pending.wait()
        with pytest.raises(UsageError, match="has no group"):
            group.allreduce([torch.ones(1)], dist.ReduceOp.SUM)
        group.abort(), group.shutdown()
        stage.cue("ended")
    else:
        stage.await_cue("ended")
        with pytest.raises((Closed, PeerLost)):
            group.allreduce([torch.ones(1_000_000)], dist.ReduceOp.SUM).wait()
    configure(group, address, 2, 2)
    assert total(group, rank) == 3


@pytest.mark.parametrize("how", ["abort", "shutdown"])
@on_ranks(3, has_stage=True)
def test_another_thread_ends_a_forming_on_all_replicas_at_once(address: str, how: str) -> None:
    """Rank 0's other thread ends the group while ranks 0 and 1 wait for rank 2."""
    began = time.monotonic()
    stage, rank, group = Stage.from_environment(), rank_of(), group_of()
    if rank == 2:
        stage.await_cue("ended")
    elif rank == 0:
        ends = threading.Timer(0.5, getattr(group, how))
        ends.start()
        with pytest.raises(Closed, match="while it formed"):
            configure(group, address, 1, 3)
        with pytest.raises(UsageError, match="has no group"):
            group.barrier()
        stage.cue("ended")
    else:
        with pytest.raises(PeerLost):
            configure(group, address, 1, 3)
    if rank == 2:  # too late: the meeting has ended
        with pytest.raises(PeerLost):
            configure(group, address, 1, 3)
    configure(group, address, 2, 3)
    assert total(group, rank) == 6
    assert time.monotonic() - began < TIMEOUT.total_seconds() / 2


@pytest.mark.parametrize("moment", ["urandom", "open"])
@on_ranks(2)
def test_a_group_ended_by_another_thread_while_its_door_opens_can_form_again(
    address: str, moment: str
) -> None:
    """Another thread shuts down rank 0's group while the group uses its door."""
    rank, group = rank_of(), group_of()
    configure(group, address, 1, 2)
    owner: Any = os if moment == "urandom" else Door
    whole = getattr(owner, moment)

    def shut_down_once(*given: Any) -> Any:
        setattr(owner, moment, whole)
        done = whole(*given)
        ending = threading.Thread(target=group.shutdown)
        ending.start()
        ending.join()
        return done

    if rank == 0:
        setattr(owner, moment, shut_down_once)
    with pytest.raises(Closed if rank == 0 else PeerLost):
        configure(group, address, 2, 2)
    configure(group, address, 3, 2)
    assert total(group, rank) == 3


@on_ranks(1)
def test_an_abort_of_the_last_group_does_not_end_the_next_one(address: str) -> None:
    group, begins, may_end = group_of(), threading.Event(), threading.Event()
    configure(group, address, 1, 1)

    def abort() -> None:
        if not begins.is_set():
            begins.set()
            assert may_end.wait(30)

    group.shutdown()
    group._pg = SimpleNamespace(abort=abort, shutdown=lambda: None)
    aborts = threading.Thread(target=group.abort)
    aborts.start()
    assert begins.wait(30)
    configure(group, address, 2, 1)
    may_end.set()
    aborts.join()
    assert total(group, 0) == 1


@on_survivors(3, 2)
def test_a_group_that_a_replica_never_joins_times_out_and_the_next_one_forms(address: str) -> None:
    rank, group = rank_of(), group_of(timedelta(seconds=2))
    if rank == 2:
        die()
    with pytest.raises((TimedOut, PeerLost)):
        configure(group, address, 1, 3)
    with pytest.raises(UsageError, match="has no group"):
        total(group, rank)
    configure(group, address, 2, 2)
    assert total(group, rank) == 3


@pytest.mark.parametrize(("victim", "moment"), [(0, "/rank/0"), (2, "/rank/2"), (0, "/roll/0")])
@on_survivors(3)
def test_the_loss_of_a_replica_that_forms_ends_the_forming_at_once(
    address: str, victim: int, moment: str
) -> None:
    rank, group = rank_of(), group_of()
    if rank == victim:
        whole = TcpStoreClient.set

        def set_and_die(store: Any, key: str, value: bytes) -> None:
            whole(store, key, value)
            if moment in key:
                die()

        TcpStoreClient.set = set_and_die
    began = time.monotonic()
    with pytest.raises(PeerLost):
        configure(group, address, 1, 3)
    assert time.monotonic() - began < 4  # of 20 s
    left = [each for each in range(3) if each != victim]
    configure(group, address, 2, 2, left.index(rank))
    assert total(group, left.index(rank)) == 3


def manager_of(rank: int, lighthouse: str, net: torch.nn.Module, **options: Any) -> Any:
    """Return a Manager and the store that it needs."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options |= {"load_state_dict": net.load_state_dict, "state_dict": net.state_dict}
    options |= {"rank": 0, "world_size": 1, "replica_id": f"replica_{rank}", "min_replica_size": 2}
    options |= {"lighthouse_addr": lighthouse, "store_addr": "localhost", "store_port": store.port}
    return torchft.Manager(timeout=TIMEOUT, **options), store


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """Run torchft's lighthouse for two replicas; yield its address."""
    server = LighthouseServer("[::]:0", 2)
    yield server.address()
    server.shutdown()


@on_ranks(2)
def test_a_replica_is_healed_through_the_group_itself(lighthouse: str) -> None:
    """Make a step, before which one replica gets the weights of the other."""
    rank, group = rank_of(), group_of()
    net = torch.nn.Linear(300, 1, bias=False)
    torch.nn.init.constant_(net.weight, 5.0 + rank)
    transport = PGTransport(group, TIMEOUT, torch.device("cpu"))
    manager, _store = manager_of(rank, lighthouse, net, pg=group, checkpoint_transport=transport)
    manager.start_quorum()
    gradient = torch.full((1, 300), 2.0)
    manager.allreduce(gradient).wait()
    assert manager.should_commit()
    weights = torch.empty(2, 300)
    group.allgather([list(weights.split(1))], [net.weight.data], c10d.AllgatherOptions()).wait()
    manager.shutdown()
    assert weights.min() == weights.max() in (5, 6)
    # At the first step torchft averages one replica's gradient with zeros of the healed one.
    assert gradient.max() == 1


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
@on_ranks(2)
def test_local_steps_of_torchft_meet_in_the_mean_of_the_replicas(
    lighthouse: str, kind: str
) -> None:
    rank, net = rank_of(), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    options = {"use_async_quorum": False, "init_sync": False}
    manager, _store = manager_of(rank, lighthouse, net, pg=group_of(), **options)
    inner, outer = (torch.optim.SGD(net.parameters(), lr) for lr in (0.5, 1.0))
    found = []
    with (
        LocalSGD(manager, net, inner, sync_every=2)
        if kind == "LocalSGD"
        else DiLoCo(manager, [net], inner, outer, sync_every=2)
    ):
        for step in range(6):
            net.weight.grad = torch.full((1, 1), rank + 1.0)
            inner.step()
            if step % 2:
                found.append(net.weight.item())
    manager.shutdown()
    # Two steps of 0.5 times the mean of the gradients 1 and 2, in each round.
    assert found == [-1.5, -3.0, -4.5]


N_KILLS = 32 if os.environ.get("SHOAL_SOAK") else 3
N_SAMPLES, N_WEIGHTS = 24, 500


def samples(step: int) -> np.ndarray:
    """Return the gradients of a step's samples: small integers with exact sums in float32."""
    shape = N_SAMPLES, N_WEIGHTS
    return np.random.default_rng(step).integers(-3, 4, shape).astype(np.float32)


def train_until_killed(lighthouse: str, own: int, name: str) -> None:
    """Train, and compare the weights after each step with NumPy's."""
    stage, net = Stage.from_environment(), torch.nn.Linear(N_WEIGHTS, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    manager, _store = manager_of(own, lighthouse, net, pg=group_of(), init_sync=False)
    expected, n_added = np.zeros(N_WEIGHTS, np.float32), 0
    while True:
        manager.start_quorum()
        manager.wait_quorum()
        n_replicas, share = manager.num_participants(), manager.participating_rank() or 0
        mine = samples(manager.current_step())[share::n_replicas].sum(0) * n_replicas
        gradient = torch.from_numpy(mine)
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            with torch.no_grad():
                net.weight -= gradient
            while n_added < manager.current_step():
                expected -= samples(n_added).sum(0)
                n_added += 1
            np.testing.assert_array_equal(net.weight.detach().numpy()[0], expected)
            stage.cue(f"{name} trains")
            stage.cue(f"step {n_added}")


class Replicas:
    """Four replicas, which a test starts and kills."""

    def __init__(self, stage: Stage, lighthouse: str, stack: contextlib.ExitStack) -> None:
        self.stage, self.lighthouse, self.stack = stage, lighthouse, stack
        self.dead: list[Ranks] = []
        self.n_started = 0
        self.alive = [self.start(own) for own in range(4)]

    def start(self, own: int) -> tuple[str, Ranks]:
        name, self.n_started = f"start {self.n_started}", self.n_started + 1
        task = self.lighthouse, own, name
        started = start_ranks(train_until_killed, 1, *task, env=self.stage.env)
        return name, self.stack.enter_context(started)

    def kill(self, own: int) -> None:
        """Kill a replica once two others have the weights."""
        others = [name for name, _ in self.alive[:own] + self.alive[own + 1 :]]
        if sum(self.stage.store.try_get(f"cue/{name} trains") is not None for name in others) < 2:
            for name in others:
                self.stage.await_cue(f"{name} trains")
        _, ranks = self.alive[own]
        os.kill(ranks.pid(0), signal.SIGKILL)
        self.dead.append(ranks)

    def end(self) -> list[Outcome]:
        """Kill all replicas; any other outcome has the reason of a failure."""
        for _, ranks in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks.pid(0), signal.SIGKILL)
        return [ranks.wait(60)[0] for ranks in self.dead + [ranks for _, ranks in self.alive]]


@pytest.mark.timeout(1800)
def test_replicas_killed_at_random_moments_leave_the_others_with_the_right_weights() -> None:
    rng, step = random.Random(23), 0
    server = LighthouseServer("[::]:0", 2, join_timeout_ms=2000, heartbeat_timeout_ms=1000)
    with Stage() as stage, contextlib.ExitStack() as stack:
        replicas = Replicas(stage, server.address(), stack)
        try:
            for _ in range(N_KILLS):
                step += rng.randrange(1, 30)
                stage.await_cue(f"step {step}")
                # Any moment is wanted here, so no cue is awaited.
                threading.Event().wait(rng.choice([0.0, 0.01, 0.1]) * rng.random())
                own = rng.randrange(4)
                replicas.kill(own)
                replicas.alive[own] = replicas.start(own)
            for name, _ in replicas.alive:
                stage.await_cue(f"{name} trains")
        finally:
            outcomes = replicas.end()
            sys.stdout.write("\n".join(map(str, outcomes)))
        assert {outcome.died for outcome in outcomes} == {"was killed by SIGKILL"}
    server.shutdown()


def test_bad_input_is_an_error_before_the_manager_could_retry_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="positive"):
        group_of(timedelta(0))
    with pytest.raises(UsageError, match="has no group"):
        group_of().barrier()
    monkeypatch.setenv("SHOAL_SERVERS", "127.0.0.1:1")  # not called
    group_of()
    monkeypatch.setenv("SHOAL_ALGO", "no such algorithm")
    with pytest.raises(UsageError, match="SHOAL_ALGO"):
        group_of()


def test_a_torchft_whose_groups_have_no_configure_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for one in ProcessGroupWrapper.__mro__:
        if "configure" in vars(one):
            monkeypatch.delattr(one, "configure")
    with pytest.raises(Unsupported, match=r"torchft==0\.2\.0"):
        group_of()
