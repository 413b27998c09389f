"""Configuration files → settings and run tables. Host only (pydantic)."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import canonical_json
from tokenscale.settings import benchmarks, machine, resuming, yaml_files
from tokenscale.settings.continuation import parse_run_id
from tokenscale.settings.data import (
    FILE_LISTS,
    CorpusSettings,
    SourceSettings,
    StoreSettings,
    TokenizerSettings,
)
from tokenscale.settings.experiments import (
    BASE_SCALE,
    EXTERNAL_PREFIX,
    SCALES,
    STUDIES,
    Experiment,
    Run,
    count_repeats,
    describe_primary,
    expand_cells,
    factor_keys,
    find_factor_problem,
    format_cell,
    matches,
    merge_settings,
    order_runs,
    varied_keys,
)
from tokenscale.settings.layout import geometry
from tokenscale.settings.mixture import MixtureSettings, NamedMixture, find_mixture_problem, resolve_mixture
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import NAME_PATTERN, NAME_RULE, option, settings_class, to_dict
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.profile import CONFIG_FILE, list_configfiles, load_profile, parse_config
from tokenscale.settings.registry import FIGURES, TOKENIZERS
from tokenscale.settings.run import OURS, RunSettings
from tokenscale.settings.yaml_files import read_yaml

#: target of all experiments' figures and one report; also stands for all their names
ALL = "all_experiments"
#: largest number of runs of one experiment: listing more would exhaust this machine's memory
MAX_RUNS = 100_000
#: primary comparisons of one experiment
MAX_PRIMARY = 3
#: targets and pages of the workflow, which no experiment may be named after
TARGETS = (
    ALL,
    *("all", "corpus", "tokens", "runs", "tables", "figures", "report"),
    *("claims", "report_now", "index"),
)


T = TypeVar("T")


@settings_class
class SubmissionBudget:
    """Limits on the jobs that one call submits to a cluster."""

    node_hours: float = option(50.0, "largest estimate by `plan`; above it nothing is submitted", ge=0)


@settings_class
class ConfigFile:
    """config/config.yaml."""

    scale: str = option(
        BASE_SCALE, "overlay of the experiments: demo, workstation, alps, study (the source studies' own cells)"
    )
    experiments: tuple[str, ...] = option(("demo",), "experiments of the report, named as their files")
    experiments_folder: str = option("config/experiments", "folder of the experiments' files")
    machine: str | None = option(
        None, "file that describes the machine, set by cluster profiles; by default this machine"
    )
    budget: SubmissionBudget = option(SubmissionBudget, "limits on submitted jobs")
    engine: Literal["auto", "gigatoken", "tokenizers", "tiktoken", "mistral-common"] = option(
        "auto",
        "library that tokenizes for token stores; auto: the fastest installed one with exact ids. It never changes ids",
    )
    corpus: str | None = option(
        None, "corpus for all experiments, instead of their own; their BPE tokenizers are trained on it"
    )
    claims: str = option("config/claims.yaml", "file of the claims that the report tests against the data")
    strict_claims: bool = option(
        False, "true: `snakemake claims` fails if a claim no longer holds at a scale of its `holds_at`"
    )
    bucket: str | None = option(
        None, "s3://BUCKET/PREFIX of `tokenscale cloud`: `snakemake report_now` first fetches the finished runs from it"
    )
    corpora: dict[str, dict[str, Any]] = option(dict, "name → CorpusSettings")
    mixtures: dict[str, dict[str, Any]] = option(dict, "name → NamedMixture: weighted mixtures of the corpora")
    tokenizers: dict[str, dict[str, Any]] = option(dict, "name → TokenizerSettings")


class Config:
    """Validated configuration: the source of everything the workflow runs."""

    def __init__(
        self,
        values: dict[str, Any],
        *,
        root: Path | str = ".",
        file: str = CONFIG_FILE,
        layers: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ):
        """Validate `values`. `layers` are (file, its values) in the order of merging, for error messages."""
        values = {k: v for k, v in values.items() if v is not None}
        if isinstance(values.get("experiments"), str):  # `--config experiments=demo`
            values["experiments"] = [values["experiments"]]
        self._values, self._file, self._layers = values, file, list(layers)
        yaml_files.raise_errors(yaml_files.find_foreign_values(values), file=self.file_of)
        self.settings: ConfigFile = yaml_files.build(ConfigFile, values, file=self.file_of)
        if self.settings.scale not in SCALES:
            raise unknown("scale", self.settings.scale, SCALES, file=self.file_of("scale"), key="scale")
        self.corpora = {
            name: self._build_named(CorpusSettings, "corpora", name, v) for name, v in self.settings.corpora.items()
        }
        for name, corpus in self.corpora.items():
            yaml_files.check_problems(corpus.problems(), file=self.file_of, key=f"corpora.{name}")
        self.mixtures = {name: self._build_mixture(name, v) for name, v in self.settings.mixtures.items()}
        self.root = Path(root)
        self.machine = machine.load_machine(self.settings.machine, root)
        self.tokenizers = {
            name: self._build_named(TokenizerSettings, "tokenizers", name, v)
            for name, v in self.settings.tokenizers.items()
        }
        for name, tokenizer in self.tokenizers.items():
            key = f"tokenizers.{name}"
            yaml_files.check_problems(tokenizer.problems(), file=self.file_of, key=key)
            if tokenizer.kind not in TOKENIZERS:  # `unknown`, of a converted store, cannot be built
                raise self._unknown("tokenizer kind", tokenizer.kind, TOKENIZERS, f"{key}.kind")
            if tokenizer.corpus is not None:
                if tokenizer.corpus not in self.corpora:
                    raise self._unknown("corpus", tokenizer.corpus, self.corpora, f"{key}.corpus")
                self.tokenizers[name] = replace(tokenizer, learnt_from=self.corpora[tokenizer.corpus])
        if self.settings.corpus in self.mixtures:
            what = "`corpus` replaces the corpus of every experiment and cannot be a mixture."
            next = "name the mixture as runs.corpus of an experiment"
            raise UserError(what, file=self.file_of("corpus"), key="corpus", found=self.settings.corpus, next=next)
        if self.settings.corpus is not None and self.settings.corpus not in self.corpora:
            raise self._unknown("corpus", self.settings.corpus, self.corpora, "corpus")
        #: tokenizers trained on the overriding corpus: name → the configured tokenizer it replaces
        self._replaced_tokenizers: dict[str, str] = {}
        folder = Path(root) / self.settings.experiments_folder
        self.available = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        for name in self.settings.experiments:
            if self.settings.experiments.count(name) > 1:
                raise UserError(
                    "an experiment is listed twice.",
                    file=self.file_of("experiments"),
                    key="experiments",
                    found=name,
                    next="list it once",
                )
            if name not in self.available:
                raise self._unknown("experiment", name, self.available, "experiments")
        self._experiments: dict[str, Experiment] = {}
        self._tables: dict[str, list[Run]] = {}
        self._raw: dict[str, dict[str, Any]] = {}
        #: name → error of experiments that this configuration cannot run (see `usable`)
        self.unusable: dict[str, UserError] = {}

    def file_of(self, key: str) -> str:
        """Return the file that sets a dotted key: the last merged file that has the key or its nearest parent."""
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

    def select_experiments(self, names: Sequence[str]) -> list[str]:
        """Return experiments' names: `names`, or the report's if empty, or for `ALL` all that fit scale and corpus."""
        if list(names) != [ALL]:
            return list(names or self.settings.experiments)
        if not self.at_scale:
            found = dict.fromkeys(
                s for name in self.available for s in (self._read_experiment(name).get("scales") or {})
            )
            raise UserError(
                f"no experiment has settings for scale {self.settings.scale}.",
                file=self.file_of("scale"),
                key="scale",
                found=", ".join(dict.fromkeys([BASE_SCALE, *found])),
                folder=self.settings.experiments_folder,
                next="choose one of these scales, or add an overlay to an experiment",
            )
        return [name for name in self.at_scale if name not in self._not_on_corpus]

    @property
    def at_scale(self) -> list[str]:
        """Names of the experiments with settings for the chosen scale."""
        return [name for name in self.available if self.has_scale(name)]

    @property
    def reported_at_scale(self) -> list[str]:
        """Names of the report's experiments with settings for the chosen scale."""
        return [name for name in self.settings.experiments if self.has_scale(name)]

    @property
    def without_overlay(self) -> list[str]:
        return [name for name in self.available if not self.has_scale(name)]

    @property
    def left_out_note(self) -> str | None:
        """Experiments that `ALL` leaves out, with the reasons, as text; None if there are none."""
        reasons = {
            f"no overlay for scale {self.settings.scale}": self.without_overlay,
            f"cannot run on the corpus {self.settings.corpus}": self._not_on_corpus,
        }
        lines = [f"left out of {ALL} ({why}): {', '.join(names)}" for why, names in reasons.items() if names]
        return "\n".join(lines) or None

    @cached_property
    def _not_on_corpus(self) -> list[str]:
        """Names of the experiments that cannot run on the configured `corpus`."""
        if self.settings.corpus is None:
            return []
        self.usable(())
        return [name for name, error in self.unusable.items() if error.facts.get("key") == "corpus"]

    def has_scale(self, name: str) -> bool:
        """Whether an experiment has settings for the chosen scale; true for an unreadable file, whose error comes when
        it is used.
        """
        if self.settings.scale == BASE_SCALE:
            return True
        try:
            scales = self._read_experiment(name).get("scales")
        except UserError:
            return True
        return self.settings.scale in scales if isinstance(scales, dict) else scales is not None

    def _read_experiment(self, name: str) -> dict[str, Any]:
        if name not in self._raw:
            self._raw[name] = read_yaml(str(self.available[name]))
        return self._raw[name]

    def _build_named(self, cls: type, section: str, name: str, values: dict[str, Any]) -> Any:
        for key in {"name", "learnt_from"} & values.keys():
            raise UserError(
                "this key is filled in automatically.",
                file=self.file_of(f"{section}.{name}.{key}"),
                key=f"{section}.{name}.{key}",
                next="remove it",
            )
        source = values.get("source")
        if cls is CorpusSettings and isinstance(source, dict):
            lists = {k: [v] for k, v in source.items() if k in FILE_LISTS and isinstance(v, str)}
            values = {**values, "source": {"kind": SourceSettings.infer_kind(source), **source, **lists}}
        return yaml_files.build(cls, {**values, "name": name}, file=self.file_of, key=f"{section}.{name}")

    def _build_mixture(self, name: str, values: dict[str, Any]) -> MixtureSettings:
        key = f"mixtures.{name}"
        if not re.fullmatch(NAME_PATTERN, name) or name in self.corpora:
            what = f"a mixture cannot be named {name!r}."
            taken = f"another name than those of the corpora: {NAME_RULE}"
            raise UserError(what, file=self.file_of(key), key=key, expected=taken, next="rename it")
        for weights in self._list_weights(values):
            for corpus in weights:
                if not isinstance(corpus, str):
                    what = f"the name of a corpus is not text: {corpus!r}."
                    raise UserError(what, file=self.file_of(key), key=key, next=f'put it in quotes: "{corpus}"')
        named: NamedMixture = yaml_files.build(NamedMixture, values, file=self.file_of, key=key)
        if (problem := find_mixture_problem(named)) is not None:
            field, what, following = problem
            raise UserError(what, file=self.file_of(key), key=f"{key}.{field}", next=following)
        for number, weights in enumerate([named.weights, *(stage.weights for stage in named.stages)]):
            where = f"{key}.stages.{number - 1}.weights" if number else f"{key}.weights"
            for corpus in weights:
                if corpus not in self.corpora:
                    raise self._unknown("corpus", corpus, self.corpora, f"{where}.{corpus}")
        return resolve_mixture(named, self.corpora)

    @staticmethod
    def _list_weights(values: Any) -> list[dict[Any, Any]]:
        stages = values.get("stages") if isinstance(values, dict) else None
        found = [values] + [*stages] if isinstance(stages, list | tuple) else [values]
        found = [part.get("weights") if isinstance(part, dict) else None for part in found]
        return [weights for weights in found if isinstance(weights, dict)]

    def experiment(self, name: str) -> Experiment:
        """Return an experiment with the scale's overlay merged. Raises UserError for an unknown name or a bad file."""
        if name not in self.available:
            raise unknown("experiment", name, self.available, folder=self.settings.experiments_folder)
        if name in TARGETS or not re.fullmatch(NAME_PATTERN, name):
            raise UserError(
                "an experiment cannot have this name.",
                file=self.available[name],
                reserved=", ".join(TARGETS),
                next=f"rename the file: {NAME_RULE}",
            )
        return self._explain_corpus_error(name, lambda: self._experiment(name))

    def _experiment(self, name: str) -> Experiment:
        if name not in self._experiments:
            file = str(self.available[name])
            raw = self._read_experiment(name)
            base: Experiment = yaml_files.build(Experiment, raw, file=file)
            for scale in base.scales:
                if scale not in SCALES:
                    raise unknown("scale", scale, SCALES, file=file, key="scales")
            if not self.has_scale(name):
                raise self._missing_overlay_error(name, base)
            overlay = base.scales.get(self.settings.scale, {})
            values = merge_settings({k: v for k, v in raw.items() if k != "scales"}, overlay)
            if isinstance(factors := values.get("factors"), dict):  # an overlay removes a factor by null
                values["factors"] = {key: levels for key, levels in factors.items() if levels is not None}
            if self.settings.corpus is not None:
                values = self._replace_corpus(values, file)
            merged = yaml_files.build(Experiment, values, file=file, key="")
            self._check(merged, file)
            self._experiments[name] = merged
        return self._experiments[name]

    def _missing_overlay_error(self, name: str, base: Experiment) -> UserError:
        scale = self.settings.scale
        return UserError(
            f"the experiment {name} has no settings for scale {scale}.",
            file=self.available[name],
            key=f"scales.{scale}",
            found=", ".join([BASE_SCALE, *(other for other in base.scales if other != BASE_SCALE)]),
            next=f"choose another scale: --config scale={next(reversed(base.scales), BASE_SCALE)};\n"
            f"or add the overlay: `scales: {{{scale}: {{}}}}` keeps the settings of {BASE_SCALE}",
        )

    def _replace_corpus(self, values: dict[str, Any], file: str) -> dict[str, Any]:
        """Return an experiment's values with the configured `corpus` in runs and benchmarks.

        BPE tokenizers are replaced by equal ones trained on that corpus. Raises UserError for an experiment that
        compares corpora, and for the tokenizer `numbers`, which cannot read text.
        """
        corpus = self.settings.corpus
        if "corpus" in varied_keys(values.get("factors") or {}):
            raise UserError(
                "the experiment compares corpora.",
                file=file,
                key="factors.corpus",
                next="remove the factor, or set `corpus` for another experiment",
            )
        has_runs = bool(values.get("runs") or values.get("factors"))
        sections = [key for key in ("data_benchmark", "storage_benchmark") if values.get(key)]
        sections += ["runs"] if has_runs or not sections else []
        values = merge_settings(values, {key: {"corpus": corpus} for key in sections})
        for key in sections:
            if "tokenizer" in values[key]:
                values[key]["tokenizer"] = self._replace_tokenizer(corpus, values[key]["tokenizer"], file, key)
        for factor, levels in (values.get("factors") or {}).items():
            keys = factor_keys(factor)
            if "tokenizer" not in keys or find_factor_problem({factor: levels}) is not None:
                continue
            for number, level in enumerate(levels):
                if len(keys) == 1:
                    levels[number] = self._replace_tokenizer(corpus, level, file, "factors")
                else:
                    position = keys.index("tokenizer")
                    level[position] = self._replace_tokenizer(corpus, level[position], file, "factors")
        return values

    def _replace_tokenizer(self, corpus: str, name: Any, file: str, section: str) -> Any:
        """Return the tokenizer for the overriding corpus; one trained on another corpus is retrained by a new name."""
        configured = self.tokenizers.get(name) if isinstance(name, str) else None
        if configured is None or configured.corpus == corpus:
            return name
        if configured.kind == "numbers" and self.corpora[corpus].source.kind != "dummy":
            raise UserError(
                f"the tokenizer {name} reads numbers, but the corpus is text.",
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
                f"the name {twin} is needed for the tokenizer {name} trained on {corpus}.",
                file=self.file_of(f"tokenizers.{twin}"),
                key=f"tokenizers.{twin}",
                next="rename the configured tokenizer",
            )
        self._replaced_tokenizers[twin] = name
        return twin

    def _check(self, experiment: Experiment, file: str) -> None:
        if (problem := find_factor_problem(experiment.factors)) is not None:
            factor, what, expected = problem
            raise UserError(
                what, file=file, key=f"factors.{factor}", expected=expected, next="change the levels of this factor"
            )
        if "seed" in varied_keys(experiment.factors) and experiment.repeats > 1:
            raise UserError(
                "seed cannot be a factor of an experiment with repeats: seed 0, repeat 1 equals seed 1, repeat 0.",
                file=file,
                key="factors.seed",
                next="use repeats alone",
            )
        for study in experiment.original.studies:
            if study not in STUDIES:
                raise unknown("study", study, STUDIES, file=file, key="original.studies")
        repeats = max(experiment.repeats, experiment.primary_repeats or 1)
        requested = repeats * math.prod(map(len, experiment.factors.values()))
        if requested > MAX_RUNS:
            raise UserError(
                "the experiment has too many runs.",
                file=file,
                key="factors, repeats",
                found=f"{requested:,}",
                expected=f"at most {MAX_RUNS:,}",
                next="use fewer levels or repeats, or several experiments",
            )
        self._check_left_out(experiment, file)
        self._check_primary(experiment, file)
        for figure in experiment.figures:
            if figure not in FIGURES:
                raise unknown("figure", figure, FIGURES, file=file, key="figures")
        for kind, benchmark in experiment.benchmarks.items():
            for key, known in (("corpus", self.corpora), ("tokenizer", self.tokenizers)):
                value = getattr(benchmark, key)
                if value not in known:
                    raise unknown(key, value, known, file=file, key=f"{kind}_benchmark.{key}")

    def _check_primary(self, experiment: Experiment, file: str) -> None:
        if len(experiment.primary or ()) > MAX_PRIMARY:
            raise UserError(
                "too many comparisons are primary: each one more raises the number of repeats that all need.",
                file=file,
                key="primary",
                found=len(experiment.primary),
                expected=f"at most {MAX_PRIMARY}",
                next="keep those that answer the question; all others are shown without a verdict",
            )
        if experiment.primary_repeats is not None and not experiment.primary:
            raise UserError(
                "primary_repeats needs primary comparisons.",
                file=file,
                key="primary_repeats",
                next="name them under `primary`, or raise `repeats`",
            )
        try:
            described = describe_primary(experiment) or []
        except UserError as error:
            raise UserError(error.what, file=file, **error.facts) from None
        for number, comparison in enumerate(described):
            if comparison in described[:number]:
                raise UserError(
                    "a primary comparison is listed twice.",
                    file=file,
                    key=f"primary.{number}",
                    next="remove one of them",
                )

    def _check_left_out(self, experiment: Experiment, file: str) -> None:
        every = expand_cells(replace(experiment, left_out=()))
        for number, left in enumerate(experiment.left_out):
            if not left.cells or not any(matches(cell, left.cells) for cell in every):
                raise UserError(
                    "this entry matches no cell of the experiment.",
                    file=file,
                    key=f"left_out.{number}.cells",
                    found=canonical_json(left.cells),
                    next="use levels of the factors, or remove the entry",
                )
        if every and not expand_cells(experiment):
            raise UserError("every cell is left out.", file=file, key="left_out", next="remove entries")

    def runs(self, name: str) -> list[Run]:
        """Return the run table of an experiment, in the randomised order of starting."""
        return self._explain_corpus_error(name, lambda: self._runs(name))

    def usable(self, required: Sequence[str]) -> list[str]:
        """Return the names of the experiments that can run. Raises UserError only for `required` ones.

        Errors of the others go to `unusable`: a file that was not requested must not stop other targets. Experiments
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
    def broken_experiments(self) -> list[str]:
        """Names of `unusable` experiments with wrong files; an unsuitable `corpus` is not counted."""
        return [name for name in self.unusable if name not in self._not_on_corpus]

    def _explain_corpus_error(self, name: str, build: Callable[[], T]) -> T:
        """Return `build()`. If it fails only because of the configured `corpus`, raise an error that says so."""
        try:
            return build()
        except UserError as error:
            if self.settings.corpus is None:
                raise
            # raises the experiment's own error, if it also fails without that corpus
            Config({**self._values, "corpus": None}, root=self.root, file=self._file, layers=self._layers).runs(name)
            raise UserError(
                f"the experiment {name} cannot run on the corpus {self.settings.corpus}.",
                file=self.file_of("corpus"),
                key="corpus",
                experiment=self.available[name],
                reason=error.facts.get("reason", error.what),
                next="remove it from `experiments`, or choose a corpus that fits",
            ) from None

    def _runs(self, name: str) -> list[Run]:
        if name not in self._tables:
            experiment, file = self.experiment(name), str(self.available[name])
            table = []
            for position, (cell, repeat) in enumerate(order_runs(experiment)):
                build = partial(self.run_settings, repeat=repeat, file=file)
                table.append(Run(resuming.resolve_settings(experiment, cell, build, file), cell, repeat, position))
            repeated = [run_id for run_id, times in Counter(run.run_id for run in table).items() if times > 1]
            if repeated:
                raise UserError(
                    "two cells of the experiment are the same run.",
                    file=file,
                    key="factors",
                    run=repeated[0],
                    next="make the levels of each factor differ",
                )
            self._check_resumed(experiment, table, file)
            if experiment.inference_benchmark is not None:
                benchmarks.check_runs(experiment.inference_benchmark, [run.settings for run in table], file)
            self._tables[name] = table
        return self._tables[name]

    def _check_resumed(self, experiment: Experiment, table: list[Run], file: str) -> None:
        """Check that each run to resume from is in the table: those of further repeats of a cell may be missing."""
        ids = {run.run_id for run in table}
        for run in table:
            resumes = isinstance(run.cell.get(resuming.KEY), dict)
            if resumes and parse_run_id(run.settings.resume_from) not in ids:
                raise UserError(
                    "a cell with more repeats resumes from a cell that does not have as many.",
                    file=file,
                    key="canary.cell" if run.repeat >= max(count_repeats(experiment).values()) else "primary_repeats",
                    next="choose a cell whose runs start from scratch",
                )

    def run_settings(self, values: dict[str, Any], *, repeat: int, file: str) -> RunSettings:
        """Build a run from an experiment's values; names of corpus, tokenizer and preset become their settings."""
        if "repeat" in values:
            raise UserError(
                "repeat cannot be set for a run.", file=file, key="runs.repeat", next="use `repeats` of the experiment"
            )
        values = merge_settings(values, {"repeat": repeat})
        if "mixture" in values:
            what = "this key is filled in automatically."
            raise UserError(what, file=file, key="runs.mixture", next="name a mixture of config.yaml as `corpus`")
        for key in ("corpus", "tokenizer", "model", "approach"):
            if isinstance(found := values.get(key), list):
                raise UserError(
                    f"a run has one {key}.",
                    file=file,
                    key=f"runs.{key}",
                    found=", ".join(map(str, found)),
                    next=f"to compare them, move the list to `factors`: {{{key}: [{', '.join(map(str, found))}]}}",
                )
        if (mixture := str(values.get("corpus"))) in self.mixtures:
            values["mixture"] = self.mixtures[mixture]
        corpora = self.corpora | {name: CorpusSettings(name) for name in self.mixtures}
        for key, known in (("corpus", corpora), ("tokenizer", self.tokenizers)):
            name = values.get(key)
            if name is None:
                raise UserError(
                    "a key is missing.", file=file, key=f"runs.{key}", allowed=", ".join(known), next="add it"
                )
            if not isinstance(name, str) or name not in known:
                raise unknown(key, str(name), known, file=file, key=f"runs.{key}")
            values[key] = known[name]
        values["model"] = self._model(values.get("model", "llama-tiny"), file)
        run: RunSettings = yaml_files.build(RunSettings, values, file=file, key="runs")
        yaml_files.check_problems(run.problems(), file=file, key="runs")
        arms = [path.parent.name for path in (self.root / "workflow/arms").glob("*/arm.yaml")]
        if run.arm != OURS and run.arm not in arms:
            raise unknown("arm", run.arm, [OURS, *arms], file=file, key="runs.arm")
        # fail before anything runs if the ranks do not fill whole nodes
        shape = geometry(run.layout.world_size, self.machine.gpus_per_node)
        if (problem := run.layout.node_problem(shape.ranks_per_node)) is not None:
            yaml_files.check_problems([("layout.tensor", problem)], file=file, key="runs")
        return run

    def _model(self, value: Any, file: str) -> ModelSettings:
        changes = dict(value) if isinstance(value, dict) else {"preset": value}
        preset = changes.pop("preset", None)
        if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
            raise unknown("model preset", str(preset), PRESETS, file=file, key="runs.model")
        base = PRESETS[preset] if preset is not None else ModelSettings()
        if not changes:
            return base
        # a changed preset must not keep the preset's name
        values = {f.name: getattr(base, f.name) for f in fields(base)} | {"name": f"{base.name}-changed"} | changes
        return yaml_files.build(ModelSettings, values, file=file, key="runs.model")

    def all_runs(self, names: list[str] | tuple[str, ...]) -> dict[str, Run]:
        """Return run id → run of several experiments. A run that two of them share appears once."""
        return {run.run_id: run for name in names for run in reversed(self.runs(name))}

    def list_corpora(self, names: list[str] | tuple[str, ...]) -> list[str]:
        """Return the sorted names of the corpora that the experiments read."""
        benchmarks = [b for name in names for b in self.experiment(name).benchmarks.values()]
        found = {corpus.name for name in names for run in self.runs(name) for corpus in run.settings.corpora}
        return sorted(found | {b.corpus for b in benchmarks})

    def stores(self, names: list[str] | tuple[str, ...]) -> list[tuple[str, str, str]]:
        """Return the sorted (corpus, tokenizer, store directory) of all token stores that the experiments need."""
        found = set()
        for name in names:
            for run in self.runs(name):
                settings = run.settings
                read = ((settings.store, settings.trained_corpora), (settings.validation_store, settings.corpora))
                for store, corpora in read:
                    if store is not None:
                        found |= {(corpus.name, settings.tokenizer.name, store.directory) for corpus in corpora}
            benchmark = self.experiment(name).data_benchmark
            if benchmark is not None:
                found |= {
                    (benchmark.corpus, benchmark.tokenizer, s.directory)
                    for s in list_benchmark_stores(benchmark.settings)
                }
        return sorted(found)

    def relevant_values(self, name: str) -> dict[str, Any]:
        """Return exactly those values of the configuration that an experiment's run table depends on.

        The machine is left out: another machine's profile must not rewrite the table.
        """
        corpora, tokenizers, mixtures = set(), set(), set()
        for run in self.runs(name):
            corpora |= {corpus.name for corpus in run.settings.corpora}
            if run.settings.mixture is not None:
                mixtures.add(run.settings.corpus.name)
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
            **({"mixtures": {m: self.settings.mixtures[m] for m in sorted(mixtures)}} if mixtures else {}),
            "tokenizers": {t: self.settings.tokenizers[t] for t in sorted(tokenizers)},
        }

    def table(self, name: str) -> dict[str, Any]:
        """Return the run table as JSON values, which the analysis reads instead of the configuration."""
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
            "cell_repeats": count_repeats(experiment),
            "primary": describe_primary(experiment),
            "cells": expand_cells(experiment),
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

    def compared_trainers(self, name: str) -> list[tuple[str, str]]:
        """Return (run of an arm, this project's run with otherwise equal levels) for the first repeat of each cell."""
        first = {format_cell(run.cell): run for run in self.runs(name) if run.repeat == 0}
        pairs = []
        for run in first.values():
            ours = first.get(format_cell(run.cell | {"arm": OURS}))
            if run.settings.arm != OURS and ours is not None:
                pairs.append((run.run_id, ours.run_id))
        return pairs

    def external(self, name: str) -> list[dict[str, Any]]:
        """Return rows of the run table for runs of other programs that have logs, sorted by name.

        Raises UserError for a pattern without the prefix of external runs, and if two patterns match one folder.
        """
        found: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(self.experiment(name).external):
            where = {"file": f"{self.settings.experiments_folder}/{name}.yaml", "key": f"external[{number}].runs"}
            if not group.runs.startswith(EXTERNAL_PREFIX) or "/" in group.runs:
                raise UserError(
                    "the folders of other programs' runs need the prefix of external runs.",
                    **where,
                    found=group.runs,
                    expected=f"a name or pattern that begins with {EXTERNAL_PREFIX}",
                    next="rename the folders",
                )
            folders = sorted((self.root / "results/runs").glob(f"{group.runs}/run.json"))
            for repeat, path in enumerate(folders):
                run_id = path.parent.name
                if run_id in found:
                    raise UserError(
                        "two patterns match the same run.", **where, run=run_id, next="make the patterns disjoint"
                    )
                found[run_id] = {"run_id": run_id, "external": True, "cell": group.cell, "repeat": repeat}
        return list(found.values())


