"""Runs → a tracker, after them or beside them. A process of its own that only reads: no rank ever
waits for it.
"""

import importlib.util
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from tokenscale.analysis.measures import Facts, Point, read_facts, read_points
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import lock_folder, naming, remove_tree
from tokenscale.runs.records.provenance import read_sealed

#: name of the experiment in MLflow, of the project in Weights & Biases
PROJECT = "tokenscale"
#: longest text for TensorBoard, longest value for MLflow, characters; the whole is in the run's
#: folder
TEXT = 200_000
VALUE = 5000
#: MLflow's limits of metrics and parameters per call
METRICS = 1000
PARAMETERS = 100
#: ours → MLflow's; a run whose export was stopped stays "RUNNING"
STATUS = {"complete": "FINISHED", "nonfinite": "FAILED"}


class TensorBoard:
    """TensorBoard: one folder per run, `<output>/<run id>/`. Event files of an earlier export are
    removed.
    """

    look = "tensorboard --logdir {output} --samples_per_plugin scalars=100000"

    def __init__(self, output: Path, run_folder: Path, facts: Facts):
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from torch.utils.tensorboard import SummaryWriter

        for earlier in run_folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._writer = SummaryWriter(str(run_folder))
        self._last = 0
        started = facts.started_unix_s
        self._write(hparams_pb(dict(facts.settings), facts.run_id, started or None), started)
        self._texts(facts, at=started)
        self._writer.flush()

    def add(self, points: list[Point]) -> None:
        """Write and flush."""
        for point in points:
            for tag, value in point.values.items():
                self._writer.add_scalar(tag, value, point.step, point.t_unix_s, new_style=True)
        self._last = points[-1].step
        self._writer.flush()

    def close(self, facts: Facts, summary: dict[str, float], ended: bool) -> None:
        """Write the values of the whole run at its last step, its outcome, and its last attempt's
        facts.
        """
        if ended:
            at = facts.ended_unix_s or 0.0
            self.add([Point(step=self._last, t_unix_s=at, values=summary)])
            self._texts(facts, at)
            self._write(_session_end(facts.status == "complete", at), at)
        self._writer.close()

    def _texts(self, facts: Facts, at: float) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        texts = {
            "outcome": facts.status,
            "settings": _table(facts.settings),
            "provenance": _table(facts.provenance),
        }
        for path in facts.files[1:]:
            changes = path.read_text(encoding="utf-8", errors="replace")
            texts[path.name] = f"~~~~diff\n{changes[:TEXT]}\n~~~~"
        for name, text in texts.items():
            self._write(text_pb(f"run/{name}", text), at)

    def _write(self, summary, at: float) -> None:
        self._writer._get_file_writer().add_summary(summary, self._last, at)


