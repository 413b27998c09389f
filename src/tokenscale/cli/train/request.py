"""Translate the command line of `train` into a run and the source of its data. Nothing is built or
written here.
"""

import argparse
import math
import re
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import canonical_json, read_json, sha256_text
from tokenscale.cli.pretokenize_file import (
    check_present,
    choose_text_column,
    make_corpus_name,
    reword_for_flags,
    strip_extensions,
    unescape,
)
from tokenscale.costs.flops import parameters
from tokenscale.data.corpus.files import describe, documents
from tokenscale.data.corpus.read import COMPRESSION, ENDINGS, detect_format
from tokenscale.data.stores.manifest import read_store_manifest
from tokenscale.data.tokenizers.base import read_tokenizer_manifest as read_tokenizer
from tokenscale.data.tokenizers.huggingface import (
    find_store_tokenizer,
    make_settings,
    resolve_tokenizer,
)
from tokenscale.settings import flags
from tokenscale.settings import source_studies as studies
from tokenscale.settings.data import (
    CleaningSettings,
    CorpusSettings,
    SourceSettings,
    TokenizerSettings,
)
from tokenscale.settings.extensions import read_extension
from tokenscale.settings.layout import DEGREES
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import decode, to_dict
from tokenscale.settings.run import RunSettings
from tokenscale.settings.source_studies import StudyFile, TrainOptions, find_flag, spell

if TYPE_CHECKING:
    from tokenscale.settings.config import Config

CONFIG = "config/config.yaml"
DUMMY_DOCUMENTS = 2000
#: entries of GPT-2's tokenizer: vocabulary of `dummy` for a model without a vocabulary size
DUMMY_VOCABULARY = 50_257
#: control ids, which precede the numbers of the tokenizer `numbers`
CONTROL = 3
TEKKEN_VOCABULARY = 131_072
#: entries that `train` learns for a small model without a vocabulary of its own, as in the demo
LEARNED_VOCABULARY = 4096
#: flags that tell where a file's documents are
COLUMNS = ("text_column", "target_column", "separator")
FILE_ENDINGS = (*(ending for known in ENDINGS.values() for ending in known), *COMPRESSION)


@dataclass(frozen=True)
class Request:
    """A requested run. With `epochs`, its steps are still the default. `stated` are the keys that
    were given.
    """

    run: RunSettings
    output_dir: Path
    stated: frozenset[str]
    epochs: float | None = None
    store: Path | None = None  # manifest of the pretokenized file
    tokenizer: Path | None = None  # folder of an existing tokenizer
    notes: tuple[str, ...] = ()


#: run; manifest of a pretokenized file; folder of an existing tokenizer; settings that the data
#: determine
_Data = tuple[RunSettings, Path | None, Path | None, dict[str, Any]]


