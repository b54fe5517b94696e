"""The links of a schedule, and the shape they form: a ring, trees, a butterfly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from shoal.analysis.trace.tracer import Trace

Link: TypeAlias = tuple[int, int]
"""The rank that sends, and the rank that receives."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Ranks that pass one chunk, or all of them, along n-1 links."""

    root: int
    children: Mapping[int, tuple[int, ...]]
    """The children of each rank, in ascending order; leaves have no entry."""
    links: Mapping[Link, int]
    """Chunks over each link."""


def links_of(trace: Trace, chunk: int | None = None) -> Mapping[Link, int]:
    """Count the chunks over each link; only contributions to `chunk`, if given."""
    return Counter(
        (message.sender, message.receiver)
        for one in trace.rounds
        for message in one.messages
        if chunk is None or message.value.chunk == chunk
    )


def is_ring(trace: Trace) -> bool:
    """Return True if every rank sends only to the next one, and the last to the first."""
    right = {(rank, (rank + 1) % trace.size) for rank in range(trace.size)}
    return trace.size > 2 and links_of(trace).keys() == right


def trees_of(trace: Trace) -> list[TreeShape]:
    """Return the one tree of all chunks, or each chunk's tree once; empty if one is not a tree."""
    whole = _tree(trace, links_of(trace), _root_of(trace, 0))
    if whole is not None:
        return [whole]
    found: dict[frozenset[Link], TreeShape] = {}
    for chunk in sorted({m.value.chunk for one in trace.rounds for m in one.messages}):
        links = links_of(trace, chunk)
        tree = _tree(trace, links, _root_of(trace, chunk))
        if tree is None:
            return []
        found.setdefault(frozenset(links), tree)
    return list(found.values())


def path_of(tree: TreeShape) -> list[int]:
    """Return the ranks from the root to the only leaf; empty if there are several leaves."""
    path = [tree.root]
    while path[-1] in tree.children:
        if len(tree.children[path[-1]]) > 1:
            return []
        path += tree.children[path[-1]]
    return path


def depths_of(tree: TreeShape) -> dict[int, int]:
    """Return each rank's distance from the root in links."""
    depth, left = {tree.root: 0}, [tree.root]
    while left:
        rank = left.pop()
        for child in tree.children.get(rank, ()):
            depth[child] = depth[rank] + 1
            left.append(child)
    return depth


def _root_of(trace: Trace, chunk: int) -> int:
    """Return the rank at which a chunk is first completely folded, or the collective's root."""
    if trace.algorithm.rooted:
        return trace.root
    for one in trace.rounds:
        for (rank, _), value in one.writes.items():
            if value.finished and value.chunk == chunk:
                return rank
    return 0


def _tree(trace: Trace, links: Mapping[Link, int], root: int) -> TreeShape | None:
    neighbours: dict[int, set[int]] = defaultdict(set)
    for a, b in links:
        neighbours[a].add(b)
        neighbours[b].add(a)
    if len({frozenset(link) for link in links}) != trace.size - 1:
        return None
    children: dict[int, tuple[int, ...]] = {}
    reached, left = {root}, [root]
    while left:
        rank = left.pop()
        below = tuple(sorted(neighbours[rank] - reached))
        if below:
            children[rank] = below
        reached.update(below)
        left += below
    return TreeShape(root, children, links) if len(reached) == trace.size else None
