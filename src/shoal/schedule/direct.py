"""Direct algorithms: one message per pair of ranks, and no rank passes anything on.

The two halves of a message between two ranks are here too; each rank calls its own half.

Sends go to rank+1 first, then to rank+2 and so on, and receives come from rank-1 first. At any time
all ranks send to different ranks, so no link into a rank is shared (no incast). The root of a
reduce or gather takes its peers in that order too, though they may all send at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step


def direct_all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Send the whole buffer to everyone; every rank folds all of them in rank order.

    Cost:   1 round; each rank sends n-1 whole buffers, so it is for a few bytes.
    Needs:  one scratch chunk, since the own contribution takes its place in the order.
    Leaves: the buffer folded over all ranks as ((0+1)+2)+..., the same bits on every rank.
    Source: the usual small-message exchange; the order is ours.
    """
    if size == 1:
        yield Finish(0)
        return
    for k in range(1, size):
        yield Send((rank + k) % size, chunk=0)
    for worker in range(size):
        if worker == rank:
            yield Copy(0, into=0, fold=worker > 0)
        else:
            yield Recv(worker, chunk=0, fold=worker > 0, buffer=Buffer.SCRATCH)
    yield Finish(0, Buffer.SCRATCH)
    yield Copy(0, into=0, buffer=Buffer.SCRATCH, into_buffer=Buffer.DATA)


def direct_broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """The root sends the whole buffer to everyone.

    Cost:   1 round; the root sends n-1 whole buffers, the others nothing.
    Needs:  1 chunk.
    Leaves: the root's buffer on every rank.
    Source: the definition.
    """
    if rank != root:
        yield Recv(root, chunk=0)
        return
    for k in range(1, size):
        yield Send((root + k) % size, chunk=0)


def direct_all_gather(rank: int, size: int) -> Iterator[Step]:
    """Send the own block to everyone.

    Cost:   1 round; each rank sends n-1 blocks, one to each peer.
    Needs:  an output of n chunks.
    Leaves: chunk r of the output is the input of rank r, on every rank.
    Source: the definition.
    """
    yield Copy(0, into=rank, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    for k in range(1, size):
        yield Send((rank + k) % size, chunk=0, buffer=Buffer.INPUT)
    for k in range(1, size):
        peer = (rank - k) % size
        yield Recv(peer, chunk=peer, buffer=Buffer.OUTPUT)


def direct_reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Send every peer its block, and fold received blocks into the own block.

    Cost:   1 round; each rank sends n-1 blocks, one to each peer.
    Needs:  an input of n chunks.
    Leaves: the output is block `rank` of the input folded over all ranks; the input is untouched.
    Source: the definition; the first half of the sharded all-reduce.
    """
    yield Copy(rank, into=0, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    for k in range(1, size):
        peer = (rank + k) % size
        yield Send(peer, chunk=peer, buffer=Buffer.INPUT)
    for k in range(1, size):
        yield Recv((rank - k) % size, chunk=0, fold=True, buffer=Buffer.OUTPUT)
    yield Finish(0, Buffer.OUTPUT)


def direct_reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Everyone sends the whole buffer to the root, which folds them.

    Cost:   1 round; the root receives n-1 whole buffers, the others send one each.
    Needs:  1 chunk.
    Leaves: the root's buffer folded over all ranks, from root+1 on upwards; the others' untouched.
    Source: the definition.
    """
    if rank != root:
        yield Send(root, chunk=0)
        return
    for k in range(1, size):
        yield Recv((root + k) % size, chunk=0, fold=True)
    yield Finish(0)


def direct_gather(rank: int, size: int, root: int) -> Iterator[Step]:
    """Everyone sends its block to the root.

    Cost:   1 round; the root receives n-1 blocks, the others send one each.
    Needs:  an output of n chunks on the root, and none elsewhere.
    Leaves: chunk r of the root's output is the input of rank r.
    Source: the definition.
    """
    if rank != root:
        yield Send(root, chunk=0, buffer=Buffer.INPUT)
        return
    yield Copy(0, into=root, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    for k in range(1, size):
        peer = (root + k) % size
        yield Recv(peer, chunk=peer, buffer=Buffer.OUTPUT)


def direct_scatter(rank: int, size: int, root: int) -> Iterator[Step]:
    """The root sends everyone its block.

    Cost:   1 round; the root sends n-1 blocks, the others nothing.
    Needs:  an input of n chunks on the root, and none elsewhere.
    Leaves: the output is block `rank` of the root's input.
    Source: the definition.
    """
    if rank != root:
        yield Recv(root, chunk=0, buffer=Buffer.OUTPUT)
        return
    yield Copy(root, into=0, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    for k in range(1, size):
        peer = (root + k) % size
        yield Send(peer, chunk=peer, buffer=Buffer.INPUT)


def pairwise_all_to_all(rank: int, size: int) -> Iterator[Step]:
    """In round k send rank+k its block, and receive the own block from rank-k.

    Cost:   1 round; each rank sends n-1 blocks, one to each peer, never two ranks to one at a time.
    Needs:  an input and an output of n chunks, which may all differ in length.
    Leaves: chunk s of the output is chunk `rank` of the input of rank s.
    Source: Thakur, Rabenseifner & Gropp, IJHPCA 2005.
    """
    yield Copy(rank, into=rank, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        yield Send(to, chunk=to, buffer=Buffer.INPUT)
        yield Recv(source, chunk=source, buffer=Buffer.OUTPUT)


def direct_send(rank: int, size: int, peer: int) -> Iterator[Step]:
    """Send the whole buffer to `peer`, which calls `direct_recv`.

    Cost:   1 round; the whole buffer.
    Needs:  1 chunk.
    Leaves: the own buffer unchanged.
    Source: the definition.
    """
    yield Send(peer, chunk=0)


def direct_recv(rank: int, size: int, peer: int) -> Iterator[Step]:
    """Receive the whole buffer from `peer`, which calls `direct_send`.

    Cost:   1 round; sends nothing.
    Needs:  1 chunk.
    Leaves: the buffer of `peer`.
    Source: the definition.
    """
    yield Recv(peer, chunk=0)