def parse_request(arguments: argparse.Namespace, world_size: int | None = None) -> Request:
    """Return the run that the flags and their preset file request; flags override the file.

    `world_size` is torchrun's, if it started this process. Raise UserError, naming the flag, for
    values that are not allowed, that contradict each other, or that no run can have.
    """
    words = TrainOptions(**flags.parse_flags(arguments, flags=studies.TRAIN_FLAGS))
    stated = flags.parse_flags(arguments, flags=studies.RUN_FLAGS)
    output = Path(words.output_dir)
    blocking = next(
        (path for path in (output, *output.parents) if path.exists() and not path.is_dir()), None
    )
    if blocking is not None:
        raise UserError(
            "the output folder is a file.", flag="--output-dir", file=blocking, next="name a folder"
        )
    words, stated, translated = studies.translate_study_flags(
        words, stated, ranks=world_size or words.world_size
    )
    ranks = world_size or words.world_size
    _check_flags(words, stated, world_size=world_size)
    if words.approach is not None:
        form, pretokenized = next(
            key for key, approach in studies.APPROACH_OF.items() if approach == words.approach
        )
        words = replace(words, dataset_type=form, pretokenized=pretokenized)  # type: ignore[arg-type]
    file = studies.load_preset_file(words.config) if words.config else StudyFile()
    notes = (
        [f"distributed.backend {backend}: the device decides"]
        if (backend := file.distributed.backend)
        else []
    )
    notes += translated
    model = _choose_model(words, file)
    values = file.values() | stated
    if words.epochs is not None:
        values.pop("budget.steps", None)
    if ranks is not None:
        if not {"layout.data", "layout.shard"} & values.keys():
            values = file.layout_values(ranks // _count_model_ranks(values)) | values
        values["layout.data"] = ranks // _count_model_ranks(values)
    values.setdefault("checkpoints.final", True)  # users of this command want the weights
    readers = values.get("layout.data", 1) * values.get("layout.shard", 1)
    values = (
        _derive_batch(
            words,
            file,
            stated=stated,
            readers=readers,
        )
        | values
    )
    if words.batch_size is not None and words.flag_of_study_003 and readers > 1:
        counts = (
            f"counts the rows of all ranks, as in study 003, which has {words.flag_of_study_003}"
        )
        notes.append(
            f"--batch-size {words.batch_size} {counts}: {values['micro_batch']} a rank at a time"
        )
    run, store, tokenizer, implied = _choose_data(words, model, notes=notes)
    if ":" in (objective := values.get("objective", "")):
        source = read_extension(("objective",), objective)
        values |= {"objective": source.name, "extensions": source.settings}
    given = frozenset(values)
    values = implied | values
    run = flags.replace_values(run, values)
    if words.epochs is None:
        run = shorten_warmup(run, stated=values)
    check_run(run, steps_known=words.epochs is None)
    return Request(
        run=run,
        output_dir=output,
        stated=given,
        epochs=words.epochs,
        store=store,
        tokenizer=tokenizer,
        notes=tuple(notes),
    )


def check_run(run: RunSettings, *, steps_known: bool = True) -> None:
    """Raise UserError for a value out of bounds, and the first of a run's problems, naming the
    flag.
    """
    decode(RunSettings, values=to_dict(run))
    for key, text in run.problems():
        if steps_known or key != "schedule.warmup_steps":
            facts = {"flag": find_flag(key), "setting": key, "reason": text}
            next_step = "change one of these flags, or leave it out"
            raise UserError("the flags do not fit together.", **facts, next=next_step)


def shorten_warmup(run: RunSettings, stated: Container[str]) -> RunSettings:
    """Return the run with a warm-up that fits its steps, if none was given: the default is longer
    than a short run.
    """
    if "schedule.warmup_steps" in stated or run.schedule.warmup_steps <= run.budget.steps:
        return run
    return flags.replace_values(run, values={"schedule.warmup_steps": run.budget.steps})


def _check_flags(words: TrainOptions, stated: dict[str, Any], world_size: int | None) -> None:
    for what, both in _list_exclusive(words, stated).items():
        if both:
            raise UserError(what, next="leave one of them out")
    requested = f"--world-size {words.world_size}"
    found = f"WORLD_SIZE={world_size}"
    if world_size is not None and words.world_size not in (None, world_size):
        what = "--world-size differs from torchrun's number of ranks."
        next_step = "leave --world-size out: torchrun sets it"
        raise UserError(what, flag=requested, found=found, next=next_step)
    ranks = world_size or words.world_size
    if ranks is not None:
        _check_degrees(stated, ranks, found=requested if world_size is None else found)
    if words.distributed and world_size is None:
        what = "--distributed needs torchrun, which did not start this process."
        raise UserError(
            what, next="start it with torchrun, or use --world-size N, which starts the ranks here"
        )


def _list_exclusive(words: TrainOptions, stated: dict[str, Any]) -> dict[str, bool]:
    """Return what is wrong if two flags are given that exclude each other → whether they are."""
    lasts = words.epochs is not None and "budget.steps" in stated
    form = words.approach is not None and (words.dataset_type is not None or words.pretokenized)
    exclusive = {
        "--epochs and --training-steps both set the length of the training.": lasts,
        "--approach and --dataset-type or --pretokenized set the same.": form,
        "--model and --model-size both name the model.": bool(words.model and words.model_size),
    }
    rows = [("batch_size", "micro_batch"), ("batch_size", "global_batch")]
    for name, other in [*rows, ("gradient_accumulation_steps", "global_batch")]:
        both = getattr(words, name) is not None and other in stated
        exclusive[f"{spell(name)} and {find_flag(other)} both set the rows of a step."] = both
    return exclusive


def _check_degrees(stated: dict[str, Any], ranks: int, found: str) -> None:
    """Refuse degrees of the layout whose product cannot be the number of ranks."""
    others = _count_model_ranks(stated)
    copies = stated.get("layout.data")
    if ranks % others == 0 and copies in (None, ranks // others):
        return
    given = " ".join(
        f"--layout.{n} {stated[f'layout.{n}']}" for n in DEGREES if f"layout.{n}" in stated
    )
    next_step = f"take a multiple of {others} ranks"
    if copies:
        next_step += ", and leave --layout.data out"
    what = "the degrees of the layout do not fit the number of ranks."
    raise UserError(what, flags=given, found=found, next=next_step)


def _count_model_ranks(values: dict[str, Any]) -> int:
    """Return the number of ranks that read the same rows or hold one replica of the model
    together.
    """
    return math.prod(values.get(f"layout.{degree}", 1) for degree in DEGREES if degree != "data")


def _choose_model(words: TrainOptions, file: StudyFile) -> ModelSettings:
    if words.model:
        return studies.find_preset(words.model, flag="--model")
    if words.model_size:
        return studies.find_preset(f"study-{words.model_size}", flag="--model-size")
    return file.model_settings(Path(words.config or "").stem) or studies.find_preset(
        "llama-tiny", flag="--model"
    )


def _derive_batch(
    words: TrainOptions, file: StudyFile, stated: dict[str, Any], readers: int
) -> dict[str, int]:
    """Return micro_batch and global_batch from the given rows per rank and passes per step.

    `readers`: number of ranks, or groups of ranks, that read different rows. With a flag of study
    003, --batch-size counts the rows of all ranks, and a pipeline cuts them into micro-batches.
    """
    rows = words.batch_size or file.training.batch_size
    passes = words.gradient_accumulation_steps or file.training.gradient_accumulation_steps
    chunks = (
        (words.n_chunk or studies.CHUNKS) if words.model_parallel_mode == "pipeline_parallel" else 1
    )
    if rows is None and passes is None:
        if chunks == 1:
            return {}
        return {
            "micro_batch": math.ceil(
                stated.get("global_batch", RunSettings().global_batch) / readers / chunks
            )
        }
    rows = rows or stated.get("micro_batch") or RunSettings().micro_batch
    if words.batch_size is not None and words.flag_of_study_003:
        return {
            "micro_batch": math.ceil(rows / readers / chunks),
            "global_batch": rows * (passes or 1),
        }
    return {"micro_batch": math.ceil(rows / chunks), "global_batch": rows * readers * (passes or 1)}


def _choose_data(words: TrainOptions, model: ModelSettings, notes: list[str]) -> _Data:
    """Return the dataset that the flags request, as --dataset-type and --pretokenized determine
    it.
    """
    path = Path(words.dataset)
    name, config = _find_hub_corpus(words.dataset)
    of_file = path.is_file() or "/" in name or name.lower().endswith(FILE_ENDINGS)
    if (
        words.pretokenized
        and not _is_text(words, path)
        and (of_file or (path / "manifest.json").is_file())
    ):
        _refuse_flags(words, "a pretokenized file", *COLUMNS, "data_path")
        return _read_pretokenized(
            words,
            path,
            model=model,
            notes=notes,
        )
    approach = studies.resolve_approach(words.dataset_type or "packed", words.pretokenized)
    if of_file:
        config = None
        _refuse_flags(words, "a file", "data_path")
        corpus = _define_corpus(
            words,
            path,
            base=CorpusSettings(),
            flag="--dataset",
            notes=notes,
        )
    elif name == "dummy":
        _refuse_flags(words, "dummy", *COLUMNS, "data_path")
        config = None
        corpus = _define_dummy_corpus(model)
    else:
        config = config or _load_config()
        corpus = _choose_from_config(
            words,
            name=name,
            config=config,
            notes=notes,
        )
    tokenizer, directory = _choose_tokenizer(
        words,
        model,
        corpus=corpus,
        config=config,
        notes=notes,
    )
    if _is_one_document(corpus.source):
        notes.append(
            f"{corpus.source.files[0]} is one document; --separator splits it into several"
        )
    return (
        RunSettings(
            corpus=corpus,
            tokenizer=tokenizer,
            model=model,
            approach=approach,
        ),
        None,
        directory,
        {},
    )


def _find_hub_corpus(name: str) -> tuple[str, Any]:
    """Return the name of the corpus that a dataset of the Hub is in the configuration, and the
    configuration; any other name as it is, and None.
    """
    on_hub = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()
    config = _load_config() if on_hub else None
    if config is None:
        return name, None
    for key, corpus in config.corpora.items():
        if corpus.source.repository == name:
            return key, config
    return name, config


def _choose_from_config(
    words: TrainOptions, name: str, config: Any, notes: list[str]
) -> CorpusSettings:
    """Return the corpus of this name in the configuration."""
    if config is None:
        what = (
            f"there is no dataset {name!r}: neither a file nor `dummy`, and no configuration is "
            "here."
        )
        hint = "work in the project's folder, or name a file"
        raise UserError(
            what, flag="--dataset", expected=f"{CONFIG}, with {name} under `corpora`", next=hint
        )
    if name not in config.corpora:
        raise _unknown_dataset_error(name, config, is_folder=Path(words.dataset).is_dir())
    if words.data_path is not None:
        return _define_corpus(
            words,
            path=Path(words.data_path),
            base=config.corpora[name],
            flag="--data-path",
            notes=notes,
        )
    _refuse_flags(words, f"the corpus {name}", *COLUMNS)
    return config.corpora[name]


def _unknown_dataset_error(name: str, config: Any, is_folder: bool) -> UserError:
    known = sorted({"dummy", *config.corpora})
    near = find_nearest(name, words=[*known, *(p.name for p in Path().iterdir() if p.is_file())])
    what = f"there is no dataset {name!r}: neither a file nor a corpus of {CONFIG}."
    hint = f"did you mean {near!r}?" if near else "correct the path, or choose a corpus"
    if is_folder:
        hint = f"it is a folder: name one of its files, {name}/FILE"
    if name in config.mixtures:
        hint = "it is a mixture: name it as `corpus` of an experiment (docs/data.md)"
    return UserError(what, flag="--dataset", allowed=f"a file; {', '.join(known)}", next=hint)


def _load_config() -> Any:
    if not Path(CONFIG).is_file():
        return None
    from tokenscale.settings.config import load_config  # needs PyYAML

    return load_config(CONFIG)


def _is_text(words: TrainOptions, path: Path) -> bool:
    """Return whether the dataset is a text file: without a manifest; a flag marks a Parquet file,
    which may be one.
    """
    if not path.is_file() or _manifest_path(path).is_file():
        return False
    return not path.name.lower().endswith(".parquet") or any(
        getattr(words, name) is not None for name in COLUMNS
    )


def _refuse_flags(words: TrainOptions, what: str, *names: str) -> None:
    for name in names:
        if getattr(words, name) is not None:
            what = f"{spell(name)} does not apply to {what}."
            raise UserError(what, flag=f"--dataset {words.dataset}", next="leave it out")


def _read_pretokenized(
    words: TrainOptions, path: Path, model: ModelSettings, notes: list[str]
) -> _Data:
    """Return the data that `pretokenize` or `convert` wrote. The manifest names its format and its
    tokenizer.
    """
    folder = path.is_dir()
    manifest_path = path / "manifest.json" if folder else _manifest_path(path)
    if path.is_file() and not manifest_path.is_file():
        next_step = (
            f"make it with `tokenscale pretokenize --input-path … --output-dir {path.parent}`, "
            "or add\n"
        )
        next_step += "--text-column NAME if it holds text, to tokenize it before the training"
        facts = {"flag": "--dataset", "file": path, "expected": manifest_path.name}
        raise UserError("the pretokenized file has no manifest beside it.", **facts, next=next_step)
    check_present(manifest_path if folder else path, flag="--dataset")
    # corpora and tokenizers also have a manifest
    if folder and "format" not in read_json(manifest_path, what="manifest"):
        what = "the dataset's folder holds no token store."
        next_step = "name a store, or leave --pretokenized out"
        raise UserError(what, flag="--dataset", folder=path, next=next_step)
    manifest = read_store_manifest(manifest_path)
    options = manifest["options"]
    stored = [
        name for name in ("codec", "codec_level", "dtype", "row_group_rows") if name in options
    ]
    values = {f"storage.{name}": options[name] for name in stored} | {"validation.rows": 0}
    values |= {
        name: options[name] for name in ("sequence_length", "eos", "packing") if name in options
    }
    source = SourceSettings(kind="files", files=(str(path),))
    corpus = CorpusSettings(
        name=make_corpus_name(path.name if folder else path.stem), source=source
    )
    approach = studies.resolve_approach(words.dataset_type or manifest["format"], pretokenized=True)
    tokenizer, directory = _find_store_tokenizer(
        words,
        path=manifest_path,
        manifest=manifest,
        notes=notes,
    )
    return (
        RunSettings(
            corpus=corpus,
            tokenizer=tokenizer,
            model=model,
            approach=approach,
        ),
        manifest_path,
        directory,
        values,
    )


def _find_store_tokenizer(
    words: TrainOptions, path: Path, manifest: dict[str, Any], notes: list[str]
) -> tuple[TokenizerSettings, Path | None]:
    """Return (settings, folder) of the tokenizer that made a store's ids. The checkpoint gets a
    copy of it.
    """
    made = manifest["tokenizer"]
    tokenizer = make_settings(
        made["name"], kind=made["kind"], vocabulary_size=manifest["vocabulary_size"]
    )
    directory = find_store_tokenizer(path, sha256=made["file_sha256"])
    if words.tokenizer_name is not None:
        found = resolve_tokenizer(words.tokenizer_name)
        notes += [found.note] if found.note else []
        if made["file_sha256"] is None and found.directory is not None:
            has = read_tokenizer(found.directory)
            for name in ("vocabulary_size", "bos_id", "eos_id"):
                if has[name] != manifest[name]:
                    theirs = f"{found.directory} has {name} {has[name]}"
                    ours = f"{path} has {name} {manifest[name]}"
                    facts = {"flag": "--tokenizer-name", "tokenizer": theirs, "store": ours}
                    next_step = "name the tokenizer that made them, or leave --tokenizer-name out"
                    raise UserError(
                        "the tokenizer is not the one that made these ids.", **facts, next=next_step
                    )
            # the store's name stays: it is part of the run's identity
            return tokenizer, found.directory
        tokenizer = found.settings
        directory = found.directory or directory
    if directory is None:
        known = "unknown" if made["file_sha256"] is None else f"{made['name']}, which is not here"
        text = (
            f"the tokenizer of these ids is {known}. The checkpoint will hold none, and "
            "`generate` will need one"
        )
        notes.append(f"{text}; --tokenizer-name FOLDER gives it")
    return tokenizer, directory


def _manifest_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".parquet") + ".manifest.json")


