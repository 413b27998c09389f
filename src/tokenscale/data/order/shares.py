"""Who holds which slots of a global batch, and which rows of a weight."""


def share(global_batch: int, rank: int, world_size: int) -> range:
    """The contiguous slots of one rank; counts differ by at most one, the first ranks hold the longer shares.

    >>> [list(share(7, rank, 3)) for rank in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    least, more = divmod(global_batch, world_size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


def micro_steps(global_batch: int, world_size: int, micro_batch: int) -> int:
    """Forward passes of one optimizer step, the same for every rank; an empty micro-batch contributes zero.

    >>> micro_steps(global_batch=9, world_size=2, micro_batch=2)
    3
    """
    largest = -(-global_batch // world_size)
    return -(-largest // micro_batch)


def rows_of(rows: int, index: int, count: int) -> range:
    """The rows of number `index` of `count` ranks, as torch.chunk and FSDP2 share them out: equal numbers, and fewer or
    none for the last where they do not divide.

    >>> [len(rows_of(10, index, 4)) for index in range(4)]
    [3, 3, 3, 1]
    """
    each = -(-rows // count)
    return range(min(index * each, rows), min((index + 1) * each, rows))
