"""Weights & Biases, offline: `<output>/<run id>/wandb/offline-run-…/`, for `wandb sync` where there is a network."""

import os
import shutil
from pathlib import Path

from tokenscale.analysis.exporters.facts import Facts
from tokenscale.analysis.exporters.measures import Point

PROJECT = "tokenscale"


def look(output: Path) -> str:
    """The command that sends it, from a machine with a network and an account."""
    return f"wandb sync {output}/*/wandb/offline-run-*"


class Exporter:
    """One offline run a run, with the run's id. The folder of an earlier export is removed."""

    def __init__(self, output: Path, run_folder: Path, facts: Facts):
        # nothing of it leaves the machine, and nothing lies in the user's home
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
            os.environ.setdefault(f"WANDB_{kind}_DIR", str((run_folder / "wandb").resolve()))
        import wandb

        shutil.rmtree(run_folder / "wandb", ignore_errors=True)
        (run_folder / "wandb").mkdir(parents=True)
        quiet = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,  # the run's commit, not the one that lies here now
            disable_code=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,  # nor this process's machine: the run's is in the config
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=PROJECT,
            id=facts.run_id,
            name=facts.run_id,
            dir=str(run_folder),
            mode="offline",
            reinit="create_new",
            config=_config(facts),
            settings=quiet,
        )
        self._files(facts)

    def add(self, points: list[Point]) -> None:
        """One row a step; a validation joins the row of the step it was made before."""
        for point in points:
            self._run.log({**point.values, "_timestamp": point.t_unix_s}, step=point.step)

    def close(self, facts: Facts, summary: dict[str, float], ended: bool) -> None:
        """Values of the whole run, its outcome, its last attempt's facts."""
        self._run.config.update(_config(facts), allow_val_change=True)
        self._files(facts)
        if ended:
            self._run.summary.update({**summary, "status": facts.status})
        self._run.finish(exit_code=0 if ended and facts.status == "complete" else 1)

    def _files(self, facts: Facts) -> None:
        for path in facts.files:
            shutil.copyfile(path, Path(self._run.dir) / path.name)
            self._run.save(str(Path(self._run.dir) / path.name), base_path=self._run.dir, policy="end")


def _config(facts: Facts) -> dict[str, object]:
    """Settings by their dotted names, provenance under one head."""
    return {**facts.settings, **{f"provenance.{name}": value for name, value in facts.provenance.items()}}
