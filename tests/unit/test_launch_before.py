"""What stands against a submission: a variable without a value, a budget that does not reach."""

from tokenscale.costs.prices import Price, sum_prices
from tokenscale.runs.launch.submission import budget_error, format_costs, unset_variable_error


def of(node_hours, **why):
    """What one run on one node takes."""
    return sum_prices([Price(4, 1, None if "unknown" in why else node_hours * 3600, 1, 1, 0, 1, **why)])


def test_a_variable_without_a_value_is_named_with_what_sets_it():
    jobs = [{"slurm_account": "$ALPS_ACCOUNT", "mem_mb": 450000, "slurm_partition": "normal"}] * 3
    said = unset_variable_error(jobs).render()
    assert "ALPS_ACCOUNT" in said.splitlines()[0]
    assert "slurm_account: $ALPS_ACCOUNT" in said and "export ALPS_ACCOUNT=<project>" in said
    assert said.count("\n") == 2, "three jobs, one message"


def test_any_resource_of_any_job_counts():
    jobs = [{"slurm_account": "g1"}, {"qos": "${MY_QOS}", "slurm_account": "$ALPS_ACCOUNT"}]
    error = unset_variable_error(jobs)
    assert "ALPS_ACCOUNT, MY_QOS" in error.what
    assert "export MY_QOS=<value>" in error.facts["next"] and "export ALPS_ACCOUNT=<project>" in error.facts["next"]


def test_values_that_only_look_like_variables_pass():
    assert unset_variable_error([]) is None
    assert (
        unset_variable_error([{"slurm_account": "g1", "slurm_extra": "--comment=of-$HOME", "runtime": 720, "n": "$"}])
        is None
    )


def test_a_budget_that_is_kept_says_nothing():
    assert budget_error({}, 50) is None
    assert budget_error({"demo": of(20.0), "other": of(30.0)}, 50) is None


def test_a_budget_that_is_not_kept_names_the_largest_experiments_and_the_way_out():
    totals = {"small": of(1.0), "large": of(40.0), "middle": of(20.04), **{f"e{n}": of(0.5) for n in range(4)}}
    error = budget_error(totals, 50)
    assert error.facts["needed"] == "63.0 node-hours (estimated)"
    assert error.facts["budget"].startswith("50 ")
    lines = error.facts["largest"].splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["large", "middle", "small"]
    assert lines[0].split()[1] == "40.0" and lines[-1] == "and 2 more experiments: 1.00"
    assert "--config 'budget={node_hours: 70}'" in error.facts["next"] and "corpus tokens" not in error.facts["next"]
    error = budget_error(totals | {"other": of(0, unknown="no device")}, 50)
    assert error.facts["needed"] == "≥ 63.0 node-hours (estimated), and 1 runs of unknown hours"


def test_upper_bounds_count_for_the_budget_and_are_marked():
    totals = {"exact": of(1.0), "bounded": of(60.0, bound="the time limit of their jobs")}
    error = budget_error(totals, 50)
    assert error.facts["needed"] == "≤ 61.0 node-hours (estimated), 1 runs with an upper bound"
    assert error.facts["largest"].split() == ["bounded", "≤", "60.0", "exact", "1.00"]
    assert "snakemake corpus tokens" in error.facts["next"]


def test_a_cost_is_listed_by_experiment_within_the_budget_and_over_it():
    totals = {"exact": of(1.0), "bounded": of(3.0, bound="the time limit of their jobs")}
    first, *lines = format_costs(totals, 50)
    assert first == "cost of 2 trainings, estimated: ≤ 4.00 node-hours, within the budget of 50 (budget.node_hours)"
    assert [line.split()[:2] for line in lines] == [["exact", "1.00"], ["bounded", "≤"], ["≤:", "1"]]
    assert "over the budget of 3 " in format_costs(totals, 3)[0] and format_costs({}, 0) == []


def test_nothing_is_free_in_a_budget_of_nothing():
    assert budget_error({"demo": of(0.1)}, 0) is not None
