"""The subcommand `completion`: a script for a shell, made by shtab from the parsers.

The script is static, so that pressing Tab runs nothing. Of Lightning's subcommands, whose options
torch and Lightning define, it has those that a command line is written with.
"""

import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning_shard.cli.parsers import PRECISIONS, TEXTS, parser_of
from lightning_shard.core.schemes import named_schemes, names_of

_ACCELERATORS = ("auto", "cpu", "gpu")
_PATHS = ("--config", "--ckpt_path", "--yaml", "--picture", "--measure", "--tensor-plan")
_PATH_NAMES = ("source", "output", "path", "folder")
_COMMON = {
    "--config": None,
    "--ckpt_path": None,
    "--model": None,
    "--data": None,
    "--trainer.accelerator": _ACCELERATORS,
    "--trainer.devices": None,
    "--trainer.num_nodes": None,
    "--trainer.precision": PRECISIONS,
    "--trainer.max_steps": None,
    "--trainer.max_epochs": None,
}
_OWN = {
    "prove": (("--ranks", "--steps", "--precision", "--shrink"), ("--no-dropout", "--json")),
    "replay": ((), ("--trust", "--pdb", "--json")),
}
"""Of the subcommands that read a fit's configuration, the options with a value, and flags."""


def run(subcommand: str, given: Namespace) -> int:
    """Print the script of a shell, and return the process's exit code."""
    if find_spec("shtab") is None:
        print(
            f"lightning-shard: {subcommand}: shtab is not installed, which writes the script; "
            f"expected it: pip install 'lightning-shard[completion]'.",
            file=sys.stderr,
        )
        return 1
    from lightning_shard.cli.entry import LIGHTNINGS

    shtab = import_module("shtab")
    print(shtab.complete(whole_parser(LIGHTNINGS, path=shtab.FILE), shell=given.shell))
    return 0


def whole_parser(lightnings: dict[str, str], path: Any = None) -> ArgumentParser:
    """Return one parser of every subcommand, to be completed and not to be used."""
    whole = ArgumentParser(prog="lightning-shard", description="Train on many devices.")
    whole.add_argument("--version", action="store_true", help="Print versions.")
    subcommands = whole.add_subparsers(dest="subcommand")
    for name, text in lightnings.items():
        _add_trainer(subcommands.add_parser(name, help=text), name)
    for name, text in TEXTS.items():
        subcommands.add_parser(name, help=text, parents=[parser_of(name)], add_help=False)
    for parser in subcommands.choices.values():
        for action in parser._actions:
            options = action.option_strings
            if action.dest in _PATH_NAMES or any(name in _PATHS for name in options):
                action.complete = path  # type: ignore[attr-defined]
    return whole


def _add_trainer(parser: ArgumentParser, name: str) -> None:
    for option, choices in _COMMON.items():
        parser.add_argument(option, choices=choices)
    names = [full for one in named_schemes() for full, _ in names_of(one.name)]
    parser.add_argument("--trainer.strategy", choices=names)
    options, flags = _OWN.get(name, ((), ()))
    for option in options:
        parser.add_argument(option)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    if name == "replay":
        parser.add_argument("folder")
    parser.add_argument("--debug", action="store_true")