def _session_end(success: bool, at: float):
    """What the plug-in for hyperparameters calls the end of a run (its own helper imports
    TensorFlow).
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.Status.Value("STATUS_SUCCESS" if success else "STATUS_FAILURE")
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=at)
    hparams = metadata.create_summary_metadata(
        plugin_data_pb2.HParamsPluginData(session_end_info=end)
    )
    return Summary(
        value=[
            Summary.Value(
                tag=metadata.SESSION_END_INFO_TAG, metadata=hparams, tensor=metadata.NULL_TENSOR
            )
        ]
    )


def _table(values: Mapping[str, object]) -> str:
    rows = [f"| {name} | {str(value).replace('|', '&#124;')} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


class Mlflow:
    """MLflow without a server: `<output>/mlflow.db` (SQLite) and `<output>/artifacts/`, one MLflow
    run per run.

    Runs of earlier exports are deleted as MLflow deletes: hidden, until `mlflow gc`.
    """

    look = "mlflow ui --backend-store-uri sqlite:///{absolute}/mlflow.db"

    def __init__(self, output: Path, run_folder: Path, facts: Facts):
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it reports to its makers otherwise
        from mlflow import MlflowClient
        from mlflow.entities import Param

        output.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{output.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(uri, uri)
        known = self._client.get_experiment_by_name(PROJECT)
        place = (output / "artifacts").resolve().as_uri()
        experiment = (
            known.experiment_id if known else self._client.create_experiment(PROJECT, place)
        )
        for earlier in self._client.search_runs(
            [experiment], f"tags.`tokenscale.run_id` = '{facts.run_id}'"
        ):
            self._client.delete_run(earlier.info.run_id)
        started = int(facts.started_unix_s * 1000) or None
        tags = {"tokenscale.run_id": facts.run_id}
        tags["mlflow.source.name"] = "tokenscale"
        run = self._client.create_run(
            experiment, start_time=started, tags=tags, run_name=facts.run_id
        )
        self._run = run.info.run_id
        self._last = 0
        self._write(
            "params",
            [Param(name, str(value)[:VALUE]) for name, value in facts.settings.items()],
            PARAMETERS,
        )
        self._facts(facts)

    def add(self, points: list[Point]) -> None:
        """Many in a call: a call takes milliseconds."""
        from mlflow.entities import Metric

        values = [(point, *item) for point in points for item in point.values.items()]
        metrics = [
            Metric(name, float(value), int(point.t_unix_s * 1000), point.step)
            for point, name, value in values
        ]
        self._write("metrics", metrics, METRICS)
        self._last = points[-1].step

    def close(self, facts: Facts, summary: dict[str, float], ended: bool) -> None:
        """Values of the whole run at its last step, its last attempt's facts, its outcome."""
        if not ended:
            return
        at = facts.ended_unix_s or 0.0
        self.add([Point(step=self._last, t_unix_s=at, values=summary)])
        self._facts(facts)
        self._client.set_terminated(
            self._run, STATUS.get(facts.status, "KILLED"), int(at * 1000) or None
        )

    def _write(self, kind: str, values: list, most: int) -> None:
        for start in range(0, len(values), most):
            batch = {kind: values[start : start + most]}
            self._client.log_batch(self._run, **batch)

    def _facts(self, facts: Facts) -> None:
        from mlflow.entities import RunTag

        tags = {**facts.provenance, "status": facts.status}
        if commit := facts.provenance.get("git.commit"):
            tags["mlflow.source.git.commit"] = commit
        self._client.log_batch(
            self._run, tags=[RunTag(name, str(value)[:VALUE]) for name, value in tags.items()]
        )
        for path in facts.files:
            self._client.log_artifact(self._run, str(path))


class Wandb:
    """Weights & Biases, offline: `<output>/<run id>/wandb/offline-run-…/`, for `wandb sync` where
    there is a network.

    The offline run has the run's id. The folder of an earlier export is removed.
    """

    # from a machine with a network and an account
    look = "wandb sync {output}/*/wandb/offline-run-*"

    def __init__(self, output: Path, run_folder: Path, facts: Facts):
        # nothing of it leaves the machine, and nothing lies in the user's home
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
            os.environ.setdefault(f"WANDB_{kind}_DIR", str((run_folder / "wandb").resolve()))
        import wandb

        remove_tree(run_folder / "wandb")
        (run_folder / "wandb").mkdir(parents=True)
        # nothing of this process's commit, code and machine: the run's are in the config
        off = ("disable_git", "disable_code", "x_disable_stats", "x_disable_meta", "silent")
        quiet: dict[str, Any] = {"console": "off", "save_code": False, "x_save_requirements": False}
        named: dict[str, Any] = {
            "project": PROJECT,
            "id": facts.run_id,
            "name": facts.run_id,
            "dir": str(run_folder),
        }
        settings = wandb.Settings(**quiet, **dict.fromkeys(off, True))
        named |= {"config": _config(facts), "settings": settings}
        self._run = wandb.init(**named, mode="offline", reinit="create_new")
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
            self._run.save(
                str(Path(self._run.dir) / path.name), base_path=self._run.dir, policy="end"
            )


def _config(facts: Facts) -> dict[str, object]:
    return {
        **facts.settings,
        **{f"provenance.{name}": value for name, value in facts.provenance.items()},
    }


Tracker = TensorBoard | Mlflow | Wandb
#: tracker → its class. The package and the extra of pyproject.toml have the same name.
#:
#: Tracker(output, run_folder, facts)     begins anew: what an earlier export of this run left in `output` is replaced
#:   .add(points)                         steps ascending; on disk when it returns
#:   .close(facts, summary, ended)        `ended`: the run is sealed; else the export was stopped before
#:   .look                                the command that shows it
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": Mlflow, "wandb": Wandb}