def _define_corpus(
    words: TrainOptions, path: Path, base: CorpusSettings, flag: str, notes: list[str]
) -> CorpusSettings:
    """Define a corpus of one file, cleaned and split as `base` is.

    Its name holds a hash of settings and content, so that no corpus overwrites another.
    """
    check_present(path, flag)
    if _manifest_path(path).is_file():
        facts = {"flag": flag, "file": path, "manifest": _manifest_path(path).name}
        raise UserError(
            "the dataset's file holds tokens, not text.", **facts, next="add --pretokenized"
        )
    columns = {
        name: getattr(words, name) or getattr(base.source, name)
        for name in ("text_column", "target_column")
    }
    separator = base.source.separator if words.separator is None else unescape(words.separator)
    source = SourceSettings(
        "files", files=(str(path),), format=base.source.format, separator=separator, **columns
    )
    one = _is_one_document(source)
    if not one:  # a wrong column or an unreadable file is reported before anything is written
        try:
            source = choose_text_column(
                path,
                source,
                given=words.text_column,
                log=notes.append,
            )
            first = next(documents(source), None)
        except UserError as error:
            raise reword_for_flags(error) from None
        if first is None:
            raise UserError(
                "the dataset's file holds no documents.",
                flag=flag,
                file=path,
                next="name another file",
            )
    corpus = replace(base, source=source, validation_share=0.0 if one else base.validation_share)
    content = {"settings": to_dict(corpus, science_only=True), "files": describe(source)["files"]}
    name = make_corpus_name(strip_extensions(path))
    return replace(corpus, name=f"{name}-{sha256_text(canonical_json(content))[:6]}")


