import shutil
import sys
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from tests.corpora import HOSTILE, make_corpus, make_tokenizer
from tests.unit.test_models_convert import LENGTH, SHAPES, TOLERANCE, ours, tokens_below
from tokenscale.base.errors import UserError
from tokenscale.cli.export import export
from tokenscale.cli.main import main
from tokenscale.data.tokenizers.load import build, load_tokenizer
from tokenscale.settings.data import TokenizerSettings
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import RunSettings
from tokenscale.train.checkpoint import Piece, State, commit, write_rank
from tokenscale.train.checkpoint_models import open_checkpoint
from tokenscale.train.models.build import build as build_model
from tokenscale.train.models.build import initialise

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

TEXTS = [f"the quick brown fox number {i} jumps over the lazy dog" for i in range(50)] + list(
    HOSTILE
)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), TEXTS)
    return make_tokenizer(tmp_path_factory.mktemp("bpe"), corpus, 320)


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory, bpe):
    """One whose own template ends a text, as BERT's do, and which cuts and pads."""
    source = tmp_path_factory.mktemp("source")
    folder = tmp_path_factory.mktemp("huggingface")
    tokenizer = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(source / "tokenizer.json"))
    build(
        TokenizerSettings(
            name="hf", kind="huggingface", source=str(source), bos="[CLS]", eos="[SEP]"
        ),
        folder,
    )
    return folder


def checkpoint_of(folder, shape, *, tokenizer=None, objective="causal", dtype=torch.float32):
    if shape.transformers is None:
        model = ours(shape).to(dtype)
    else:
        model = build_model(shape, LENGTH, objective=objective, kernel="sdpa").eval().to(dtype)
        initialise(model, 0)
    pieces = {
        f"model.{name}": Piece.of(weight.detach()) for name, weight in model.named_parameters()
    }
    names = list(pieces)
    for rank, mine in enumerate((names[::2], names[1::2])):
        write_rank(folder, rank, State({name: pieces[name] for name in mine}))
    if tokenizer is not None:
        shutil.copytree(tokenizer, folder.with_name(folder.name + ".partial") / "tokenizer")
    run = RunSettings(model=shape, sequence_length=LENGTH, objective=objective)
    facts = {
        "kind": "model",
        "run_id": run.identity,
        "step": 0,
        "run": to_dict(run),
        "objective": objective,
    }
    commit(folder, 2, facts | {"model": to_dict(model.settings)})
    return model


def loaded(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options).eval()


@pytest.mark.parametrize("name", SHAPES)
def test_the_library_loads_what_is_exported(tmp_path, bpe, name):
    shape = replace(SHAPES[name], vocabulary_size=320)
    model = checkpoint_of(tmp_path / "final", shape, tokenizer=bpe)
    export(tmp_path / "final", tmp_path / "out", log=lambda line: None)
    library = loaded(tmp_path / "out")
    tokens = tokens_below(320)
    with torch.no_grad():
        torch.testing.assert_close(library(input_ids=tokens).logits, model(tokens), **TOLERANCE)
    assert library.dtype == torch.float32
    names = (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(names)
    assert (
        library.generation_config.bos_token_id == 0 and library.generation_config.eos_token_id == 1
    )
    with torch.no_grad():
        prompt = torch.tensor([[0, 5, 9]])
        written = library.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)
        for k in range(4):  # greedy: the library's cache against our whole forward pass
            assert model(written[:, : 3 + k])[0, -1].argmax() == written[0, 3 + k]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_folder_for_dcp_is_opened_as_the_checkpoint_is(tmp_path, bpe, name):
    model = checkpoint_of(
        tmp_path / "final", replace(SHAPES[name], vocabulary_size=320), tokenizer=bpe
    )
    flags = ["--checkpoint", str(tmp_path / "final"), "--output", str(tmp_path / "out")]
    assert main(["export", *flags, "--format", "dcp"]) == 0
    assert (
        not list((tmp_path / "out").glob("*.safetensors"))
        and (tmp_path / "out/tokenizer.json").is_file()
    )
    tokens = tokens_below(320)
    with torch.no_grad():
        assert torch.equal(
            open_checkpoint(tmp_path / "out", tokenizer=bpe, device="cpu").model(tokens),
            model(tokens),
        )
    assert (
        main(
            [
                "generate",
                *flags[:1],
                str(tmp_path / "out"),
                "--tokenizer",
                str(bpe),
                "--prompt",
                "the",
            ]
        )
        == 0
    )
    checkpoint_of(tmp_path / "other", library_shape("opt"), tokenizer=bpe)
    with pytest.raises(UserError, match="its own format"):
        export(tmp_path / "other", tmp_path / "more", format="dcp")


def library_shape(kind):
    sizes = {
        "dimension": 64,
        "layers": 2,
        "heads": 4,
        "key_value_heads": 4,
        "hidden": 96,
        "vocabulary_size": 321,
    }
    return ModelSettings(name=kind, transformers=kind, **sizes)