def track(
    directories: list[Path], to: str, output: Path, *, follow: bool, log: Callable[[str], None]
) -> None:
    """Export each run's points and facts to `output`; with `follow` until every run is sealed.

    Raises UserError where the tracker's package is missing, a folder is no run's, or a run has not
    ended and is not followed; nothing is written then.
    """
    if to not in TRACKERS:
        raise unknown("tracker", word=to, words=TRACKERS)
    # not imported yet: its class sets what it reads at its import
    if importlib.util.find_spec(to) is None:
        raise UserError(f"the package {to} is not installed.", next=f"python -m pip install {to}")
    names = Counter(
        _checked(directory, follow) or str(directory.resolve()) for directory in directories
    )
    if twice := [name for name, n in names.items() if n > 1]:
        raise UserError("a run is named twice.", run=", ".join(twice), next="name each run once")
    with ExitStack() as stack, _raising_from_threads():
        jobs = [
            stack.enter_context(
                closing(
                    _export(
                        path,
                        tracker=TRACKERS[to],
                        output=output,
                        log=log,
                    )
                )
            )
            for path in directories
        ]
        began = time.monotonic()
        while jobs := [job for job in jobs if next(job, "ended") != "ended"]:
            time.sleep(max(2.0, 10 * (time.monotonic() - began)))  # each turn reads the whole logs
            began = time.monotonic()
    log(f"look   {TRACKERS[to].look.format(output=output, absolute=output.resolve())}")


@contextmanager
def _raising_from_threads() -> Iterator[None]:
    """Print no trace of a thread whose error is raised here, too, as those of TensorBoard's writer."""
    before = threading.excepthook
    threading.excepthook = lambda failed: (
        None if issubclass(failed.exc_type, OSError) else before(failed)
    )
    try:
        yield
    finally:
        threading.excepthook = before


def _checked(directory: Path, follow: bool) -> str | None:
    """The run's id; None for a run that is about to start."""
    path = directory / "run.json"
    if not path.is_file():
        starting = any(directory.glob("attempt=*"))
        if follow and starting:
            return None
        what = "the run has not started yet." if starting else "there is no run in this folder."
        next_step = (
            "--follow waits for it" if starting else "name a folder of a run: results/runs/RUN_ID"
        )
        raise UserError(what, path=path, next=next_step)
    found = read_facts(directory)
    if not follow and read_sealed(path) is None:
        reason = (
            f"status {found.status}, not sealed"
            if found.status == "running"
            else "its seal does not match"
        )
        next_step = "--follow exports it while it runs, or wait for its end"
        raise UserError("the run has not ended.", path=path, found=reason, next=next_step)
    return found.run_id


def _export(
    directory: Path, tracker: type[Tracker], output: Path, log: Callable[[str], None]
) -> Generator[None, None, None]:
    """Export the new points of a run at each step of the generator, until the run is sealed."""
    while not (directory / "run.json").is_file():
        yield
    exporter: Tracker | None = None
    summary = dict[str, float]()
    done = False
    # step and time of each point that has been handed on
    handed: list[tuple[int, float]] | None = None
    with ExitStack() as stack:
        try:
            while True:
                # before reading: nothing is written after it
                ended = read_sealed(directory / "run.json") is not None
                points, summary = read_points(directory, ended=ended)
                facts = read_facts(directory)
                marks = [(point.step, point.t_unix_s) for point in points]
                folder = output / facts.run_id
                if handed is None:
                    if (folder / "run.json").exists():
                        next_step = "--output another folder"
                        raise UserError(
                            "the output is the folder of the run itself.",
                            output=folder,
                            next=next_step,
                        )
                    stack.enter_context(lock_folder(folder, what=f"the export of {facts.run_id}"))
                elif marks[: len(handed)] != handed and exporter is not None:
                    log(
                        f"anew   {directory.name}: a later attempt repeats steps, or logs were "
                        "moved away"
                    )
                    exporter.close(facts, summary, False)
                    exporter = None
                    handed = []
                handed = handed or []
                with naming(folder):
                    exporter = exporter or tracker(output, folder, facts)
                    if new := points[len(handed) :]:
                        exporter.add(new)
                handed = marks
                if ended:
                    break
                yield
            done = True
        finally:
            if exporter is not None:  # also where it is stopped before the run's end
                with naming(folder):
                    exporter.close(read_facts(directory), summary, done)
    last = f"up to step {points[-1].step}" if points else "no step"
    log(f"run    {directory.name}: {len(points)} points, {last}")
