"""The arguments of subcommands, parsed without torch; of Lightning's own, those used most."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
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


def _flag(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _file(text: str, kind: Callable[[str], Any] = new_file) -> dict[str, Any]:
    return {"type": kind, "metavar": "FILE", "help": text}


def _size(text: str, default: str | None = None) -> dict[str, Any]:
    return {"type": num_bytes, "metavar": "SIZE", "default": default, "help": text}


def _number(text: str, default: int | None = None, **given: Any) -> dict[str, Any]:
    return {"type": at_least_one, "metavar": "N", "default": default, "help": text, **given}


def _one_of(text: str, choices: Iterable[str], default: str | None = None) -> dict[str, Any]:
    return {"choices": (*choices,), "default": default, "help": text}


_JSON = _flag("Print JSON, for scripts.")
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
        "--no-dropout": _flag("Compare with dropout off."),
        "--to-the-bit": _flag("Allow no rounding (same_bits)."),
        "--json": _JSON,
    },
    "replay": {
        "folder": {"metavar": "DIR", "help": "Folder of the recorded step."},
        "--rank": {"type": int | None, "help": "The one rank to take, alone."},
        "--trust": _flag("Make classes of user code in the files."),
        "--pdb": _flag("Look at the error in pdb, where it was raised."),
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


_ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "consolidate": {
        "source": {"metavar": "SRC", "help": "The checkpoint, a folder or a file."},
        "output": {"metavar": "OUT", "help": "Where to; the suffix says as what."},
        "--format": _one_of(
            "What OUT is, whatever its suffix.", ("ckpt", "pt", "safetensors", "huggingface")
        ),
        "--weights-only": _flag("Write a .ckpt without optimizers, schedulers and callbacks."),
        "--dtype": _one_of("Turn floating-point weights into this format.", DTYPES),
        "--prefix": {"default": "", "help": "Write only weights whose names begin so, without it."},
        "--max-shard-size": _size(
            "Longest file of the Hugging Face layout (default: %(default)s).", "5GB"
        ),
        "--trust": _flag("Load objects, too (hyperparameters, callbacks): loading them runs code."),
    },
    "describe": {
        "path": {"metavar": "PATH", "help": "The checkpoint, a folder or a file."},
        "--verify": _flag("Compare it with its checksums."),
        "--json": _JSON,
        "--depth": _number("Levels of modules (default: %(default)s).", 3),
    },
    "plan": {
        "--config": {"type": configuration, "required": True, "help": "A config of `fit`."},
        "--devices": _number("Number of all devices.", required=True),
        "--nodes": _number("Number of nodes they are in."),
        "--device-memory": _size("Memory of a device, such as 80GiB (default: the machine's)."),
        "--machine": {
            "default": "h100",
            "help": "Profile: h100, a100, cpu or a JSON file of your own (default: %(default)s).",
        },
        "--global-batch": _number(
            "Samples of a step of all devices (default: the config's batch on each)."
        ),
        "--precision": _one_of("Lightning's string (default: the config's).", PRECISIONS),
        "--tensor-plan": _file("YAML of the layers that tensor parallel splits.", mapping_in),
        "--values": _flag(
            "Build the module with values, for code that reads them while it is made."
        ),
        "--all": _flag("Print the best of every strategy, with all figures."),
        "--json": _JSON,
        "--yaml": _file("Write the recommended trainer options."),
        "--picture": _file("Draw memory against a device's.", new_picture),
    },
    "doctor": {
        "--json": _JSON,
        "--measure": _file("Write a machine profile for `plan`."),
        "--ranks": _number("Ranks that measure (default: the GPUs, or 2)."),
        "--backend": _one_of(
            "Backend between them (default: %(default)s).", ("auto", *BACKENDS), "auto"
        ),
        "--network": _size(
            "Bytes a second of a device to other hosts, such as 50GB (default: the adapters')."
        ),
    },
    "strategies": {"--json": _JSON},
    "completion": {"shell": _one_of("The shell.", SHELLS)},
    "report": {
        "run_folder": {"metavar": "RUN_DIR", "help": "Folder of the run."},
        "others": {"metavar": "OTHER", "nargs": "*", "default": [], "help": "Runs laid over it."},
        "--output": _file("The page (default: report.html in RUN_DIR)."),
    },
}


def parser_of(subcommand: str) -> ArgumentParser:
    """Return the parser of one of these subcommands."""
    parser = OneLineParser(
        prog=f"lightning-shard {subcommand}",
        description={**LIGHTNINGS, **TEXTS}[subcommand],
        epilog=_EXAMPLES.get(subcommand, _OF_A_TRAINER.format(subcommand)),
        formatter_class=RawDescriptionHelpFormatter,
    )
    for option, settings in _ARGUMENTS.get(subcommand, {}).items():
        parser.add_argument(option, **settings)
    if subcommand in LIGHTNINGS:
        _add_trainers(parser, subcommand)
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    return parser


def _add_trainers(parser: ArgumentParser, subcommand: str) -> None:
    for option, settings in (CONFIGURED.get(subcommand, {}) | _COMMON).items():
        shown = {name: value for name, value in settings.items() if name != "type"}
        action = parser.add_argument(option, **shown)
        if option == "--trainer.strategy":
            action.choices = [full for one in named_schemes() for full, _ in names_of(one.name)]
            action.metavar = "NAME"
