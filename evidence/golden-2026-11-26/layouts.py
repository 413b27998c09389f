"""Train our Llama of 4 layers in bf16 (autocast) by each layout, and print what `tokenscale golden`
says of each.

`python -m evidence.golden-2026-11-26.layouts` in the project's folder: each layout is judged
against one process, with three other layouts drawn as floor runs, and without.
"""

import random
from collections import Counter

from tests.distributed.parity import LAYOUTS, each, on_ranks, run_of, steps

from tokenscale_golden.reading import Curve
from tokenscale_golden.verdict import judge

STEPS = 12
FLOORS = 3

if __name__ == "__main__":
    cases = {name: run_of(layout, precision="bf16") for name, layout in LAYOUTS.items()}
    found = on_ranks(each, {"one process": run_of(precision="bf16")} | cases, steps, STEPS)
    curves = {name: Curve.of(*ranks[0][:2]) for name, ranks in found.items()}
    old = curves.pop("one process")
    draw = random.Random(0)
    kinds = Counter()
    for name, new in curves.items():
        chosen = draw.sample([other for other in curves if other != name], FLOORS)
        alone = judge(old, new)
        verdict = judge(old, new, [curves[other] for other in chosen])
        kinds[alone.kind, verdict.kind] += 1
        print(
            (
                f"| {name} | {verdict.largest:.1e} | {alone.kind} | {', '.join(chosen)} | "
                f"{verdict.kind} |"
            ),
            flush=True,
        )
    for (alone, verdict), count in sorted(kinds.items()):
        print(f"without floor runs {alone}, with {FLOORS} {verdict}: {count}")
