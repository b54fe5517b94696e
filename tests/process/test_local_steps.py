"""`shoal.average.DiLoCo` over real ranks, compared with the algorithm in one process."""

import functools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from process.arrays import digest
from process.examples import names_of_page
from process.local_steps import Case, check, expected, local_step, start, steps, weight_of
from process.ranks import on_ranks, on_survivors, run_survivors
from process.stage import Stage, die
from unit.in_process import in_ranks
from wires import rounded

import shoal
from shoal.average import Averager, ChunkTopK, DiLoCo, ErrorFeedback, OuterSGD
from shoal.errors import PeerLost, ShoalError, UsageError

CASES = [
    Case(every=4),
    Case(every=3, lr=1.0, momentum=0.0),
    Case(every=4, nesterov=False, weighted=True),
    Case(every=6, fragments=3, delay=1, alpha=0.5),
    Case(every=5, fragments=2, delay=4, alpha=0.25, weighted=True),
]
N_STEPS = 23


@in_ranks(2)
def test_parameters_of_bfloat16_are_averaged(group: shoal.Group) -> None:
    from ml_dtypes import bfloat16

    weights = {"w": np.ones(5, bfloat16)}
    diloco = DiLoCo(group, weights, OuterSGD(lr=1.0, momentum=0.5), every=1)
    for _ in range(2):
        weights["w"] -= bfloat16(0.25 * (group.rank + 1))
        diloco.step()
    diloco.load_state_dict(diloco.state_dict())
    # Nesterov steps with gradients of 0.375: 1.5 times that, then 1.75 times.
    assert np.asarray(weights["w"], np.float32).tolist() == [1 - 3.25 * 0.375] * 5


@on_ranks(2)
def test_unknown_options_and_weighted_float16_are_refused() -> None:
    from ml_dtypes import bfloat16

    whole, half, brain = (np.ones(5, kind) for kind in (np.float32, np.float16, bfloat16))
    with shoal.init(wire="fp16") as group:
        narrow = ErrorFeedback("fp16")
        for one, compress in ((whole, None), (whole, "fp16"), (whole, narrow), (half, "identity")):
            with pytest.raises(UsageError, match="weighted=True cannot be used with float16"):
                DiLoCo(group, {"w": one}, every=1, compress=compress, weighted=True)
        with pytest.raises(UsageError, match="a quorum cannot be used with float16"):
            DiLoCo(group, {"w": half}, every=1, quorum=1)
        with pytest.raises(TypeError, match="no option 'quorm' of local steps: pass one of every"):
            DiLoCo(group, {"w": whole}, every=1, quorm=2)
        with pytest.raises(UsageError, match="every must be a whole number of steps"):
            DiLoCo(group, {"w": whole})
        DiLoCo(group, {"w": half}, every=1)
        DiLoCo(group, {"w": brain}, every=1, weighted=True)  # no codec rounds it
        for compress in ("bf16", "identity", ErrorFeedback("mxfp8")):
            DiLoCo(group, {"w": whole}, every=1, weighted=True, compress=compress)


def train_cases(group: shoal.Group) -> list[tuple[str, str]]:
    digests = []
    for case in CASES:
        weights, diloco = start(group, case)
        steps(diloco, weights, group.rank, range(1, N_STEPS + 1), case)
        wanted = expected(case, group.size, N_STEPS)
        check(diloco.parameters, wanted.shared)
        check(weights, wanted.locals[group.rank])
        digests.append((digest(*diloco.parameters.values()), digest(*weights.values())))
        diloco.sync()
        assert digest(*weights.values()) == digest(*diloco.parameters.values())
        has_left = any(any(weights) for weights in wanted.weights.values())
        assert diloco.rounds == wanted.n_sent + case.fragments * has_left
    return digests


@on_ranks(3)
def test_ranks_train_as_in_the_papers_with_the_same_global_bits_in_every_run() -> list[str]:
    with shoal.init() as group:
        first = train_cases(group)
        assert train_cases(group) == first
    return [shared for shared, _ in first]


