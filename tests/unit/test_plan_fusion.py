"""How long fusion buffers are: for which models, in which clusters, and who overrides it."""

import pytest

from shoal.average.sizes import fusion_bytes_for, fusion_bytes_from
from shoal.errors import UsageError
from shoal.plan import Planner, default_cluster
from shoal.plan.defaults import wire_of
from shoal.plan.fusion import LEAST_FUSION_BYTES, MOST_FUSION_BYTES, choose_fusion
from shoal.plan.quantities import bytes_of

MIB = 1 << 20
CLUSTERS = {
    "one rank": default_cluster([0]),
    "one host": default_cluster([0] * 4),
    "slow hosts": default_cluster(range(8), wire=wire_of(200)),
    "fast hosts": default_cluster(range(8), n_cores=16, wire=wire_of(25_000)),
    "hosts of 8": default_cluster([rank // 8 for rank in range(64)], n_cores=32),
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_larger_models_have_buffers_at_least_as_long(cluster: str) -> None:
    planner = Planner(CLUSTERS[cluster])
    lengths = [choose_fusion(n << 16, planner).n_bytes for n in (1, 16, 256, 4096, 65_536)]
    assert lengths == sorted(lengths)
    assert lengths[0] == LEAST_FUSION_BYTES
    assert lengths[-1] <= MOST_FUSION_BYTES


def test_slow_links_have_shorter_buffers_than_memory() -> None:
    slow, fast = (
        choose_fusion(100 * MIB, Planner(CLUSTERS[name])).n_bytes
        for name in ("slow hosts", "one host")
    )
    assert slow < fast


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("total", [2.01, 3.9, 4.1, 25, 1000])
def test_no_buffer_of_a_model_above_2_mib_is_too_short_for_servers(
    cluster: str, total: float
) -> None:
    n_bytes = int(total * MIB)
    longest = choose_fusion(n_bytes, Planner(CLUSTERS[cluster]), has_servers=True).n_bytes
    assert n_bytes / -(-n_bytes // longest) >= MIB


def test_the_reason_names_the_choice_and_what_was_next_best() -> None:
    fusion = choose_fusion(50 * MIB, Planner(CLUSTERS["slow hosts"]))
    assert fusion.why.startswith("50 MiB in buffers of 512 KiB leave ")
    assert ", of 1 MiB " in fusion.why


def test_the_environment_overrides_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(CLUSTERS["one host"])
    chosen = fusion_bytes_for(100 * MIB, planner, "here")
    assert chosen == choose_fusion(100 * MIB, planner).n_bytes
    monkeypatch.setenv("SHOAL_FUSION_BYTES", "12345")
    assert fusion_bytes_for(100 * MIB, planner, "here") == 12345


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("64", 64), ("512KiB", 524_288), ("25MiB", 26_214_400), ("1.5 MB", 1_500_000)],
)
def test_the_environment_writes_sizes_as_the_commands_do(text: str, n_bytes: int) -> None:
    assert fusion_bytes_from({"SHOAL_FUSION_BYTES": text}) == n_bytes


@pytest.mark.parametrize("text", ["-1", "1e6", "25M", "25Mb", "a lot"])
def test_what_is_no_length_is_refused_as_by_the_commands(text: str) -> None:
    with pytest.raises(UsageError) as of_command:
        bytes_of(text)
    with pytest.raises(UsageError) as refused:
        fusion_bytes_from({"SHOAL_FUSION_BYTES": text})
    assert str(refused.value) == f"SHOAL_FUSION_BYTES: {of_command.value}"


@pytest.mark.parametrize("text", ["0", "63", "2TiB", "9" * 20])
def test_a_length_that_no_buffer_can_have_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="64 B to 1 TiB"):
        fusion_bytes_from({"SHOAL_FUSION_BYTES": text})
