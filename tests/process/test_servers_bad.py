"""What servers and workers are told wrong: a clear error where somebody can act, and no harm."""

import time
from pathlib import Path
from typing import Any

from process.ranks import run_ranks
from process.serving import (
    N_WORKERS,
    Lines,
    ServerProcess,
    await_that,
    job_env,
    new_key,
    served_group,
    status_of,
    sums,
)

import shoal
from shoal.group.pool import view as pool_view
from shoal.group.pool.addresses import Address
from shoal.group.pool.protocol import Reserve
from shoal.group.pool.watch import Watch
from shoal.rendezvous import job_key
from shoal.shapes import Shape


def ask_for_what_cannot_be_served() -> list[Any]:
    """Rank 0 announces a plan that nobody can make; then it comes to its senses."""
    lines, right_pack = Lines(), pool_view.pack

    def pack(shape: Shape) -> bytes:
        return right_pack(shape._replace(algorithm="no such algorithm"))

    pool_view.pack = pack
    right = []
    with served_group() as group:
        for number in range(2):
            pool: Any = group.pool  # type: ignore[attr-defined]
            view = pool.view
            right.append(sums(group, number, 1_000_003))
            if number == 0:
                pool_view.pack = right_pack
                await_that(lambda: pool.view not in (None, view), "the next view")  # noqa: B023
        shared = pool.view.n_shared
    return [right, shared > 0, lines.told]


def test_a_server_that_is_asked_for_an_impossible_plan_says_so_to_the_workers(
    tmp_path: Path,
) -> None:
    keys = [new_key(tmp_path, name) for name in ("one", "two")]
    with ServerProcess(*keys) as server:
        found = run_ranks(
            ask_for_what_cannot_be_served, N_WORKERS, env=job_env(keys[0], server.address)
        )
        assert status_of(keys[1], server.address)["n_jobs"] <= 1  # it lives
        assert any("cannot serve what worker 0 announced" in line for line in server.log)
    for right, is_shared, _ in found:
        assert right == [True, True]
        assert is_shared
    told = [line for line in found[0][2] if line.startswith("view 1 of the servers has ended: ")]
    assert len(told) == 1
    assert "server 3 cannot serve what worker 0 announced: " in told[0]
    assert "no such algorithm" in told[0]


def why_not(key: Path, *addresses: str, version: str = shoal.__version__) -> dict[str, str]:
    """What a job's log would say of servers, once it has heard of all."""
    named = [Address(*address.rsplit(":", 1)) for address in addresses]
    named = [Address(host, int(port)) for host, port in named]
    secret = job_key({"SHOAL_KEY_FILE": str(key)})
    assert secret is not None
    watch = Watch(named, secret, Reserve(version, "a job", N_WORKERS), lambda: None)
    try:
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            told = {str(address): why for address, why in watch.trouble().items()}
            n_known = len(watch.ready()) + len(told)
            if n_known == len(named) and "has not answered yet" not in told.values():
                return told
            time.sleep(0.01)
        raise AssertionError(told)
    finally:
        watch.close()


def test_whoever_a_server_will_not_serve_is_told_why_in_the_log_of_the_job(tmp_path: Path) -> None:
    keys = [new_key(tmp_path, name) for name in ("one", "two")]
    with ServerProcess(*keys, more=["--max-jobs", "1"]) as server:
        own, port = server.address, server.port
        assert why_not(keys[0], own, f"localhost:{port}") == {
            f"localhost:{port}": f"is the same server as {own}: name it once"
        }
        assert why_not(keys[0], own, version="0.0.1") == {
            own: f"refuses: it runs shoal {shoal.__version__}, and the workers 0.0.1: install the "
            "same on all"
        }
        secret = job_key({"SHOAL_KEY_FILE": str(keys[0])})
        assert secret is not None
        where = [Address("127.0.0.1", port)]
        holder = Watch(where, secret, Reserve(shoal.__version__, "one", 3), lambda: None)
        try:
            await_that(holder.ready, "the server to take the first job")
            assert why_not(keys[1], own) == {
                own: "refuses: it serves 1 job, the most that --max-jobs allows"
            }
        finally:
            holder.close()
