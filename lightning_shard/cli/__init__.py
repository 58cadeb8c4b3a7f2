"""The `lightning-shard` command: Lightning's own command line, with this package's strategies.

Each subcommand is in a module that is imported for it alone: `fit` and the like (`shard_cli`) need
torch and Lightning; what needs neither is answered without them, here and in `parsers`.

Every subcommand tells what can be mended without a look into code in one line, or with a traceback
to debug. An error that user code was on the way of has its traceback, which says where.
"""

import sys
import traceback
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from textwrap import shorten

from lightning_shard.cli.arguments import OneLineParser
from lightning_shard.cli.parsers import CONFIGURED, HOMES, LIGHTNINGS, TEXTS, parser_of
from lightning_shard.core.extras import missing_in
from lightning_shard.errors import ShardError

_REFUSED = 2  # the exit code where these could compare or replay nothing
_EPILOG = """\
    lightning-shard fit --config configs/gpt_zero3.yaml
    lightning-shard fit --model my_file.MyModel --trainer.strategy zero3 --trainer.devices 4
    lightning-shard prove --config configs/gpt_zero3.yaml
    lightning-shard plan --config configs/gpt_zero3.yaml --devices 64 --device-memory 80GiB
    lightning-shard report runs/1

The first four are Lightning's own, with the strategies of this package; `fit --help` lists their
options that are used most, and `fit --help-all` every one. What you can mend ends a command with
one line on standard error and exit code 1, or 2 for arguments, and for a prove or replay that could
not be made. With --debug after the subcommand its traceback comes, too.
"""


def told(run: Callable[[], int], *, debug: bool, status: int = 1) -> int:
    """Run a subcommand and return its exit code; where 1 is a finding, no error may end with it."""
    try:
        return run()
    except Exception as error:
        is_ours = isinstance(error, ShardError)
        lacks = "; ".join(missing_in(str(error)))
        if status == 1 and not is_ours and not lacks and not _is_mended_outside(error):
            raise
        if debug:
            traceback.print_exc()
        else:
            said = str(error) if is_ours else f"{shorten(str(error), 600)} (--debug shows where)"
            print(f"lightning-shard: {lacks or f'{type(error).__name__}: {said}'}", file=sys.stderr)
        return status


def _is_mended_outside(error: Exception) -> bool:
    """Whether an error is of arguments and files: no line of user code was on its way."""
    from lightning_shard.core.call_site import went_through_user_code  # which imports torch

    return type(error).__name__ == "MisconfigurationException" or not went_through_user_code(error)


def main() -> int:
    """Run the command line in `sys.argv` and return the process's exit code."""
    first, *rest = sys.argv[1:] or [""]
    if first in ("-h", "--help", "--version") and rest:  # it would end the parsing of what follows
        first, *rest = *rest, first
        sys.argv[1:] = first, *rest
    debug = "--debug" in sys.argv
    if first in TEXTS:
        parsed = parser_of(first).parse_args(rest)  # which may exit
        home = import_module(f"lightning_shard.cli.{HOMES[first]}")
        return told(lambda: home.run(first, parsed), debug=debug)
    if first in LIGHTNINGS and {"-h", "--help"} & {*rest}:
        parser_of(first).parse_args(["--help"])  # which exits
    sys.argv[1:] = ["--help" if one == "--help-all" else one for one in sys.argv[1:]]
    if first in CONFIGURED:
        home = import_module("lightning_shard.cli.without_trainer")
        return told(home.RUN[first], debug=debug, status=_REFUSED)
    if first.startswith(("-", *LIGHTNINGS)) and LIGHTNINGS.keys() & {*sys.argv}:
        home = import_module("lightning_shard.cli.shard_cli")  # options may stand before fit
        return told(home.run, debug=debug)
    _parser().parse_args()  # which exits
    return 0


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="lightning-shard",
        description="Train, evaluate and predict with any LightningModule, on many devices.",
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    versions = (f"{name} {version(name)}" for name in ("lightning-shard", "lightning", "torch"))
    parser.add_argument("--version", action="version", version=", ".join(versions))
    subcommands = parser.add_subparsers(required=True, metavar="SUBCOMMAND", dest="subcommand")
    for name, text in {**LIGHTNINGS, **TEXTS}.items():
        subcommands.add_parser(name, help=text, add_help=False)
    return parser


__all__ = ["main"]
