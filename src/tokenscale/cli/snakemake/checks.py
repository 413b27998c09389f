"""Checks before the first job is submitted, and the last lines of a call: readiness in a dry run,
reports otherwise.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tokenscale.base.errors import UserError
from tokenscale.cli.snakemake import internals
from tokenscale.runs.launch import cluster, submission
from tokenscale.runs.launch.image import find_image_error
from tokenscale.settings.closure import find_missing_packages
from tokenscale.settings.config import Config
from tokenscale.settings.profile import Call, find_replaced_entries, load_profile

if TYPE_CHECKING:
    from tokenscale.cli.snakemake.internals import Job, Workflow


class CallChecks:
    """Checks of one Snakemake call."""

    def __init__(self, workflow: "Workflow", config: Config, call: Call):
        self.workflow = workflow
        self.config = config
        self.call = call

    def start(self) -> None:
        """Wait for the jobs of this call. Raise UserError if they must not be submitted."""
        internals.wait_for_jobs_when_interrupted()
        if internals.submits_jobs(self.workflow):
            errors = self._find_errors(internals.get_jobs_to_submit(self.workflow))
        else:
            errors = self._find_errors_here(internals.get_jobs_to_run(self.workflow))
        for error in errors:
            raise error

    def end(self) -> None:
        """Print what a dry run's jobs need, or where the reports of a call lie that has nothing
        left to do.
        """
        if not internals.is_planned(self.workflow):
            return
        lines = (
            self._describe_dry_run()
            if internals.is_dry_run(self.workflow)
            else self._describe_reports()
        )
        for line in lines:
            internals.print_after_log(line)

    def _find_errors(self, jobs: list["Job"]) -> Iterator[UserError]:
        """Yield why jobs must not be submitted: options, accounts, the image, the budget."""
        from tokenscale.cli.plan_prices import RunPrices

        config = self.config
        machine = self.config.machine
        trained = [job.wildcards.run_id for job in jobs if job.rule.name == "train"]
        variables = submission.unset_variable_error(dict(job.resources.items()) for job in jobs)
        errors = [self._find_replaced_options(jobs), variables]
        if machine.container is not None and machine.container_packages:
            runs = config.all_runs(config.usable(()))
            settings = {run_id: runs[run_id].settings for run_id in trained}
            lacking = find_missing_packages(settings, packages=machine.container_packages)
            errors.append(
                submission.missing_package_error(
                    lacking, machine=config.settings.machine or "", container=machine.container
                )
            )
        if trained:
            errors.append(find_image_error(machine))
        if machine.starter == "srun":
            errors += self._find_site_errors(jobs, trained)
        prices = RunPrices(config).sum_by_experiment(trained)
        errors.append(submission.budget_error(prices, config.settings.budget.node_hours))
        yield from filter(None, errors)

    def _find_errors_here(self, jobs: list["Job"]) -> Iterator[UserError]:
        """Yield why jobs must not run on this machine."""
        from tokenscale.cli.plan_prices import RunPrices

        trained = [job.wildcards.run_id for job in jobs if job.rule.name == "train"]
        if error := RunPrices(self.config).find_cpu_error(trained):
            yield error

    def _find_site_errors(
        self, jobs: list["Job"], trained: list[str]
    ) -> Iterator[UserError | None]:
        """Yield what the cluster's accounts, partition and purged folders object to."""
        from tokenscale.cli import ready
        from tokenscale.cli.plan_prices import RunPrices

        machine = self.config.machine
        profile = self.call.profile
        for account in sorted(
            {str(dict(job.resources.items()).get("slurm_account", "")) for job in jobs}
        ):
            yield cluster.account_error(account, machine)
        if profile and jobs:
            file, values = load_profile(profile)
            yield from cluster.partition_errors(
                values,
                ready.read_resources(profile),
                machine,
                partitions=cluster.query_partitions(),
                file=str(file),
            )
        yield ready.find_purge_error(self.config, RunPrices(self.config), trained, profile=profile)

    def _find_replaced_options(self, jobs: list["Job"]) -> UserError | None:
        maps = internals.get_given_resources(self.workflow)
        rules = {job.rule.name for job in jobs}
        return submission.replaced_options_error(
            find_replaced_entries(maps, rules, profile=self.call.profile) if jobs else {}
        )

    def _describe_dry_run(self) -> Iterator[str]:
        """Yield the jobs by their reasons, the cost of what would be submitted, and whether the
        experiments can start, as `ready` says it.

        A dry run has no executor: where trainings start by srun, their jobs would be submitted.
        """
        from tokenscale.cli.plan_prices import RunPrices
        from tokenscale.cli.snakemake.jobs import list_planned_jobs
        from tokenscale.cli.snakemake.reasons import render

        if found := list_planned_jobs(internals.planned):
            yield render(found, targets=internals.get_targets(), call=self.call) + "\n"
        jobs = internals.get_jobs_to_submit(self.workflow)
        if error := self._find_replaced_options(jobs):
            yield error.render()
        trained = [job.wildcards.run_id for job in jobs if job.rule.name == "train"]
        prices = RunPrices(self.config)
        if self.config.machine.starter == "srun":
            allowed = self.config.settings.budget.node_hours
            yield from submission.format_costs(
                prices.sum_by_experiment(trained), node_hours=allowed
            )
        if trained:
            from tokenscale.cli import ready

            planned = {
                getattr(job.wildcards, "experiment", None)
                for job in internals.get_jobs_to_run(self.workflow)
            }
            chosen = self.config.select_experiments(())
            names = [
                name for name in dict.fromkeys([*chosen, *self.config.available]) if name in planned
            ] or chosen
            problems = list(
                ready.find_problems(
                    self.config,
                    names,
                    prices,
                    profile=self.call.profile,
                )
            )
            yield from ready.render(
                self.config,
                names,
                prices=prices,
                lacks=problems,
                colour=sys.stderr.isatty(),
            )

    def _describe_reports(self) -> Iterator[str]:
        """Yield each report's page with its answers and cautions, which follow the page's name in
        its log.
        """
        if internals.get_jobs_to_run(self.workflow, unfinished=True):
            return
        for page in internals.find_outputs(self.workflow, rule="build_page"):
            log = Path("results/logs", Path(page).parent.name, "page.log")
            text = log.read_text(errors="replace") if log.is_file() else ""
            answers = text.partition(f"{page}\n")[2]
            yield f"report   {page}\n{answers}".rstrip("\n")
