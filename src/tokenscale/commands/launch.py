"""The verb `launch`: a run by its id or by its settings, started, printed, or written down for sbatch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.errors import UserError, nearest
from tokenscale.files import write_text
from tokenscale.launch.command import Launch, job_of
from tokenscale.launch.start import start as start_run
from tokenscale.settings import machine as machines
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import RunSettings


@dataclass(frozen=True)
class Request:
    """A run, what it reads and writes, and the machine it is for. `site` and `profile` are where that was said."""

    run: RunSettings
    output: Path
    manifests: dict[str, Path]
    machine: Machine
    site: str | None = None
    profile: dict[str, Any] | None = None
    profile_name: str | None = None


def stated(run: str, output: Path | None, site: str | None, manifests: dict[str, Path]) -> Request:
    """From settings as JSON and paths, as the rule passes them."""
    if output is None:
        raise UserError("a run that is given as JSON needs --output.", next="--output results/runs/<run id>/done.json")
    return Request(RunSettings.from_json(run), output, manifests, machines.load(site), site)


def named(run_id: str | None, profile: str | None, config: str) -> Request:
    """From the id of a run in any experiment, at a profile's scale and for its machine."""
    from tokenscale.settings import config as configuration
    from tokenscale.settings import profile as profiles
    from tokenscale.settings.manifests import done, manifests_of

    if run_id is None:
        raise UserError("no run is named.", next="python -m tokenscale launch RUN_ID; `snakemake -n runs` lists ids")
    overrides = profiles.configuration(profile) if profile else {}
    settings = configuration.load(config, overrides=overrides)
    runs = settings.all_runs(list(settings.available))
    if run_id not in runs:
        near = nearest(run_id, runs)
        raise UserError(
            f"no experiment has a run {run_id}.",
            scale=settings.settings.scale,
            next=f"did you mean {near}?" if near else "`snakemake -n runs` lists ids; --profile chooses another scale",
        )
    run = runs[run_id].settings
    return Request(
        run,
        Path(done(run_id)),
        {role: Path(path) for role, path in manifests_of(run).items()},
        settings.machine,
        settings.settings.machine,
        profiles.read(profile)[1] if profile else {},
        profile,
    )


def printed(request: Request, share: int) -> str:
    """The command that would start the run's processes, with the variables it adds, for a shell."""
    launch = Launch(request.run, request.machine, request.output.parent, share, job=job_of(request.machine))
    return launch.printed(request.manifests)


def written(request: Request, file: Path, share: int) -> str:
    """Write the run's job script to a file; returns what to do with it."""
    from tokenscale.launch import submission

    words = ["launch", "--run", request.run.to_json(), "--site", request.site or "", "--share", str(share)]
    words += ["--output", str(request.output)]
    for role, path in request.manifests.items():
        words += [f"--{role.replace('_', '-')}", str(path)]
    manifests = [str(path) for path in request.manifests.values()]
    text = submission.script(request.run, request.machine, request.profile or {}, words, manifests)
    write_text(file, text)
    Path(submission.LOGS).mkdir(parents=True, exist_ok=True)  # sbatch makes no folders, and says nothing of it
    missing = [manifest for manifest in manifests if not Path(manifest).is_file()]
    profile = f"--profile {request.profile_name} " if request.profile_name else ""
    first = f"snakemake {profile}{' '.join(missing)}\n" if missing else ""
    return f"{first}sbatch {file}"


def start(request: Request, share: int) -> int:
    """Start it here; a folder that another attempt holds is waited for."""
    return start_run(request.run, request.output, request.manifests, machine=request.machine, share=share, wait=True)
