"""Distribution of a global batch's slots and of a weight's rows over ranks."""


def rank_slots(global_batch: int, rank: int, world_size: int) -> range:
    """Return the contiguous slots of a rank. Counts differ by at most one; the first ranks have more."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside range({world_size})")
    least, more = divmod(global_batch, world_size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


def micro_steps(global_batch: int, world_size: int, micro_batch: int) -> int:
    """Return the forward passes per optimizer step, equal on all ranks; an empty micro-batch contributes zero."""
    largest = -(-global_batch // world_size)
    return -(-largest // micro_batch)


def shard_rows(rows: int, index: int, count: int) -> range:
    """Return the rows of shard `index` of `count`, as torch.chunk and FSDP2 split them.

    All shards are equal except for the last ones, which may be smaller or empty.
    """
    each = -(-rows // count)
    return range(min(index * each, rows), min((index + 1) * each, rows))
