"""Every layout translates as one process does: greedy, in fp32, token by token."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.distributed import parity
from tests.distributed.parity import (
    GPT2_PARTS,
    LENGTH,
    ONE,
    SHAPE,
    batch_of,
    each,
    on_ranks,
    run_of,
    trainer_of,
)
from tokenscale.settings.layout import LayoutSettings
from tokenscale.train.evaluation.generation import Pair, TextModel, translate
from tokenscale.train.phase_timer import HostTimer

pytestmark = [pytest.mark.slow(30), pytest.mark.distributed]
#: weights so far apart that texts vary and rounding decides nothing
LLAMA = replace(SHAPE, heads=8, initial_deviation=0.4)
GPT2 = replace(GPT2_PARTS, initial_deviation=0.3)
#: an id is a character; 97 entries, of which the last is no text
TOKENIZER = SimpleNamespace(
    eos_id=1,
    vocabulary_size=96,
    decode=lambda ids: " ".join(map(str, ids)),
)
#: batches of several sentences and of one, an odd number of them, and a source that leaves no room
PAIRS = [
    Pair(n, text, "")
    for n, text in enumerate(["a", "bc", "xy", "k", "def", "q", "ghij", "zw", "n" * LENGTH])
]
#: BOS, a number for each letter, EOS
PROMPTS = [np.array([0, *(2 + ord(letter) % 90 for letter in pair.source), 1]) for pair in PAIRS]
LAYOUTS = {**parity.LAYOUTS, "1f1b-tp-zero3@2x2x2": LayoutSettings(pipeline=2, tensor=2, shard=2)}
#: what `make test` compares: each way to split a model, and a pair of them
DAILY = {"ddp@2", "zero2@2", "tp@2", "1f1b@2", "1f1b-tp@2x2"}


def mark(name: str) -> tuple:
    """Uneven shares, other pairs, all three at once, other numbers of ranks and schedules are long."""
    return () if name in DAILY else (pytest.mark.long,)


def translations(world, run):
    """What this rank translates before and after a step that changes much, and its loss."""
    trainer = trainer_of(run, world)
    place = run.layout.coordinate(world.rank)
    readers = run.layout.data_parallel_size

    def texts():
        model = TextModel(trainer.parallel, world.device)
        made = translate(
            model,
            PAIRS,
            PROMPTS,
            tokenizer=TOKENIZER,
            positions=LENGTH,
            device=world.device,
            rank=place.data_rank,
            world_size=readers,
        )
        return {translation.pair.number: translation.hypothesis for translation in made}

    before = texts()
    batch, useful = batch_of(0, world, run.layout)
    loss = trainer.step(batch, useful, 0.05, HostTimer()).loss_sum.item() * place.is_group_leader
    return place.data_rank, before, texts(), world.sum(loss)[0] / useful.item()


@pytest.fixture(scope="module")
def found(request):
    """(layout, model) → (data rank, before, after, loss) of each rank, of the cases that a selected
    test names.
    """
    layouts = {"single": ONE} | {
        name: LAYOUTS[name] for (name,) in parity.selected(request, "name")
    }
    runs = {
        (n, shape): run_of(layout, model=shape, seed=1)
        for n, layout in layouts.items()
        for shape in (LLAMA, GPT2)
    }
    return on_ranks(each, runs, translations)


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=mark(n)) for n in LAYOUTS])
def test_every_layout_translates_token_by_token_as_one_process_does(found, name, shape):
    ((_, before, after, loss),) = found["single", shape]
    assert len(set(before.values())) > 4 and before != after and before[8] == "", (
        "texts vary, and a step changes them"
    )
    assert all("96" not in text.split() for text in before.values())
    readers = LAYOUTS[name].data_parallel_size
    for expected, chosen in ((before, 1), (after, 2)):
        shares = {
            reader: [rank[chosen] for rank in found[name, shape] if rank[0] == reader]
            for reader in range(readers)
        }
        assert all(share == of_rank[0] for of_rank in shares.values() for share in of_rank), (
            "a group agrees"
        )
        assert sum(len(of_rank[0]) for of_rank in shares.values()) == len(PAIRS)
        assert {
            number: text for of_rank in shares.values() for number, text in of_rank[0].items()
        } == expected
    assert found[name, shape][0][3] == pytest.approx(loss, rel=1e-5), "training goes on as without"
