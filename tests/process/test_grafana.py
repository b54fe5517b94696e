"""The queries of `deploy/grafana.json`, answered by a real Prometheus that scrapes real ranks."""

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process.ranks import free_port, start_ranks
from process.stage import Stage, pretend_hosts

import shoal
from shoal.state import monitor
from shoal.state.prometheus import text_of

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())
PROMETHEUS = shutil.which("prometheus") or ""
PERIOD_S = 1
SHARE, WAIT = "Share of time in calls", "Longest wait for each rank"
ENDED, BYTES = "Calls ended, by collective", "Bytes of calls, by collective"
DEADLINE_S = 60

pytestmark = [
    pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: half a minute"),
    pytest.mark.skipif(not PROMETHEUS, reason="no prometheus on the PATH: install it"),
]


def sum_until_the_end() -> None:
    """Sum in a loop; once the test has seen rates, rank 1 is late until it has seen waits."""
    stage = Stage.from_environment()
    pretend_hosts(1)
    with shoal.init() as group:
        n_seen = np.zeros(25_000, np.float32)
        while not n_seen[0]:
            if group.rank == 0:
                n_seen[0] = stage.store.try_get("cue/rates") is not None
            group.all_reduce(n_seen)
        if group.rank == 1:
            stage.await_cue("waits")
        group.all_reduce(n_seen)


@contextlib.contextmanager
def exported() -> Iterator[int]:
    """Serve what `shoal top --prometheus` prints, as node_exporter does, and yield the port."""

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text_of(monitor.read_all()).encode())

        def log_message(self, *_what: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@contextlib.contextmanager
def prometheus(target: int, folder: Path) -> Iterator[str]:
    """Run Prometheus on loopback, and yield the address of its API."""
    jobs = [{"job_name": "node", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}]
    every = {"scrape_interval": f"{PERIOD_S}s", "scrape_timeout": f"{PERIOD_S}s"}
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": every, "scrape_configs": jobs}))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    command = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        command.append(f"--web.listen-address={address}")
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}/api/v1"
    finally:
        server.kill()
        server.wait()


def ask(url: str, **arguments: str) -> Any:
    """Return an answer of the API that is not empty; an error of the query ends the test."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(arguments)}") as answer:
                data = json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code != 503:  # it is still starting
                raise AssertionError((arguments, error.read())) from None
            continue
        except OSError:
            continue
        if found := data["result"] if isinstance(data, dict) else data:
            return found
        os.sched_yield()
    raise AssertionError((url, arguments, "remains empty"))


def as_grafana_does(query: str) -> str:
    for name in ("comm_id", "hostname"):
        query = query.replace(f"${name}", ".*")
    query = query.replace("$__rate_interval", f"{4 * PERIOD_S}s")
    assert "$" not in query
    return query


def test_all_panels_show_data_of_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = {
        (panel["title"], target["legendFormat"]): as_grafana_does(target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }
    found = {}
    with contextlib.ExitStack() as stack:
        # NOT tmp_path: the path of a socket has at most 107 characters.
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-", dir="/tmp"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.setattr(monitor, "_folders", lambda: [Path(runtime, "shoal")])
        stage = stack.enter_context(Stage())
        env = {**stage.env, "XDG_RUNTIME_DIR": runtime, "SHOAL_MONITOR": "1"}
        ranks = stack.enter_context(start_ranks(sum_until_the_end, 2, env=env))
        url = stack.enter_context(prometheus(stack.enter_context(exported()), tmp_path))
        for one in DASHBOARD["templating"]["list"][1:]:
            series = as_grafana_does(one["query"]).removeprefix("label_values(").removesuffix(")")
            match, _, label = series.rpartition(", ")
            assert ask(f"{url}/label/{label}/values", **{"match[]": match})
        for (title, legend), query in queries.items():
            if title != WAIT:
                found[title, legend] = ask(f"{url}/query", query=query)
        ended, n_bytes = (queries[title, "{{collective}}"] for title in (ENDED, BYTES))
        ratio = ask(f"{url}/query", query=f"({n_bytes}) / ({ended})")
        stage.cue("rates")
        ((_, query),) = ((key, query) for key, query in queries.items() if key[0] == WAIT)
        wait = ask(f"{url}/query", query=f"{query} > 2")
        stage.cue("waits")
        ranks.wait()
    assert [line["metric"] for line in ratio] == [{"collective": "AllReduce"}]
    assert float(ratio[0]["value"][1]) == pytest.approx(100_000)
    assert [line["metric"]["peer_rank"] for line in wait] == ["1"]
    shares = [float(line["value"][1]) for line in found[SHARE, "rank {{rank}} on {{hostname}}"]]
    assert len(shares) == 2
    assert all(0 < share <= 1.01 for share in shares)
    for direction, least in (("out of", 50_000), ("into", -50_000)):
        (host,) = found["Between hosts", f"{direction} {{{{hostname}}}}"]
        assert float(host["value"][1]) / least > 1
