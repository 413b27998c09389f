"""`config/config.yaml` and `config/experiments/*.yaml` → settings, run tables, JSON schemas. Host only (pydantic)."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import canonical_json
from tokenscale.settings import continuation as continuing
from tokenscale.settings import inference, machine, resuming, validate
from tokenscale.settings import profile as profiles
from tokenscale.settings.claims import Ledger
from tokenscale.settings.data import (
    FILE_LISTS,
    CorpusSettings,
    SourceSettings,
    StoreSettings,
    TokenizerSettings,
)
from tokenscale.settings.experiments import (
    BASE,
    EXTERNAL,
    SCALES,
    STUDIES,
    Experiment,
    Run,
    cells,
    matches,
    merge,
    order,
    problem_of,
    settings_of,
    varied,
)
from tokenscale.settings.layout import geometry
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import NAME, NAME_IN_WORDS, STRICT, option, to_dict
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.registry import FIGURES, TOKENIZERS
from tokenscale.settings.run import RunSettings
from tokenscale.settings.yaml_files import read_yaml

#: what Snakemake and every command read; files of `--configfile` are merged over it
CONFIG_FILE = "config/config.yaml"
#: the target of every experiment's figures and one report of them; stands for all of their names
ALL = "all_experiments"
#: more of them no workflow goes through, and listing them would take this machine's memory
MOST_RUNS = 100_000
#: names of the workflow's own targets and pages
TARGETS = (
    ALL,
    *("all", "corpus", "tokens", "runs", "tables", "figures", "report"),
    *("claims", "report_now", "report_pretokenization", "report_ddp", "index", "changes"),
)


T = TypeVar("T")


@dataclass(frozen=True)
class SubmissionBudget:
    """What the jobs of one call may take where they are submitted to a cluster."""

    __pydantic_config__ = STRICT

    node_hours: float = option(
        50.0, "runs that need more, as `plan` estimates them, are refused before the first one is submitted", ge=0
    )


@dataclass(frozen=True)
class ConfigFile:
    """config/config.yaml."""

    __pydantic_config__ = STRICT

    scale: str = option(BASE, "which overlay of the experiments applies: demo, workstation, alps")
    experiments: tuple[str, ...] = option(("demo",), "experiments of the report, by the names of their files")
    experiments_folder: str = option("config/experiments", "where the experiments' files lie")
    machine: str | None = option(None, "file of the machine, said by cluster profiles; by default this one")
    budget: SubmissionBudget = option(SubmissionBudget, "what submitted jobs may take")
    engine: Literal["auto", "gigatoken", "tokenizers", "tiktoken", "mistral-common"] = option(
        "auto", "what makes the ids of token stores; auto: the fastest that is here and exact. The ids are the same"
    )
    unpack_from_archive: bool = option(
        False, "true: text becomes archives, and packed stores are unpacked from these; the stores are the same"
    )
    corpus: str | None = option(
        None, "experiments read this corpus in place of their own, and their BPE tokenizers are trained on it"
    )
    claims: str = option("config/claims.yaml", "the ledger: sentences that the report holds against the data")
    strict_claims: bool = option(
        False, "true: `snakemake claims` fails where a sentence that is relied on (`holds_at`) no longer holds"
    )
    baseline: str | None = option(
        None, "folder of another report: the report then has a page of what has changed since"
    )
    corpora: dict[str, dict[str, Any]] = option(dict, "name → CorpusSettings")
    tokenizers: dict[str, dict[str, Any]] = option(dict, "name → TokenizerSettings")


class Config:
    """The whole configuration, validated. Everything the workflow asks about what to run, it asks here."""

    def __init__(
        self,
        values: dict[str, Any],
        *,
        root: Path | str = ".",
        file: str = CONFIG_FILE,
        layers: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ):
        """`layers`: (file, its values) in the order in which they were merged into `values`, for error messages."""
        values = {k: v for k, v in values.items() if v is not None}
        if isinstance(values.get("experiments"), str):  # `--config experiments=demo`
            values["experiments"] = [values["experiments"]]
        self._values, self._file, self._layers = values, file, list(layers)
        self.settings: ConfigFile = validate.build(ConfigFile, values, file=self.file_of)
        if self.settings.scale not in SCALES:
            raise unknown("scale", self.settings.scale, SCALES, file=self.file_of("scale"), key="scale")
        self.corpora = {
            name: self._named(CorpusSettings, "corpora", name, v) for name, v in self.settings.corpora.items()
        }
        for name, corpus in self.corpora.items():
            validate.check_problems(corpus.source.problems(), file=self.file_of, key=f"corpora.{name}.source")
        self.root = Path(root)
        self.machine = machine.load(self.settings.machine, root)
        self.tokenizers = {
            name: self._named(TokenizerSettings, "tokenizers", name, v) for name, v in self.settings.tokenizers.items()
        }
        for name, tokenizer in self.tokenizers.items():
            key = f"tokenizers.{name}"
            validate.check_problems(tokenizer.problems(), file=self.file_of, key=key)
            if tokenizer.kind not in TOKENIZERS:  # of a converted store: nothing can make it
                raise self._unknown("tokenizer kind", tokenizer.kind, TOKENIZERS, f"{key}.kind")
            if tokenizer.corpus is not None:
                if tokenizer.corpus not in self.corpora:
                    raise self._unknown("corpus", tokenizer.corpus, self.corpora, f"{key}.corpus")
                self.tokenizers[name] = replace(tokenizer, learnt_from=self.corpora[tokenizer.corpus])
        if self.settings.corpus is not None and self.settings.corpus not in self.corpora:
            raise self._unknown("corpus", self.settings.corpus, self.corpora, "corpus")
        #: tokenizers trained on the overriding corpus: name → the configured tokenizer it replaces
        self._replaced_tokenizers: dict[str, str] = {}
        folder = Path(root) / self.settings.experiments_folder
        self.available = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        for name in self.settings.experiments:
            if self.settings.experiments.count(name) > 1:
                raise UserError(
                    "an experiment is named twice.",
                    file=self.file_of("experiments"),
                    key="experiments",
                    found=name,
                    next="name it once",
                )
            if name not in self.available:
                raise self._unknown("experiment", name, self.available, "experiments")
        self._experiments: dict[str, Experiment] = {}
        self._tables: dict[str, list[Run]] = {}
        self._raw: dict[str, dict[str, Any]] = {}
        #: experiments that this configuration cannot run, and why (see `usable`)
        self.unusable: dict[str, UserError] = {}

    def file_of(self, key: str) -> str:
        """The file that sets a dotted key: of the files merged, the last one that holds it, or its nearest parent."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            for file, values in reversed(self._layers):
                inner: Any = values
                for part in parts[:length]:
                    inner = inner[part] if isinstance(inner, Mapping) and part in inner else None
                if inner is not None:
                    return file
        return self._file

    def _unknown(self, kind: str, word: str, words: Iterable[str], key: str) -> UserError:
        return unknown(kind, word, words, file=self.file_of(key), key=key)

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Names of experiments: those given, those of the report for none; for `ALL` all that fit scale and corpus."""
        if list(names) == [ALL]:
            return [name for name in self.at_scale if name not in self._without_corpus]
        return list(names or self.settings.experiments)

    @property
    def at_scale(self) -> list[str]:
        """Names of the experiments that have settings for the chosen scale."""
        return [name for name in self.available if self.has_scale(name)]

    @property
    def without_overlay(self) -> list[str]:
        """Names of the experiments that have no settings for the chosen scale."""
        return [name for name in self.available if not self.has_scale(name)]

    @property
    def left_out_note(self) -> str | None:
        """Lines that list the experiments `ALL` leaves out, and why; None where it leaves out none."""
        reasons = {
            f"without an overlay for scale {self.settings.scale}": self.without_overlay,
            f"which cannot run on the corpus {self.settings.corpus}": self._without_corpus,
        }
        lines = [f"left out of {ALL}, {why}: {', '.join(names)}" for why, names in reasons.items() if names]
        return "\n".join(lines) or None

    @cached_property
    def _without_corpus(self) -> list[str]:
        """Names of the experiments that cannot run on the configured `corpus`."""
        if self.settings.corpus is None:
            return []
        self.usable(())
        return [name for name, error in self.unusable.items() if error.facts.get("key") == "corpus"]

    def has_scale(self, name: str) -> bool:
        """Whether an experiment has settings for the chosen scale: its own are those of `BASE`, others are overlays.

        A file that cannot be read counts as one that has: the error is raised where the experiment is used.
        """
        if self.settings.scale == BASE:
            return True
        try:
            scales = self._content(name).get("scales")
        except UserError:
            return True
        return self.settings.scale in scales if isinstance(scales, dict) else scales is not None

    def _content(self, name: str) -> dict[str, Any]:
        """What an experiment's file says."""
        if name not in self._raw:
            self._raw[name] = read_yaml(str(self.available[name]))
        return self._raw[name]

    def _named(self, cls: type, section: str, name: str, values: dict[str, Any]) -> Any:
        for key in {"name", "learnt_from"} & values.keys():
            raise UserError(
                "this is filled in, not written.",
                file=self.file_of(f"{section}.{name}.{key}"),
                key=f"{section}.{name}.{key}",
                next="remove it",
            )
        source = values.get("source")
        if cls is CorpusSettings and isinstance(source, dict):
            lists = {k: [v] for k, v in source.items() if k in FILE_LISTS and isinstance(v, str)}
            values = {**values, "source": {"kind": SourceSettings.implied_kind(source), **source, **lists}}
        return validate.build(cls, {**values, "name": name}, file=self.file_of, key=f"{section}.{name}")

    def experiment(self, name: str) -> Experiment:
        """An experiment with its scale's overlay merged in. Raises UserError for an unknown name or a bad file."""
        if name not in self.available:
            raise unknown("experiment", name, self.available, folder=self.settings.experiments_folder)
        if name in TARGETS or not re.fullmatch(NAME, name):
            raise UserError(
                "an experiment cannot have this name.",
                file=self.available[name],
                taken=", ".join(TARGETS),
                next=f"rename the file: {NAME_IN_WORDS}",
            )
        return self._with_its_corpus_named(name, lambda: self._experiment(name))

    def _experiment(self, name: str) -> Experiment:
        if name not in self._experiments:
            file = str(self.available[name])
            raw = self._content(name)
            stated: Experiment = validate.build(Experiment, raw, file=file)
            for scale in stated.scales:
                if scale not in SCALES:
                    raise unknown("scale", scale, SCALES, file=file, key="scales")
            if not self.has_scale(name):
                raise self._no_overlay(name, stated)
            overlay = stated.scales.get(self.settings.scale, {})
            values = merge({k: v for k, v in raw.items() if k != "scales"}, overlay)
            if self.settings.corpus is not None:
                values = self._on_another_corpus(values, file)
            merged = validate.build(Experiment, values, file=file, key="")
            self._check(merged, file)
            self._experiments[name] = merged
        return self._experiments[name]

    def _no_overlay(self, name: str, stated: Experiment) -> UserError:
        scale = self.settings.scale
        return UserError(
            f"the experiment {name} has no settings for scale {scale}.",
            file=self.available[name],
            key=f"scales.{scale}",
            found=", ".join([BASE, *(other for other in stated.scales if other != BASE)]),
            next=f"another scale: --config scale={next(reversed(stated.scales), BASE)};\n"
            f"or add the overlay: `scales: {{{scale}: {{}}}}` keeps the settings of {BASE}",
        )

    def _on_another_corpus(self, values: dict[str, Any], file: str) -> dict[str, Any]:
        """An experiment's values with the configured `corpus` in place of its own, in runs and benchmarks.

        Its BPE tokenizers are replaced by equal ones that are trained on that corpus. Raises UserError for an
        experiment that compares corpora, and for the tokenizer `numbers`, which cannot read text.
        """
        corpus = self.settings.corpus
        if "corpus" in varied(values.get("factors") or {}):
            raise UserError(
                "it compares corpora.",
                file=file,
                key="factors.corpus",
                next="leave the factor out, or set `corpus` in another experiment",
            )
        has_runs = bool(values.get("runs") or values.get("factors"))
        sections = [key for key in ("data_benchmark", "storage_benchmark") if values.get(key)]
        sections += ["runs"] if has_runs or not sections else []
        values = merge(values, {key: {"corpus": corpus} for key in sections})
        for key in sections:
            if "tokenizer" in values[key]:
                values[key]["tokenizer"] = self._tokenizer_for(corpus, values[key]["tokenizer"], file, key)
        for factor, levels in (values.get("factors") or {}).items():
            keys = settings_of(factor)
            if "tokenizer" not in keys or problem_of({factor: levels}) is not None:
                continue
            for number, level in enumerate(levels):
                if len(keys) == 1:
                    levels[number] = self._tokenizer_for(corpus, level, file, "factors")
                else:
                    position = keys.index("tokenizer")
                    level[position] = self._tokenizer_for(corpus, level[position], file, "factors")
        return values

    def _tokenizer_for(self, corpus: str, name: Any, file: str, section: str) -> Any:
        """The tokenizer to use on the overriding corpus: itself, or for one learnt from another corpus its twin."""
        configured = self.tokenizers.get(name) if isinstance(name, str) else None
        if configured is None or configured.corpus == corpus:
            return name
        if configured.kind == "numbers" and self.corpora[corpus].source.kind != "dummy":
            raise UserError(
                f"its tokenizer {name} reads numbers, and that corpus is text.",
                file=file,
                key=f"{section}.tokenizer",
                next="choose a tokenizer that reads text, or a corpus of numbers",
            )
        if configured.corpus is None:
            return name
        twin = f"{name}-{corpus}"
        trained = replace(configured, name=twin, corpus=corpus, learnt_from=self.corpora[corpus])
        if self.tokenizers.setdefault(twin, trained) != trained:
            raise UserError(
                f"the tokenizer {twin} is configured, and {name} trained on {corpus} needs this name.",
                file=self.file_of(f"tokenizers.{twin}"),
                key=f"tokenizers.{twin}",
                next="rename it",
            )
        self._replaced_tokenizers[twin] = name
        return twin

    def _check(self, experiment: Experiment, file: str) -> None:
        """What the fields of an experiment must be beside their types."""
        if (problem := problem_of(experiment.factors)) is not None:
            factor, what, expected = problem
            raise UserError(
                what, file=file, key=f"factors.{factor}", expected=expected, next="change the values of this factor"
            )
        if "seed" in varied(experiment.factors) and experiment.repeats > 1:
            raise UserError(
                "seed is a factor and there are repeats: seed 0, repeat 1 would be seed 1, repeat 0 again.",
                file=file,
                key="factors.seed",
                next="use repeats alone",
            )
        for study in experiment.original.studies:
            if study not in STUDIES:
                raise unknown("study", study, STUDIES, file=file, key="original.studies")
        requested = experiment.repeats * math.prod(map(len, experiment.factors.values()))
        if requested > MOST_RUNS:
            raise UserError(
                "the experiment has too many runs.",
                file=file,
                key="factors, repeats",
                found=f"{requested:,}",
                expected=f"at most {MOST_RUNS:,}",
                next="fewer levels or repeats, or several experiments",
            )
        self._check_left_out(experiment, file)
        for figure in experiment.figures:
            if figure not in FIGURES:
                raise unknown("figure", figure, FIGURES, file=file, key="figures")
        for kind, benchmark in experiment.benchmarks.items():
            for key, known in (("corpus", self.corpora), ("tokenizer", self.tokenizers)):
                value = getattr(benchmark, key)
                if value not in known:
                    raise unknown(key, value, known, file=file, key=f"{kind}_benchmark.{key}")

    def _check_left_out(self, experiment: Experiment, file: str) -> None:
        """What is left out must be there, and something must be left."""
        every = cells(replace(experiment, left_out=()))
        for number, left in enumerate(experiment.left_out):
            if not left.cells or not any(matches(cell, left.cells) for cell in every):
                raise UserError(
                    "no cell of the experiment is left out by this.",
                    file=file,
                    key=f"left_out.{number}.cells",
                    found=canonical_json(left.cells),
                    next="name levels of the factors, or remove it",
                )
        if every and not cells(experiment):
            raise UserError("every cell is left out.", file=file, key="left_out", next="leave less out")

    def runs(self, name: str) -> list[Run]:
        """The run table of an experiment, in the randomised order of starting."""
        return self._with_its_corpus_named(name, lambda: self._runs(name))

    def usable(self, required: Sequence[str]) -> list[str]:
        """Names of the experiments that this configuration can run. Raises UserError only for `required` ones.

        The others' errors are kept in `unusable`: a file outside the request must not stop other targets. Experiments
        without an overlay for the chosen scale are left out.
        """
        for name in self.available:
            if name in self.without_overlay and name not in required:
                continue
            try:
                self.runs(name)
            except UserError as error:
                if name in required:
                    raise
                self.unusable[name] = error
        return [name for name in self.at_scale if name not in self.unusable]

    @property
    def misfits(self) -> list[str]:
        """Names of `unusable` experiments whose own files are wrong; not of those that cannot take another corpus."""
        return [name for name in self.unusable if name not in self._without_corpus]

    def _with_its_corpus_named(self, name: str, build: Callable[[], T]) -> T:
        """What `build` returns. Where only the configured `corpus` makes it fail, the error says so."""
        try:
            return build()
        except UserError as error:
            if self.settings.corpus is None:
                raise
            # raises the experiment's own error, where it has one without that corpus, too
            Config({**self._values, "corpus": None}, root=self.root, file=self._file, layers=self._layers).runs(name)
            raise UserError(
                f"the experiment {name} cannot run on the corpus {self.settings.corpus}.",
                file=self.file_of("corpus"),
                key="corpus",
                experiment=self.available[name],
                reason=error.facts.get("reason", error.what),
                next="leave it out of `experiments`, or give it a corpus that fits",
            ) from None

    def _runs(self, name: str) -> list[Run]:
        if name not in self._tables:
            experiment, file = self.experiment(name), str(self.available[name])
            table = []
            for position, (cell, repeat) in enumerate(order(experiment)):
                build = partial(self.run_settings, repeat=repeat, file=file)
                table.append(Run(resuming.settings_of(experiment, cell, build, file), cell, repeat, position))
            repeated = [run_id for run_id, times in Counter(run.run_id for run in table).items() if times > 1]
            if repeated:
                raise UserError(
                    "two cells of the experiment are the same run.",
                    file=file,
                    key="factors",
                    run=repeated[0],
                    next="a factor's level must differ from the others",
                )
            self._check_resumed(table, file)
            if experiment.inference_benchmark is not None:
                inference.check(experiment.inference_benchmark, [run.settings for run in table], file)
            self._tables[name] = table
        return self._tables[name]

    def _check_resumed(self, table: list[Run], file: str) -> None:
        """What a run goes on from, by its levels, is in the table, too: for a canary's repeats it may not be."""
        ids = {run.run_id for run in table}
        for run in table:
            named = isinstance(run.cell.get(resuming.KEY), dict)
            if named and continuing.writer_of(run.settings.resume_from) not in ids:
                raise UserError(
                    "the canary's cell goes on from another, which has no such repeat.",
                    file=file,
                    key="canary.cell",
                    next="name a cell whose runs begin by themselves",
                )

    def run_settings(self, values: dict[str, Any], *, repeat: int, file: str) -> RunSettings:
        """One run from the words of an experiment file: names of corpus, tokenizer and preset become their settings."""
        if "repeat" in values:
            raise UserError("a run's repeat is not set by hand.", file=file, key="runs.repeat", next="use repeats")
        values = merge(values, {"repeat": repeat})
        for key, known in (("corpus", self.corpora), ("tokenizer", self.tokenizers)):
            name = values.get(key)
            if name is None:
                raise UserError(
                    "a key is missing.", file=file, key=f"runs.{key}", allowed=", ".join(known), next="add it"
                )
            if not isinstance(name, str) or name not in known:
                raise unknown(key, str(name), known, file=file, key=f"runs.{key}")
            values[key] = known[name]
        values["model"] = self._model(values.get("model", "llama-tiny"), file)
        run: RunSettings = validate.build(RunSettings, values, file=file, key="runs")
        validate.check_problems(run.problems(), file=file, key="runs")
        # refuses what fits no nodes, before anything runs
        shape = geometry(run.layout.world_size, self.machine.gpus_per_node)
        if (problem := run.layout.node_problem(shape.ranks_per_node)) is not None:
            validate.check_problems([("layout.tensor", problem)], file=file, key="runs")
        return run

    def _model(self, value: Any, file: str) -> ModelSettings:
        changes = dict(value) if isinstance(value, dict) else {"preset": value}
        preset = changes.pop("preset", None)
        if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
            raise unknown("model preset", str(preset), PRESETS, file=file, key="runs.model")
        base = PRESETS[preset] if preset is not None else ModelSettings()
        if not changes:
            return base
        # the label must not claim the preset's shape
        values = {f.name: getattr(base, f.name) for f in fields(base)} | {"name": f"{base.name}-changed"} | changes
        return validate.build(ModelSettings, values, file=file, key="runs.model")

    def all_runs(self, names: list[str] | tuple[str, ...]) -> dict[str, Run]:
        """run id → run over several experiments; a run that two of them need appears once."""
        return {run.run_id: run for name in names for run in reversed(self.runs(name))}

    def corpora_of(self, names: list[str] | tuple[str, ...]) -> list[str]:
        """Names of the corpora that the experiments read, sorted."""
        benchmarks = [b for name in names for b in self.experiment(name).benchmarks.values()]
        found = {run.settings.corpus.name for name in names for run in self.runs(name)}
        return sorted(found | {b.corpus for b in benchmarks})

    def stores(self, names: list[str] | tuple[str, ...]) -> list[tuple[str, str, str]]:
        """(corpus, tokenizer, store directory) of every token store that the experiments need, sorted."""
        found = set()
        for name in names:
            for run in self.runs(name):
                for store in (run.settings.store, run.settings.validation_store):
                    if store is not None:
                        found.add((run.settings.corpus.name, run.settings.tokenizer.name, store.directory))
            benchmark = self.experiment(name).data_benchmark
            if benchmark is not None:
                found |= {
                    (benchmark.corpus, benchmark.tokenizer, s.directory) for s in benchmark_stores(benchmark.settings)
                }
        return sorted(found)

    def relevant(self, name: str) -> dict[str, Any]:
        """The configuration's values that an experiment's run table depends on, and no others.

        The machine is not among them: another machine's profile must not rewrite the table.
        """
        corpora, tokenizers = set(), set()
        for run in self.runs(name):
            corpora.add(run.settings.corpus.name)
            tokenizers.add(run.settings.tokenizer.name)
        for benchmark in self.experiment(name).benchmarks.values():
            corpora.add(benchmark.corpus)
            tokenizers.add(benchmark.tokenizer)
        tokenizers = {self._replaced_tokenizers.get(t, t) for t in tokenizers}
        corpora |= {c for t in tokenizers if (c := self.tokenizers[t].corpus)}
        return {
            "scale": self.settings.scale,
            "corpus": self.settings.corpus,
            "experiments": [name],
            "experiments_folder": self.settings.experiments_folder,
            "corpora": {c: self.settings.corpora[c] for c in sorted(corpora)},
            "tokenizers": {t: self.settings.tokenizers[t] for t in sorted(tokenizers)},
        }

    def table(self, name: str) -> dict[str, Any]:
        """The run table as JSON values: what the analysis reads instead of the configuration."""
        experiment = self.experiment(name)
        return {
            "schema": 1,
            "experiment": name,
            "question": experiment.question,
            "note": experiment.note,
            "original": to_dict(experiment.original),
            "scale": self.settings.scale,
            "factors": experiment.factors,
            "left_out": [to_dict(left) for left in experiment.left_out],
            "repeats": experiment.repeats,
            "cells": cells(experiment),
            "target_loss": experiment.target_loss,
            "figures": list(experiment.figures),
            "runs": [
                {
                    "run_id": r.run_id,
                    "cell": r.cell,
                    "repeat": r.repeat,
                    "position": r.position,
                    "run": to_dict(r.settings),
                }
                for r in self.runs(name)
            ]
            + self.external(name),
        }

    def external(self, name: str) -> list[dict[str, Any]]:
        """Lines of the run table for runs of other programs: those whose logs are there, in the order of their names.

        Raises UserError for a pattern of folders that are not theirs, and where one folder would be two runs.
        """
        found: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(self.experiment(name).external):
            where = {"file": f"{self.settings.experiments_folder}/{name}.yaml", "key": f"external[{number}].runs"}
            if not group.runs.startswith(EXTERNAL) or "/" in group.runs:
                raise UserError(
                    "runs of other programs say so by the names of their folders.",
                    **where, found=group.runs, expected=f"a name or pattern that begins with {EXTERNAL}",
                )  # fmt: skip
            folders = sorted((self.root / "results/runs").glob(f"{group.runs}/run.json"))
            for repeat, path in enumerate(folders):
                run_id = path.parent.name
                if run_id in found:
                    raise UserError("two patterns name the same run.", **where, run=run_id)
                found[run_id] = {"run_id": run_id, "external": True, "cell": group.cell, "repeat": repeat}
        return list(found.values())