@on_ranks(2)
def test_the_page_about_local_steps_runs_unchanged() -> None:
    shared, momentum = 1.0, 0.0
    for n_steps in (20, 20, 10):
        ends = [rank + (shared - rank) * 0.9**n_steps for rank in (0, 1)]
        gradient = shared - sum(ends) / 2
        momentum = 0.9 * momentum + gradient
        shared -= 0.7 * (gradient + 0.9 * momentum)
    weights = names_of_page("local_steps.md", 1)["weights"].values()
    assert [value.flat[0] for value in weights] == [pytest.approx(shared, rel=1e-5)] * 2


@in_ranks(2)
def test_a_run_from_a_saved_state_has_the_bits_of_an_uninterrupted_one(group: shoal.Group) -> None:
    for case in CASES:
        weights, diloco = start(group, case)
        steps(diloco, weights, group.rank, range(1, 8), case)
        whole = pickle.dumps((weights, diloco.state_dict()))
        steps(diloco, weights, group.rank, range(8, 18), case)
        others, loaded = start(group, case)
        steps(loaded, others, group.rank, range(1, 5), case)
        saved, state = pickle.loads(whole)
        for name, value in saved.items():
            others[name][...] = value
        loaded.load_state_dict(state)
        steps(loaded, others, group.rank, range(8, 18), case)
        check(loaded.parameters, expected(case, group.size, 17).shared)
        assert digest(*loaded.parameters.values()) == digest(*diloco.parameters.values())
        assert digest(*others.values()) == digest(*weights.values())
    with pytest.raises(UsageError, match="1 fragments, but this object has 2"):
        start(group, CASES[-1])[1].load_state_dict(start(group, CASES[0])[1].state_dict())
    ahead, late = start(group, CASES[0])[1], start(group, CASES[0])[1]
    steps(ahead, {}, group.rank, range(4), CASES[0])
    with pytest.raises(UsageError, match=r"rounds .*\(1, 1\) on rank 0.*\(0, 0\) on rank 1"):
        late.load_state_dict((late if group.rank else ahead).state_dict())


@pytest.mark.parametrize(
    ("case", "dies_in"),
    # In the last case the others have sent their parts and train on before they notice the loss.
    [(CASES[0], 9), (CASES[2], 11), (Case(every=4, delay=2, alpha=0.5), 8)],
    ids=["between rounds", "in a round", "streaming"],
)
@on_survivors(3, 1, has_stage=True)
def test_survivors_finish_the_round_in_which_a_rank_was_lost(case: Case, dies_in: int) -> str:
    stage = Stage.from_environment()
    with shoal.init() as group:
        rank = group.rank
        weights, diloco = start(group, case)
        n_lost = 0
        for number in range(1, N_STEPS + 1):
            if number == dies_in:
                stage.meet(rank, 3, "all have the rounds before", victim=1)
            local_step(weights, rank)
            try:
                diloco.step(weight_of(rank, number) if case.weighted else None)
            except PeerLost:
                n_lost += 1
                diloco.regroup(group.shrink())
        wanted = expected(case, 3, N_STEPS, [(1, dies_in)])
        check(diloco.parameters, wanted.shared)
        check(weights, wanted.locals[rank])
        assert n_lost == 1
        return digest(*diloco.parameters.values())


STREAM = Case(every=4, fragments=2, delay=1, alpha=0.5)


@on_survivors(3, 2, has_stage=True)
def test_a_round_finished_on_one_rank_counts_on_all_survivors() -> str:
    """Rank 2 is lost after rank 0 applied a round that rank 1 only sent."""
    stage = Stage.from_environment()
    with shoal.init() as group:
        rank = group.rank
        weights, diloco = start(group, STREAM)
        steps(diloco, weights, rank, range(1, 3), STREAM)
        if rank == 0:
            steps(diloco, weights, rank, range(3, 4), STREAM)
            assert diloco.rounds == 1
        stage.meet(rank, 3, "rank 0 has finished a round", victim=2)
        assert diloco.rounds == (rank == 0)
        diloco.regroup(group.shrink())
        assert diloco.rounds == 1
        steps(diloco, weights, rank, range(4 if rank == 0 else 3, 20), STREAM)
        taken_up = digest(*diloco.parameters.values())
        diloco.sync()
        assert digest(*diloco.parameters.values()) == digest(*weights.values())
        return taken_up