@pytest.mark.parametrize(
    "kind, objective", [("distilbert", "masked"), ("bert", "masked"), ("opt", "causal")]
)
def test_a_model_of_the_library_comes_back_to_it(tmp_path, bpe, kind, objective):
    """And a masked one with its mask: the id behind all others, where the tokenizer has none of its
    own.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    model = checkpoint_of(
        tmp_path / "final", library_shape(kind), tokenizer=bpe, objective=objective
    )
    export(tmp_path / "final", tmp_path / "out", log=lambda line: None)
    auto = AutoModelForMaskedLM if objective == "masked" else AutoModelForCausalLM
    found = auto.from_pretrained(tmp_path / "out").eval()
    tokens = tokens_below(321)
    with torch.no_grad():
        torch.testing.assert_close(
            found(input_ids=tokens).logits, model(tokens), atol=1e-6, rtol=1e-6
        )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    words = load_tokenizer(bpe).encode_batch(["the quick", " fox"])
    if objective == "masked":
        assert tokenizer.mask_token == "[MASK]" and tokenizer.mask_token_id == 320
        assert tokenizer("the quick[MASK] fox")["input_ids"] == [0, *words[0], 320, *words[1]]
    assert tokenizer("the quick")["input_ids"] == [0, *words[0]]
    assert found.config.bos_token_id == 0 and found.config.pad_token_id == 2


@pytest.mark.parametrize("kind", ["bpe", "huggingface", "tekken_folder"])
def test_the_exported_tokenizer_has_our_ids(tmp_path, kind, request):
    from transformers import AutoTokenizer

    folder = request.getfixturevalue(kind)
    tokenizer = load_tokenizer(folder)
    shape = replace(SHAPES["llama-tied"], vocabulary_size=tokenizer.vocabulary_size)
    checkpoint_of(tmp_path / "final", shape, tokenizer=folder)
    export(tmp_path / "final", tmp_path / "out", log=lambda line: None)
    found = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert len(found) == tokenizer.vocabulary_size and found.model_max_length == LENGTH
    special = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == special
    texts = TEXTS[-40:] + [
        "<s>",
        "a </s> b <pad>",
        "[CLS] [SEP]",
        " two  spaces\n\nand lines ",
        "ab",
    ]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert found(text)["input_ids"] == [tokenizer.bos_id, *ids], text
        assert found(text, add_special_tokens=False)["input_ids"] == ids.tolist(), text
    for text, ids in zip(texts[-2:], tokenizer.encode_batch(texts[-2:]), strict=True):
        assert found.decode(ids.tolist()) == tokenizer.decode(ids), text
    assert found.decode(
        [tokenizer.bos_id, *ids.tolist()], skip_special_tokens=True
    ) == tokenizer.decode(ids)
    saved = found.save_pretrained(tmp_path / "again") and AutoTokenizer.from_pretrained(
        tmp_path / "again"
    )
    assert saved("a <s> b")["input_ids"] == found("a <s> b")["input_ids"]


def test_the_verb_exports_and_says_what_and_weights_in_bf16_stay_so(tmp_path, capsys):
    build(
        TokenizerSettings(name="numbers", kind="numbers", vocabulary_size=96), tmp_path / "numbers"
    )
    model = checkpoint_of(
        tmp_path / "final", SHAPES["gpt2"], dtype=torch.bfloat16, tokenizer=tmp_path / "numbers"
    )
    assert (
        main(
            [
                "export",
                "--checkpoint",
                str(tmp_path / "final"),
                "--output",
                str(tmp_path / "deep/out"),
            ]
        )
        == 0
    )
    words = capsys.readouterr().out
    assert "GPT2LMHeadModel, " in words and "numbers, not text" in words
    assert not (tmp_path / "deep/out/tokenizer.json").exists()
    library = loaded(tmp_path / "deep/out", dtype="auto")
    assert library.dtype == torch.bfloat16 and library.config.n_positions == LENGTH
    assert torch.equal(library.transformer.wte.weight, model.embedding.weight)


def test_a_tokenizer_can_be_named(tmp_path, bpe, huggingface):
    shape = replace(SHAPES["llama"], vocabulary_size=320)
    checkpoint_of(tmp_path / "final", shape)
    export(tmp_path / "final", tmp_path / "out", bpe, log=lambda line: None)
    assert (tmp_path / "out/tokenizer.json").is_file()
    with pytest.raises(UserError, match="more entries"):
        export(tmp_path / "final", tmp_path / "other", huggingface)
    checkpoint_of(tmp_path / "with", replace(shape, vocabulary_size=400), tokenizer=bpe)
    with pytest.raises(UserError, match="not the one that the model was trained with"):
        export(tmp_path / "with", tmp_path / "other", huggingface)
    assert not (tmp_path / "other").exists() and not (tmp_path / "other.partial").exists()


GELU = replace(SHAPES["llama"], activation="gelu", vocabulary_size=320)


def test_what_the_library_lacks_and_folders_that_hold_anything_are_refused(tmp_path, bpe, capsys):
    for number, (shape, objective, words) in enumerate(
        (
            (SHAPES["llama"], "masked", "decoder of the masked objective cannot be exported"),
            (GELU, "causal", "activation gelu for swiglu"),
            (library_shape("roberta"), "masked", "count positions from its padding id"),
        )
    ):
        checkpoint_of(tmp_path / f"{number}", shape, objective=objective, tokenizer=bpe)
        with pytest.raises(UserError, match=words):
            export(tmp_path / f"{number}", tmp_path / "out")
        assert not list(tmp_path.glob("out*"))
    checkpoint_of(tmp_path / "final", SHAPES["llama"])
    (tmp_path / "out").mkdir()
    export(tmp_path / "final", tmp_path / "out", log=lambda line: None)  # an empty one is taken
    for source, output, words in (("final", "out", "not empty"), (".", "other", "checkpoint.json")):
        assert (
            main(
                [
                    "export",
                    "--checkpoint",
                    str(tmp_path / source),
                    "--output",
                    str(tmp_path / output),
                ]
            )
            == 2
        )
        assert words in capsys.readouterr().err


def test_the_library_is_not_needed_to_write_its_files(tmp_path, bpe, monkeypatch):
    checkpoint_of(tmp_path / "final", replace(SHAPES["llama"], vocabulary_size=320), tokenizer=bpe)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert (
        main(["export", "--checkpoint", str(tmp_path / "final"), "--output", str(tmp_path / "out")])
        == 0
    )
