"""Prometheus' text format, and `shoal top`'s metrics in it, labelled like NCCL Inspector's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from shoal.state.remote import DAMAGED

_METRICS: Final = {
    "shoal_calls_in_flight": ("gauge", "Calls that have not ended."),
    "shoal_wait_seconds": ("gauge", "How long a call has waited for another rank, at most."),
    "shoal_calls_total": ("counter", "Calls begun."),
    "shoal_collectives_total": ("counter", "Calls that have ended, by collective."),
    "shoal_collective_bytes_total": ("counter", "Bytes of the buffers of these calls."),
    "shoal_counted_seconds_total": ("counter", "Time in which calls are counted."),
    "shoal_communication_seconds_total": ("counter", "Time in which a call was in flight."),
    "shoal_stalls_total": ("counter", "Steps that could not continue, by cause."),
    "shoal_link_sent_bytes_total": ("counter", "Bytes sent to another rank."),
    "shoal_link_received_bytes_total": ("counter", "Bytes received from another rank."),
}
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def text_of(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the numbers of all ranks in Prometheus' text format; skips damaged documents."""
    return exposition(_METRICS, _samples_of(documents))


def exposition(
    metrics: Mapping[str, tuple[str, str]],
    samples: Iterable[tuple[str, float, Mapping[str, object]]],
) -> str:
    """Return metrics in Prometheus' text format; metrics without a sample are left out.

    Args:
        metrics: the type and the help text, by the metric's name.
        samples: a metric's name, a value, and its labels.
    """
    lines: dict[str, list[str]] = {name: [] for name in metrics}
    for name, value, labels in samples:
        shown = ",".join(f'{key}="{_label(of)}"' for key, of in labels.items())
        lines[name].append(f"{name}{{{shown}}} {value}\n")
    return "".join(
        f"# HELP {name} {what}\n# TYPE {name} {kind}\n{''.join(lines[name])}"
        for name, (kind, what) in metrics.items()
        if lines[name]
    )


def _samples_of(
    documents: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    for world in (world for world in documents if world.get("is_readable")):
        with contextlib.suppress(*DAMAGED):
            own = {
                "comm_id": f"0x{world['world']}",
                "hostname": world["host"],
                "rank": world["rank"],
                "slurm_job_id": world["slurm_job_id"],
                "pid": world["pid"],
                "n_ranks": world["size"],
                "n_nodes": world["n_hosts"],
            }
            samples = [(name, value + 0, own | labels) for name, value, labels in _samples(world)]
            yield from samples


def _label(value: object) -> str:
    """Return a label's value, escaped, and with "?" for characters that control a terminal."""
    text = str(value).translate(_ESCAPES)
    return "".join(char if char.isprintable() else "?" for char in text)


def _samples(world: Mapping[str, Any]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    yield "shoal_calls_in_flight", len(world["in_flight"]), {}
    waits = [wait for call in world["in_flight"] for wait in call["waits"]]
    for rank, host in sorted({(wait["rank"], wait["host"]) for wait in waits}):
        since_s = max(wait["since_s"] for wait in waits if wait["rank"] == rank)
        yield "shoal_wait_seconds", since_s, {"peer_rank": rank, "peer_hostname": host}
    yield "shoal_calls_total", world["n_calls"], {}
    for collective, (n_calls, n_bytes) in world["ended"].items():
        labels = {"collective": collective.title().replace("_", "")}  # as NCCL's: AllReduce
        yield "shoal_collectives_total", n_calls, labels
        yield "shoal_collective_bytes_total", n_bytes, labels
    yield "shoal_counted_seconds_total", world["counted_s"], {}
    yield "shoal_communication_seconds_total", world["busy_s"], {}
    for cause, n in world["stalls"].items():
        yield "shoal_stalls_total", n, {"cause": cause}
    for link in world["links"]:
        peer = {"peer_rank": link["rank"], "peer_hostname": link["host"], "link": link["kind"]}
        yield "shoal_link_sent_bytes_total", link["bytes_out"], peer
        yield "shoal_link_received_bytes_total", link["bytes_in"], peer
