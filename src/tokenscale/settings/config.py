"""Configuration files → settings and run tables. Host only (pydantic)."""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import canonical_json, sha256_text
from tokenscale.settings import experiments as design
from tokenscale.settings import machine, options
from tokenscale.settings.data import (
    FILE_LISTS,
    CorpusSettings,
    SourceSettings,
    TokenizerSettings,
)
from tokenscale.settings.experiments import BASE_SCALE, SCALES, Experiment, Run, merge_settings
from tokenscale.settings.extensions import FOLDER as EXTENSIONS
from tokenscale.settings.extensions import Source, is_reference, read_extension
from tokenscale.settings.flags import build_flags
from tokenscale.settings.layout import geometry
from tokenscale.settings.mixture import (
    MixtureSettings,
    NamedMixture,
    find_mixture_problems,
    resolve_mixture,
)
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import (
    EXTENSION_NAME,
    NAME_PATTERN,
    NAME_RULE,
    collect,
    join_key,
    option,
    settings_class,
    to_dict,
)
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.profile import CONFIG_FILE, Call, list_texts, load_profile
from tokenscale.settings.registry import TOKENIZERS, list_figures
from tokenscale.settings.run import GPU, OURS, READERS, RunSettings, parse_run_id
from tokenscale.settings.yaml_files import find_foreign_values, read_yaml

#: target of all experiments' figures and one report; also stands for all their names
ALL = "all_experiments"
#: target of the experiments that the claims of the source studies need, and of their report
REPLICATION = "replication"
#: targets and pages of the workflow, which no experiment may be named after
TARGETS = (
    ALL,
    REPLICATION,
    *[
        "all",
        "corpus",
        "tokens",
        "runs",
        "tables",
        "figures",
        "report",
        "claims",
        "report_now",
        "index",
    ],
)


#: endings of files that a user takes for the name of a corpus
ENDINGS = (".parquet", ".jsonl", ".csv", ".tsv", ".txt")
#: setting of a run that may name an extension → kinds that it may be of
OWN_KINDS = {"objective": ("objective",), "approach": ("approach", "token_format")}
#: folder of the default configuration's report; that of another configuration has a name behind it
REPORT = "results/report"
#: settings that choose what a report says, in the order of a folder's name; the others say how it
#: is computed
REPORTED = [
    "scale",
    "experiments",
    "corpus",
    "device",
    "experiments_folder",
    "claims",
    "replication",
    "corpora",
    "mixtures",
    "tokenizers",
]


@settings_class
class CallBudget:
    """Limits on the jobs that one call starts."""

    node_hours: float = option(
        50.0, description="largest estimate by `plan`; above it nothing is submitted", ge=0
    )
    cpu_hours: float = option(
        12.0,
        description="hours that trainings without a GPU take at least; above it nothing is started",
        ge=0,
    )


