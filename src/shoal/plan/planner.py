"""The planner of a group: chooses by its cluster, the settings and measured times."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from shoal.codec import Codec
from shoal.errors import UsageError
from shoal.plan.channels import n_lanes
from shoal.plan.cluster import Cluster, numbered
from shoal.plan.defaults import default_cluster
from shoal.plan.settings import Forced
from shoal.plan.text import show_bytes

if TYPE_CHECKING:
    from shoal.plan.choose import Choice
    from shoal.plan.tuning import Tuning

_LOG: Final = logging.getLogger("shoal")


def size_class(n_bytes: int) -> int:
    """Return the size that a choice is made for: the next power of two, so choices are few."""
    return 1 << max(0, n_bytes - 1).bit_length() if n_bytes else 0


class Planner:
    """Chooses the algorithms of one group, only by its arguments, so equally on all ranks.

    Args:
        forced: the algorithms that `SHOAL_ALGO` names.
        tuning: times measured on this cluster; times of another cluster are ignored.
        n_channels: the channels between hosts, which large calls are cut over.
        title: the name of the group in the log.
        level: the level of the log lines that show choices.
    """

    def __init__(
        self,
        cluster: Cluster,
        forced: Forced | None = None,
        tuning: Tuning | None = None,
        *,
        n_channels: int = 1,
        title: str = "",
        level: int = logging.DEBUG,
    ) -> None:
        self.cluster = cluster
        self.n_channels = n_channels
        self.forced = forced or Forced()
        self.tuning = tuning if tuning is not None and tuning.hosts == cluster.hosts else None
        self._title = title
        self._level = level
        self._choices: dict[tuple[str, int, bool, Codec], Choice] = {}
        self._in_table: set[tuple[str, int, bool, Codec]] = set()
        self._warned: set[tuple[str, bool]] = set()  # shared with subgroups

    def choose(
        self,
        collective: str,
        n_bytes: int,
        uneven: bool = False,
        codec: Codec = Codec.IDENTITY,
    ) -> Choice:
        """Return the algorithm for one call, chosen and logged once per power of two.

        Arguments as in `choose.choose`. UsageError if `SHOAL_ALGO` forces one without `codec`.
        """
        key = (collective, size_class(n_bytes), uneven, codec)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._choose(*key)
            _LOG.log(
                logging.DEBUG if key in self._in_table else self._level,
                *("%s: %s of up to %s: %s, since %s", self._title, collective),
                *(show_bytes(key[1]), choice.name, choice.why),
            )
        return choice

    def table(self, collective: str, sizes: Mapping[int, Codec]) -> str:
        """Return the algorithms for sizes, ascending powers of two with codecs, as text.

        Later choices for these sizes are logged at DEBUG. Raises UsageError as `choose`.
        """
        runs: list[tuple[str, int]] = []
        for n_bytes, codec in sizes.items():
            key = (collective, n_bytes, False, codec)
            name = self._choose(*key).name
            if runs and runs[-1][0] == name:
                runs.pop()
            runs.append((name, n_bytes))
            self._in_table.add(key)
        words = [f"{name} up to {show_bytes(n_bytes)}" for name, n_bytes in runs]
        return ", ".join(words)

    def n_lanes(self, collective: str, n_bytes: int) -> int:
        """Return the number of channels that a call is cut over, the same on all of its ranks."""
        return n_lanes(collective, n_bytes, self.cluster, self.n_channels)

    def of(self, ranks: Sequence[int], title: str = "") -> Planner:
        """Return the planner of a subgroup of some ranks, with the same costs."""
        hosts = numbered(self.cluster.hosts[rank] for rank in ranks)
        cluster = default_cluster(hosts, n_cores=self.cluster.n_cores, wire=self.cluster.wire)
        part = Planner(
            *(cluster, self.forced, self.tuning),
            n_channels=self.n_channels,
            title=title,
            level=self._level,
        )
        part._warned = self._warned
        return part

    def _choose(self, collective: str, n_bytes: int, uneven: bool, codec: Codec) -> Choice:
        # This loads all algorithms, which a group of one rank may never need.
        from shoal.plan.choose import can_serve, choose

        forced = self.forced.of(collective)
        if forced and can_serve(collective, forced, self.cluster, uneven=uneven):
            self._check_codec(collective, forced, codec)
            return choose(collective, n_bytes, self.cluster, forced, uneven, codec)
        if self.forced.is_for(collective) and (collective, uneven) not in self._warned:
            self._warned.add((collective, uneven))
            _LOG.warning(
                "%s: SHOAL_ALGO asks for %s by %s, which cannot serve %s; the planner chooses",
                *(self._title, collective, forced, "uneven blocks" if uneven else "this group"),
            )
        narrow = codec.is_narrow and self.cluster.n_hosts > 1
        measured = None  # no narrow wire was measured
        if self.tuning and not narrow:
            measured = self.tuning.choose(collective, n_bytes)
        if measured and can_serve(collective, measured.name, self.cluster, uneven=uneven):
            return measured
        return choose(collective, n_bytes, self.cluster, "", uneven, codec)

    def _check_codec(self, collective: str, name: str, codec: Codec) -> None:
        from shoal.plan.choose import may_encode

        if may_encode(collective, name, self.cluster, codec):
            return
        good = "sharded or local/sharded" if collective == "all_reduce" else "direct"
        raise UsageError(
            f"{self._title}: SHOAL_ALGO asks for {collective} by {name}, which sends sums between "
            f"hosts before they are complete: {codec} would round them at every hop. Ask for "
            f"{good}, or leave one of SHOAL_ALGO and the wire out"
        )
