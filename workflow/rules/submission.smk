"""Before the first job is submitted: accounts and the budget. A dry run says the same at its end, and goes on."""

import atexit

from tokenscale.launch import before


def to_submit():
    return [
        job
        for job in workflow.dag.needrun_jobs(exclude_finished=False)
        if job.rule.name not in workflow._localrules and not job.is_norun
    ]


def without_a_value(jobs):
    return before.without_a_value(dict(job.resources.items()) for job in jobs)


def over_budget(jobs):
    from tokenscale.commands.priced import Priced

    trainings = [job.wildcards.run_id for job in jobs if job.rule.name == "train"]
    hours, unknown = Priced(settings).hours(trainings)
    return before.over_budget(hours, settings.settings.budget.node_hours, unknown)


def say(error):
    print(error.render(), file=sys.stderr, flush=True)


onstart:
    if workflow.non_local_exec and not workflow.remote_exec:
        jobs = to_submit()
        error = without_a_value(jobs) or over_budget(jobs)
        if error:
            say(error)
            # leaves through Snakemake, which takes its lock off the folder
            sys.exit(2)


def warn():
    """A dry run calls no hook and knows no executor: where a machine's ranks come from srun, jobs are submitted."""
    if workflow.dryrun and workflow.scheduler is not None:
        jobs = to_submit()
        found = [without_a_value(jobs)]
        if settings.machine.starter == "srun":
            found.append(over_budget(jobs))
        for error in filter(None, found):
            say(error)


atexit.register(warn)
