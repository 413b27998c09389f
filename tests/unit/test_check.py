"""`check`: what it prints of experiments, and when it ends with 2."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.corpora import make_run
from tests.machines import write_image_record
from tests.unit.test_batches_objectives import Pairs
from tests.unit.test_config import BASE, EXPERIMENT
from tokenscale.cli.check import check_labels
from tokenscale.cli.main import main
from tokenscale.runs.records.provenance import count_gpus
from tokenscale.settings import config as configuration
from tokenscale.settings.experiments import SCALES
from tokenscale.settings.manifests import list_manifests

ROOT = Path(__file__).parents[2]
#: one of the study's approaches at local batch 1 was at another sequence length than all others
MIX_UP = """
question: Does reading tokens pay off more with larger batches?
runs: {corpus: c, tokenizer: t, model: llama-micro, sequence_length: 64, global_batch: 8, budget: {steps: 20}}
factors:
  approach: [padding-free, token-list]
  micro_batch: [1, 2]
  sequence_length: [64, 128]
left_out:
  - {cells: {approach: padding-free, micro_batch: 1, sequence_length: 64}, reason: "-"}
  - {cells: {approach: token-list, sequence_length: 128}, reason: "-"}
  - {cells: {micro_batch: 2, sequence_length: 128}, reason: "-"}
