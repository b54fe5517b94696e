"""The contract of every torch backend, after torch's own tests: cases pass on Gloo and on shoal."""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.ranks import on_ranks, on_survivors
from process.shared_ranks import Case, SharedRanks, cases_in
from process.stage import Stage, error_of
from torch._C import _distributed_c10d as c10d
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

SIZE = 2
HAS_HOOKS = hasattr(c10d, "NanCheckHook")
HAS_RECONFIGURE = hasattr(dist, "_reconfigure")


@pytest.fixture(scope="module", params=["gloo", "shoal"])
def backend_ranks(request: pytest.FixtureRequest) -> Iterator[SharedRanks]:
    with SharedRanks(SIZE, backend=request.param) as ranks:
        yield ranks


def group_of() -> Any:
    return dist.distributed_c10d._get_default_group()


def case_sequence_numbers_count_the_calls_of_each_group() -> None:
    group = group_of()
    assert group._get_sequence_number_for_group() == 0
    for number in range(1, 4):
        dist.all_reduce(torch.ones(1))
        assert group._get_sequence_number_for_group() == number
    part = dist.new_group([0, 1])
    assert part._get_sequence_number_for_group() == 0
    dist.all_reduce(torch.ones(1), group=part)
    assert (part._get_sequence_number_for_group(), group._get_sequence_number_for_group()) == (1, 3)


def case_a_work_has_the_number_of_its_call() -> None:
    for number in range(1, 4):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if hasattr(c10d.Work, "_get_sequence_number"):
            assert work._get_sequence_number() == number
        work.wait()


def case_groups_may_be_made_in_any_order() -> None:
    everyone, single = dist.new_group([0, 1]), dist.new_group([0])
    if dist.get_rank() == 0:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=single)
        assert tensor.item() == 1
    dist.barrier(group=everyone)


def case_a_wait_takes_its_work_off_torchs_list_and_waits_for_no_later_call_on_its_storage() -> None:
    tensor, note = torch.ones(2), torch.ones(1)
    with allow_inflight_collective_as_graph_input_ctx():
        if dist.get_rank() == 0:
            works = [dist.all_reduce(part, async_op=True) for part in tensor.split(1)]
            assert c10d._get_work_registry_size() == 2
            works[0].wait()
            dist.send(note, 1)
            works[1].wait()
        else:
            dist.all_reduce(tensor[:1])
            dist.recv(note, 0)
            dist.all_reduce(tensor[1:])
        assert c10d._get_work_registry_size() == 0
    assert tensor.tolist() == [SIZE] * 2


def case_the_result_is_right_after_the_work_is_dropped() -> None:
    tensor = torch.full((4,), dist.get_rank() + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    del work
    dist.barrier()
    assert tensor.tolist() == [3.0] * 4
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    del tensor, work
    dist.barrier()


def case_ranks_of_a_group_may_be_a_tensor() -> None:
    if not HAS_RECONFIGURE:
        return
    group = dist.new_group(ranks=torch.arange(SIZE))
    assert dist.get_process_group_ranks(group) == [0, 1]
    tensor = torch.tensor([dist.get_rank()])
    dist.broadcast(tensor, src=0, group=group)
    assert tensor.item() == 0


def case_a_timeout_can_be_set() -> None:
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timedelta(seconds=20))
        dist.barrier()


def case_the_backend_object_is_accessible() -> None:
    if hasattr(dist, "get_backend_impl"):
        backend = dist.get_backend_impl(None, torch.device("cpu"))
        assert (backend.rank(), backend.size()) == (dist.get_rank(), SIZE)
        tensor = torch.ones(1)
        backend.allreduce([tensor], dist.AllreduceOptions()).wait()
        assert tensor.item() == SIZE


def case_batches_of_messages_work_in_either_order() -> None:
    peer = 1 - dist.get_rank()
    for receives_first in (False, True):
        for count in (1, 2):
            sent = [torch.tensor([dist.get_rank() + 100 * i]) for i in range(count)]
            taken = [torch.zeros_like(each) for each in sent]
            batch = []
            for one, other in zip(sent, taken, strict=True):
                pair = [dist.P2POp(dist.isend, one, peer), dist.P2POp(dist.irecv, other, peer)]
                batch += pair[::-1] if receives_first else pair
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            assert [each.item() for each in taken] == [peer + 100 * i for i in range(count)]


def with_nan() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor[3] = float("nan")
    return tensor


def case_the_nan_check_finds_one_in_sent_data_and_can_be_removed() -> None:
    if not HAS_HOOKS:
        return
    dist.all_reduce(with_nan())
    hook = c10d.NanCheckHook.attach(group_of())
    assert "NaN" in str(error_of(dist.all_reduce, with_nan()))
    taken = torch.ones(3) if dist.get_rank() == 0 else with_nan()[:3]
    dist.broadcast(taken, 0)
    whole = torch.full((SIZE,), float("nan"))
    dist.all_gather_single(whole, torch.ones(1))
    assert (taken.tolist(), whole.tolist()) == ([1.0] * 3, [1.0] * SIZE)
    hook.remove()
    dist.all_reduce(with_nan())


def case_hooks_of_the_user_see_each_call() -> None:
    if not HAS_HOOKS:
        return
    seen: list[str] = []
    group = group_of()
    group.register_pre_hook(1, lambda args: seen.append(f"before {args.name.name}"))
    group.register_post_hook(2, lambda args: seen.append(f"after {args.name.name}"))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    dist.barrier()
    assert seen == ["before ALLREDUCE", "after ALLREDUCE", "before BARRIER", "after BARRIER"]


@pytest.mark.parametrize("case", cases_in(globals()))
def test_backend(case: Case, backend_ranks: SharedRanks) -> None:
    backend_ranks.run(case)