def benchmark_stores(settings: Any) -> list[StoreSettings]:
    """The token stores that the data benchmark reads."""
    return [
        StoreSettings("padded", sequence_length=settings.sequence_length),
        StoreSettings("token-list"),
        StoreSettings("packed", sequence_length=settings.sequence_length),
        # as the studies' files were
        StoreSettings("padded", sequence_length=settings.sequence_length, codec="snappy", dtype="int64"),
        StoreSettings("token-list", codec="snappy", dtype="int64"),
    ]


def load(
    file: Path | str = CONFIG_FILE,
    *,
    configfiles: Sequence[Path | str] = (),
    profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    root: Path | str = ".",
) -> Config:
    """The configuration, merged as Snakemake merges it: mappings key by key, everything else replaced.

    From lowest to highest: `file`, `configfiles` (without any, those of the Snakemake profile), the `config:` of the
    profile, and `overrides` (`--config key=value`). Raises UserError for files that are missing or unreadable.
    """
    root = Path(root)
    layers = [(str(file), read_yaml(root / file))]
    stated: list[tuple[str, Mapping[str, Any]]] = []
    if profile is not None:
        found = profiles.read(profile, root)
        configfiles = configfiles or profiles.configfiles(found[1])
        stated.append((str(found[0]), profiles.stated(*found)))
    layers += [(str(name), read_yaml(root / name)) for name in configfiles]
    layers += [*stated, ("--config", dict(overrides or {}))]
    values: dict[str, Any] = {}
    for _, layer in layers:
        values = merge(values, layer)
    return Config(values, root=root, file=str(file), layers=layers)


