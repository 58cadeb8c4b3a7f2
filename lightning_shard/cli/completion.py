"""The subcommand `completion`: a script for a shell, made by shtab from the parsers.

The script is static, so that pressing Tab runs nothing. Of Lightning's subcommands, whose options
torch and Lightning define, it has those that a command line is written with.
"""

from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Any

from lightning_shard.cli.parsers import LIGHTNINGS, TEXTS, parser_of

_PATHS = (
    *("--config", "--ckpt_path", "--yaml", "--picture", "--measure", "--machine"),
    "--tensor-plan",
)
_PATH_NAMES = ("source", "output", "path", "folder", "run_folder", "others")


def run(subcommand: str, given: Namespace) -> int:
    """Print the script of a shell, and return the process's exit code."""
    shtab = import_module("shtab")
    print(shtab.complete(whole_parser(path=shtab.FILE), shell=given.shell))
    return 0


def whole_parser(path: Any = None) -> ArgumentParser:
    """Return one parser of every subcommand, to be completed and not to be used."""
    whole = ArgumentParser(prog="lightning-shard", description="Train on many devices.")
    whole.add_argument("--version", action="store_true", help="Print versions.")
    subcommands = whole.add_subparsers(dest="subcommand")
    for name, text in {**LIGHTNINGS, **TEXTS}.items():
        subcommands.add_parser(name, help=text, parents=[parser_of(name)], add_help=False)
    for parser in subcommands.choices.values():
        for action in parser._actions:
            if action.dest in _PATH_NAMES or any(name in _PATHS for name in action.option_strings):
                action.complete = path  # type: ignore[attr-defined]
    return whole
