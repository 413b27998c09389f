"""TensorBoard: one folder a run, `<output>/<run id>/`. Needs neither TensorFlow nor torch."""

from collections.abc import Mapping
from pathlib import Path

from tokenscale.analysis.exporters.facts import Facts
from tokenscale.analysis.exporters.measures import Point

#: longest text that is handed to the viewer, characters; the whole is in the run's folder
LONGEST = 200_000


def look(output: Path) -> str:
    """The command that shows it."""
    return f"tensorboard --logdir {output} --samples_per_plugin scalars=100000"


class Exporter:
    """Scalars at the time they were logged, hyperparameters, texts. Event files of an earlier export are removed."""

    def __init__(self, output: Path, run_folder: Path, facts: Facts):
        from tensorboard.plugins.hparams import summary_v2 as hparams
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        for earlier in run_folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._writer = EventFileWriter(str(run_folder))
        self._last = 0
        started = facts.started_unix_s
        self._summary(hparams.hparams_pb(dict(facts.settings), facts.run_id, started or None), 0, started)
        self._texts(facts, started)
        self._writer.flush()

    def add(self, points: list[Point]) -> None:
        """Write and flush."""
        for point in points:
            self._scalars(point.values, point.step, point.t_unix_s)
        self._writer.flush()

    def close(self, facts: Facts, summary: dict[str, float], ended: bool) -> None:
        """Values of the whole run at its last step, its outcome, and its last attempt's facts."""
        if ended:
            at = facts.ended_unix_s or 0.0
            self._scalars(summary, self._last, at)
            self._texts(facts, at)
            self._summary(_session_end(facts.status == "complete", at), self._last, at)
        self._writer.close()

    def _texts(self, facts: Facts, at: float) -> None:
        self._text("run/outcome", facts.status, at)
        self._text("run/settings", _table(facts.settings), at)
        self._text("run/provenance", _table(facts.provenance), at)
        if facts.diff:
            self._text("run/dirty.diff", f"~~~~diff\n{facts.diff[:LONGEST]}\n~~~~", at)

    def _text(self, tag: str, text: str, at: float) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._summary(text_pb(tag, text), self._last, at)

    def _scalars(self, values: dict[str, float], step: int, at: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        self._last = step  # one record a step: a record costs more than what is in it
        self._summary(Summary(value=[scalar_pb(tag, value).value[0] for tag, value in values.items()]), step, at)

    def _summary(self, summary, step: int, at: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=at, step=step, summary=summary))


def _session_end(success: bool, at: float):
    """What the plug-in for hyperparameters calls the end of a run (its own helper imports TensorFlow)."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.Status.Value("STATUS_SUCCESS" if success else "STATUS_FAILURE")
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=at)
    hparams = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
    value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=hparams, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])


def _table(values: Mapping[str, object]) -> str:
    """Markdown."""
    rows = [f"| {name} | {str(value).replace('|', '&#124;')} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])