@settings_class
class ConfigFile:
    """config/config.yaml."""

    scale: str = option(
        BASE_SCALE,
        description="overlay of the experiments: demo, workstation, alps, study (source studies), campaign (real text)",
    )
    experiments: tuple[str, ...] = option(
        ("demo",), description="experiments of the report, named as their files"
    )
    experiments_folder: str = option(
        "config/experiments", description="folder of the experiments' files", path=True
    )
    machine: str | None = option(
        None,
        description="file of the machine, from cluster profiles; by default this one",
        path=True,
    )
    parts_per_job: int = option(
        64,
        description=(
            "parts of a corpus or a token store that one job builds, as many at a time as it has "
            "cores and, on a cluster, memory for"
        ),
        ge=1,
    )
    budget: CallBudget = option(CallBudget, description="limits on submitted jobs")
    engine: Literal["auto", "gigatoken", "tokenizers", "tiktoken", "mistral-common"] = option(
        "auto",
        description=(
            "library that tokenizes for token stores; auto: the fastest installed one with exact "
            "ids. It never changes ids"
        ),
    )
    corpus: str | None = option(
        None,
        description="corpus for all experiments, instead of theirs; BPE tokenizers are trained on it",
    )
    device: Literal["auto", "cpu"] | None = option(
        None,
        description="device of all runs, instead of theirs: auto (or cuda, gpu), cpu",
        synonyms=GPU,
    )
    claims: str = option(
        "config/claims.yaml",
        description="file of the claims that the report tests against the data",
        path=True,
    )
    replication: str = option(
        "config/replication.yaml",
        description="file of the source studies' claims, which the target `replication` tests",
        path=True,
    )
    strict_claims: bool = option(
        False,
        description="true: the target `claims` fails if a claim no longer holds at its `holds_at`",
    )
    report_logs: bool = option(
        True,
        description="false: the report's folder has no packed logs, and `verify` cannot prove it",
    )
    bucket: str | None = option(
        None,
        description="s3://BUCKET/PREFIX of the command `cloud`; the target `report_now` fetches from it",
    )
    corpora: dict[str, dict[str, Any]] = option(dict, description="name → CorpusSettings")
    mixtures: dict[str, dict[str, Any]] = option(
        dict, description="name → NamedMixture: weighted mixtures of the corpora"
    )
    tokenizers: dict[str, dict[str, Any]] = option(dict, description="name → TokenizerSettings")


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
        """Validate `values`. `layers` are (file, its values) in the order of merging, for error
        messages.
        """
        values = _without_nulls(values)
        self._values = values
        self._file = file
        self._layers = list(layers)
        options.raise_errors(find_foreign_values(values), file=self.file_of)
        settings: ConfigFile = options.decode(ConfigFile, values, file=self.file_of)
        self.settings = settings
        self.root = Path(root)
        paths = (self.root / settings.experiments_folder).glob("*.yaml")
        self.available = {path.stem: path for path in sorted(paths)}
        self.corpora: dict[str, CorpusSettings] = {}
        self.mixtures: dict[str, MixtureSettings] = {}
        self.tokenizers: dict[str, TokenizerSettings] = {}
        #: tokenizers trained on the overriding corpus: name → the configured tokenizer it replaces
        self._replaced_tokenizers: dict[str, str] = {}
        self._experiments: dict[str, Experiment] = {}
        self._tables: dict[str, list[Run]] = {}
        self._raw: dict[str, dict[str, Any]] = {}
        #: extensions by `module:Name`, and by the names that they have in runs
        self._references: dict[str, Source] = {}
        self._extensions: dict[str, Source] = {}
        #: name → error of experiments that this configuration cannot run (see `usable`)
        self.unusable: dict[str, UserError] = {}
        errors: list[UserError] = []
        for name, given in settings.corpora.items():
            with collect(errors):
                self.corpora[name] = self._build_named(
                    CorpusSettings,
                    section="corpora",
                    name=name,
                    values=given,
                )
        for name, given in settings.tokenizers.items():
            with collect(errors):
                self.tokenizers[name] = self._build_tokenizer(name, values=given)
        for name, given in settings.mixtures.items():
            with collect(errors):
                self.mixtures[name] = self._build_mixture(name, values=given)
        with collect(errors):
            self.machine = machine.load_machine(settings.machine, root)
        options.raise_errors([*errors, *self._find_errors()], file=self.file_of)

    def file_of(self, key: str) -> str:
        """Return the file that sets a dotted key: the last merged file that has the key or its
        nearest parent.
        """
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            for file, values in reversed(self._layers):
                inner: Any = values
                for part in parts[:length]:
                    inner = inner[part] if isinstance(inner, Mapping) and part in inner else None
                if inner is not None:
                    return file
        return self._file

    def _find_errors(self) -> Iterator[UserError | tuple[str, str]]:
        settings = self.settings
        if settings.scale not in SCALES:
            yield unknown(
                "scale",
                word=settings.scale,
                words=SCALES,
                key="scale",
            )
        if settings.corpus in settings.mixtures:
            yield (
                "corpus",
                "a mixture cannot replace every corpus: name it as runs.corpus of an experiment",
            )
        elif settings.corpus is not None and settings.corpus not in settings.corpora:
            yield unknown(
                "corpus",
                word=settings.corpus,
                words=settings.corpora,
                key="corpus",
            )
        for name, times in Counter(settings.experiments).items():
            if times > 1:
                yield "experiments", f"{name} is listed twice: list it once"
            if name not in self.available:
                yield unknown(
                    "experiment",
                    word=name,
                    words=self.available,
                    key="experiments",
                )

    def _build_named(self, cls: type, section: str, name: str, values: dict[str, Any]) -> Any:
        key = f"{section}.{name}"
        for own in {"name", "learnt_from"} & values.keys():
            raise UserError(
                "this key is filled in automatically.", key=f"{key}.{own}", next="remove it"
            )
        source = values.get("source")
        if cls is CorpusSettings and isinstance(source, dict):
            lists = {k: [v] for k, v in source.items() if k in FILE_LISTS and isinstance(v, str)}
            values = {
                **values,
                "source": {"kind": SourceSettings.infer_kind(source), **source, **lists},
            }
        found: Any = options.decode(
            cls,
            values={**values, "name": name},
            file=self.file_of,
            key=key,
        )
        options.raise_errors(found.problems(), file=self.file_of, key=key)
        return found

    def _build_tokenizer(self, name: str, values: dict[str, Any]) -> TokenizerSettings:
        tokenizer: TokenizerSettings = self._build_named(
            TokenizerSettings,
            section="tokenizers",
            name=name,
            values=values,
        )
        if tokenizer.kind not in TOKENIZERS:  # `unknown`, of a converted store, cannot be built
            raise unknown(
                "tokenizer kind",
                word=tokenizer.kind,
                words=TOKENIZERS,
                key=f"tokenizers.{name}.kind",
            )
        if tokenizer.corpus is None:
            return tokenizer
        if tokenizer.corpus not in self.settings.corpora:
            raise unknown(
                "corpus",
                word=tokenizer.corpus,
                words=self.settings.corpora,
                key=f"tokenizers.{name}.corpus",
            )
        return replace(tokenizer, learnt_from=self.corpora.get(tokenizer.corpus))

    def _build_mixture(self, name: str, values: dict[str, Any]) -> MixtureSettings:
        key = f"mixtures.{name}"
        known = self.settings.corpora
        if not re.fullmatch(NAME_PATTERN, name) or name in known:
            taken = f"another name than those of the corpora: {NAME_RULE}"
            raise UserError(
                f"a mixture cannot be named {name!r}.", key=key, expected=taken, next="rename it"
            )
        named: NamedMixture = options.decode(NamedMixture, values, file=self.file_of, key=key)
        used = [
            (corpus, f"{at}.{corpus}")
            for at, weights in named.weights_by_key.items()
            for corpus in weights
        ]
        errors = [
            unknown(
                "corpus",
                word=corpus,
                words=known,
                key=at,
            )
            for corpus, at in used
            if corpus not in known
        ]
        options.raise_errors([*find_mixture_problems(named), *errors], file=self.file_of, key=key)
        if not named.names <= self.corpora.keys():
            return MixtureSettings()  # a corpus has errors
        return resolve_mixture(named, corpora=self.corpora)

    def select_experiments(self, names: Sequence[str]) -> list[str]:
        """Return experiments' names: `names`, or the report's if empty, or for `ALL` all that fit
        scale and corpus.
        """
        if list(names) != [ALL]:
            return list(dict.fromkeys(names or self.settings.experiments))
        if not self.at_scale:
            scales = [
                scale
                for name in self.available
                for scale in self._read_experiment(name).get("scales") or ()
            ]
            where = {"file": self.file_of("scale"), "folder": self.settings.experiments_folder}
            raise unknown(
                "scale of the experiments",
                word=self.settings.scale,
                words={BASE_SCALE, *scales},
                key="scale",
                **where,
            )
        return [name for name in self.at_scale if name not in self._not_on_corpus]

    def report_folder(self, experiments: Sequence[str] = ()) -> str:
        """Return the folder of the report of these experiments, by default of those of the
        configuration.

        It is `REPORT` for `config/config.yaml` as it stands. Otherwise its name tells what differs:
        the paths of the `--configfile` files, then each setting that a command line, a profile or
        `experiments` gives another value than the files. Different choices have different folders.

        >>> layers = [("config/config.yaml", {}), ("mine.yaml", {"scale": "alps"}), ("", {}), ("--config", {})]
        >>> Config({"scale": "alps"}, layers=layers).report_folder(["storage"])
        'results/report-mine,experiments=storage'
        """
        files = self._layers[:-2]  # behind them: a profile's values and `--config`
        merged: dict[str, Any] = functools.reduce(
            merge_settings, (dict(values) for _, values in files)
        )
        known: ConfigFile = options.decode(
            ConfigFile, values=_without_nulls(merged), file=self.file_of
        )
        chosen = replace(self.settings, experiments=tuple(experiments or self.settings.experiments))
        given = {
            key: getattr(chosen, key)
            for key in REPORTED
            if getattr(chosen, key) != getattr(known, key)
        }
        parts = [_name_part(file.removesuffix(".yaml")) for file, _ in files[1:]]
        name = ",".join(parts + [f"{key}={_name_part(value)}" for key, value in given.items()])
        name = name if len(name) <= 100 else f"{name[:100]}-{sha256_text(name)[:12]}"
        return f"{REPORT}-{name}" if name else REPORT

    @property
    def at_scale(self) -> list[str]:
        """Names of the experiments with settings for the chosen scale."""
        return [name for name in self.available if self.has_scale(name)]

    @property
    def left_out_note(self) -> str | None:
        """Experiments that `ALL` leaves out, with the reasons, as text; None if there are none."""
        reasons = {
            f"no overlay for scale {self.settings.scale}": [
                n for n in self.available if not self.has_scale(n)
            ],
            f"cannot run on the corpus {self.settings.corpus}": self._not_on_corpus,
        }
        lines = [
            f"left out of {ALL} ({why}): {', '.join(names)}"
            for why, names in reasons.items()
            if names
        ]
        return "\n".join(lines) or None

    @cached_property
    def _not_on_corpus(self) -> list[str]:
        """Names of the experiments that cannot run on the configured `corpus`."""
        if self.settings.corpus is None:
            return []
        self.usable(())
        return [name for name, error in self.unusable.items() if error.facts.get("key") == "corpus"]

    def has_scale(self, name: str) -> bool:
        """Whether an experiment has settings for the chosen scale; true for one that cannot be
        read.
        """
        try:
            scales = self._read_experiment(name).get("scales")
        except UserError:
            return True
        chosen = self.settings.scale
        return chosen == BASE_SCALE or (
            chosen in scales if isinstance(scales, dict) else scales is not None
        )

    def _read_experiment(self, name: str) -> dict[str, Any]:
        if name not in self.available:
            raise unknown(
                "experiment",
                word=name,
                words=self.available,
                folder=self.settings.experiments_folder,
            )
        if name not in self._raw:
            self._raw[name] = read_yaml(self.available[name])
        return self._raw[name]

    def experiment(self, name: str) -> Experiment:
        """Return an experiment with the scale's overlay merged. Raises UserError for an unknown
        name or a bad file.
        """
        if name not in self._experiments:
            with self._explain_corpus(name):
                self._experiments[name] = self._load_experiment(name)
        return self._experiments[name]

    def _load_experiment(self, name: str) -> Experiment:
        raw = self._read_experiment(name)
        scale = self.settings.scale
        file = str(self.available[name])
        if name in TARGETS or not re.fullmatch(NAME_PATTERN, name):
            what = "an experiment cannot have this name."
            reserved = ", ".join(TARGETS)
            raise UserError(
                what, file=file, reserved=reserved, next=f"rename the file: {NAME_RULE}"
            )
        base: Experiment = options.decode(Experiment, values=raw, file=file)
        for found in base.scales.keys() - SCALES:
            raise unknown(
                "scale",
                word=found,
                words=SCALES,
                file=file,
                key="scales",
            )
        overlay = base.scales.get(scale, {})
        if not self.has_scale(name):
            what = f"the experiment {name} has no settings for scale {scale}."
            scales = [BASE_SCALE, *base.scales]
            hint = f"choose another scale: --config scale={scales[-1]};\nor add the overlay: "
            hint += f"`scales: {{{scale}: {{}}}}` keeps the settings of {BASE_SCALE}"
            raise UserError(
                what,
                file=file,
                key=f"scales.{scale}",
                found=", ".join(dict.fromkeys(scales)),
                next=hint,
            )
        if "scales" in overlay:
            raise UserError(
                "an overlay has no scales.",
                file=file,
                key=f"scales.{scale}.scales",
                next="remove the key",
            )
        values = merge_settings({k: v for k, v in raw.items() if k != "scales"}, overlay)
        # an overlay removes a factor by null
        if isinstance(factors := values.get("factors"), dict):
            values["factors"] = {
                key: levels for key, levels in factors.items() if levels is not None
            }
        values = self._resolve_extensions(values, file)
        # the file is valid without its overlay
        key = f"scales.{scale}" if overlay else ""
        experiment: Experiment = options.decode(Experiment, values, file=file, key=key)
        options.raise_errors(design.find_factor_errors(experiment.factors), file=file)
        if self.settings.corpus is not None:
            experiment = self._replace_corpus(experiment, self.settings.corpus, file)
        if (
            self.settings.device
            and experiment.has_runs
            and "device" not in design.varied_keys(experiment.factors)
        ):
            experiment = replace(
                experiment, runs=experiment.runs | {"device": self.settings.device}
            )
        options.raise_errors(
            design.find_errors(experiment, corpus=self.corpora, tokenizer=self.tokenizers),
            file=file,
        )
        errors: list[UserError] = []
        for number, figure in enumerate(experiment.figures):
            if is_reference(figure):
                with collect(errors, key=f"figures.{number}"):
                    self._read_extension(("figure",), figure)
        options.raise_errors(errors, file=file)
        return replace(experiment, figures=tuple(list_figures(experiment.figures)))

    def _replace_corpus(self, experiment: Experiment, corpus: str, file: str) -> Experiment:
        """Return an experiment with `corpus` in runs and benchmark, and BPE tokenizers trained on
        it.

        Raises UserError for an experiment that compares corpora, and for the tokenizer `numbers`,
        which cannot read text.
        """
        factors = experiment.factors
        if "corpus" in design.varied_keys(factors):
            next_step = "remove the factor, or set `corpus` for another experiment"
            raise UserError(
                "the experiment compares corpora.", file=file, key="factors.corpus", next=next_step
            )
        swap = partial(self._replace_tokenizer, corpus, file)
        changes: dict[str, Any] = {}
        if (one := experiment.storage_benchmark) is not None:
            tokenizer = swap("storage_benchmark", one.tokenizer)
            changes["storage_benchmark"] = replace(one, corpus=corpus, tokenizer=tokenizer)
        if experiment.has_runs:
            own = (
                {"tokenizer": swap("runs", experiment.runs["tokenizer"])}
                if "tokenizer" in experiment.runs
                else {}
            )
            changes["runs"] = experiment.runs | {"corpus": corpus} | own
        for factor, levels in factors.items():
            if "tokenizer" in (keys := design.factor_keys(factor)):
                rows = [
                    dict(zip(keys, level if len(keys) > 1 else [level], strict=True))
                    for level in levels
                ]
                rows = [row | {"tokenizer": swap("factors", row["tokenizer"])} for row in rows]
                swapped = [
                    list(row.values()) if len(keys) > 1 else row["tokenizer"] for row in rows
                ]
                factors = factors | {factor: swapped}
        return replace(experiment, **changes, factors=factors)

    def _replace_tokenizer(self, corpus: str, file: str, section: str, name: Any) -> Any:
        """Return the tokenizer for the overriding corpus; one trained on another corpus is
        retrained by a new name.
        """
        configured = self.tokenizers.get(name) if isinstance(name, str) else None
        if configured is None or configured.corpus == corpus:
            return name
        if configured.kind == "numbers" and self.corpora[corpus].source.kind != "dummy":
            what = f"the tokenizer {name} reads numbers, but the corpus is text."
            raise UserError(
                what, file=file, key=f"{section}.tokenizer", next="choose one that reads text"
            )
        if configured.corpus is None:
            return name
        twin = f"{name}-{corpus}"
        trained = replace(configured, name=twin, corpus=corpus, learnt_from=self.corpora[corpus])
        if self.tokenizers.setdefault(twin, trained) != trained:
            what = f"the name {twin} is needed for the tokenizer {name} trained on {corpus}."
            key = f"tokenizers.{twin}"
            raise UserError(
                what, file=self.file_of(key), key=key, next="rename the configured tokenizer"
            )
        self._replaced_tokenizers[twin] = name
        return twin

    def runs(self, name: str) -> list[Run]:
        """Return the run table of an experiment, in the randomised order of starting."""
        if name not in self._tables:
            experiment = self.experiment(name)
            with self._explain_corpus(name):
                self._tables[name] = self._build_runs(name, experiment)
        return self._tables[name]

    def usable(self, required: Sequence[str]) -> list[str]:
        """Return the names of the experiments that can run. Raises UserError only for `required`
        ones.

        Errors of the others go to `unusable`: a file that was not requested must not stop other
        targets. Experiments without an overlay for the chosen scale are left out.
        """
        for name in self.available:
            if name not in required and not self.has_scale(name):
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
        """Names of `unusable` experiments with wrong files; an unsuitable `corpus` is not
        counted.
        """
        return [name for name in self.unusable if name not in self._not_on_corpus]

    @contextmanager
    def _explain_corpus(self, name: str) -> Iterator[None]:
        """Turn an error of an experiment that only the configured `corpus` causes into one that
        says so.
        """
        try:
            yield
        except UserError as error:
            if self.settings.corpus is None:
                raise
            # raises the experiment's own error, if it also fails without that corpus
            Config(
                {**self._values, "corpus": None},
                root=self.root,
                file=self._file,
                layers=self._layers,
            ).runs(name)
            what = f"the experiment {name} cannot run on the corpus {self.settings.corpus}."
            next_step = "remove it from `experiments`, or choose a corpus that fits"
            facts = {
                "experiment": self.available[name],
                "reason": error.facts.get("reason", error.what),
                "next": next_step,
            }
            raise UserError(what, file=self.file_of("corpus"), key="corpus", **facts) from None

    def build_run(self, name: str, cell: dict[str, Any], *, repeat: int, position: int) -> Run:
        """Return one run of an experiment. `position` is its place in the order of starting."""
        experiment = self.experiment(name)
        file = str(self.available[name])
        build = partial(self.run_settings, repeat=repeat, file=file)
        return Run(
            settings=design.resolve_settings(experiment, cell, build, file=file),
            cell=cell,
            repeat=repeat,
            position=position,
            share_nodes=experiment.share_nodes,
        )

    def _build_runs(self, name: str, experiment: Experiment) -> list[Run]:
        file = str(self.available[name])
        table: list[Run] = []
        errors: list[Any] = []
        for position, (cell, repeat) in enumerate(design.order_runs(experiment)):
            if errors and repeat:
                break  # further repeats have the same errors
            with collect(errors):
                table.append(self.build_run(name, cell, repeat=repeat, position=position))
        options.raise_errors(errors, file=file)
        ids = Counter(run.run_id for run in table)
        errors = []
        for run_id in (run_id for run_id, times in ids.items() if times > 1):
            errors = [("factors", f"two cells of the experiment are the same run: {run_id}")]
        for run in table:  # those of further repeats of a cell may be missing
            resumes = isinstance(run.cell.get("resume_from"), dict)
            if resumes and parse_run_id(run.settings.resume_from or "") not in ids:
                of_canary = run.repeat >= max(design.count_repeats(experiment).values())
                key = "canary.cell" if of_canary else "primary_repeats"
                errors = errors or [
                    (key, "a cell with more repeats resumes from a cell that does not have as many")
                ]
        options.raise_errors(errors, file=file)
        if (benchmark := experiment.inference_benchmark) is not None:
            problems = benchmark.problems([run.settings for run in table])
            options.raise_errors(problems, file=file, key="inference_benchmark")
        return table

    def run_settings(self, values: dict[str, Any], *, repeat: int, file: str) -> RunSettings:
        """Build a run from an experiment's values; names of corpus, tokenizer and preset become
        their settings.
        """
        filled = {
            "repeat": "use `repeats` of the experiment",
            "mixture": "name a mixture of config.yaml as `corpus`",
            "extensions": "name one as `objective` or `approach`: module:Name",
        }
        errors: list = [
            (f"runs.{key}", f"is filled in: {hint}")
            for key, hint in filled.items()
            if key in values
        ]
        given = merge_settings(values, overlay={"repeat": repeat})
        given.pop("mixture", None)
        given.pop("extensions", None)
        if (mixture := str(given.get("corpus"))) in self.mixtures:
            given["mixture"] = self.mixtures[mixture]
        corpora = self.corpora | {name: CorpusSettings(name) for name in self.mixtures}
        known: dict[str, Mapping[str, Any]] = {"corpus": corpora, "tokenizer": self.tokenizers}
        for key in ("corpus", "tokenizer", "model", "approach"):
            found = given.get(key)
            if isinstance(found, list):
                listed = f"{{{key}: [{', '.join(map(str, found))}]}}"
                errors.append(
                    (
                        f"runs.{key}",
                        f"a run has one {key}: to compare several, use `factors`: {listed}",
                    )
                )
            elif key not in known:
                continue
            elif found is None:
                errors.append((f"runs.{key}", f"is missing: {', '.join(known[key])}"))
            elif not isinstance(found, str) or found not in known[key]:
                errors.append(
                    unknown(
                        key,
                        word=str(found),
                        words=known[key],
                        key=f"runs.{key}",
                    )
                )
                if key == "corpus" and Path(str(found)).suffix in ENDINGS:
                    own = f"corpora: {{{Path(str(found)).stem}: {{source: {{files: {found}}}}}}}"
                    errors[-1].facts["next"] = f"name its file in the configuration: {own}"
            else:
                given[key] = known[key][found]
                continue
            given.pop(key, None)  # the other settings are validated with its default
        for key, kinds in OWN_KINDS.items():
            source = self._extensions.get(value := str(given.get(key)))
            if source is None and EXTENSION_NAME.fullmatch(value):
                own = ":".join(given.pop(key).split(".")[:2])
                what = f"{value!r} has the digest of its code."
                errors.append(UserError(what, key=f"runs.{key}", next=f"write {own}"))
            if source is None:
                continue
            if source.settings[-1].kind not in kinds:
                errors.append((f"runs.{key}", f"{given.pop(key)} is of another kind"))
                continue
            given["extensions"] = (*given.get("extensions", ()), *source.settings)
        with collect(errors):
            given["model"] = self._build_model(given.pop("model", "llama-tiny"), file)
        with collect(errors):
            run: RunSettings = options.decode(
                RunSettings,
                values=given,
                file=file,
                key="runs",
            )
        options.raise_errors(errors, file=file)
        if run.arm not in (OURS, *READERS, *self._arms):
            errors.append(
                unknown(
                    "arm",
                    word=run.arm,
                    words=[OURS, *READERS, *self._arms],
                    key="runs.arm",
                )
            )
        errors += [(f"runs.{key}", text) for key, text in run.problems()]
        # fail before anything runs if the ranks do not fill whole nodes
        with collect(errors):
            shape = geometry(run.layout.world_size, gpus_per_node=self.machine.gpus_per_node)
            if (problem := run.layout.node_problem(shape.ranks_per_node)) is not None:
                errors.append(("runs.layout.tensor", problem))
        options.raise_errors(errors, file=file)
        return run

    def _resolve_extensions(self, values: dict[str, Any], file: str) -> dict[str, Any]:
        """Return an experiment's values with the names that extensions have in runs: with digests."""
        errors: list[UserError] = []

        def resolve(value: Any, key: str, kinds: tuple[str, ...]) -> Any:
            if isinstance(value, dict):
                return {k: resolve(v, join_key(key, k), _own_kinds(k)) for k, v in value.items()}
            if isinstance(value, list):
                return [resolve(inner, key, kinds) for inner in value]
            if kinds and isinstance(value, str) and ":" in value:
                with collect(errors, key=key):
                    return self._read_extension(kinds, value).name
            return value

        resolved: dict[str, Any] = resolve(values, "", ())
        options.raise_errors(errors, file=file)
        return resolved

    def _read_extension(self, kinds: tuple[str, ...], reference: str) -> Source:
        """Return an extension as the folder has it at first reading: one plan has one version."""
        if reference not in self._references:
            found = read_extension(kinds, reference, self.root / EXTENSIONS)
            self._references[reference] = found
            self._extensions[found.name] = found
        return self._references[reference]

    @cached_property
    def _arms(self) -> list[str]:
        return [path.parent.name for path in (self.root / "arms").glob("*/arm.yaml")]

    def _build_model(self, value: object, file: str) -> ModelSettings:
        changes = dict(value) if isinstance(value, dict) else {"preset": value}
        preset = changes.pop("preset", None)
        if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
            raise unknown(
                "model preset",
                word=str(preset),
                words=PRESETS,
                file=file,
                key="runs.model",
            )
        base = PRESETS[preset] if preset is not None else ModelSettings()
        if not changes:
            return base
        # a changed preset must not keep the preset's name
        values = (
            {f.name: getattr(base, f.name) for f in fields(base)}
            | {"name": f"{base.name}-changed"}
            | changes
        )
        return options.decode(ModelSettings, values, file=file, key="runs.model")

    def all_runs(self, names: Iterable[str]) -> dict[str, Run]:
        """Return run id → run of several experiments. A run that two of them have appears once; it
        shares nodes if both of them say so.
        """
        found: dict[str, Run] = {}
        for name in names:
            for run in reversed(self.runs(name)):
                other = found.get(run.run_id, run)
                if run.share_nodes and not other.share_nodes:
                    found[run.run_id] = replace(run, share_nodes=False)
                else:
                    found[run.run_id] = run
        return found

    def list_corpora(self, names: Iterable[str]) -> list[str]:
        """Return the sorted names of the corpora that the experiments read."""
        benchmarks = (self.experiment(name).storage_benchmark for name in names)
        found = {benchmark.corpus for benchmark in benchmarks if benchmark is not None}
        return sorted(
            found
            | {
                corpus.name
                for run in self.all_runs(names).values()
                for corpus in run.settings.corpora
            }
        )

    def stores(self, names: Iterable[str]) -> list[tuple[str, str, str]]:
        """Return the sorted (corpus, tokenizer, store directory) of all token stores that the
        experiments need.
        """
        found = set()
        for settings in (run.settings for run in self.all_runs(names).values()):
            read = (
                (settings.store, settings.trained_corpora),
                (settings.validation_store, settings.corpora),
            )
            for store, corpora in read:
                if store is not None:
                    found |= {
                        (corpus.name, settings.tokenizer.name, store.directory)
                        for corpus in corpora
                    }
        return sorted(found)

    def relevant_values(self, name: str) -> dict[str, Any]:
        """Return exactly those values of the configuration that an experiment's run table depends
        on.

        The machine is left out: another machine's profile must not rewrite the table.
        """
        corpora = set()
        tokenizers = set()
        mixtures = set()
        for run in (run.settings for run in self.runs(name)):
            corpora |= {corpus.name for corpus in run.corpora}
            mixtures |= {run.corpus.name} if run.mixture is not None else set()
            tokenizers.add(run.tokenizer.name)
        if (benchmark := self.experiment(name).storage_benchmark) is not None:
            corpora.add(benchmark.corpus)
            tokenizers.add(benchmark.tokenizer)
        tokenizers = {self._replaced_tokenizers.get(t, t) for t in tokenizers}
        corpora |= {c for t in tokenizers if (c := self.tokenizers[t].corpus)}
        return {
            "scale": self.settings.scale,
            "corpus": self.settings.corpus,
            **({"device": self.settings.device} if self.settings.device else {}),
            "experiments": [name],
            "experiments_folder": self.settings.experiments_folder,
            "corpora": {c: self.settings.corpora[c] for c in sorted(corpora)},
            **(
                {"mixtures": {m: self.settings.mixtures[m] for m in sorted(mixtures)}}
                if mixtures
                else {}
            ),
            "tokenizers": {t: self.settings.tokenizers[t] for t in sorted(tokenizers)},
        }

    def table(self, name: str) -> dict[str, Any]:
        """Return the run table as JSON values, which the analysis reads instead of the
        configuration.
        """

        def row(run: Run) -> dict[str, Any]:
            own = {key: getattr(run, key) for key in ("run_id", "cell", "repeat", "position")}
            return own | {"run": to_dict(run.settings)}

        rows = [row(run) for run in self.runs(name)]
        return self.describe_experiment(name) | {"runs": rows}

    def describe_experiment(self, name: str) -> dict[str, Any]:
        """Return the run table without its runs."""
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
            "cell_repeats": design.count_repeats(experiment),
            "primary": design.describe_primary(experiment),
            "cells": design.expand_cells(experiment),
            "target_loss": experiment.target_loss,
            "figures": list(experiment.figures),
        }

    def compared_trainers(self, name: str) -> list[tuple[str, str]]:
        """Return (run of an arm, this project's run with otherwise equal levels) for the first
        repeat of each cell.
        """
        first = {design.format_cell(run.cell): run for run in self.runs(name) if run.repeat == 0}
        pairs = [
            (run, first.get(design.format_cell(run.cell | {"arm": OURS}))) for run in first.values()
        ]
        return [
            (run.run_id, ours.run_id)
            for run, ours in pairs
            if run.settings.arm not in (OURS, *READERS) and ours is not None
        ]