class Tally(OuterSGD):
    """Steps of a rank that each add 1 to its elements: n steps add n, with the weight n.

    As outer optimizer it applies averages unchanged, and records each rank's contribution.
    """

    def __init__(
        self, group: shoal.Group, fragments: int = 1, quorum: int = 2, grace: float = 0.0
    ) -> None:
        super().__init__(lr=1.0, momentum=0.0)
        self.weights = {name: np.zeros(group.size, np.float64) for name in "abc"[:fragments]}
        self.rank = group.rank
        options: Any = {"fragments": fragments, "quorum": quorum, "grace": grace}
        self.diloco = DiLoCo(group, self.weights, self, every=4, **options)
        self.given: list[Any] = []  # by round and rank
        self.folded = 0.0
        self.n_steps = 0

    def train(self) -> None:
        for weight in self.weights.values():
            weight[self.rank] += 1
        self.n_steps += 1
        self.diloco.step()

    def step(self, name: str, parameter: Any, gradient: Any) -> None:
        total, self.folded = self.diloco.folded - self.folded, self.diloco.folded
        self.given.append(np.sqrt(-gradient * total))  # n steps moved its element by n * n / total
        super().step(name, parameter, gradient)

    def check(self, group: shoal.Group) -> int:
        """Check that all steps of these ranks count once in each fragment; return their number."""
        made = np.empty(group.size, np.int64)
        group.all_gather(made, np.array([len(self.weights) * self.n_steps]))
        given = sum(self.given)[list(group.view.ranks)]
        np.testing.assert_allclose(given, made, rtol=1e-9)
        return int(made.sum())


N_ROUNDS = 5


@on_ranks(3, has_stage=True)
def test_with_a_quorum_every_step_of_every_rank_counts_once_with_its_weight() -> None:
    """Ranks 0 and 1 make rounds; rank 2 makes one step while they make at least four."""
    stage = Stage.from_environment()
    with shoal.init() as group:
        tally = Tally(group)
        for number in range(N_ROUNDS):
            if group.rank == 2:
                for fast in (0, 1):
                    stage.await_cue(f"rank {fast} is ready for round {number}")
            first = tally.n_steps
            while tally.diloco.rounds == number:
                tally.train()
                if tally.n_steps - first >= 4:
                    stage.cue(f"rank {group.rank} is ready for round {number}")
            stage.cue(f"rank {group.rank} is ready for round {number}")
        tally.diloco.sync()
        assert tally.diloco.folded == tally.check(group)


@pytest.mark.parametrize(
    ("fragments", "quorum", "grace"), [(2, 2, 0.0), (3, 1, 0.0), (3, 3, 0.001), (2, 9, 0.0)]
)
@in_ranks(3)
def test_fragments_and_quorums_of_any_size_count_every_step_once(
    group: shoal.Group, fragments: int, quorum: int, grace: float
) -> None:
    tally = Tally(group, fragments, quorum, grace)
    while tally.diloco.rounds < 3 * N_ROUNDS:
        tally.train()
    tally.diloco.sync()
    assert tally.diloco.folded == tally.check(group)
    for value in tally.weights.values():
        of_rank_0 = value.copy()
        group.broadcast(of_rank_0)
        assert of_rank_0.tobytes() == value.tobytes()


@on_ranks(2, has_stage=True)
def test_no_step_waits_for_a_rank_that_syncs() -> int:
    """Rank 0 syncs while its first round is in flight, after rank 1 began the second."""
    stage = Stage.from_environment()
    with shoal.init(timeout_s=20) as group:
        weights = {"a": np.full(64, group.rank, np.float32)}
        diloco = DiLoCo(group, weights, OuterSGD(lr=1.0, momentum=0.0), every=1, quorum=1)
        if group.rank == 0:
            diloco.step()
            stage.cue("rank 0 has sent a round")
        else:
            stage.await_cue("rank 0 has sent a round")
            while diloco.rounds == 0:
                diloco.step()
            diloco.step()  # begins the second round, unless one of these steps did
        diloco.sync()
        assert diloco.rounds >= 2
        return diloco.rounds