def schemas() -> dict[str, dict[str, Any]]:
    """File name → JSON schema (draft 2020-12) of what users write, for editors."""
    config = pydantic.TypeAdapter(ConfigFile).json_schema()
    experiment = pydantic.TypeAdapter(Experiment).json_schema()
    run = pydantic.TypeAdapter(RunSettings).json_schema(ref_template="#/$defs/{model}")
    definitions = run.pop("$defs", {})
    named = {"type": "string"}
    run["properties"] |= {
        "corpus": named | {"description": "name of a corpus in config.yaml"},
        "tokenizer": named | {"description": "name of a tokenizer in config.yaml"},
        "model": {
            "description": "name of a preset, or a mapping with `preset` and changes",
            "anyOf": [{"enum": sorted(PRESETS)}, {"type": "object"}],
        },
    }
    run["properties"].pop("repeat")  # experiments say `repeats`
    run["properties"][resuming.KEY]["anyOf"].append({"$ref": "#/$defs/ResumeFrom"})
    definitions["ResumeFrom"] = pydantic.TypeAdapter(resuming.ResumeFrom).json_schema()
    experiment.setdefault("$defs", {}).update({**definitions, "Runs": run})
    experiment["properties"]["runs"] = {"$ref": "#/$defs/Runs"}
    # a name with a comma: keys that move together
    experiment["properties"]["factors"]["patternProperties"] = {",": {"type": "array", "items": {"type": "array"}}}
    for section, cls in (("corpora", CorpusSettings), ("tokenizers", TokenizerSettings)):
        inner = pydantic.TypeAdapter(cls).json_schema()
        inner["properties"].pop("name")
        if section == "corpora":  # one file need not be a list
            for key in FILE_LISTS:
                listed = inner["$defs"]["SourceSettings"]["properties"][key]
                listed["anyOf"] = [{"type": "string"}, {"type": listed.pop("type"), "items": listed.pop("items")}]
        config.setdefault("$defs", {}).update(inner.pop("$defs", {}))
        config["$defs"][cls.__name__] = inner
        config["properties"][section] = {
            "type": "object",
            "description": config["properties"][section].get("description", ""),
            "additionalProperties": {"$ref": f"#/$defs/{cls.__name__}"},
        }
    config["properties"]["scale"]["enum"] = list(SCALES)
    claims = pydantic.TypeAdapter(Ledger).json_schema()
    for schema in (config, experiment, claims):
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return {"config.schema.json": config, "experiment.schema.json": experiment, "claims.schema.json": claims}
