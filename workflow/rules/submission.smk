"""Checks before the first job is submitted: profile, accounts, image, budget. A dry run also prints the cost."""

import atexit

from tokenscale.runs.launch import submission as before
from tokenscale.settings import profile
from tokenscale.settings.closure import find_missing_packages


def without_a_value(jobs):
    return before.unset_variable_error(dict(job.resources.items()) for job in jobs)


def taken_away(jobs):
    maps = internals.get_given_resources(workflow)
    rules = {job.rule.name for job in jobs}
    lost = (
        profile.find_replaced_entries(maps, rules, COMMAND_LINE, os.environ)
        if jobs
        else {}
    )
    return before.replaced_options_error(lost)


def sum_prices(jobs):
    return run_prices().sum_by_experiment(
        job.wildcards.run_id for job in jobs if job.rule.name == "train"
    )


def over_budget(jobs):
    return before.budget_error(sum_prices(jobs), settings.settings.budget.node_hours)


def not_in_the_image(jobs):
    machine = settings.machine
    if machine.container is None or not machine.container_packages:
        return None
    runs = {
        job.wildcards.run_id: run_of(job.wildcards)
        for job in jobs
        if job.rule.name == "train"
    }
    found = find_missing_packages(runs, machine.container_packages)
    return before.missing_package_error(
        found, settings.settings.machine, machine.container
    )


def print_error(error):
    print(error.render(), file=sys.stderr, flush=True)


onstart:
    if internals.submits_jobs(workflow):
        jobs = internals.get_jobs_to_submit(workflow)
        error = (
            taken_away(jobs)
            or without_a_value(jobs)
            or not_in_the_image(jobs)
            or over_budget(jobs)
        )
        if error:
            print_error(error)
            # exit through Snakemake, which unlocks the folder
            sys.exit(2)


def print_submission_checks():
    """Print the checks in a dry run, which calls no hook and has no executor: with srun, jobs would be submitted."""
    if workflow.dryrun and internals.is_planned(workflow):
        jobs = internals.get_jobs_to_submit(workflow)
        found = [taken_away(jobs), without_a_value(jobs)]
        if settings.machine.starter == "srun":
            found += [not_in_the_image(jobs), over_budget(jobs)]
            costs = before.format_costs(
                sum_prices(jobs), settings.settings.budget.node_hours
            )
            print(*costs, sep="\n", file=sys.stderr, flush=True)
        for error in filter(None, found):
            print_error(error)


atexit.register(print_submission_checks)