def _is_one_document(source: SourceSettings) -> bool:
    """Return whether a source is a single undivided text file: its one document cannot be held
    out.
    """
    if source.kind != "files" or len(source.files) != 1 or source.separator:
        return False
    return (
        detect_format(Path(source.files[0])) if source.format == "auto" else source.format
    ) == "text"


def _define_dummy_corpus(model: ModelSettings) -> CorpusSettings:
    """Define a corpus of random numbers that, with the control ids, fill the model's vocabulary."""
    numbers = (model.vocabulary_size or DUMMY_VOCABULARY) - CONTROL
    if numbers < 2:
        what = "the model's vocabulary is too small for the dataset dummy."
        next_step = "name a dataset, or another model"
        has = f"{model.name} has {model.vocabulary_size} entries"
        raise UserError(what, model=has, expected="at least 5", next=next_step)
    source = SourceSettings(kind="dummy", documents=DUMMY_DOCUMENTS, vocabulary_size=numbers)
    corpus = CorpusSettings(source=source, cleaning=CleaningSettings(deduplicate=False))
    return replace(
        corpus, name=f"dummy-{sha256_text(canonical_json(to_dict(corpus, science_only=True)))[:6]}"
    )


def _choose_tokenizer(
    words: TrainOptions,
    model: ModelSettings,
    corpus: CorpusSettings,
    config: "Config | None",
    notes: list[str],
) -> tuple[TokenizerSettings, Path | None]:
    """Return (settings, folder if it is already built) of the tokenizer."""
    room = model.vocabulary_size
    name = words.tokenizer_name
    if name is None and corpus.source.kind == "dummy":
        numbers = corpus.source.vocabulary_size + CONTROL
        name = f"numbers-{numbers}"
        return TokenizerSettings(name=name, kind="numbers", vocabulary_size=numbers), None
    entries = room if room is not None and room < TEKKEN_VOCABULARY else _fitting_vocabulary(model)
    if name is None and entries is not None:
        note = f"tokenizer: {entries:,} entries learned from the corpus, to fit the model; "
        notes.append(f"{note}tekken has {TEKKEN_VOCABULARY:,} (--tokenizer-name tekken)")
        learnt: dict[str, Any] = {
            "corpus": corpus.name,
            "learnt_from": corpus,
            "vocabulary_size": entries,
        }
        return TokenizerSettings(name=f"bpe-{entries}-{corpus.name}", kind="bpe", **learnt), None
    name = name or "tekken"
    directory = None
    if config is not None and name in config.tokenizers:
        settings = config.tokenizers[name]
    else:
        found = resolve_tokenizer(name)
        settings = found.settings
        directory = found.directory
        notes += [found.note] if found.note else []
    size = read_tokenizer(directory)["vocabulary_size"] if directory else None
    size = TEKKEN_VOCABULARY if settings.kind == "tekken" else size
    if room is not None and size is not None and size > room:
        raise vocabulary_error(model, tokenizer=settings.name, size=size)
    return settings, directory


def _fitting_vocabulary(model: ModelSettings) -> int | None:
    """Return the size of a learned vocabulary for a model whose weights would mostly be tekken's
    embedding.
    """
    if model.vocabulary_size is not None or model.transformers is not None:
        return None
    small = model.with_vocabulary(LEARNED_VOCABULARY).with_positions(1)
    mostly = TEKKEN_VOCABULARY * model.dimension > 4 * parameters(small)
    return LEARNED_VOCABULARY if mostly else None


def vocabulary_error(model: ModelSettings, tokenizer: str, size: int) -> UserError:
    """Return the error for an embedding that has fewer rows than the tokenizer has ids."""
    next_step = (
        "leave --tokenizer-name out: a tokenizer with as many entries as the model is then "
        "learned from the text"
    )
    facts = {
        "model": f"{model.name} has {model.vocabulary_size:,}",
        "tokenizer": f"{tokenizer} has {size:,}",
    }
    return UserError(
        "the tokenizer has more entries than the model's embedding.", **facts, next=next_step
    )
