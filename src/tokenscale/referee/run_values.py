"""Values of a run's logs and record against its settings, its inputs and each other."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np

from tokenscale.analysis.runs import find_shape
from tokenscale.costs.exchanges import exchanged_bytes, is_predicted
from tokenscale.costs.flops import parameters
from tokenscale.costs.memory import memory
from tokenscale.costs.schedule import learning_rate, steps_of
from tokenscale.data.order.permutation import micro_steps, rank_slots
from tokenscale.referee import siblings  # noqa: F401  # its expectations come before these
from tokenscale.referee.accounting import EXACT_S, LEFT_BETWEEN, PHASES
from tokenscale.referee.expectations import (
    Evidence,
    NotCheckedError,
    Row,
    at_step,
    differ,
    expect,
)
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import OURS, READERS, RunSettings, start_step

#: series of steps → least ratio of a lone value to those beside it, and whether above them counts;
#: a step may take long, and gradients of a step may be large
LONE = {"loss": (1.25, True), "grad_norm": (20.0, True), "step_s": (4.0, False)}
#: times the median distance of values from those beside them, and fewest steps that are judged
LONE_SPREADS = 10.0
FEWEST_BESIDE = 9
#: steps before and after a validation whose training loss stands beside it, and the least ratio by
#: which it leaves what the validations before and after it have
STEPS_BESIDE = 3
VALIDATION_RATIO = 1.25
#: relative difference of a sum of losses that another order of its terms makes
SAME_SUM = 1e-12
#: values of a step that all ranks compute of the global batch, and their relative difference
OF_ALL_RANKS = ("grad_norm", "grad_norm_clipped", "loss_scale", "learning_rate", "skipped")
SAME_ON_RANKS = 1e-6
#: share of the predicted activations that a CPU holds at least, and at most. The archives of this
#: version hold what is predicted; runs of earlier ones held down to 0.85 of it in pipelines
LEAST_ACTIVATIONS = 0.8
MOST_ACTIVATIONS = 1.05
#: bytes of the numbers that ranks send beside weights, gradients and positions: losses and norms
SINGLE_NUMBERS = 64
SINGLE_NUMBERS_SHARE = 1e-4


# -- how the run ended


@expect(
    "run.json",
    must="readable, with settings of this version",
    known_from="record",
    word="invalid",
)
def _find_unreadable_records(evidence: Evidence) -> Iterator[str]:
    if evidence.trouble:
        yield evidence.trouble
    elif evidence.row.get("steps_asked") is None:
        yield "the settings in run.json are not readable by this version"
    elif not evidence.row["sealed"] and evidence.row["status"] == "running":
        yield "the run has not ended (run.json is not sealed)"


@expect(
    "seal of run.json",
    must="the hash of its content",
    known_from="record",
    word="suspect",
)
def _find_broken_seals(evidence: Evidence) -> Iterator[str]:
    if not (
        evidence.trouble
        or evidence.row.get("steps_asked") is None
        or evidence.row["sealed"]
        or evidence.row["status"] == "running"
    ):
        yield "run.json does not match its seal"


@expect(
    "status",
    must="complete",
    known_from="record",
    word="invalid",
)
def _find_failures(evidence: Evidence) -> Iterator[str]:
    if evidence.row["status"] == "nonfinite":
        first = _find_first_nonfinite(evidence)
        where = (
            ""
            if first is None
            else f" at step {first} of {evidence.row.get('steps_asked') or 'an unknown number'}"
        )
        yield f"training stopped: loss or gradient not finite{where}"
    elif evidence.row["status"] not in ("complete", "running", "unreadable"):
        yield evidence.get("outcome.reason") or f"status {evidence.row['status']}"


@expect(
    "hashes of the logs",
    must="those sealed in run.json, each another",
    known_from="record",
    word="invalid",
)
def _find_changed_logs(evidence: Evidence) -> Iterator[str]:
    if evidence.changed:
        yield f"logs differ from the hashes sealed into run.json: {', '.join(evidence.changed)}"
    yield from evidence.copies


@expect(
    "source files",
    must="unchanged while the run trained",
    known_from="record",
    word="suspect",
)
def _find_changed_code(evidence: Evidence) -> Iterator[str]:
    if changed := evidence.get("outcome.code_changed"):
        yield f"source files were edited while it trained: {', '.join(map(str, changed))}"


@expect(
    "log lines",
    must="readable, but for the last line of a killed process",
    known_from="logs",
    word="suspect",
)
def _find_broken_lines(evidence: Evidence) -> Iterator[str]:
    if red := evidence.row["quarantined"] - evidence.row["quarantined_benign"]:
        yield f"{red} broken log line{'s' * (red > 1)} that no killed process explains"


@expect(
    "runs on its nodes",
    must="one, where the experiment does not say share_nodes",
    known_from="launcher",
    word="caution",
)
def _find_shared_nodes(evidence: Evidence) -> Iterator[str]:
    if (evidence.row.get("share") or 1) > 1:
        yield (
            f"up to {evidence.row['share']} runs had its node at once: its times are not those of "
            "a run alone"
        )


def _find_first_nonfinite(evidence: Evidence) -> int | None:
    steps = evidence.steps
    bad = steps["nonfinite"] > 0
    if evidence.row.get("arm") not in READERS:
        bad |= np.isnan(steps["loss_sum"]) & (steps["useful_tokens"] > 0)
    return int(steps["step"][bad].min()) if bad.any() else None


# -- steps and counts


@expect(
    "steps",
    must="all of the budget, of all ranks, finite",
    known_from="settings",
    word="invalid",
)
def _find_missing_steps(evidence: Evidence) -> Iterator[str]:
    if (
        evidence.trouble
        or evidence.row.get("steps_asked") is None
        or evidence.row["status"] == "nonfinite"
    ):
        return
    if not len(evidence.steps) and evidence.row["steps_asked"]:
        yield "its logs hold no step"
    elif evidence.row["steps_seen"] != evidence.row["steps_asked"]:
        logs = "its log" if evidence.row["external"] else "the logs of all ranks"
        yield f"{evidence.row['steps_seen']} of {evidence.row['steps_asked']} steps are in {logs}"
    if (first := _find_first_nonfinite(evidence)) is not None:
        # of another program, lines are taken as steps
        place = f"line {first + 1} of its losses" if evidence.row["external"] else f"step {first}"
        yield f"loss or gradient not finite at {place}"


@expect(
    "rows of each rank and step",
    must="the rank's share of the global batch",
    known_from="settings",
    word="invalid",
)
def _find_other_shares(evidence: Evidence) -> Iterator[str]:
    if evidence.row.get("global_batch") is None or not len(evidence.steps):
        raise NotCheckedError(
            "the global batch size is not known" if len(evidence.steps) else "the logs hold no step"
        )
    rows = evidence.steps.sums("rows")
    for wrong in np.flatnonzero(evidence.steps.whole() & (rows != evidence.row["global_batch"]))[
        :1
    ]:
        step = evidence.steps.numbers[wrong]
        batch = evidence.row["global_batch"]
        yield f"ranks hold {int(rows[wrong])} rows at step {step}, the global batch is {batch}"
        return
    if not evidence.row.get("external"):
        of_rank = {}
        for rank in np.unique(evidence.steps["rank"]).astype(int).tolist():
            place = evidence.settings.layout.coordinate(rank)
            readers = evidence.settings.layout.data_parallel_size
            slots = rank_slots(
                evidence.settings.global_batch, rank=place.data_rank, world_size=readers
            )
            of_rank[rank] = len(slots) * place.is_group_leader
        must = np.array([of_rank[int(rank)] for rank in evidence.steps["rank"]])
        yield from at_step(
            evidence.steps,
            name="rows",
            wrong=evidence.steps["rows"] != must,
            must=must,
        )


@expect(
    "total_tokens of each rank",
    must="rows × sequence length; length-bucketed: at most",
    known_from="settings",
    word="invalid",
)
def _find_other_total_tokens(evidence: Evidence) -> Iterator[str]:
    if (length := evidence.row.get("sequence_length")) is None:
        raise NotCheckedError("the sequence length is not known")
    total = evidence.column("total_tokens")
    room = evidence.steps["rows"] * length
    fixed = not evidence.row.get("external") and evidence.row["approach"] != "length-bucketed"
    for at in np.flatnonzero((total != room) if fixed else (total > room))[:1]:
        held = (
            f"{evidence.steps['rows'][at]:.0f} rows of {length} hold "
            f"{'' if fixed else 'at most '}{room[at]:.0f}"
        )
        yield f"a rank reports {total[at]:.0f} tokens at step {evidence.steps['step'][at]:.0f}, {held}"


@expect(
    "seconds, tokens, bytes and losses",
    must="values from which rates can be computed",
    known_from="arithmetic",
    word="invalid",
)
def _find_values_without_rates(evidence: Evidence) -> Iterator[str]:
    if (empty := evidence.steps.whole() & (evidence.steps.sums("total_tokens") < 1)).any():
        yield f"no tokens at step {evidence.steps.numbers[empty][0]}"
    most = dict.fromkeys(("step_s", "data_wait_s", *PHASES), MOST_S) | {
        "loss_sum": MOST_NATS * evidence.raw["useful_tokens"]
    }
    yield from (
        f"{name} above any that is possible"
        for name, limit in most.items()
        if (evidence.raw[name] > limit).any()
    )
    if ((evidence.raw["step_s"] > 0) & (evidence.raw["step_s"] < LEAST_S)).any():
        yield "step_s below any that is possible"
    if (evidence.raw["memory_peak_bytes"] < 1).any():
        yield "memory_peak_bytes of 0"
    for event in evidence.named("memory"):
        if (event["activations_bytes"] or 0) < 0:
            yield f"activations_bytes of {event['activations_bytes']}"
    for event in evidence.named("validation") + evidence.named("source_validation"):
        where = f"validation at step {event['step']} has"
        useful = event["useful_tokens"] or 0
        loss = event["loss_sum"]
        if useful < 1 or loss is None or not 0 <= loss <= MOST_NATS * useful:
            yield f"{where} a loss_sum of {loss} over {useful} useful tokens"
        for name, limit in {
            "rows": math.inf,
            "correct_tokens": useful,
            "duration_s": MOST_S,
        }.items():
            if not 0 <= (event[name] or 0) <= limit:
                yield f"{where} {name} of {event[name]}"


@expect(
    "useful_tokens",
    must="at most total_tokens",
    known_from="same record",
    word="invalid",
)
def _find_excess_useful_tokens(evidence: Evidence) -> Iterator[str]:
    if (evidence.column("useful_tokens") > evidence.steps["total_tokens"]).any():
        yield "more useful tokens than tokens"


@expect(
    "tokens and order digest of each step",
    must="those of its samples, read again",
    known_from="store or text",
    word="invalid",
)
def _find_other_samples(evidence: Evidence) -> Iterator[str]:
    if evidence.settings.arm == "studies":
        raise NotCheckedError("the studies' readers have an order and rows of their own")
    if isinstance(counted := evidence.recount.counted, str):
        raise NotCheckedError(counted)
    place = np.searchsorted(evidence.steps.numbers, counted.steps)
    known = np.isin(counted.steps, evidence.steps.numbers[evidence.steps.whole()])
    logged = {name: evidence.steps.sums(name) for name in ("useful_tokens", "total_tokens")}
    logged["order_digest"] = evidence.steps.digests()
    for (name, values), must in zip(
        logged.items(), (counted.useful, counted.total, counted.digests), strict=True
    ):
        found = values[place[known]]
        expected = must[known]
        for wrong in np.flatnonzero(found != expected)[:1]:
            step = counted.steps[known][wrong]
            n = int((found != expected).sum())
            batch = f"the batch has {expected[wrong]} ({n} of {len(found)} steps)"
            yield f"{name} is {found[wrong]:.0f} at step {step}, {batch}"
    if len(counted.steps) < len(evidence.steps.numbers):
        raise NotCheckedError(
            f"{len(counted.steps)} of {len(evidence.steps.numbers)} steps were counted again"
        )


@expect(
    "useful_tokens",
    must="above zero in some step",
    known_from="logs",
    word="invalid",
)
def _find_runs_without_labels(evidence: Evidence) -> Iterator[str]:
    if len(evidence.steps) and not evidence.steps.sums("useful_tokens").any():
        yield "no step has a label: the run predicts nothing"


@expect(
    "steps without a label, and skipped ones",
    must="none",
    known_from="logs",
    word="caution",
)
def _find_empty_steps(evidence: Evidence) -> Iterator[str]:
    empty = evidence.steps.sums("useful_tokens") == 0
    skipped = evidence.steps.largest("skipped") > 0
    if 0 < empty.sum() < len(empty):
        yield f"{empty.sum()} of {len(empty)} steps ({empty.mean():.1%}) have no label"
    if skipped.any():
        yield (
            f"{skipped.sum()} of {len(skipped)} steps ({skipped.mean():.1%}) were skipped: their "
            "gradient overflowed"
        )


@expect(
    "micro_steps",
    must="passes for the largest share of the global batch",
    known_from="settings",
    word="invalid",
)
def _find_other_micro_steps(evidence: Evidence) -> Iterator[str]:
    run = evidence.settings
    must = np.full(
        len(evidence.steps),
        micro_steps(
            run.global_batch, world_size=run.layout.data_parallel_size, micro_batch=run.micro_batch
        ),
    )
    if run.arm != OURS:  # of the rank's own rows
        must = np.ceil(evidence.steps["rows"] / run.micro_batch)
    yield from at_step(
        evidence.steps,
        name="micro_steps",
        wrong=evidence.column("micro_steps") != must,
        must=must,
    )
    if run.arm == OURS and (stated := evidence.get("micro_steps")) is not None and len(must):
        yield from differ("run.json has micro_steps", found=stated, expected=int(must[0]))


@expect(
    "learning_rate of each step",
    must="that of the schedule",
    known_from="settings",
    word="invalid",
    tolerance="1e-12 of it",
)
def _find_other_learning_rates(evidence: Evidence) -> Iterator[str]:
    run = evidence.own
    numbers = evidence.steps.numbers
    found = evidence.column("learning_rate")
    steps = _count_budget_steps(evidence)
    shares = np.zeros(len(numbers))
    if steps is None and run.schedule.shape != "constant":
        if run.budget.useful_tokens is None:
            raise NotCheckedError("the budget in seconds decides it")
        before = (evidence.get("outcome.begins_at_useful_tokens") or 0) + np.cumsum(
            evidence.steps.sums("useful_tokens")
        )
        share = np.minimum(
            (before - evidence.steps.sums("useful_tokens")) / run.budget.useful_tokens, 1.0
        )
        last_warm = max(run.schedule.warmup_steps - 1, 0)
        if last_warm not in numbers:
            raise NotCheckedError("the warm-up was in another run")
        warm = share[np.searchsorted(numbers, last_warm)]
        shares = (share - warm) / (1 - warm) if warm < 1 else np.ones(len(share))
    peak = run.optimizer.learning_rate
    schedule = run.schedule
    rates = [
        learning_rate(
            k,
            steps,
            peak=peak,
            schedule=schedule,
            share=s,
        )
        for k, s in zip(numbers.tolist(), shares.tolist(), strict=True)
    ]
    must = np.array(rates)[evidence.steps.place]
    yield from at_step(
        evidence.steps,
        name="learning_rate",
        wrong=~np.isclose(found, must, rtol=1e-12, atol=0),
        must=must,
    )


@expect(
    "grad_norm_clipped",
    must="grad_norm, scaled to at most clip_norm",
    known_from="settings, same record",
    word="invalid",
    tolerance="1e-4 of it",
)
def _find_other_clipping(evidence: Evidence) -> Iterator[str]:
    limit = evidence.own.optimizer.clip_norm
    norm = evidence.column("grad_norm")
    clipped = evidence.column("grad_norm_clipped")
    must = norm if limit is None else norm / np.maximum((norm + 1e-6) / limit, 1)
    wrong = ~np.isclose(clipped, must, rtol=1e-4, atol=1e-30, equal_nan=True)
    yield from at_step(
        evidence.steps,
        name="grad_norm_clipped",
        wrong=wrong,
        must=must,
    )


@expect(
    f"{', '.join(OF_ALL_RANKS)} of a step",
    must="the same on all ranks",
    known_from="other ranks",
    word="invalid",
    tolerance=f"{SAME_ON_RANKS:g}",
)
def _find_other_ranks(evidence: Evidence) -> Iterator[str]:
    """They are of the global batch, and each rank updates its weights by them."""
    _ = evidence.own
    steps = evidence.steps
    for name in OF_ALL_RANKS:
        must = steps.largest(name)[steps.place]
        wrong = ~np.isclose(steps[name], must, rtol=SAME_ON_RANKS, atol=0, equal_nan=True)
        yield from at_step(
            steps,
            name=name,
            wrong=wrong,
            must=must,
        )


@expect(
    "grad_norm of steps with a loss",
    must="logged, above zero",
    known_from="logs",
    word="suspect",
)
def _find_missing_gradients(evidence: Evidence) -> Iterator[str]:
    _ = evidence.own
    norm = evidence.steps["grad_norm"]
    loss = evidence.steps.sums("loss_sum")[evidence.steps.place]
    if evidence.row["status"] != "nonfinite":
        yield from at_step(
            evidence.steps,
            name="grad_norm",
            wrong=(loss > 0) & ~(norm > 0) & ~(evidence.steps["skipped"] > 0),
            must="above zero",
        )


@expect(
    "loss, gradient norm and time of a step",
    must="near those of the steps beside it, and not the same again and again",
    known_from="the run's own steps",
    word="caution",
    tolerance=", ".join(f"{least:g}×" for least, _ in LONE.values()),
)
def _find_lone_values(evidence: Evidence) -> Iterator[str]:
    """A value that is far from the median of the five around it, or a value that steps in a row
    repeat.
    """
    _ = evidence.own
    evidence.column("own_s")  # logs of this version's trainer
    steps = evidence.steps
    useful = np.maximum(steps.sums("useful_tokens"), 1)
    series = {
        "loss": steps.sums("loss_sum") / useful,
        "grad_norm": steps.largest("grad_norm"),
        "step_s": steps.largest("step_s"),
    }
    for name, values in series.items():
        least, both = LONE[name]
        if len(values) < FEWEST_BESIDE or not (values > 0).all() or steps["skipped"].any():
            continue
        log = np.log(values)
        if (same := int((np.diff(log) == 0).sum())) > 2 + 0.01 * len(log):
            yield f"{name} is that of the step before at {same} of {len(log)} steps"
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(log, 2, mode="reflect"), 5)
        apart = log - np.median(windows, axis=1)
        limit = max(math.log(least), LONE_SPREADS * float(np.median(np.abs(apart))))
        for at in np.flatnonzero((np.abs(apart) if both else -apart) > limit)[:1]:
            ratio = math.exp(apart[at])
            yield f"{name} of step {steps.numbers[at]} is {ratio:.3g} × that of the steps beside it"


@expect(
    "loss of a validation",
    must="as far from the training loss of the steps beside it as before and after",
    known_from="the run's own steps",
    word="caution",
    tolerance=f"{VALIDATION_RATIO:g}×",
)
def _find_lone_validations(evidence: Evidence) -> Iterator[str]:
    """Training losses are counted apart from validations, with the same weights. Where corpora
    follow each other, both need not move alike.
    """
    if evidence.own.mixture is not None or not len(evidence.steps):
        return
    steps = evidence.steps
    loss = steps.sums("loss_sum") / np.maximum(steps.sums("useful_tokens"), 1)
    ratios: dict[int, float] = {}
    for event in evidence.named("validation"):
        if event["step"] is None:
            continue
        near = np.abs(steps.numbers - event["step"] + 0.5) < STEPS_BESIDE
        beside = float(np.median(loss[near])) if near.any() else 0.0
        if beside > 0 and (event["loss_sum"] or 0) > 0 and (event["useful_tokens"] or 0) > 0:
            ratios[event["step"]] = event["loss_sum"] / event["useful_tokens"] / beside
    ordered = sorted(ratios.items())
    for (_, before), (step, ratio), (_, after) in zip(
        ordered, ordered[1:], ordered[2:], strict=False
    ):
        low, high = sorted((before, after))
        if not low / VALIDATION_RATIO <= ratio <= high * VALIDATION_RATIO:
            yield (
                f"the validation at step {step} is {ratio:.3g} × the training loss beside it, those "
                f"before and after {before:.3g} × and {after:.3g} ×"
            )
            return


@expect(
    "skipped",
    must="fp16 steps without a finite gradient, never all",
    known_from="settings, same record",
    word="invalid",
)
def _find_wrongly_skipped_steps(evidence: Evidence) -> Iterator[str]:
    skipped = evidence.column("skipped") > 0
    if not skipped.any():
        return
    share = f"{skipped.sum()} of {len(skipped)} rows are marked skipped"
    if skipped.all():
        yield f"{share}: no step changed a weight"
    elif not evidence.row.get("external") and evidence.own.precision != "fp16":
        yield f"{share}, but precision {evidence.own.precision} has no loss scaling"
    elif (finite := skipped & np.isfinite(evidence.steps["grad_norm"])).any():
        yield f"{share}, {finite.sum()} of them with a finite gradient"


@expect(
    "loss_scale",
    must="halved by a skipped step, else the same or doubled",
    known_from="same record",
    word="invalid",
)
def _find_other_loss_scales(evidence: Evidence) -> Iterator[str]:
    scale = evidence.steps["loss_scale"]
    if np.isnan(scale).all():
        return
    if not evidence.row.get("external") and evidence.own.precision != "fp16":
        yield f"a loss scale, but precision {evidence.own.precision} has none"
        return
    following = (
        (np.diff(evidence.raw["step"]) == 1)
        & (np.diff(evidence.raw["rank"]) == 0)
        & (np.diff(evidence.raw["attempt"]) == 0)
    )
    ratio = evidence.raw["loss_scale"][1:] / evidence.raw["loss_scale"][:-1]
    halved = evidence.raw["skipped"][:-1] > 0
    wrong = np.concatenate(
        [[False], following & ~np.where(halved, ratio == 0.5, (ratio == 1) | (ratio == 2))]
    )
    must = f"half, or one or two times that of the step before ({scale[0]:g} at first)"
    yield from at_step(
        evidence.raw,
        name="loss_scale",
        wrong=wrong,
        must=must,
    )


def _count_budget_steps(evidence: Evidence) -> int | None:
    """Optimizer steps of the budget, those of earlier runs included; None if tokens or the clock
    end the run.
    """
    run = evidence.settings
    if run.budget.kind in ("useful_tokens", "wall_s", "steps"):
        return steps_of(run.budget, rows_per_epoch=1, global_batch=1, flops_per_row=1)
    return int(evidence.recorded("budget_steps"))


# -- the record


@expect(
    "settings",
    must="those of the run table and of the run id",
    known_from="plan",
    word="invalid",
)
def _find_other_settings(evidence: Evidence) -> Iterator[str]:
    if evidence.get("run_id") not in (None, evidence.row["run_id"]):
        yield f"run.json is of the run {evidence.get('run_id')}"
        return
    planned = evidence.planned
    found = evidence.settings
    if planned is None:
        raise NotCheckedError("the run table has no settings")
    if found.identity != planned.identity:
        there, here = (to_dict(run, science_only=True) for run in (planned, found))
        names = sorted(k for k in there.keys() | here.keys() if there.get(k) != here.get(k))
        yield f"the settings in run.json are not those of the run table: {', '.join(names)}"


@expect(
    "fields of run.json",
    must="of their type, within what is possible",
    known_from="record",
    word="invalid",
)
def _find_impossible_fields(evidence: Evidence) -> Iterator[str]:
    for path, (least, most, whole) in FIELDS.items():
        if (value := evidence.get(path)) is None:
            continue
        number = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
        if not number or not least <= value <= most or (whole and value != int(value)):
            yield f"run.json has {path} {value!r}"
    cut = evidence.get("text_cut")
    for corpus, share in cut.items() if isinstance(cut, dict) else ():
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            yield f"run.json has text_cut {share!r} of {corpus}"
    for path, expected in TEXTS.items():
        value = evidence.get(path)
        if value is not None and not (isinstance(value, str) and re.fullmatch(expected, value)):
            yield f"run.json has {path} {value!r}"
    if evidence.run is not None and evidence.run.arm == OURS:
        unknown = {name for name, _ in json.loads(evidence.row.get("unknown_facts") or "[]")}
        if missing := [name for name in RECORDED - unknown if evidence.get(name) is None]:
            raise NotCheckedError(f"run.json has no {', '.join(sorted(missing))}")


@expect(
    "parameters",
    must="the weights of the model with the vocabulary of its inputs",
    known_from="settings, store manifest",
    word="invalid",
)
def _find_other_parameters(evidence: Evidence) -> Iterator[str]:
    stated = evidence.recorded("parameters")
    model = evidence.settings.model.with_positions(evidence.settings.sequence_length)
    if (
        model.transformers is None
        and evidence.recount.vocabulary_size is None
        and model.vocabulary_size is None
    ):
        none, one = (parameters(model.with_vocabulary(size)) for size in (0, 1))
        if stated <= none or (stated - none) % (one - none):
            yield (
                f"parameters are {stated}, which no vocabulary gives: {none} + {one - none} × "
                "its size"
            )
    yield from differ("run.json has parameters", found=stated, expected=parameters(evidence.shape))


@expect(
    "flops_per_token by each convention",
    must="those of the model",
    known_from="settings, parameters",
    word="invalid",
    tolerance="1e-9 of it",
)
def _find_other_flops(evidence: Evidence) -> Iterator[str]:
    _ = evidence.settings
    ordered = [evidence.get(f"flops_per_token.{name}") for name in ("causal", "full", "hardware")]
    if None not in ordered and ordered != sorted(ordered):
        yield (
            f"run.json has flops_per_token causal, full, hardware {ordered}, which must not "
            "decrease"
        )
        return
    columns = {
        "full": "flops_per_token",
        "causal": "flops_per_token_causal",
        "hardware": "flops_per_token_hardware",
    }
    for name, column in columns.items():
        stated = evidence.recorded(f"flops_per_token.{name}")
        counted = evidence.row.get(column)
        if evidence.row.get("predicted_parameters_bytes") is None:
            raise NotCheckedError("the vocabulary size is not at hand")
        yield from differ(
            f"run.json has flops_per_token.{name}",
            found=stated,
            expected=counted,
            tolerance=1e-9,
        )


@expect(
    "number_format, optimizer, kernel, compilation, device, validation_attention",
    must="those of the settings",
    known_from="settings",
    word="invalid",
)
def _find_other_computing(evidence: Evidence) -> Iterator[str]:
    run = evidence.settings
    must = {"number_format": evidence.settings.number_format}
    if run.device == "cpu":
        yield from differ(
            "run.json has hardware.device_kind",
            found=evidence.row.get("device_kind"),
            expected="cpu",
        )
    if run.arm == OURS:
        must["optimizer"] = f"AdamW, {'fused' if run.optimizer.fused else 'foreach'}"
        kernel = "sdpa" if evidence.row.get("device_kind") == "cpu" else run.attention
        must |= {} if kernel == "auto" else {"kernel": kernel}
        if evidence.get("compilation") and not run.compile:
            yield "run.json has a compilation, but compile was not asked for"
    for name, value in (must | {"validation_attention": run.validation_attention}).items():
        if (found := evidence.get(name)) is not None:
            yield from differ(f"run.json has {name}", found, expected=value)
    if missing := [name for name in must if evidence.get(name) is None]:
        raise NotCheckedError(f"run.json has no {', '.join(missing)}")


@expect(
    "learning rates before a resumed run",
    must="those of its own schedule and budget",
    known_from="record",
    word="caution",
)
def _find_other_earlier_schedules(evidence: Evidence) -> Iterator[str]:
    if isinstance(earlier := evidence.get("earlier_schedule"), dict):
        other = ", ".join(f"{name} {value}" for name, value in earlier.items())
        yield (
            f"steps before {start_step(evidence.settings)} had the learning rates of other settings "
            f"({other})"
        )


@expect(
    "budget_steps",
    must="steps of the budget",
    known_from="settings, store",
    word="invalid",
)
def _find_other_budgets(evidence: Evidence) -> Iterator[str]:
    run = evidence.settings
    if "budget_steps" not in evidence.record:
        raise NotCheckedError("run.json does not have it")
    epoch: Fraction | float = math.nan
    flops = 1.0
    if run.budget.kind == "epochs":
        if isinstance(evidence.recount.counted, str):
            raise NotCheckedError("the rows of an epoch are not at hand")
        epoch = evidence.recount.counted.rows_per_epoch
    if run.budget.kind == "flops":
        flops = run.sequence_length * (evidence.row.get("flops_per_token") or math.nan)
    must = steps_of(
        run.budget, rows_per_epoch=epoch, global_batch=run.global_batch, flops_per_row=flops
    )
    yield from differ(
        "run.json has budget_steps", found=evidence.record["budget_steps"], expected=must
    )
    if (
        run.budget.useful_tokens is not None
        and evidence.row["status"] == "complete"
        and len(evidence.steps)
    ):
        useful = evidence.steps.sums("useful_tokens")
        done = (evidence.get("outcome.begins_at_useful_tokens") or 0) + useful.sum()
        goal = run.budget.useful_tokens
        if not done - useful[-1] < goal <= done:
            yield f"the run ended after {done:.0f} useful tokens, its budget is {goal}"


@expect(
    "outcome, attempt, ranks and nodes",
    must="those of the logs",
    known_from="logs, settings",
    word="invalid",
)
def _find_other_outcomes(evidence: Evidence) -> Iterator[str]:
    run = evidence.settings
    world = evidence.get("hardware.world_size")
    nodes = evidence.get("hardware.nodes")
    if world is not None:
        yield from differ(
            "run.json has hardware.world_size", found=world, expected=run.layout.world_size
        )
    if nodes is not None and not (isinstance(nodes, list) and len(nodes) <= run.layout.world_size):
        yield f"run.json has hardware.nodes {nodes!r}"
    begins = evidence.get("outcome.begins_at")
    before = evidence.get("outcome.begins_at_useful_tokens")
    if begins is not None:
        yield from differ("run.json has outcome.begins_at", found=begins, expected=start_step(run))
    if begins == 0 and before:
        yield f"run.json has outcome.begins_at 0, and outcome.begins_at_useful_tokens {before}"
    if evidence.row["status"] == "complete" and evidence.get("outcome.stopped_at") is not None:
        yield "run.json has the status complete, and outcome.stopped_at"
    if len(evidence.raw):
        attempt = evidence.get("attempt")
        last = int(evidence.raw["attempt"].max())
        steps = evidence.get("outcome.steps")
        if attempt is not None and attempt != last:
            yield f"run.json is of attempt {attempt}, the last one that logged steps is {last}"
        if evidence.row["status"] == "complete" and steps is not None:
            yield from differ(
                "run.json has outcome.steps",
                found=steps,
                expected=int(evidence.raw["step"].max()) + 1,
            )


@expect(
    "text, tokenizer and time of day of another program's run",
    must="known",
    known_from="its log",
    word="caution",
)
def _find_facts_not_logged(evidence: Evidence) -> Iterator[str]:
    if not evidence.row.get("external"):
        return
    if not (evidence.row["corpus"] and evidence.row["tokenizer"]):
        yield "text and tokenizer are not stated: losses compare only where both are the same"
    if evidence.row["started_unix_s"] is None:
        yield "times of day in the log are not read: order of the runs and drift are not known"
    log = evidence.get("log")
    if not isinstance(log, dict):
        return
    yield "the log counts no padding: every position is taken as useful"
    unit = str(log.get("time_unit"))
    if "/s" in unit and evidence.row["world_size"] != 1:
        which = "each device" if unit.endswith("/device") else "all devices"
        yield f"the trainer's own {unit.partition('/')[0]} a second are taken as of {which}"
    if log.get("every") != 1:
        yield f"the log has a line for every {log.get('every')} steps, and lines are taken as steps"
    yield from map(str, log.get("notes") or ())


@expect(
    "world_size that ranks observed",
    must="that of the layout",
    known_from="settings",
    word="invalid",
)
def _find_other_world_sizes(evidence: Evidence) -> Iterator[str]:
    if evidence.get("log"):
        raise NotCheckedError("another trainer wrote the log")
    asked = evidence.row.get("world_size")
    seen = sorted(
        {
            event["world_size"]
            for event in evidence.named("run_start")
            if event["world_size"] is not None
        }
    )
    if asked is not None and not seen:
        yield "no rank reported its start"
    elif asked is not None and seen != [asked]:
        yield f"ranks observed world size {', '.join(map(str, seen))}, asked was {asked}"


# -- events


@expect(
    "rows and useful_tokens of validations",
    must="those of the held-out slice",
    known_from="settings, held-out store",
    word="invalid",
)
def _find_other_validation_sizes(evidence: Evidence) -> Iterator[str]:
    for event in evidence.named("validation") + evidence.named("source_validation"):
        where = f"of the {event['event'].replace('_', ' ')} at step {event['step']}"
        rows = event["rows"] or 0
        useful = event["useful_tokens"] or 0
        correct = event["correct_tokens"]
        run = evidence.own
        whole = event["event"] == "validation"
        if not isinstance(evidence.recount.held_out, str):
            names = list(evidence.recount.held_out) if whole else [event["corpus"]]
            must = tuple(
                map(
                    sum,
                    zip(
                        *(evidence.recount.held_out.get(name, (0, 0)) for name in names),
                        strict=True,
                    ),
                )
            )
            if (rows, useful) != must:
                slice_has = f"the slice has {must[0]} and {must[1]}"
                yield (
                    f"{where.removeprefix('of the ')} validated on {rows} rows and {useful} "
                    f"useful, {slice_has}"
                )
                return
        if (
            rows > run.validation.rows * (len(run.corpora) if whole else 1)
            or useful > rows * run.sequence_length
        ):
            yield (
                f"{useful} useful tokens in {rows} rows {where}: more than {run.validation.rows} "
                "rows a corpus hold"
            )
            return
        if (correct is not None) != run.validation.accuracy:
            found = "missing" if run.validation.accuracy else "logged"
            yield f"correct_tokens {where} are {found}, against the settings"
            return
    sizes = {(event["rows"], event["useful_tokens"]) for event in evidence.named("validation")}
    if len(sizes) > 1:
        yield (
            f"validated on {' and '.join(str(n) for _, n in sorted(sizes, key=str))} useful "
            "tokens: it is fixed"
        )
    if sizes and isinstance(evidence.recount.held_out, str):
        raise NotCheckedError(evidence.recount.held_out)


@expect(
    "validations of a mixture's corpora",
    must="one of each corpus, which add up to the validation",
    known_from="settings, logs",
    word="invalid",
    tolerance=f"{SAME_SUM:g} of the loss, {LEFT_BETWEEN.seconds:g} s and {100 * LEFT_BETWEEN.share:g} % "
    "of the time",
)
def _find_other_sums(evidence: Evidence) -> Iterator[str]:
    """The loss over all corpora is the sum of those of each one, which are logged apart."""
    mixture = evidence.own.mixture
    if mixture is None:
        return
    parts: dict[tuple, list[Row]] = defaultdict(list)
    for event in evidence.named("source_validation"):
        parts[event["attempt"], event["step"]].append(event)
    for whole in evidence.named("validation"):
        of = parts[whole["attempt"], whole["step"]]
        where = f"the validation at step {whole['step']}"
        corpora = sorted(str(event["corpus"]) for event in of)
        if corpora != sorted(mixture.names):
            expected = ", ".join(sorted(mixture.names))
            yield f"{where} is of corpora {', '.join(corpora) or 'unknown'}, expected {expected}"
            return
        for name in ("rows", "useful_tokens", "correct_tokens", "loss_sum"):
            values = [event[name] for event in of]
            if whole[name] is None or None in values:
                continue
            if not math.isclose(whole[name], sum(values), rel_tol=SAME_SUM):
                yield f"{where} has {name} {whole[name]:.12g}, its corpora have {sum(values):.12g}"
                return
        took = whole["duration_s"] or 0.0
        of_corpora = sum(event["duration_s"] or 0.0 for event in of)
        if not -EXACT_S <= took - of_corpora <= LEFT_BETWEEN.beside(took):
            yield f"{where} took {took:.6g} s, those of its corpora {of_corpora:.6g} s"
            return


@expect(
    "bytes of weights, gradients, moments",
    must="those of the rank's share of the model",
    known_from="settings",
    word="invalid",
)
def _find_other_memory(evidence: Evidence) -> Iterator[str]:
    if not (events := evidence.named("memory")):
        raise NotCheckedError("the logs do not have it")
    run = _complete_settings(evidence)
    for event in events:
        of = memory(run, rank=event["rank"], device=evidence.row["device_kind"])
        for kind in ("parameters", "gradients", "optimizer"):
            if event[f"{kind}_bytes"] is not None and event[f"{kind}_bytes"] != getattr(of, kind):
                found = f"{kind}_bytes of rank {event['rank']} are {event[f'{kind}_bytes']}"
                yield f"{found}, its share of the model has {getattr(of, kind)}"
                return


@expect(
    "activations_bytes",
    must="those predicted for the layout on a CPU; length-bucketed: at most",
    known_from="settings",
    word="caution",
    tolerance=f"{LEAST_ACTIVATIONS:g} to {MOST_ACTIVATIONS:g} of them",
)
def _find_other_activations(evidence: Evidence) -> Iterator[str]:
    if evidence.row["device_kind"] != "cpu":
        raise NotCheckedError("kernels of GPUs hold what is not predicted to the byte")
    if not (events := evidence.named("memory")):
        raise NotCheckedError("the logs do not have it")
    run = _complete_settings(evidence)
    for event in events:
        predicted = memory(run, rank=event["rank"], device="cpu").activations
        if not predicted or event["activations_bytes"] is None:
            continue
        share = event["activations_bytes"] / predicted
        least = 0.0 if run.approach == "length-bucketed" else LEAST_ACTIVATIONS
        if not least <= share <= MOST_ACTIVATIONS:
            found = f"activations_bytes of rank {event['rank']} are {event['activations_bytes']}"
            yield f"{found}, predicted are {predicted}"
            return


@expect(
    "sent_bytes",
    must="the bytes that the layout sends, but for losses and norms",
    known_from="settings",
    word="invalid",
    tolerance=f"{SINGLE_NUMBERS:g} bytes, {SINGLE_NUMBERS_SHARE:g} of them",
)
def _find_other_sent_bytes(evidence: Evidence) -> Iterator[str]:
    events = [event for event in evidence.named("memory") if event["sent_bytes"] is not None]
    if not events:
        raise NotCheckedError("the logs do not have it")
    run = _complete_settings(evidence)
    if not is_predicted(run):
        raise NotCheckedError("it is not predicted for these settings")
    for event in events:
        predicted = exchanged_bytes(run, rank=event["rank"])
        of_numbers = SINGLE_NUMBERS + SINGLE_NUMBERS_SHARE * predicted
        if abs(event["sent_bytes"] - predicted) > of_numbers:
            found = f"sent_bytes of rank {event['rank']} are {event['sent_bytes']}"
            yield f"{found}, the layout sends {predicted}"
            return


@expect(
    "memory_peak_bytes",
    must="from the model's to the machine's bytes, never falling",
    known_from="settings, record",
    word="invalid",
)
def _find_impossible_peaks(evidence: Evidence) -> Iterator[str]:
    peak = evidence.column("memory_peak_bytes")
    for _, _, rows in evidence.raw.logs():
        fell = np.concatenate([[False], np.diff(evidence.raw["memory_peak_bytes"][rows]) < 0])
        if fell.any():
            at = rows.start + int(np.flatnonzero(fell)[0])
            yield (
                f"memory_peak_bytes falls to {evidence.raw['memory_peak_bytes'][at]:.0f} at step "
                f"{evidence.raw['step'][at]:.0f}"
            )
            return
    named = re.search(r"(\d+) ?GB", evidence.row.get("device") or "")
    most = int(named[1]) * 1.1e9 if named else evidence.get("hardware.memory_bytes")
    if most is not None and (evidence.row.get("device_kind") == "cpu" or named):
        yield from at_step(
            evidence.steps,
            name="memory_peak_bytes",
            wrong=peak > most,
            must=f"at most {most:.0f}",
        )
    run = _complete_settings(evidence)
    held = {
        rank: memory(run, rank, device=evidence.row["device_kind"])
        for rank in np.unique(evidence.steps["rank"]).astype(int).tolist()
    }
    least = np.array(
        [
            (m := held[int(rank)]).parameters + m.gradients + m.optimizer
            for rank in evidence.steps["rank"]
        ]
    )
    yield from at_step(
        evidence.steps,
        name="memory_peak_bytes",
        wrong=peak < least,
        must=least,
    )


def _complete_settings(evidence: Evidence) -> RunSettings:
    """Settings with the model's vocabulary, by the number of parameters where the inputs are not at
    hand.
    """
    shape = (
        find_shape(evidence.own, count=evidence.get("parameters"))
        if evidence.recount.vocabulary_size is None
        else evidence.shape
    )
    if shape is None:
        raise NotCheckedError("the vocabulary size is not at hand")
    return replace(evidence.own, model=shape)


@expect(
    "energy_j",
    must="watts of a device, over the attempt; in run.json, the sum over ranks",
    known_from="clocks, device",
    word="invalid",
)
def _find_impossible_energy(evidence: Evidence) -> Iterator[str]:
    joules = [
        (event["attempt"], event["rank"], event["energy_j"]) for event in evidence.named("run_stop")
    ]
    known = [entry for entry in joules if entry[2] is not None]
    total = evidence.get("outcome.energy_j")
    if not known and total is None:
        return
    seconds = {
        (a, r): float(np.ptp(evidence.raw["t_mono_s"][rows]) + evidence.raw["step_s"][rows][0])
        for a, r, rows in evidence.raw.logs()
    }
    for attempt, rank, energy in known:
        took = seconds.get((attempt, rank), math.nan)
        if (
            energy < 0
            or energy > MOST_WATTS * (took + 60)
            or (took > 10 and energy < LEAST_WATTS * took)
        ):
            yield f"energy_j of rank {rank} is {energy:.4g} in {took:.4g} s: {energy / took:.3g} W"
            return
    of = [energy for attempt, _, energy in joules if attempt == evidence.get("attempt")]
    if total is not None and of and None not in of:
        yield from differ(
            "run.json has outcome.energy_j",
            found=total,
            expected=sum(of),
            tolerance=1e-6,
        )
    elif total is not None and not known:
        took = sum(seconds.values())
        if total > MOST_WATTS * (10 * took + 3600):
            yield (
                f"run.json has outcome.energy_j {total:.4g} for {took:.4g} s of steps of all ranks"
            )


#: what the clock of a process may be ahead of the wall clock: seconds, and a share of it
CPU_CLOCK_S = 0.1
CPU_CLOCK_SHARE = 0.02


@expect(
    "cpu_s",
    must="at most the cores' seconds between init_done and run_stop, above zero where steps took time",
    known_from="clocks, machine",
    word="invalid",
    tolerance=f"{CPU_CLOCK_S:g} s and {100 * CPU_CLOCK_SHARE:g} %",
)
def _find_impossible_processor_time(evidence: Evidence) -> Iterator[str]:
    """The kernel counts a process's time on its cores apart from the clocks that steps are timed
    by. Steps that are logged shorter than they were leave it too little time.
    """
    begun = {
        (event["attempt"], event["rank"]): event["t_mono_s"]
        for event in evidence.named("init_done")
    }
    known = [event for event in evidence.named("run_stop") if event["cpu_s"] is not None]
    if not known:
        raise NotCheckedError("the logs hold no processor time")
    cores = evidence.recorded("hardware.cores")
    for event in known:
        began = begun.get((event["attempt"], event["rank"]))
        if began is None or event["t_mono_s"] is None:
            continue
        took = event["t_mono_s"] - began
        spent = event["cpu_s"]
        most = (1 + CPU_CLOCK_SHARE) * cores * took + CPU_CLOCK_S
        if spent > most or spent < 0 or (spent == 0 and took > CPU_CLOCK_S):
            yield (
                f"rank {event['rank']} computed for {spent:.4g} s in {took:.4g} s on {cores:g} cores"
            )
            return


#: seconds of a step, and nats a token, that no training has
LEAST_S = 1e-7
MOST_S = 1e7
MOST_NATS = 1e5
#: watts of a device: more than any takes, and less than any running one
MOST_WATTS = 3_000
LEAST_WATTS = 1
#: field of run.json → its least and its largest value, and whether it is a whole number
FIELDS: dict[str, tuple[float, float, bool]] = {
    "schema": (1, 1, True),
    "attempt": (0, 1e6, True),
    "parameters": (1, 1e15, True),
    "budget_steps": (1, 1e12, True),
    "micro_steps": (1, 1e9, True),
    "started_unix_s": (1e9, 1e11, False),
    **{f"flops_per_token.{name}": (1, 1e17, False) for name in ("full", "causal", "hardware")},
    "hardware.cores": (1, 1 << 16, True),
    "hardware.threads_per_rank": (1, 1 << 16, True),
    "hardware.world_size": (1, 1e7, True),
    "hardware.memory_bytes": (1 << 26, 1 << 60, True),
    "hardware.load_average_1min": (0, 1e7, False),
    "text_lost": (0, 1, False),
    "text_unknown": (0, 1, False),
    "launch.share": (1, 1e4, True),
    "outcome.steps": (0, 1e12, True),
    "outcome.begins_at": (0, 1e12, True),
    "outcome.begins_at_useful_tokens": (0, 1e18, True),
    "outcome.ended_unix_s": (1e9, 1e11, False),
    "outcome.energy_j": (0, 1e15, False),
}
#: fields that the trainer always records
RECORDED = {
    *("run_id", "schema", "attempt", "digest", "code", "environment", "inputs", "versions"),
    *("parameters", "micro_steps", "started_unix_s", "number_format", "optimizer", "kernel"),
    *("hardware.device", "hardware.device_kind", "hardware.threads_per_rank"),
    *("hardware.world_size", "hardware.memory_bytes", "hardware.cpu", "hardware.cores"),
    *("outcome.begins_at", "outcome.begins_at_useful_tokens", "outcome.steps"),
}
#: field of run.json → pattern of its text
TEXTS = {
    "number_format": "fp32|bf16|fp16|fp8",
    "hardware.device": r"\S.*",
    "hardware.device_kind": "cpu|cuda|mps|xpu|tpu",
    "git.commit": "[0-9a-f]{40}|[0-9a-f]{64}",
    "digest": "[0-9a-f]{64}",
}