def find_homes(key: str) -> list[str]:
    """Return where a setting of this name, or of this flag of `train`, belongs; empty for an
    unknown name.
    """
    from tokenscale.settings.source_studies import RUN_FLAGS

    of_experiment = "of an experiment (config/experiments/NAME.yaml)"
    places = [(flag, f"runs.{{}} {of_experiment}") for flag in RUN_FLAGS]
    for cls, place in (
        (Experiment, f"{{}} {of_experiment}"),
        (CorpusSettings, "corpora.NAME.{}"),
        (TokenizerSettings, "tokenizers.NAME.{}"),
        (machine.Machine, "{} of the machine's file (`machine: FILE`)"),
        (ConfigFile, "{} of config/config.yaml"),
    ):
        places += [(flag, place) for flag in build_flags(cls, left_out=("name", "learnt_from"))]
    found: dict[str, None] = {}
    for flag, place in places:
        parts = flag.key.split(".")
        spelt = {name.lstrip("-").replace("-", "_") for name in flag.names}
        if key in parts or key in spelt:
            found[
                place.format(".".join(parts[: parts.index(key) + 1] if key in parts else parts))
            ] = None
    return list(found)[:3]


options.HOMES.append(find_homes)


def _own_kinds(key: str) -> tuple[str, ...]:
    """Return the kinds of extensions that a key of an experiment may name; those of all keys of a
    factor of several.
    """
    return tuple(kind for part in design.factor_keys(key) for kind in OWN_KINDS.get(part, ()))


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without null values, and with one experiment as a list
    (`experiments=demo`).
    """
    values = {key: value for key, value in values.items() if value is not None}
    experiments = values.get("experiments")
    return values | ({"experiments": [experiments]} if isinstance(experiments, str) else {})


def _name_part(value: object) -> str:
    """Return a text, a path or a list of names as a part of a folder's name; of other values a
    hash.
    """
    if isinstance(value, tuple):
        return "+".join(map(_name_part, value))
    if isinstance(value, str):
        return "+".join(quote(part, safe="") for part in value.split("/"))
    return sha256_text(canonical_json(value))[:12]


def load_config(
    file: Path | str = CONFIG_FILE,
    *,
    configfiles: Sequence[Path | str] = (),
    profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    root: Path | str = ".",
) -> Config:
    """Load the configuration, merged as Snakemake merges it: mappings key by key, other values
    replaced.

    From lowest to highest precedence: `file`, `configfiles` (by default those of the Snakemake
    profile), `config:` of the profile, and `overrides` (`--config key=value`). Raises UserError for
    a missing or unreadable file.
    """
    if profile is not None:
        configfiles = configfiles or list_texts(load_profile(profile, root)[1].get("configfile"))
    layers = Call(
        configfiles=tuple(map(str, configfiles)), config=overrides or {}, profile=profile
    ).layers(root, file)
    values = functools.reduce(merge_settings, (dict(layer) for _, layer in layers))
    return Config(values, root=root, file=str(file), layers=layers)
