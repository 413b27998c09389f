"""llm.c: its train_gpt2.c, with the contract's values in place of its literals, compiled by gcc.

The program has no command line: batch size, length, number of steps, learning rate, betas and file
names are literals. A copy of the file is compiled in which exactly these are replaced, together
with the format of its log line. Validation and generation are off. `dataloader.h` takes the place
of llm.c's reader. Weights are written in the format of its checkpoints. Losses and times are parsed
from the lines that the program prints.
"""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from contract import Contract
from safetensors.numpy import load_file

#: as llm.c's Makefile compiles it on Linux
FLAGS = [
    "-Ofast",
    "-march=native",
    "-fopenmp",
    "-DOMP",
    "-Wno-unused-result",
    "-Wno-ignored-pragmas",
    "-Wno-unknown-attributes",
]
LINE = re.compile(
    r"step (\d+): train loss (\S+) \(took (\S+) ms, ended at (\S+) s, peak (\d+) KiB\)"
)
MAGIC = 20240326
VERSION = 3
PADDING = 128
#: tensors of a layer in the order of a checkpoint
LAYER = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")

contract = Contract()
shape = contract.shape
optimizer = contract.optimizer
schedule = contract.schedule
contract.require(
    {
        "models other than GPT-2": shape["norm"] != "layer"
        or shape["activation"] != "gelu"
        or not shape["biases"],
        "a head of its own": not shape["tied_embeddings"],
        "another width of the feed-forward layer than 4 × dimension": shape["hidden"]
        != 4 * shape["dimension"],
        "another norm_epsilon than 1e-5": shape["norm_epsilon"] != 1e-5,
        "dropout": shape["dropout"] > 0,
        "gradient accumulation (micro_batch below the sequences of a step)": contract.micro_batch
        < contract.rows,
        "another schedule than constant": schedule["shape"] != "constant"
        or schedule["warmup_steps"] > 0,
        "weight decay of matrices only": optimizer["weight_decay"] > 0,
        "clipping": optimizer["clip_norm"] is not None,
        "another precision than fp32": contract.precision != "fp32",
        "compile: true": contract.compile,
        "a GPU": contract.device != "cpu",
        "several ranks": contract.world_size > 1,
    }
)


def write_weights(path: Path) -> None:
    """Write a checkpoint as write_model in llm.c's train_gpt2.py: a header, then the tensors of all
    layers by kind.
    """
    weights = load_file(contract.weights_folder / "model.safetensors")
    embedding = weights["transformer.wte.weight"]
    padded = -(-len(embedding) // PADDING) * PADDING
    header = np.zeros(256, np.int32)
    header[:5] = MAGIC, VERSION, shape["maximum_positions"], len(embedding), shape["layers"]
    header[5:8] = shape["heads"], shape["dimension"], padded
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(
            np.pad(embedding, ((0, padded - len(embedding)), (0, 0))).astype(np.float32).tobytes()
        )
        file.write(weights["transformer.wpe.weight"].astype(np.float32).tobytes())
        for kind in LAYER:
            for suffix in ("weight", "bias"):
                for layer in range(shape["layers"]):
                    tensor = weights[f"transformer.h.{layer}.{kind}.{suffix}"]
                    # matrices are [in, out] in transformers
                    file.write(tensor.T.astype(np.float32).tobytes())
        for suffix in ("weight", "bias"):
            file.write(weights[f"transformer.ln_f.{suffix}"].astype(np.float32).tobytes())


def replace_literals(text: str) -> str:
    """Return train_gpt2.c with the contract's values. Each literal must occur exactly once."""
    numbers = (
        contract.learning_rates[0],
        *(optimizer[name] for name in ("beta1", "beta2", "epsilon", "weight_decay")),
    )
    values = {
        '"gpt2_124M.bin"': '"weights.bin"',
        '"dev/data/tinystories/TinyStories_train.bin"': '"tokens.bin"',
        '"dev/data/tinystories/TinyStories_val.bin"': '"tokens.bin"',
        "int B = 4;": f"int B = {contract.rows};",
        "int T = 64;": f"int T = {contract.sequence_length};",
        "step <= 40;": f"step < {contract.steps};",
        "if (step % 10 == 0)": "if (0)",
        "if (step > 0 && step % 20 == 0)": "if (0)",
        "1e-4f, 0.9f, 0.999f, 1e-8f, 0.0f": ", ".join(f"{float(number)!r}f" for number in numbers),
        (
            r'printf("step %d: train loss %f (took %f ms)\n", step, model.mean_loss, '
            r"time_elapsed_s "
            r"* 1000);"
        ): (
            "write_inputs(model.inputs, (size_t)B * T);\n        "
            r'printf("step %d: train loss %.9g (took %.9g ms, ended at %.9f s, peak %ld KiB)\n", '
            r"step, "
            "model.mean_loss, time_elapsed_s * 1000, end.tv_sec + end.tv_nsec / 1e9, "
            "peak_memory());"
        ),
    }
    for literal, value in values.items():
        if text.count(literal) != 1:
            raise ValueError(
                f"train_gpt2.c has {literal!r} {text.count(literal)} times, expected once"
            )
        text = text.replace(literal, value)
    return text


def compile_program(name: str, *options: str) -> Path:
    """Compile the copy of train_gpt2.c in the working directory. Exits with gcc's message if that
    fails.
    """
    path = contract.folder / name
    command = [
        "gcc",
        *FLAGS,
        *options,
        "-I",
        str(contract.source),
        "train_gpt2.c",
        "-lm",
        "-o",
        str(path),
    ]
    if subprocess.run(command, cwd=contract.folder, check=False).returncode:
        contract.fail("gcc cannot compile train_gpt2.c (see above)")
    return path


write_weights(contract.folder / "weights.bin")
contract.tokens.astype(np.int32).tofile(contract.folder / "tokens.bin")
(contract.folder / "llmc").mkdir()
shutil.copyfile(Path(__file__).with_name("dataloader.h"), contract.folder / "llmc/dataloader.h")
source = (contract.source / "train_gpt2.c").read_text(encoding="utf-8")
(contract.folder / "train_gpt2.c").write_text(replace_literals(source), encoding="utf-8")
version = subprocess.run(
    ["gcc", "--version"], capture_output=True, text=True, check=True
).stdout.splitlines()[0]

if contract.facts["recording"]:
    from record import record

    record(contract, compile_program("train_gpt2.so", "-shared", "-fPIC", "-DTESTING"))
else:
    program = compile_program("train_gpt2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # subprocess.run then kills the program
    done = subprocess.run(
        [str(program)], cwd=contract.folder, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, flush=True)
    if done.returncode:
        contract.fail(f"train_gpt2.c ended with exit code {done.returncode}")
    inputs = np.fromfile(contract.folder / "inputs.bin", np.int32).reshape(
        -1, contract.rows, contract.sequence_length
    )
    before = None
    for (_, loss, took, ended, peak), tokens_bt in zip(
        LINE.findall(done.stdout), inputs, strict=True
    ):
        # from end to end: its own time leaves out what it does between two steps
        step_s = float(took) / 1000 if before is None else float(ended) - before
        before = float(ended)
        memory = {"memory_peak_bytes": int(peak) * 1024} if int(peak) else {}
        contract.log_step(
            loss=float(loss),
            tokens_bt=tokens_bt,
            step_s=step_s,
            ended_mono_s=float(ended),
            **memory,
        )
contract.close(compiler=version, flags=" ".join(FLAGS))
