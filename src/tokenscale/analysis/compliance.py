"""Does a run's log support a number? valid, suspect or invalid, with the reasons in words."""

from collections import defaultdict
from typing import Any

Row = dict[str, Any]

#: order in which a rank must report, once an attempt
ORDER = ("run_start", "init_done", "run_stop")


def complete_steps(steps: list[Row]) -> int:
    """Number of steps that have a row of every rank."""
    ranks: dict[int, set[int]] = defaultdict(set)
    world = {}
    for row in steps:
        ranks[row["step"]].add(row["rank"])
        world[row["step"]] = row["world_size"]
    return sum(len(found) == world[step] for step, found in ranks.items())


def check(
    run: Row, raw: list[Row], steps: list[Row], events: list[Row], changed: list[str] = (), trouble: str | None = None
) -> tuple[str, str]:
    """(validity, reasons parted by "; ").

    `raw` are all step rows of all attempts, `steps` the merged ones; `changed` names logs that differ from their sealed
    hash, `trouble` says what is wrong with run.json. Invalid: a number from this run would be wrong.
    Suspect: it may be right, and somebody should look.
    """
    invalid, suspect = [], []
    if trouble:
        invalid.append(trouble)
    elif run.get("steps_asked") is None:
        invalid.append("the settings in run.json are not readable by this version")
    elif not run["sealed"]:
        ended = run["status"] != "running"
        (suspect if ended else invalid).append(
            "run.json does not match its seal" if ended else "the run has not ended (run.json is not sealed)"
        )
    diverged = run["status"] == "nonfinite"
    if diverged:
        invalid.append(_stop(run, steps))
    elif run["status"] not in ("complete", "running", "unreadable"):
        invalid.append(f"status {run['status']}")
    if changed:
        suspect.append(f"logs differ from the hashes sealed into run.json: {', '.join(changed)}")
    if not trouble and run.get("steps_asked") is not None:
        invalid += [] if diverged else _whole(run, steps)
        invalid += _content(run, steps)
    invalid += _world(run, events)
    suspect += _monotone(raw)
    suspect += _event_order(run, events)
    if (run.get("share") or 1) > 1:
        suspect.append(f"{run['share']} runs had its node at once: its times are not those of a run alone")
    red = run["quarantined"] - run["quarantined_benign"]
    if red:
        suspect.append(f"{red} broken log line{'s' * (red > 1)} that no killed process explains")
    validity = "invalid" if invalid else "suspect" if suspect else "valid"
    return validity, "; ".join(invalid + suspect)


def _first_nonfinite(steps: list[Row]) -> int | None:
    return min(
        (r["step"] for r in steps if r["nonfinite"] or (r["loss_sum"] is None and (r["useful_tokens"] or 0) > 0)),
        default=None,
    )


def _stop(run: Row, steps: list[Row]) -> str:
    """Why a run ended early whose training ran into a number that is not finite."""
    first = _first_nonfinite(steps)
    where = "" if first is None else f" at step {first} of {run.get('steps_asked') or 'an unknown number'}"
    return f"training stopped: loss or gradient not finite{where}"


def _whole(run: Row, steps: list[Row]) -> list[str]:
    """What a run that was not stopped must have: all of its steps, all of them finite."""
    found = []
    if run["steps_seen"] != run["steps_asked"]:
        found.append(f"{run['steps_seen']} of {run['steps_asked']} steps are in the logs of all ranks")
    if (first := _first_nonfinite(steps)) is not None:
        found.append(f"loss or gradient not finite at step {first}")
    return found


def _content(run: Row, steps: list[Row]) -> list[str]:
    found = []
    if any((r["useful_tokens"] or 0) > (r["total_tokens"] or 0) for r in steps):
        found.append("more useful tokens than tokens")
    if any(r["step_s"] is not None and r["step_s"] <= 0 for r in steps):
        found.append("a step that took no time")
    rows: dict[int, int] = defaultdict(int)
    ranks: dict[int, int] = defaultdict(int)
    for r in steps:
        rows[r["step"]] += r["rows"] or 0
        ranks[r["step"]] += 1
    world = {r["step"]: r["world_size"] for r in steps}
    wrong = sorted(s for s in rows if ranks[s] == world[s] and rows[s] != run["global_batch"])
    if wrong:
        found.append(f"ranks hold {rows[wrong[0]]} rows at step {wrong[0]}, the global batch is {run['global_batch']}")
    return found


def _world(run: Row, events: list[Row]) -> list[str]:
    seen = sorted({e["world_size"] for e in events if e["event"] == "run_start" and e["world_size"] is not None})
    if not seen:
        return ["no rank reported its start"] if run.get("world_size") is not None else []
    if run.get("world_size") is not None and seen != [run.get("world_size")]:
        return [f"ranks observed world size {', '.join(map(str, seen))}, asked was {run['world_size']}"]
    return []


def _monotone(raw: list[Row]) -> list[str]:
    last: dict[tuple[int, int], Row] = {}
    steps = clock = False
    for row in raw:  # in the order of the file
        key = (row["attempt"], row["rank"])
        before = last.get(key)
        if before is not None:
            steps |= row["step"] != before["step"] + 1
            clock |= None not in (row["t_mono_s"], before["t_mono_s"]) and row["t_mono_s"] < before["t_mono_s"]
        last[key] = row
    return ["steps skip or repeat inside an attempt"] * steps + [
        "the monotonic clock goes back inside an attempt"
    ] * clock


def _event_order(run: Row, events: list[Row]) -> list[str]:
    named: dict[tuple[int, int], list[str]] = defaultdict(list)
    for event in events:
        if event["event"] in ORDER:
            named[event["attempt"], event["rank"]].append(event["event"])
    found = []
    if any(names != [name for name in ORDER if name in names] for names in named.values()):
        found.append("events out of order or repeated inside an attempt")
    last = max((attempt for attempt, _ in named), default=None)
    ended = all("run_stop" in names for (attempt, _), names in named.items() if attempt == last)
    if run["status"] == "complete" and not ended:
        found.append("a rank of the last attempt reported no run_stop")
    return found