def list_benchmark_stores(settings: Any) -> list[StoreSettings]:
    """Return the token stores that the data benchmark reads."""
    return [
        StoreSettings("padded", sequence_length=settings.sequence_length),
        StoreSettings("token-list"),
        StoreSettings("packed", sequence_length=settings.sequence_length),
        # as in the source studies
        StoreSettings("padded", sequence_length=settings.sequence_length, codec="snappy", dtype="int64"),
        StoreSettings("token-list", codec="snappy", dtype="int64"),
    ]


def load_config(
    file: Path | str = CONFIG_FILE,
    *,
    configfiles: Sequence[Path | str] = (),
    profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    root: Path | str = ".",
) -> Config:
    """Load the configuration, merged as Snakemake merges it: mappings key by key, other values replaced.

    From lowest to highest precedence: `file`, `configfiles` (by default those of the Snakemake profile), `config:` of
    the profile, and `overrides` (`--config key=value`). Raises UserError for a missing or unreadable file.
    """
    root = Path(root)
    layers = [(str(file), read_yaml(root / file))]
    profile_layers: list[tuple[str, dict[str, Any]]] = []
    if profile is not None:
        profile_file, profile_values = load_profile(profile, root)
        configfiles = configfiles or list_configfiles(profile_values)
        profile_layers.append((str(profile_file), parse_config(profile_file, profile_values)))
    layers += [(str(name), read_yaml(root / name)) for name in configfiles]
    layers += [*profile_layers, ("--config", dict(overrides or {}))]
    values: dict[str, Any] = {}
    for _, layer in layers:
        values = merge_settings(values, layer)
    return Config(values, root=root, file=str(file), layers=layers)
