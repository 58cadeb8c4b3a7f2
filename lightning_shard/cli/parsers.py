"""The arguments of subcommands, parsed without torch; of Lightning's own, those used most."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from lightning_shard.cli.arguments import (
    OneLineParser,
    at_least_one,
    configuration,
    mapping_in,
    new_file,
    new_picture,
    num_bytes,
)
from lightning_shard.core.schemes import BACKENDS, named_schemes, names_of

TEXTS = {
    "consolidate": "Write a checkpoint as a .ckpt, .pt or .safetensors, or for Hugging Face.",
    "describe": "Say what is in a checkpoint.",
    "plan": "Find the strategy and options for so many devices and their memory.",
    "doctor": "Say what this machine has and lacks for training, and what to do.",
    "strategies": "List the strategies, what they need, and the backends of this machine.",
    "completion": "Print the script by which a shell completes this command.",
    "report": "Make a page of what a run's callbacks have written, also while it runs.",
}
"""By subcommand what it does."""

LIGHTNINGS = {
    "fit": "Train a model.",
    "validate": "Run the validation epoch once.",
    "test": "Run the test epoch once.",
    "predict": "Predict with a trained model.",
    "prove": "Say whether a model trains on ranks as on one device, and if not, why.",
    "replay": "Take a recorded step of many ranks again in one process, under a debugger.",
}
"""By subcommand of Lightning's command line what it does."""

HOMES = {
    "consolidate": "checkpoints",
    "describe": "checkpoints",
    "plan": "planning",
    "doctor": "machine",
    "strategies": "machine",
    "completion": "completion",
    "report": "reporting",
}
"""By subcommand the module of `lightning_shard.cli` that runs it."""

SHELLS = ("bash", "zsh", "fish")
"""The shells that `completion` knows."""

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true")
"""Lightning's names of precisions."""

_EXAMPLES = {
    "consolidate": """\
    lightning-shard consolidate last.ckpt/ whole.ckpt            with optimizers, to resume anywhere
    lightning-shard consolidate last.ckpt/ model.safetensors --dtype bfloat16
    lightning-shard consolidate last.ckpt/ model/ --max-shard-size 2GB    Hugging Face layout

SRC is a folder of the sharded format, of Lightning's ModelParallelStrategy or FSDPStrategy, or of
torch.distributed.checkpoint; a .ckpt, a .pt, or safetensors. Paths of fsspec (s3://...) work too.
""",
    "describe": """\
    lightning-shard describe last.ckpt --verify
    lightning-shard describe last.ckpt --json | jq .global_step

The exit code is 1 if something is missing or damaged.
""",
    "plan": """\
    lightning-shard plan --config my.yaml --devices 64 --nodes 8 --device-memory 80GiB
    lightning-shard plan --config my.yaml --devices 8 --machine a100 --json | jq .reason
    lightning-shard plan --config my.yaml --devices 8 --yaml strategy.yaml --picture memory.png

Nothing is trained and no device is needed. The exit code is 1 if nothing fits.
""",
    "doctor": """\
    torchrun --nproc-per-node 1 --no-python lightning-shard doctor    what its ranks see
    lightning-shard doctor --measure here.json

The exit code is 1 if something is there that training fails with.
""",
    "strategies": """\
    lightning-shard strategies --json | jq -r '.strategies[].name'
""",
    "completion": """\
    eval "$(lightning-shard completion bash)"    in ~/.bashrc
    lightning-shard completion zsh > "${fpath[1]}/_lightning-shard"
    lightning-shard completion fish > ~/.config/fish/completions/lightning-shard.fish
""",
    "report": """\
    lightning-shard report runs/1
    lightning-shard report runs/1 --output report.html
    lightning-shard report runs/1 runs/2

RUN_DIR is the folder that StepMonitor and the other callbacks of lightning_shard.profiling have.
""",
}
_OF_A_TRAINER = """\
    lightning-shard {0} --help-all                                              every option
    lightning-shard {0} --trainer.strategy.help lightning_shard.ZeRO3Strategy   those of a strategy
"""
_JSON: dict[str, Any] = {"action": "store_true", "help": "Print JSON, for scripts."}
_COMMON: dict[str, dict[str, Any]] = {
    "--config": {"help": "YAML file of all of these; several are laid over each other."},
    "--model": {"help": "Class of the LightningModule, such as my_file.MyModel."},
    "--data": {"help": "Class of the LightningDataModule, if the model has no loaders."},
    "--ckpt_path": {"help": "Checkpoint to go on from, or to load."},
    "--trainer.strategy": {"help": "A name of lightning-shard strategies, or a class."},
    "--trainer.accelerator": {"choices": ("auto", "cpu", "gpu"), "help": "Kind of devices."},
    "--trainer.devices": {"help": "Devices of each node."},
    "--trainer.num_nodes": {"help": "Number of nodes."},
    "--trainer.precision": {"choices": PRECISIONS, "help": "Precision."},
    "--trainer.max_steps": {"help": "Optimizer steps, at most."},
    "--trainer.max_epochs": {"help": "Epochs, at most."},
}
CONFIGURED: dict[str, dict[str, dict[str, Any]]] = {
    "prove": {
        "--ranks": {"type": int | None, "help": "Ranks (default: trainer.devices)."},
        "--steps": {"type": int, "default": 3, "help": "Optimizer steps to compare."},
        "--precision": {"default": "32-true", "help": "Precision; float64 decides."},
        "--shrink": {"type": int | None, "help": "Blocks to keep of each list."},
        "--narrow": {"type": int | None, "help": "Number that divides widths."},
        "--no-dropout": {"action": "store_true", "help": "Compare with dropout off."},
        "--to-the-bit": {"action": "store_true", "help": "Allow no rounding (same_bits)."},
        "--json": _JSON,
    },
    "replay": {
        "folder": {"metavar": "DIR", "help": "Folder of the recorded step."},
        "--rank": {"type": int | None, "help": "The one rank to take, alone."},
        "--trust": {"action": "store_true", "help": "Make classes of user code in the files."},
        "--pdb": {"action": "store_true", "help": "Look at the error in pdb, where it was raised."},
        "--json": _JSON,
    },
}
"""By subcommand that reads the configuration of a fit its own options."""

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
"""By given name torch's name of a format."""


