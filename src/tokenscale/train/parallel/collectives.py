"""Collectives whose names differ between torch's versions."""

import torch.distributed as dist

#: [n, …] of each rank → [ranks x n, …], laid end to end (torch 2.13 renames it)
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: [ranks x n, …] of each rank → [n, …], this rank's part of their sum
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