def lose_one_of_a_quorum() -> tuple[Any, int]:
    with shoal.init() as group:
        tally, n_lost = Tally(group), 0
        while not (n_lost and tally.diloco.rounds >= N_ROUNDS):
            if group.rank == 1 and tally.diloco.rounds >= 2:
                die()
            try:
                tally.train()
            except PeerLost:
                n_lost += 1
                tally.diloco.regroup(group.shrink())
        tally.diloco.sync()
        return tally.given, tally.n_steps


def test_steps_of_survivors_count_once_after_a_rank_is_lost() -> None:
    (first, n_first), (last, n_last) = run_survivors(lose_one_of_a_quorum, 3, 1)
    # A rank that took over a round has not seen the contributions to it.
    given = sum(max(first, last, key=len))
    np.testing.assert_allclose(given[[0, 2]], [n_first, n_last], rtol=1e-9)


@on_survivors(3, 1, has_stage=True)
def test_all_survivors_make_a_round_that_was_opened_with_a_lost_rank() -> None:
    """Rank 1 is lost after ranks 1 and 2 sent a round that rank 0 has not seen open."""
    stage = Stage.from_environment()
    with shoal.init() as group:
        tally = Tally(group)
        while group.rank > 0 and tally.diloco._n_sent == 0:
            tally.train()
        stage.meet(group.rank, 3, "a round is open", victim=1)
        rest = group.shrink()
        tally.diloco.regroup(rest)
        while tally.diloco.rounds == 0:
            tally.train()
        tally.diloco.sync()
        tally.check(rest)


@on_survivors(3, 2)
def test_survivors_finish_a_sync_that_a_lost_rank_interrupted() -> str:
    """Rank 2 is lost after rank 1 sent the round of a `sync` and before rank 0 did."""
    case = CASES[0]
    with shoal.init(timeout_s=10.0) as group:
        weights, diloco = start(group, case)
        steps(diloco, weights, group.rank, range(1, 6), case)
        counts = diloco._counts

        def interrupted(own: shoal.Group) -> Any:
            found = counts(own)
            if group.rank == 2:
                die()
            own.barrier(name="the survivors alone")
            return found

        if group.rank != 1:
            diloco._counts = interrupted  # type: ignore[method-assign]
        with pytest.raises(PeerLost):
            diloco.sync()
        diloco._counts = counts  # type: ignore[method-assign]
        diloco.regroup(group.shrink())
        diloco.sync()
        assert digest(*weights.values()) == digest(*diloco.parameters.values())
        assert diloco.rounds == 2
        return digest(*weights.values())


@in_ranks(2)
def test_an_impossible_length_of_a_state_is_refused_on_every_rank(group: shoal.Group) -> None:
    weights, diloco = start(group, Case(every=4))
    own: Any = diloco._own
    broadcast = own.broadcast
    for length in (-1.0, math.nan, math.inf, 2.0**60):

        def damage(data: Any, root: int, length: float = length, **how: Any) -> None:
            if group.rank == root and how["name"] == "length of a fragment":
                data[0] = length
            broadcast(data, root, **how)

        own.broadcast = damage
        with pytest.raises(ShoalError, match=r"rank 0 announced .* the state of fragment 0"):
            diloco._share(0, 0)
    own.broadcast = broadcast
    steps(diloco, weights, group.rank, range(1, 5), Case(every=4))
    check(diloco.parameters, expected(Case(every=4), 2, 4).shared)


# Residuals in rounds of local steps: each counts once, even if a round fails.


start_rounded = functools.partial(start, compress=ErrorFeedback("bf16"))


def residuals(diloco: DiLoCo, fragment: int = 0) -> dict[str, Any]:
    found = diloco.state_dict()["rounding"][fragment]["residuals"]
    return {name: value.tobytes() for name, value in found.items()}


