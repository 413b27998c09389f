"""Files of the workflow's targets, and inputs and parameters of its rules, from the
configuration.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tokenscale.analysis import tables
from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import (
    canonical_json,
    read_json,
    sha256_text,
    write_arguments,
    write_json,
)
from tokenscale.data.corpus.files import check_files
from tokenscale.data.corpus.fingerprint import fingerprint_sources
from tokenscale.runs.records.provenance import DESIGNS, INDEX
from tokenscale.settings import manifests
from tokenscale.settings.claims import load_claims
from tokenscale.settings.config import ALL, REPLICATION, REPORT, TARGETS, Config
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.experiments import Run, StorageBenchmark, digest_design
from tokenscale.settings.options import to_dict
from tokenscale.settings.registry import ALIASES, FIGURES, SOURCES, TOKENIZERS
from tokenscale.settings.run import RunSettings, parse_run_id
from tokenscale.settings.yaml_files import read_yaml

CORPORA = Path("results/corpus")
#: run id → its place in the experiments, of the last call that submitted jobs
RUN_INDEX = Path("results", INDEX)
#: (folder of a corpus or a store, number) → manifest of a part
part_manifest = "{}/parts/{:05d}/manifest.json".format
_check_files = cache(check_files)
#: files of an experiment's tables, in their folder: those of `ingest`, those of `validate`, and all
RECORDED = (*tables.recorded_files(), tables.MANIFEST)
JUDGED = (f"{tables.JUDGED}.parquet", tables.VERDICT)
TABLES = (*RECORDED, *JUDGED)


class Targets:
    """Files of each target. `existing_only` leaves out runs, benchmarks and manifests that do not
    exist. `job_runs` are the ids of the runs of the job that this process is for, if it is one.

    Methods raise UserError for experiments whose files do not match the settings.
    """

    def __init__(
        self, config: Config, existing_only: bool = False, job_runs: Sequence[str] = ()
    ) -> None:
        self.config = config
        self._job_runs = job_runs
        self._existing_only = existing_only
        #: experiments of the report
        self.chosen = config.select_experiments(())
        #: experiments that may be requested; those that cannot run are refused when they are
        self.experiments = [name for name in config.available if name not in TARGETS]
        #: name of a report's folder → its experiments: each experiment has its own report
        self.reports = {self._report_name([name]): [name] for name in [*self.experiments, ALL]}
        self.report = self._report_name(())
        self.reports[self.report] = self.chosen
        #: folder of the report on the source studies, whose claims name its experiments
        self.replication = self.report.replace(Path(REPORT).name, REPLICATION, 1)
        self.reports[self.replication] = [REPLICATION]

    @cached_property
    def _usable(self) -> list[str]:
        config = self.config
        return config.usable([name for name in self.chosen if config.has_scale(name)])

    @cached_property
    def runs(self) -> dict[str, Run]:
        """Run id → run of all experiments, or, in the job of a run, of that run and those that it
        resumes from.
        """
        return self._read_job_runs() or self.config.all_runs(self._usable)

    def expand(self) -> None:
        """Expand all experiments, in the process that plans. Jobs do so only where they need it."""
        _ = self.runs

    def write_index(self, *, needed: bool) -> None:
        """Record where in the experiments each run is, and the digests of their designs, for the
        jobs of this call. Raises UserError if it cannot be written and is `needed`: without it, jobs
        expand all experiments, and runs record no design.
        """
        homes: dict[str, str] = {}
        designs: dict[str, dict[str, str]] = {}
        for name in self._usable:
            digest = digest_design(self.config.describe_experiment(name))
            for run in self.config.runs(name):
                homes[run.run_id] = name
                designs.setdefault(run.run_id, {})[name] = digest
        rows = {
            run_id: {
                "experiment": homes[run_id],
                "cell": run.cell,
                "repeat": run.repeat,
                "position": run.position,
                "share_nodes": run.share_nodes,
                DESIGNS: designs.get(run_id, {}),
            }
            for run_id, run in self.runs.items()
        }
        try:
            write_json(RUN_INDEX, value=rows)
        except OSError as error:
            if not needed:
                return
            what = "the list of runs cannot be written."
            hint = "make the folder results/arguments writable"
            raise UserError(what, file=RUN_INDEX, reason=error.strerror, next=hint) from None

    def _read_job_runs(self) -> dict[str, Run]:
        """Return the runs of this job by the index of the call that submitted it; none if the index
        is missing or of another configuration. A run's id proves its settings.
        """
        found: dict[str, Run] = {}
        left = list(self._job_runs)
        try:
            index = read_json(RUN_INDEX) if left else {}
            while left:
                run_id = left.pop()
                row = index[run_id]
                run = self.config.build_run(
                    row["experiment"], row["cell"], repeat=row["repeat"], position=row["position"]
                )
                if run.run_id != run_id:
                    return {}
                found[run_id] = replace(run, share_nodes=row["share_nodes"])
                writer = parse_run_id(run.settings.resume_from or "")
                if writer is not None and writer in index:
                    left.append(writer)
        except (UserError, LookupError, TypeError):
            return {}
        return found

    @cached_property
    def storage_benchmarks(self) -> dict[str, StorageBenchmark]:
        """Id → benchmark, which experiments share as they share runs."""
        found = (self.config.experiment(name).storage_benchmark for name in self._usable)
        return {benchmark.id: benchmark for benchmark in found if benchmark is not None}

    def _report_name(self, experiments: Sequence[str]) -> str:
        return Path(self.config.report_folder(experiments)).name

    def _existing(self, files: Iterable[str]) -> list[str]:
        return [file for file in files if not self._existing_only or os.path.isfile(file)]

    # --- targets
    # ---------------------------------------------------------------------------------------------------

    def corpus_files(self) -> list[str]:
        return [manifests.corpus_manifest(name) for name in self.config.list_corpora(self.chosen)]

    def token_files(self) -> list[str]:
        """Return everything that runs read, so that they can then start in their planned order."""
        runs = [run.settings for run in self.config.all_runs(self.chosen).values()]
        texts = {corpus.name for run in runs if run.online for corpus in run.trained_corpora}
        return [
            *(
                manifests.tokenizer_manifest(name)
                for name in sorted({run.tokenizer.name for run in runs})
            ),
            *(manifests.corpus_records(name) for name in sorted(texts)),
            *(manifests.store_manifest(*store) for store in self.config.stores(self.chosen)),
        ]

    def run_files(self, experiments: Sequence[str]) -> list[str]:
        return self._existing(map(manifests.done_file, self.config.all_runs(experiments)))

    def table_files(self, experiments: Iterable[str]) -> list[str]:
        return [f"results/tables/{name}/{JUDGED[0]}" for name in experiments]

    def figure_files(self, experiments: Iterable[str]) -> list[str]:
        figures = {name: self.config.experiment(name).figures for name in experiments}
        return [
            f"results/figures/{name}/{figure}.svg" for name in figures for figure in figures[name]
        ]

    def description_files(self, report: str) -> list[str]:
        return [f"results/figures/{name}/description.json" for name in self.experiments_of(report)]

    def experiments_of(self, report: str) -> list[str]:
        if report == self.replication:
            return self._replicating
        return self.config.select_experiments(self.reports[report])

    @cached_property
    def _replicating(self) -> list[str]:
        """Experiments that fit scale and corpus, and that a claim of the source studies asks
        first.
        """
        claims = load_claims(self.ledger_of(self.replication)).claims.values()
        asked = {claim.experiments[0] for claim in claims}
        found = [name for name in self.config.select_experiments([ALL]) if name in asked]
        if not found:
            raise UserError(
                "no experiment can test a claim of the source studies.",
                file=self.config.settings.replication,
                scale=self.config.settings.scale,
                next="choose another scale, such as --config scale=demo",
            )
        return found

    def ledger_of(self, report: str) -> Path:
        """Return the file of the claims that a report judges."""
        settings = self.config.settings
        return Path(settings.replication if report == self.replication else settings.claims)

    def page_files(self, report: str) -> list[str]:
        """Return the first page, and one page per experiment if there are several."""
        experiments = self.experiments_of(report)
        return [
            f"results/{report}/{page}.html"
            for page in ("index", *(experiments if len(experiments) > 1 else ()))
        ]

    def report_files(self, report: str) -> list[str]:
        """Return all files of a report. Its figures are direct inputs: Snakemake then redraws a
        deleted one.
        """
        if os.path.lexists(folder := Path("results", report)) and not folder.is_dir():
            raise UserError(
                "the report's folder is no folder.", path=folder, next=f"remove it: rm {folder}"
            )
        files = [
            *self.page_files(report),
            *(f"results/{report}/{name}" for name in ("report.pdf", "SHA256SUMS")),
        ]
        return files + self.figure_files(self.experiments_of(report))

    def experiment_files(self, name: str) -> list[str]:
        """Return the files of an experiment's own report, or of the report of all experiments."""
        return self.report_files(self._report_name([name]))

    def find_nearest(self, target: str, rules: Iterable[str]) -> str | None:
        """Return the rule, or for a path the file of an experiment, nearest to a mistyped
        target.
        """
        if "/" not in target:
            return find_nearest(target, words=rules)
        figures = [
            f"results/figures/{e}/{f}.svg" for e in self.experiments for f in (*FIGURES, *ALIASES)
        ]
        config = self.config
        files = [*map(manifests.done_file, self.runs)]
        files += [
            *map(manifests.corpus_manifest, config.corpora),
            *map(manifests.mixture_manifest, config.mixtures),
        ]
        files += map(manifests.tokenizer_manifest, config.tokenizers)
        files += [
            path
            for name, corpus in config.corpora.items()
            if corpus.parts > 1
            for path in self.part_manifests(str(CORPORA / name), name)
        ]
        stores = [manifests.store_manifest(*store) for store in config.stores(self.chosen)]
        reports = [
            f"results/{r}/{name}"
            for r in self.reports
            for name in ("index.html", "report.pdf", "SHA256SUMS")
        ]
        return find_nearest(
            target, words=[*files, *stores, *self.table_files(self.experiments), *figures, *reports]
        )

    # --- inputs of rules
    # -------------------------------------------------------------------------------------------

    def table_inputs(self, experiment: str) -> dict[str, list[str]]:
        """Return the inputs of an experiment's tables by name."""
        own = self.config.experiment(experiment)
        found = {
            "runs": self.run_files([experiment]),
            "benchmarks": own.benchmark_files(experiment),
            "certificates": [
                manifests.certificate_file(*pair)
                for pair in self.config.compared_trainers(experiment)
            ],
        }
        return self.design_inputs(experiment) | {
            name: self._existing(files) for name, files in found.items()
        }

    def design_inputs(self, experiment: str) -> dict[str, list[str]]:
        """Return the manifests by which the design of an experiment is judged."""
        config = self.config
        found = {
            "stores": [manifests.store_manifest(*store) for store in config.stores([experiment])],
            "corpora": [
                manifests.corpus_manifest(name) for name in config.list_corpora([experiment])
            ],
        }
        return {name: self._existing(files) for name, files in found.items()}

    def report_tables(self, report: str) -> list[str]:
        return [
            f"results/tables/{name}/{table}"
            for name in self.experiments_of(report)
            for table in TABLES
        ]

    def run_of(self, run_id: str) -> RunSettings:
        if run_id not in self.runs:
            near = find_nearest(run_id, words=self.runs)
            hint = f"did you mean {near}?" if near else "snakemake -n -p runs lists them"
            folder = self.config.settings.experiments_folder
            raise UserError(f"no experiment has a run {run_id}.", folder=folder, next=hint)
        return self.runs[run_id].settings

    def storage_benchmark_of(self, identity: str) -> StorageBenchmark:
        """Return the benchmark with this id. Raises UserError if no experiment has it."""
        if identity not in self.storage_benchmarks:
            near = find_nearest(identity, words=self.storage_benchmarks)
            raise UserError(
                f"no experiment has a storage benchmark {identity}.",
                folder=self.config.settings.experiments_folder,
                next=f"did you mean {near}?" if near else "snakemake -n -p lists them",
            )
        return self.storage_benchmarks[identity]

    def run_inputs(self, run_id: str) -> dict[str, str | list[str]]:
        """Return the manifests that a run reads by role, and what provides the state that it
        resumes from.
        """
        run = self.run_of(run_id)
        named = manifests.list_manifests(run)
        state = list[str]()
        if run.resume_from is not None:
            own = (writer := parse_run_id(run.resume_from)) in self.runs
            state = [
                manifests.done_file(writer)
                if own
                else os.path.join(run.resume_from, "checkpoint.json")
            ]
        records = (
            [manifests.corpus_records(corpus.name) for corpus in run.trained_corpora]
            if run.online
            else []
        )
        roles = ("corpus", "tokenizer", "store", "validation_store", "arm")
        return {role: named.get(role, []) for role in roles} | {
            "records": records,
            "resume_from": state,
        }

    def corpus_inputs(self, corpus: str) -> list[str]:
        """Return the manifest of a corpus's download, if it has one. Raises UserError for
        unreadable source files.
        """
        found = self.config.corpora[corpus]
        if found.source.kind == "files":
            _check_files(found, CORPORA, self.config.file_of)
        return (
            [f"results/downloads/{corpus}/manifest.json"]
            if SOURCES[found.source.kind].downloaded
            else []
        )

    def part_manifests(self, folder: str, corpus: str) -> list[str]:
        """Return the manifests of all parts of a corpus, or of one of its stores."""
        return [
            part_manifest(folder, number) for number in range(self.config.corpora[corpus].parts)
        ]

    def part_ranges(self) -> dict[range, list[str]]:
        """Return the parts that one job builds → the corpora that have such a range."""
        size = self.config.settings.parts_per_job
        found: dict[range, list[str]] = {}
        for name, corpus in self.config.corpora.items():
            if corpus.parts == 1:
                continue
            for first in range(0, corpus.parts, size):
                parts = range(first, min(first + size, corpus.parts))
                found.setdefault(parts, []).append(name)
        return found

    def mixed_corpora(self, mixture: str, store: str | None = None) -> list[str]:
        """Return the corpora of a mixture that runs read: in a validation store all, otherwise
        those with a weight.
        """
        mixed = self.config.mixtures[mixture]
        held_out = store is not None and StoreSettings.parse(store).split == "validation"
        return [
            source.corpus.name for source in (mixed.sources if held_out else mixed.trained_sources)
        ]

    def tokenizer_inputs(self, tokenizer: str) -> dict[str, list[str]]:
        """Return the corpus that a tokenizer learns from, or its files in a folder: other files,
        another tokenizer.
        """
        found = self.config.tokenizers[tokenizer]
        names = (
            ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
            if found.source
            else ()
        )
        files = filter(os.path.isfile, (os.path.join(found.source or "", name) for name in names))
        return {
            "corpus": [manifests.corpus_manifest(found.corpus)] if found.corpus else [],
            "source": list(files),
        }

    def page_figures(self, report: str) -> list[str]:
        """Return the figures on a report's first page: those of its experiment, if it has only
        one.
        """
        experiments = self.experiments_of(report)
        return self.figure_files(experiments if len(experiments) == 1 else ())

    def tokenizer_modules(self, experiment: str) -> list[str]:
        """Return the modules of a user's own kinds of tokenizers."""
        runs = self.config.runs(experiment)
        modules = {TOKENIZERS[run.settings.tokenizer.kind].module for run in runs}
        return sorted(module for module in modules if module is not None)

    # --- parameters of rules
    # ---------------------------------------------------------------------------------------

    def content_of(self, corpus: str, part: int | None = None) -> str:
        """Return the fingerprint of a corpus's or a part's source files: it shows Snakemake changes
        of large files.
        """
        return fingerprint_sources(self.config.corpora[corpus], folder=CORPORA, number=part)

    def part_arguments(self, corpus: str, parts: range) -> str:
        """Return the arguments of a job that builds parts of a corpus: their numbers, and the
        fingerprints of their source files.
        """
        return self.arguments(
            part=list(parts), content=[self.content_of(corpus, number) for number in parts]
        )

    def claims_digest(self, report: str) -> str:
        """Return a digest of the content of a report's claims. Raises UserError for wrong
        claims.
        """
        ledger = self.ledger_of(report)
        load_claims(ledger)
        return sha256_text(canonical_json(read_yaml(ledger)))

    def settings(self, value: object) -> str:
        """Return `@FILE` for `--settings` with this settings object."""
        return self.arguments(settings=canonical_json(to_dict(value)))

    def arguments(self, **options: Any) -> str:
        """Return `@FILE`, which stands for these options: lists and settings may exceed an
        argument's limit.

        The file's name is its content's hash, so that as a parameter it shows Snakemake other
        values.
        """
        words: list[str] = []
        for name, value in options.items():
            words += [
                f"--{name.replace('_', '-')}",
                *map(str, value if isinstance(value, list) else [value]),
            ]
        path = f"results/arguments/{sha256_text(canonical_json(words))[:16]}.json"
        try:
            return write_arguments(path, words)
        except OSError as error:
            what = "the arguments of a job cannot be written."
            hint = "make the folder results/arguments writable"
            raise UserError(what, file=path, reason=error.strerror, next=hint) from None
