"""Names of all-reduces that are sharded by weights; peers send them too."""

import pytest

from shoal.errors import UsageError
from shoal.schedule import find
from shoal.schedule.weights import Weights, parse


def test_weights_have_one_name_that_parses_to_them() -> None:
    for weights, part, name in (
        (Weights((1,) * 8, (3,) * 4), "", "sharded[8*1|4*3]"),
        (Weights((1,) * 8, (3,) * 4), "servers", "sharded[8*1|4*3].servers"),
        (Weights((2,) * 8, (6,) * 4), "workers", "sharded[8*1|4*3].workers"),
        (Weights((1, 2, 2, 0)), "", "sharded[1,2*2,0|]"),
        (Weights((0, 0), (5, 10)), "servers", "sharded[2*0|1,2].servers"),
        (Weights((1,) * 4096, (7,) * 4096), "", "sharded[4096*1|4096*7]"),
    ):
        assert weights.name(part) == name
        assert parse(name) == (weights.reduced, part)
        assert parse("sharded[1,1,2|3,3]") == parse("sharded[2*1,1*2|2*3]")


def test_an_invalid_name_is_refused_with_the_reason() -> None:
    forms = ["sharded[8*1]", "sharded[8*1|4*3].both", "sharded[8*1|4*3]/ring", "sharded[8*-1|]"]
    forms += ["sharded[8*1.5|]", "sharded[|4*3]", "sharded[\u0663*1|]", "sharded[8*1|4*3]\n"]
    weights = ["8*1,|", "1|2**3", "0*1|1", "1|12345678", "12345*1|"]
    for name, why in (
        *dict.fromkeys(forms, "write sharded[8*1|4*3]").items(),
        *((f"sharded[{one}]", "cannot read the weights") for one in weights),
        ("sharded[4097*1|]", "4097 workers; the limit is 4096"),
        ("sharded[1|4000*1,97*1]", "4097 servers; the limit is 4096"),
        ("sharded[1048577|]", "a weight of 1048577 among the workers"),
        ("sharded[4*0|2*0]", "all weights are 0"),
        ("sharded[4*1|].servers", "the servers have no part"),
        ("sharded[4*1|2*0].servers", "the servers have no part"),
        ("sharded[4*0|2*1].workers", "the workers have no part"),
        ("sharded[" + "1," * 2048 + "1|]", "the name has 4107 B; the limit is 4096 B"),
        ("sharded[" + ",".join(["9999*1"] * 580) + "|]", "5799420 workers"),
        ("sharded[1\n\x1b[2J|]", ""),
        ("sharded[\n\x1b[2J" + "1," * 4096, ""),
    ):
        with pytest.raises(UsageError) as caught:
            find("all_reduce", name)
        assert why in str(caught.value)
        assert len(str(caught.value)) < 300
        assert str(caught.value).isprintable()
    for collective, name in (("reduce", "sharded[2*1|]"), ("all_reduce", "ring/sharded[2*1|]")):
        with pytest.raises(UsageError, match="no algorithm"):
            find(collective, name)


def test_a_name_must_fit_the_size_of_the_group() -> None:
    whole, servers, workers = (
        find("all_reduce", f"sharded[4*1|2*3]{part}") for part in ("", ".servers", ".workers")
    )
    for algorithm, size in ((whole, 4), (servers, 5), (workers, 6)):
        for ask in (
            lambda algorithm=algorithm, size=size: algorithm.n_chunks(size),
            lambda algorithm=algorithm, size=size: algorithm.scratch(0, size),
            lambda algorithm=algorithm, size=size: list(algorithm.steps(0, size)),
            lambda algorithm=algorithm, size=size: algorithm.fitted(1 << 20, size).n_chunks(size),
        ):
            with pytest.raises(UsageError, match=f"is for 4 workers.*not for a group of {size}"):
                ask()