def lost(given: dict[str, Any]) -> dict[str, Any]:
    """Return the rounding errors of values sent without a residual."""
    return {name: (one - rounded("bf16", one)).tobytes() for name, one in given.items()}


@pytest.mark.parametrize("when", ["rank 0 has finished the round", "the average is saved"])
@on_survivors(3, 2, has_stage=True)
def test_a_residual_counts_once_when_a_rank_is_lost(when: str) -> None:
    with shoal.init() as group:
        rank = group.rank
        weights, diloco = start_rounded(group, STREAM)
        steps(diloco, weights, rank, range(2), STREAM)
        given = {name: diloco.parameters[name] - weights[name] for name in ("wide", "one")}
        if when == "rank 0 has finished the round" and rank == 0:
            steps(diloco, weights, rank, range(1), STREAM)
        if when == "the average is saved":
            diloco.state_dict()
        Stage.from_environment().meet(rank, 3, when, victim=2)
        diloco.regroup(group.shrink())
        if diloco.rounds == 0:
            steps(diloco, weights, rank, range(1), STREAM)
        assert diloco.rounds == 1
        assert residuals(diloco) == lost(given)


@in_ranks(2)
def test_a_round_without_weights_does_not_change_residuals(group: shoal.Group) -> None:
    case = Case(every=1, weighted=True)
    weights, diloco = start_rounded(group, case)
    for weight in (1.0, 0.0):
        before = residuals(diloco)
        local_step(weights, group.rank)
        diloco.step(weight)
    assert any(map(any, before.values()))
    assert residuals(diloco) == before
    # The round counts here as on a rank that takes it over.
    assert diloco.state_dict()["rounding"][0]["n_steps"] == 2
    diloco.close()
    compress = ErrorFeedback("bf16")
    averager = Averager(group, {"a": ((3,), "float32")}, compress=compress, weighted=True)
    for weight in (1.0, 0.0):
        averager.begin(weight)["a"][...] = 1 / 3
        averager.ready("a")
        if weight:
            averager.wait()
        else:
            kept = averager.state_dict()["residuals"]["a"]
            with pytest.raises(UsageError, match="weights of all ranks are 0"):
                averager.wait()
    assert kept.any()
    assert averager.state_dict()["residuals"]["a"].tobytes() == kept.tobytes()


@in_ranks(2)
def test_residuals_hold_unweighted_values(group: shoal.Group) -> None:
    """Train by steps of weight 1024, whose products are exact, and by steps without weights.

    A round of one step follows rounds of four, and one of four follows it.
    """
    plain, case = Case(every=4), Case(every=4, weighted=True)
    found = []
    for one, weight in ((plain, None), (case, 1024.0)):
        weights, diloco = start_rounded(group, one)
        for n_steps in (9, 4):
            for _ in range(n_steps):
                local_step(weights, group.rank)
                diloco.step(weight)
            diloco.sync()
        assert diloco.rounds == 4
        given = diloco.state_dict()["rounding"][0]["residuals"]
        found.append({n: v.tobytes() for n, v in {**diloco.parameters, **weights}.items()})
        found[-1] |= {f"residual of {name}": one.tobytes() for name, one in given.items()}
    assert found[0] == found[1]


@in_ranks(2)
def test_a_rank_without_weight_keeps_its_residual(group: shoal.Group) -> None:
    weights, diloco = start_rounded(group, Case(every=1, weighted=True))
    for weight in (1.0, float(group.rank)):
        before = residuals(diloco)
        local_step(weights, group.rank)
        diloco.step(weight)
    assert any(map(any, before.values()))
    assert (residuals(diloco) == before) == (group.rank == 0)


@in_ranks(1)
def test_top_k_is_refused_where_rounds_have_different_weights(group: shoal.Group) -> None:
    for more in ({"weighted": True}, {"quorum": 1}):
        options: Any = {"every": 1, "compress": ChunkTopK(), **more}
        with pytest.raises(UsageError, match="cannot be used with weights or a quorum"):
            DiLoCo(group, {"w": np.ones(3, np.float32)}, **options)
