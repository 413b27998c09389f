"""Count what a call does, to test laws of growth without a clock."""

import sys
from collections.abc import Callable
from types import FrameType


def count_operations(call: Callable[[], object]) -> int:
    """Return the number of Python instructions that a call executes, in all functions it calls."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(tracer)
    return count