class Member:
    """A rank of a group that `reconfigure` forms, whose handles go through the test's store."""

    def __init__(self, backend: str) -> None:
        self.stage = Stage.from_environment()
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.n_exchanges = 0
        dist.init_process_group(backend, timeout=timedelta(seconds=30), enable_reconfigure=True)
        assert dist._supports_reconfigure()
        self.backend = dist.get_backend_impl(None, torch.device("cpu"))

    def handles(self) -> list[str]:
        self.n_exchanges += 1
        key = f"handles {self.n_exchanges}"
        self.stage.store.set(f"{key} {self.rank}", dist._get_reconfigure_handle().encode())
        return [self.stage.store.get(f"{key} {r}", 30.0).decode() for r in range(self.size)]

    def form(self, uuid: int, handles: Any) -> None:
        dist._reconfigure(uuid, handles, timeout=timedelta(seconds=30)).wait()

    def check(self, size: int) -> None:
        assert dist.get_world_size() == size
        tensor = torch.full((4,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size * (size + 1) / 2] * 4


def form_and_form_again(member: Member) -> None:
    member.form(100, member.handles())
    assert dist.get_rank() == member.rank
    member.check(3)
    member.form(101, member.handles())
    member.check(3)


def send_through_the_backend(member: Member) -> None:
    member.form(300, member.handles())
    after, before = (dist.get_rank() + 1) % 3, (dist.get_rank() - 1) % 3
    taken = torch.zeros(4)
    works = [member.backend.send([torch.full((4,), member.rank + 1.0)], after, 0)]
    works.append(member.backend.recv([taken], before, 0))
    for work in works:
        work.wait()
    assert taken.tolist() == [before + 1.0] * 4


def leave_the_middle_out(member: Member) -> None:
    member.form(400, member.handles())
    first, _, last = member.handles()
    if member.rank != 1:
        member.form(401, [first, last])
        assert dist.get_rank() == member.rank // 2
        member.check(2)
        tensor = torch.full((4,), 42.0 if dist.get_rank() == 0 else 0.0)
        dist.broadcast(tensor, group_src=0)
        assert tensor.tolist() == [42.0] * 4
    member.stage.meet(member.rank, 3, "done")


def go_from_one_to_all_and_back(member: Member) -> None:
    member.form(600 + member.rank, [dist._get_reconfigure_handle()])
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    member.form(603, member.handles())
    member.check(3)
    member.stage.meet(member.rank, 3, "formed")
    member.form(604 + member.rank, [dist._get_reconfigure_handle()])
    member.check(1)
    member.stage.meet(member.rank, 3, "done")


def join_late(member: Member) -> None:
    handles = member.handles()
    if member.rank < 1:
        member.form(900, handles[:1])
    member.form(901, member.handles())
    member.check(3)


def merge_and_split(member: Member) -> None:
    handles = member.handles()
    mine = handles[:1] if member.rank < 1 else handles[1:]
    member.form(1000 + (member.rank >= 1), mine)
    member.form(1002, member.handles())
    member.check(3)


def go_on_after_an_abort(member: Member) -> None:
    member.form(1200, member.handles())
    member.backend.abort()
    assert member.backend.get_error() == c10d.ErrorType.SUCCESS
    member.form(1201, member.handles())
    member.check(3)


def use_a_uuid_again(member: Member) -> None:
    uuid = 1100 + member.rank
    member.form(uuid, [dist._get_reconfigure_handle()])
    error = error_of(member.form, uuid, [dist._get_reconfigure_handle()])
    assert isinstance(error, RuntimeError)
    assert "already used" in str(error)


LIVES = (form_and_form_again, send_through_the_backend, leave_the_middle_out, join_late)
LIVES += (go_from_one_to_all_and_back, merge_and_split, go_on_after_an_abort, use_a_uuid_again)
needs_reconfigure = pytest.mark.skipif(not HAS_RECONFIGURE, reason="torch 2.14 and later have it")


@needs_reconfigure
@pytest.mark.parametrize("backend", ["gloo", "shoal"])
@pytest.mark.parametrize("life", [life.__name__ for life in LIVES])
@on_ranks(3, has_stage=True)
def test_a_group_is_formed_again(backend: str, life: str) -> None:
    member = Member(backend)
    globals()[life](member)
    member.stage.meet(member.rank, 3, "end")
    dist.destroy_process_group()


@needs_reconfigure
@on_ranks(3, has_stage=True)
def test_using_an_unformed_group_is_an_error_and_a_set_of_handles_is_sorted() -> None:
    from shoal.errors import UsageError

    member = Member("shoal")
    assert isinstance(error_of(dist.all_reduce, torch.ones(1)), UsageError)
    handles = member.handles()
    assert isinstance(error_of(member.form, 1, handles[: member.rank]), UsageError)
    member.form(2, set(handles))  # ranks by the order of the handles
    assert dist.get_rank() == sorted(handles).index(handles[member.rank])
    member.check(3)
    dist.destroy_process_group()


@needs_reconfigure
@pytest.mark.parametrize("victim", [0, 2])
@on_survivors(3, has_stage=True)
def test_survivors_form_a_group_again_after_a_death(victim: int) -> None:
    member = Member("shoal")
    handles = member.handles()
    member.form(1, handles)
    member.check(3)
    member.stage.meet(member.rank, 3, "ready")
    if member.rank == victim:
        os.kill(os.getpid(), 9)
    assert isinstance(error_of(dist.all_reduce, torch.ones(1 << 20)), RuntimeError)
    member.form(2, [each for rank, each in enumerate(handles) if rank != victim])
    member.check(2)
    dist.barrier()
    dist.destroy_process_group()
