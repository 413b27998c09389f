"""What `plan` says of memory."""

from dataclasses import replace

import pytest

from tokenscale.cli.plan import render_memory
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import RunSettings

RUN = RunSettings(model=PRESETS["llama-1.4b-nemo"], sequence_length=2048, global_batch=32, micro_batch=2)


def test_a_line_says_the_sum_and_its_parts():
    """By hand, in GiB: 1.41 G weights in fp32; inputs of 16 blocks 0.50, autocast's copies of their matrices 1.63, the
    loss' gradients by the head's weight 1.00 and by what goes into it 0.03, and the last norm 0.03."""
    head, line = render_memory([replace(RUN, precision="bf16", activation_checkpointing="block", loss_chunk=1024)])
    assert "GPU" in head
    named, _, parts = line.partition(" = ")
    assert (
        named.split() == "llama-1.4b-nemo one rank 2 x 2048 bf16 block checkpointing, loss_chunk 1024 24.2 GiB".split()
    )
    assert parts == "5.25 parameters + 5.25 gradients + 10.5 optimizer + 3.19 activations"


def test_layouts_that_need_the_same_share_a_line_and_repeats_add_none():
    layouts = [LayoutSettings(), LayoutSettings(data=2), LayoutSettings(data=16), LayoutSettings(shard=2)]
    runs = [replace(RUN, layout=layout, repeat=repeat) for layout in layouts for repeat in range(3)]
    lines = list(render_memory(runs))[1:]
    data = "one rank, data 2 (5.25 GiB sent), data 16 (9.84 GiB sent)"
    assert [(data in line, "zero3 2" in line) for line in lines] == [(True, False), (False, True)]
    assert len({line.index(" = ") for line in lines}) == 1, "sums stand below each other"


def test_a_vocabulary_that_is_not_known_is_said_and_not_guessed():
    unknown = replace(RUN, model=PRESETS["llama-150m"])
    lines = list(render_memory([replace(unknown, layout=LayoutSettings(data=n)) for n in (1, 2, 4)]))[1:]
    assert lines == ["    llama-150m: not known before the tokenizer tekken is built, which decides the vocabulary"]
    tokenizer = replace(RUN.tokenizer, kind="numbers", name="numbers", vocabulary_size=512)
    (line,) = list(render_memory([replace(unknown, tokenizer=tokenizer)]))[1:]
    assert "not known" not in line and "activations" in line


@pytest.mark.parametrize("setting", ["compile", "float8"])
def test_activations_of_compiled_blocks_and_float8_are_stated_as_without(setting):
    (plain,) = list(render_memory([RUN]))[1:]
    (line,) = list(render_memory([replace(RUN, **{setting: True})]))[1:]
    assert f"{setting} " in line and line.endswith(f" activations as without {setting}")
    assert line.split("= ")[1] == f"{plain.split('= ')[1]} as without {setting}"


def test_runs_that_do_not_fit_the_machines_gpu_are_listed():
    runs = [replace(RUN, layout=LayoutSettings(data=2)), replace(RUN, layout=LayoutSettings(shard=4))]
    large, small = sorted(list(render_memory(runs, 33.0))[1:])
    assert "data 2" in large and large.endswith(": does not fit a GPU of 33 GiB")
    assert "zero3 4" in small and "fit" not in small
    lines = list(render_memory([replace(RUN, device="cpu")], 1.0))
    assert "CPU" in lines[0] and not any("fit" in line for line in lines)
