"""What stands against a submission: a variable without a value, a budget that does not reach."""

from tokenscale.launch.before import over_budget, without_a_value


def test_a_variable_without_a_value_is_named_with_what_sets_it():
    jobs = [{"slurm_account": "$ALPS_ACCOUNT", "mem_mb": 450000, "slurm_partition": "normal"}] * 3
    said = without_a_value(jobs).render()
    assert said.startswith("tokenscale: a variable of the profile has no value: ALPS_ACCOUNT.\n")
    assert "slurm_account: $ALPS_ACCOUNT" in said and "export ALPS_ACCOUNT=<project>" in said
    assert said.count("\n") == 2, "three jobs, one message"


def test_any_resource_of_any_job_counts():
    jobs = [{"slurm_account": "g1"}, {"qos": "${MY_QOS}", "slurm_account": "$ALPS_ACCOUNT"}]
    error = without_a_value(jobs)
    assert "ALPS_ACCOUNT, MY_QOS" in error.what
    assert "export MY_QOS=<value>" in error.facts["next"] and "export ALPS_ACCOUNT=<project>" in error.facts["next"]


def test_values_that_only_look_like_variables_pass():
    assert without_a_value([]) is None
    assert (
        without_a_value([{"slurm_account": "g1", "slurm_extra": "--comment=of-$HOME", "runtime": 720, "n": "$"}])
        is None
    )


def test_a_budget_that_is_kept_says_nothing():
    assert over_budget({}, 50) is None
    assert over_budget({"demo": 20.0, "other": 30.0}, 50) is None


def test_a_budget_that_is_not_kept_names_the_largest_experiments_and_the_way_out():
    hours = {"small": 1.0, "large": 40.0, "middle": 20.04, **{f"e{n}": 0.5 for n in range(4)}}
    error = over_budget(hours, 50, unknown=3)
    assert error.facts["needed"] == "63.0 node-hours (estimated), and 3 runs of unknown hours"
    assert error.facts["budget"].startswith("50 ")
    lines = error.facts["largest"].splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["large", "middle", "small"]
    assert lines[0].split()[1] == "40.0" and lines[-1] == "and 2 more experiments: 1.0"
    assert "--config 'budget={node_hours: 70}'" in error.facts["next"]


def test_nothing_is_free_in_a_budget_of_nothing():
    assert over_budget({"demo": 0.1}, 0) is not None