def parser_of(subcommand: str) -> ArgumentParser:
    """Return the parser of one of these subcommands."""
    parser = OneLineParser(
        prog=f"lightning-shard {subcommand}",
        description={**LIGHTNINGS, **TEXTS}[subcommand],
        epilog=_EXAMPLES.get(subcommand, _OF_A_TRAINER.format(subcommand)),
        formatter_class=RawDescriptionHelpFormatter,
    )
    if subcommand in LIGHTNINGS:
        _add_trainers(parser, subcommand)
    else:
        _ARGUMENTS[subcommand](parser)
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    return parser


def _add_trainers(parser: ArgumentParser, subcommand: str) -> None:
    for option, settings in (CONFIGURED.get(subcommand, {}) | _COMMON).items():
        shown = {name: value for name, value in settings.items() if name != "type"}
        action = parser.add_argument(option, **shown)
        if option == "--trainer.strategy":
            action.choices = [full for one in named_schemes() for full, _ in names_of(one.name)]
            action.metavar = "NAME"


def _add_consolidate(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="The checkpoint, a folder or a file.")
    parser.add_argument("output", metavar="OUT", help="Where to; the suffix says as what.")
    parser.add_argument(
        "--format",
        choices=["ckpt", "pt", "safetensors", "huggingface"],
        help="What OUT is, whatever its suffix.",
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="Write a .ckpt without optimizers, schedulers and callbacks.",
    )
    parser.add_argument(
        "--dtype", choices=list(DTYPES), help="Turn floating-point weights into this format."
    )
    parser.add_argument(
        "--prefix", default="", help="Write only weights whose names begin so, without it."
    )
    parser.add_argument(
        "--max-shard-size",
        type=num_bytes,
        default="5GB",
        metavar="SIZE",
        help="Longest file of the Hugging Face layout (default: %(default)s).",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="Load objects, too (hyperparameters, callbacks): loading them runs code.",
    )


def _add_describe(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="The checkpoint, a folder or a file.")
    parser.add_argument("--verify", action="store_true", help="Compare it with its checksums.")
    parser.add_argument("--json", **_JSON)
    parser.add_argument(
        "--depth", type=at_least_one, default=3, help="Levels of modules (default: %(default)s)."
    )


def _add_plan(parser: ArgumentParser) -> None:
    parser.add_argument("--config", type=configuration, required=True, help="A config of `fit`.")
    parser.add_argument(
        "--devices", type=at_least_one, required=True, help="Number of all devices."
    )
    parser.add_argument("--nodes", type=at_least_one, help="Number of nodes they are in.")
    parser.add_argument(
        "--device-memory",
        type=num_bytes,
        metavar="SIZE",
        help="Memory of a device, such as 80GiB (default: the machine's).",
    )
    parser.add_argument(
        "--machine",
        default="h100",
        help="Profile: h100, a100, cpu or a JSON file of your own (default: %(default)s).",
    )
    parser.add_argument(
        "--global-batch",
        type=at_least_one,
        metavar="N",
        help="Samples of a step of all devices (default: the config's batch on each).",
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="Lightning's string (default: the config's)."
    )
    parser.add_argument(
        "--tensor-plan",
        type=mapping_in,
        metavar="FILE",
        help="YAML of the layers that tensor parallel splits.",
    )
    parser.add_argument(
        "--values",
        action="store_true",
        help="Build the module with values, for code that reads them while it is made.",
    )
    parser.add_argument(
        "--all", action="store_true", help="Print the best of every strategy, with all figures."
    )
    parser.add_argument("--json", **_JSON)
    parser.add_argument(
        "--yaml", type=new_file, metavar="FILE", help="Write the recommended trainer options."
    )
    parser.add_argument(
        "--picture", type=new_picture, metavar="FILE", help="Draw memory against a device's."
    )


def _add_doctor(parser: ArgumentParser) -> None:
    parser.add_argument("--json", **_JSON)
    parser.add_argument(
        "--measure", type=new_file, metavar="FILE", help="Write a machine profile for `plan`."
    )
    parser.add_argument(
        "--ranks",
        type=at_least_one,
        metavar="N",
        help="Ranks that measure (default: the GPUs, or 2).",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", *BACKENDS),
        default="auto",
        help="Backend between them (default: %(default)s).",
    )
    parser.add_argument(
        "--network",
        type=num_bytes,
        metavar="SIZE",
        help="Bytes a second of a device to other hosts, such as 50GB (default: the adapters').",
    )


def _add_strategies(parser: ArgumentParser) -> None:
    parser.add_argument("--json", **_JSON)


def _add_completion(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="The shell.")


def _add_report(parser: ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN_DIR", help="Folder of the run.")
    parser.add_argument("others", metavar="OTHER", nargs="*", help="Others, laid over it.")
    parser.add_argument(
        "--output",
        type=new_file,
        metavar="FILE",
        help="The page (default: report.html in RUN_DIR).",
    )


_ARGUMENTS = {
    "consolidate": _add_consolidate,
    "describe": _add_describe,
    "plan": _add_plan,
    "doctor": _add_doctor,
    "strategies": _add_strategies,
    "completion": _add_completion,
    "report": _add_report,
}
