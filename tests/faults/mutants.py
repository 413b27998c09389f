"""Small changes of the most important functions: a test must fail for each.  python -m tests.faults.mutants [NAME …]

Changes one operator, constant, condition or statement at a time in a copy of the project, runs the
tests of the function and prints the mutants that survive.
"""

import argparse
import ast
import copy
import math
import random
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.mutations import copy_to, run_tests, write

UNIT = "tests/unit/test_{}.py"
#: file of src/tokenscale: functions → test files of tests/unit, or paths, beside its own examples;
#: quick ones first
FUNCTIONS = {
    "train/models/losses.py: _loss_and_gradient": "losses",
    "train/trainer.py: Trainer.step forward_backward": (
        "training training_loop "
        "tests/distributed/test_parity.py::test_gradients_in_buckets_alone_stay_from_step_to_step "
        "tests/distributed/test_parity.py::"
        "test_weights_losses_and_norms_after_some_steps_are_those_of_one_process[zero1@2-plain] "
        "tests/distributed/test_parity.py::"
        "test_weights_losses_and_norms_after_some_steps_are_those_of_one_process[ddp@2-plain]"
    ),
    "train/budget.py: Budget.share Budget.exchange Budget.after Budget.load": "training_loop training",
    "train/optimizer.py: update total_norm LossScale.update": "training training_loop",
    "train/parallel/sharding.py: fill_buckets _all_reduce": (
        "tests/distributed/test_parity.py::test_a_bucket_ends_with_the_tensor_that_fills_it "
        "tests/distributed/test_parity.py::"
        "test_small_gradients_share_an_all_reduce_and_each_gets_its_own_sum"
    ),
    "train/models/attention.py: Bounds.positions Bounds.mask Bounds.lengths": "attention",
    "train/checkpoint.py: write_rank commit _overlap": "checkpoint_reading tests/faults/test_power_cut.py",
    "train/resume.py: Checkpoints._chosen Checkpoints.due Checkpoints._write": "tests/faults/test_resume.py "
    "tests/faults/test_power_cut.py",
    "costs/schedule.py: steps_of epoch_ends learning_rate": "training",
    (
        "data/order/permutation.py: permute _shuffle _feistel get_samples row_digests rank_slots "
        "micro_steps "
        "shard_rows"
    ): "order",
    "data/order/packing.py: split_documents best_fit_decreasing pack concatenate": "order",
    "data/batches/objectives.py: mask_tokens ignore_sources": "batches_objectives",
    "data/batches/batch.py: document_ids": "batches",
    "data/batches/streams.py: TokenStream.read TokenStream._load TokenStream._load_chunk": "passes batches",
    "data/stores/packed.py: PackedStore.read": "bad_input_stores formats formats_writing",
    "referee/statistics.py: summary summarize_pairs sign_flip_p verdict holm": "statistics analysis_claims",
    "referee/claims.py: find_edges _test_points judge_cell": "analysis_claims",
    "settings/closure.py: _closure _scan_source write_listing": "closure",
    "settings/run.py: find_difference find_other_schedule": "settings tests/faults/test_resume.py",
    "base/files.py: atomic is_sealed read_record": "launch_lock records tests/faults/test_power_cut.py",
}
#: parts of lines, before or after the change, whose mutants change speed or memory alone, or
#: nothing
EQUIVALENT = (
    "if last - first > 8:",
    "window: int = 1 << 18",
    "(n + 1) // 2 + (2))",  # the loop ends before
    *("(len(bucket) >= 1)", "len(bucket) > (0)"),  # a copy of one tensor
    "bucket[(-1)].contiguous()",  # the only one
    "flat is not bucket[(-1)]",  # the only one, or a copy of all
    "for values in bucket]), strict=(False)",  # as many parts as tensors
    "spaces = 0  # bit",
    "sum(dim=(1), keepdim=True)",  # the last of two dimensions
    "picked)[:, (-1)]",  # the only column
    "return orders[(-1)][index]",  # the only one
    *(f"else {ends}" for ends in ("(0, (1))", "(0, -(0))", "(0, -(2))", "((-1), -1)", "((1), -1)")),
    "range(first, last + (2))",  # an epoch without a position, as those before
    "non_blocking=(False)",
    "(draws <= np.uint64(round(share",  # equal draws of 63 bits
    "(tokens_bt == bos_id, positions, -(2))",  # below any place, too
    "torch.where(here, places, (1))",  # a place that adds nothing
    "torch.where(begins, places, (-1))",  # the first place begins a document
    "(fitting | -fitting)",  # the length of a negative number is that of its lowest bit
    "(kind <= round((MASKED",  # equal draws of 32 bits
    'states[(-1)]["step"]',  # states of one step
    "(self._block_start < number",  # a block that is read again
    "(n + 1) // (1) + 1",  # the loop ends before
    "(p > statistics.LEVEL)",  # no share of flips is equal to it
    "into.row_bytes, strict=(False)",  # as many places as buffers
    "(p <= LEVEL)",  # no share of flips is equal to it
    "(smallest_p > LEVEL)",
    "(effect.high <= equality)",  # an end of the interval has a p that is not below the level
    "(effect.low >= equality)",
    "adjusted = [(",  # each is set
    "largest = (-1.0)",  # below any p, too
    "(median <= near)",  # a median at an edge is within
    "time.sleep(0.02) → pass",  # asks as often as it can
    "into.ids.max(initial=(1)",  # a batch has tokens
    "len(self._parts) == (0)",  # the slower of two ways to the same rows
    "flush=(False)",  # a line is read later
    # as many numbers as dimensions
    *(f"{names}, strict=(False)" for names in ("zip(low, high", "others, extent")),
    "time.monotonic() >= deadline",  # at one instant
    "good = ((self._good + 1) / (1 - found_inf))",  # infinity, which is set to zero, too
    "ScheduleSettings, share: float = (",  # read only where callers pass it
)
#: seconds of processor time: of tests as they are, at most; after which a mutant hangs, and how many
#: times as long as the tests take without it
MOST_S = 1200
LEAST_S = 20
TIMES_AS_LONG = 3
PAIRS = [
    "Lt",
    "LtE",
    "Gt",
    "GtE",
    "Eq",
    "NotEq",
    "Is",
    "IsNot",
    "In",
    "NotIn",
    "Add",
    "Sub",
    "Mult",
    "Div",
    "LShift",
    "RShift",
    "BitAnd",
    "BitOr",
    "Mod",
    "FloorDiv",
    "And",
    "Or",
]
SWAP = {getattr(ast, PAIRS[i]): getattr(ast, PAIRS[i ^ 1]) for i in range(len(PAIRS))} | {
    ast.BitXor: ast.BitOr
}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield changed copies of a node; those of its children are made at the children."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAP:
        yield ast.Compare(node.left, [SWAP[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in SWAP:
        changed = copy.copy(node)
        changed.op = SWAP[type(node.op)]()
        yield changed
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield from (ast.Constant(node.value + by) for by in (1, -1))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    if isinstance(node, (ast.AugAssign, ast.Raise, ast.Break, ast.Continue)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a function's body but for messages and annotations."""
    yield node
    if isinstance(node, (ast.Raise, ast.JoinedStr)):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_comment"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from children(child)


def find_function(tree: ast.Module, name: str) -> ast.FunctionDef:
    node: ast.AST = tree
    for part in name.split("."):
        node = next(n for n in node.body if getattr(n, "name", None) == part)
    return node


def mutants(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield (what is changed, the changed file) for each mutant of a function."""
    whole = text.encode()
    lines = whole.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    for node in children(find_function(ast.parse(text), name)):
        tests = [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else []
        for old, new in [(node, n) for n in changes(node)] + [
            (t, ast.UnaryOp(ast.Not(), t)) for t in tests
        ]:
            begin = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            written = ast.unparse(ast.fix_missing_locations(new)).encode()
            changed = (
                whole[:begin]
                + (written if isinstance(old, ast.stmt) else b"(%b)" % written)
                + whole[end:]
            )
            before, after = (
                t.splitlines()[old.lineno - 1].decode().strip() for t in (whole, changed)
            )
            yield f"{name}: {before} → {after}", changed.decode()


def _count_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="parts of names of functions or files; all without"
    )
    parser.add_argument(
        "--most", type=int, default=10**6, help="mutants a function, drawn at random by the seed"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    killed = total = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_to(Path(folder))
        for where, tests in FUNCTIONS.items():
            file, names = where.split(": ")
            path = Path(folder, "src/tokenscale", file)
            text = path.read_text()
            chosen = [
                n
                for n in names.split()
                if not arguments.names or any(a in file + n for a in arguments.names)
            ]
            made = []
            for name in chosen:
                of_name = [
                    m for m in mutants(text, name) if not any(line in m[0] for line in EQUIVALENT)
                ]
                made += draw.sample(of_name, min(arguments.most, len(of_name)))
            paths = [test if "/" in test else UNIT.format(test) for test in tests.split()]
            if ">>>" in text:
                paths.append(f"src/tokenscale/{file}")
            before = _count_cpu_s()
            if made and (code := run_tests(paths, Path(folder), limit_s=MOST_S)[0]) != 0:
                raise SystemExit(f"{' '.join(paths)}: exit code {code} as they are")
            # a mutant that is as slow as the function itself is not seen
            limit_s = LEAST_S + math.ceil(TIMES_AS_LONG * (_count_cpu_s() - before))
            for what, changed in made:
                write(path, changed)
                code, _ = run_tests(paths, Path(folder), limit_s=limit_s)
                total = total + 1
                killed = killed + (code != 0)
                if code == 0:
                    print(f"survived  {file}: {what}", flush=True)
            write(path, text)
            if made:
                print(
                    f"{file:<32} {killed} of {total} mutants so far are seen by a test", flush=True
                )
    raise SystemExit(killed < total)


if __name__ == "__main__":
    main()