repeats: 6
scales: {workstation: {}, alps: {}, study: {}, campaign: {}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokenscale.cli.check.count_gpus", lambda: 0)
    monkeypatch.setattr("tokenscale.cli.check.count_cores", lambda: 8)
    experiments = tmp_path / "config/experiments"
    experiments.mkdir(parents=True)
    (tmp_path / "config/config.yaml").write_text(json.dumps(BASE))
    every = {"scales": {"workstation": {}, "alps": {}, "study": {}, "campaign": {}}}
    (experiments / "e.yaml").write_text(json.dumps(EXPERIMENT | every))
    (experiments / "mix_up.yaml").write_text(MIX_UP)
    clean = {**EXPERIMENT, **every, "factors": {"precision": ["fp32", "bf16"]}, "repeats": 6}
    clean["runs"] = {**EXPERIMENT["runs"], "device": "cpu", "budget": {"epochs": 1.0}}
    (experiments / "clean.yaml").write_text(json.dumps(clean))
    return tmp_path


def test_an_experiment_is_checked_at_the_scales_that_it_has_and_a_clean_one_is_one_line_at_each(
    folder, capsys
):
    assert main(["check", "clean"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{scale:<12} clean: 12 runs" for scale in SCALES
    ]
    text = (folder / "config/experiments/clean.yaml").read_text()
    (folder / "config/experiments/clean.yaml").write_text(text.replace('"workstation": {}, ', ""))
    assert main(["check", "clean"]) == 0
    scales = ("demo", "alps", "study", "campaign")
    assert capsys.readouterr().out.splitlines() == [
        f"{scale:<12} clean: 12 runs" for scale in scales
    ]
    main(["check", "--scale", "workstation"])
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith(
        "left out of all_experiments (no overlay for scale workstation): clean"
    )
    assert "clean: " not in out
    assert main(["check", "clean", "--scale", "workstation"]) == 2


def test_the_studys_mix_up_ends_with_2_and_is_named(folder, capsys):
    assert main(["check", "mix_up", "--scale", "alps"]) == 2
    head, *found = capsys.readouterr().out.splitlines()
    assert head == "alps         mix_up: 24 runs"
    cell = "approach=padding-free, micro_batch=1, sequence_length=128"
    assert found[0].startswith(f"  refuse  mix_up at alps: cell {cell} differs ")
    assert "(config/experiments/mix_up.yaml: left_out). Next: " in found[0]


def test_without_names_everything_is_checked_at_every_scale(folder, capsys):
    assert main(["check"]) == 2
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line[0] != " "] == [
        "clean:",
        "e:",
        "mix_up:",
    ] * len(SCALES)
    assert "  warn    e at demo: with 2 repeats of a cell" in out


def test_this_machine_counts_for_the_scale_in_use_alone_unless_a_file_says_what_nodes_hold(
    folder, capsys
):
    main(["check", "e"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "has no GPU" in line]
    assert len(lines) == 1 and "e at demo" in lines[0]
    main(["check", "e", "--scale", "alps"])
    assert "e at alps: this machine has no GPU" in capsys.readouterr().out
    (folder / "m.toml").write_text("gpus_per_node = 2\n")
    main(["check", "e", "--machine", "m.toml"])
    out = capsys.readouterr().out
    assert "runs at world size 1 leave GPUs of a 2-GPU node idle" in out and "has no GPU" not in out


CONTAINER = 'starter = "srun"\ngpus_per_node = 4\ncontainer = "image/train.toml"\n'
RECORD = 'container_record = "image.json"'
HAS = ["torch", "numpy", "pydantic", "pyarrow", "safetensors", "tokenizers", "xxhash"]


def on_alps(folder, packages, capsys, *names, record=RECORD):
    """(exit code, lines) of a check for a machine whose container has these packages."""
    (folder / "image").mkdir(exist_ok=True)
    (folder / "image/train.toml").write_text('image = "registry/image:1"\n')
    write_image_record(folder / "image.json", image="registry/image:1")
    (folder / "m.toml").write_text(
        f"{CONTAINER}{record}\ncontainer_packages = {json.dumps(packages)}\n"
    )
    code = main(["check", *names, "--scale", "alps", "--machine", "m.toml"])
    return code, capsys.readouterr().out.splitlines()


def test_a_run_whose_image_lacks_what_it_imports_is_refused_by_name(folder, capsys):
    model = {"transformers": "distilbert", "dimension": 32, "layers": 1, "heads": 2, "hidden": 64}
    values = json.loads((folder / "config/experiments/clean.yaml").read_text())
    values["runs"] |= {"model": model, "objective": "masked"}
    (folder / "config/experiments/library.yaml").write_text(json.dumps(values))
    code, lines = on_alps(folder, HAS, capsys, "clean", "library")
    (refused,) = [line for line in lines if line.startswith("  refuse")]
    assert (
        code == 2
        and "library at alps: 12 runs import transformers" in refused
        and "to image/requirements.txt" in refused
    )
    ids = [
        run.run_id for run in configuration.load_config(overrides={"scale": "alps"}).runs("library")
    ]
    assert all(run_id in refused for run_id in ids[:3]) and "and 9 more" in refused
    code, lines = on_alps(folder, [*HAS, "transformers"], capsys, "clean", "library")
    assert code == 0 and not any("refuse" in line for line in lines)
    code, lines = on_alps(folder, [], capsys, "clean")
    assert code == 0 and any(
        "the packages in the image of image/train.toml are not listed" in line for line in lines
    )
    main(["check", "clean", "--scale", "alps"])
    assert "not listed" not in capsys.readouterr().out, (
        "without a container ranks run in this environment"
    )


def test_an_image_without_a_record_is_refused_once(folder, capsys):
    for record, expected in (("", 2), ('container_record = "none.json"', 2), (RECORD, 0)):
        code, lines = on_alps(folder, HAS, capsys, "clean", "e", record=record)
        refused = [line for line in lines if "(m.toml: container_record)" in line]
        assert (code, len(refused)) == (expected, expected // 2)


def test_tokens_that_are_there_say_whether_data_are_repeated(folder, capsys):
    stores = {"y": "{", "list": "[]", "older": '{"options": "none"}'}
    for name, split, documents in (("token-list", "train", 40), ("x", "validation", 10**6)):
        counts = {"documents": documents, "rows": 40, "tokens_useful": 3960, "tokens_cut": 0}
        stores[name] = json.dumps(
            counts | {"split": split, "options": {"split": split, "eos": False}}
        )
    for name, text in stores.items():
        (folder / "results/tokens/c/t" / name).mkdir(parents=True)
        (folder / "results/tokens/c/t" / name / "manifest.json").write_text(text)
    main(["check", "e", "--scale", "demo"])
    out = capsys.readouterr().out
    # 20 steps of 8 rows: 4 times 40 documents, 2.6 times 4,000 tokens
    assert "every run reads its text 2.6 to 4 times" in out and "not known" not in out


def test_a_corpus_is_found_in_the_configuration(folder, capsys):
    source = {"files": ["a.txt"], "validation_files": ["a.txt"]}
    (folder / "config/config.yaml").write_text(
        json.dumps({**BASE, "corpora": {"c": {"source": source}}})
    )
    assert main(["check", "e", "--scale", "demo"]) == 2
    assert "(config/config.yaml: corpora.c.source.validation_files)" in capsys.readouterr().out


def test_gpus_are_counted_as_the_process_may_use_them(monkeypatch):
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: [Path(f"/dev/nvidia{n}") for n in range(4)]
    )
    found = {}
    for visible in (None, "0,2", "", "-1"):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found[visible] = count_gpus()
    assert found == {None: 4, "0,2": 2, "": 0, "-1": 0}


def test_no_shipped_experiment_is_refused_or_ends_without_a_verdict(tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "config", tmp_path / "config")
    shutil.copytree(ROOT / "arms", tmp_path / "arms")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokenscale.cli.check.count_gpus", lambda: 0)
    monkeypatch.setattr("tokenscale.cli.check.count_cores", lambda: 2)
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert "refuse" not in out and "every verdict is “too few runs”" not in out and "warn" in out


@pytest.mark.parametrize(("words", "level"), [(2, "note"), (40, "refuse")])
def test_the_share_of_rows_that_keep_a_label_is_stated(tmp_path, words, level):
    lab = Pairs(tmp_path / "lab", [(f"{i} " * words, f"short {i}") for i in range(40)])
    run = replace(make_run("padded", 32, labels="target"), eos=True)
    assert not list(check_labels([run], tmp_path / "results"))
    folders = {"corpus": lab.corpus, "tokenizer": lab.tokenizer} | {
        role: lab.store(store)
        for role in ("store", "validation_store")
        if (store := getattr(run, role)) is not None
    }
    for role, path in list_manifests(run).items():
        (tmp_path / path).parent.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).parent.symlink_to(folders[role])
    (problem,) = check_labels([run], tmp_path / "results")
    assert problem.level == level and "rows keep a label" in problem.what
