"""MLflow without a server: `<output>/mlflow.db` (SQLite) and `<output>/artifacts/`."""

import os
from pathlib import Path

from tokenscale.analysis.exporters.facts import Facts
from tokenscale.analysis.exporters.measures import Point

EXPERIMENT = "tokenscale"
#: MLflow's limits: metrics and parameters a call, characters of a value
METRICS, PARAMETERS, LONGEST = 1000, 100, 5000
#: ours → MLflow's; a run whose export was stopped stays "RUNNING"
STATUS = {"complete": "FINISHED", "nonfinite": "FAILED"}


def look(output: Path) -> str:
    """The command that shows it."""
    return f"mlflow ui --backend-store-uri {_uri(output)}"


def _uri(output: Path) -> str:
    return f"sqlite:///{output.resolve() / 'mlflow.db'}"


class Exporter:
    """One MLflow run a run. Those of earlier exports are deleted as MLflow deletes: hidden, until `mlflow gc`."""

    def __init__(self, output: Path, run_folder: Path, facts: Facts):
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it reports to its makers otherwise
        from mlflow import MlflowClient
        from mlflow.entities import Param

        output.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(_uri(output), _uri(output))
        known = self._client.get_experiment_by_name(EXPERIMENT)
        place = (output / "artifacts").resolve().as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT, place)
        for earlier in self._client.search_runs([experiment], f"tags.`tokenscale.run_id` = '{facts.run_id}'"):
            self._client.delete_run(earlier.info.run_id)
        run = self._client.create_run(
            experiment,
            start_time=int(facts.started_unix_s * 1000) or None,
            tags={"tokenscale.run_id": facts.run_id, "mlflow.source.name": "tokenscale"},
            run_name=facts.run_id,
        )
        self._run, self._last = run.info.run_id, 0
        settings = [Param(name, str(value)[:LONGEST]) for name, value in facts.settings.items()]
        for start in range(0, len(settings), PARAMETERS):
            self._client.log_batch(self._run, params=settings[start : start + PARAMETERS])
        self._facts(facts)

    def add(self, points: list[Point]) -> None:
        """Many in a call: a call takes milliseconds."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), int(point.t_unix_s * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + METRICS])
        self._last = points[-1].step

    def close(self, facts: Facts, summary: dict[str, float], ended: bool) -> None:
        """Values of the whole run at its last step, its last attempt's facts, its outcome."""
        if not ended:
            return
        at = facts.ended_unix_s or 0.0
        self.add([Point(self._last, at, summary)])
        self._facts(facts)
        self._client.set_terminated(self._run, STATUS.get(facts.status, "KILLED"), int(at * 1000) or None)

    def _facts(self, facts: Facts) -> None:
        from mlflow.entities import RunTag

        tags = {**facts.provenance, "status": facts.status}
        if facts.commit:
            tags["mlflow.source.git.commit"] = facts.commit
        self._client.log_batch(self._run, tags=[RunTag(name, str(value)[:LONGEST]) for name, value in tags.items()])
        for path in facts.files:
            self._client.log_artifact(self._run, str(path))
