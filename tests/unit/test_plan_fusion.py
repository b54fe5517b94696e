"""The length of fusion buffers by model and cluster, and its override."""

import pytest
from unit.in_process import run_in_threads, run_well

from shoal.average import Averager
from shoal.errors import UsageError
from shoal.group.group import Group
from shoal.plan import Planner, default_cluster
from shoal.plan.defaults import wire_of
from shoal.plan.fusion import LEAST_FUSION_BYTES, MOST_FUSION_BYTES, choose_fusion

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


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("total", [2.01, 3.9, 4.1, 25, 1000])
def test_no_buffer_above_2_mib_is_too_short_for_servers(cluster: str, total: float) -> None:
    n_bytes = int(total * MIB)
    longest = choose_fusion(n_bytes, Planner(CLUSTERS[cluster]), has_servers=True).n_bytes
    assert n_bytes / -(-n_bytes // longest) >= MIB


def test_slow_links_use_shorter_buffers_than_memory_and_the_reason_names_the_next_best() -> None:
    slow, fast = (choose_fusion(50 * MIB, Planner(CLUSTERS[n])) for n in ("slow hosts", "one host"))
    assert slow.n_bytes < fast.n_bytes
    assert slow.why.startswith("50 MiB in buffers of 512 KiB leave ")
    assert ", of 1 MiB " in slow.why


def fusion_bytes_of(group: Group) -> int:
    return Averager(group, {"a": ((256,), "float32")}).fusion_bytes


def test_the_environment_overrides_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_well(fusion_bytes_of, 1) == [LEAST_FUSION_BYTES]
    for text, n_bytes in (("64", 64), ("512KiB", 524_288), ("1.5 MB", 1_500_000)):
        monkeypatch.setenv("SHOAL_FUSION_BYTES", text)
        assert run_well(fusion_bytes_of, 1) == [n_bytes]
    unreadable = dict.fromkeys(("-1", "25Mb", "a lot"), "SHOAL_FUSION_BYTES: cannot read the bytes")
    beyond = dict.fromkeys(("0", "63", "2TiB", "9" * 20), "64 B to 1 TiB")
    for text, words in (unreadable | beyond).items():
        monkeypatch.setenv("SHOAL_FUSION_BYTES", text)
        (error,) = run_in_threads(fusion_bytes_of, 1)
        assert isinstance(error, UsageError)
        assert words in str(error)
