"""What is recorded of an arm that gives batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def timing(open_s: float, batch_s: Sequence[float], useful_tokens: int, total_tokens: int) -> dict[str, Any]:
    """Seconds until the first batch could be asked for, seconds of each batch, and the tokens of these batches."""
    return {
        "open_s": open_s,
        "batch_s": list(batch_s),
        "median_batch_s": float(np.median(batch_s)),
        "seconds": sum(batch_s),
        "useful_tokens": useful_tokens,
        "total_tokens": total_tokens,
    }
