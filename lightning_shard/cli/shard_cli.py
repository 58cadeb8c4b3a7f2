"""The subcommands of `lightning-shard`: a LightningCLI with this package's strategies.

The model and the data module are named by `class_path`, and classes of the directory that the
command runs in are found, as they are by `python -m`. An error of this package ends the command
with one message and exit code 1; with `--debug` the traceback comes too.
"""

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_shard.cli.nearest import NearestNamesParser
from lightning_shard.cli.refusals import tell
from lightning_shard.errors import ShardError

DEBUG_FLAG = "--debug"
"""Shows the traceback of an error of this package."""


class ShardCLI(LightningCLI):
    """LightningCLI with any model and any data module, and `--debug`."""

    def __init__(self, **options: Any) -> None:
        self._refusal: ShardError | None = None
        super().__init__(
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            parser_class=NearestNamesParser,
            **options,
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        if isinstance(self.parser, NearestNamesParser) and parser is not self.parser:
            self.parser.of_subcommands.append(parser)
        parser.add_argument(
            DEBUG_FLAG,
            action="store_true",
            help="Show the traceback of an error of lightning_shard, not only its message.",
        )

    @override
    def before_instantiate_classes(self) -> None:
        self.parser.add_instantiator(self._instantiate_strategy, Strategy, subclasses=True)

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            if self._refusal is None:
                raise
            raise self._refusal from error

    def _instantiate_strategy(
        self, strategy_class: type[Strategy], *args: Any, **kwargs: Any
    ) -> Strategy:
        """Remember why a strategy refused its options: jsonargparse buries it in its own error."""
        try:
            return strategy_class(*args, **kwargs)
        except ShardError as error:
            self._refusal = error
            raise


def find_classes_here() -> None:
    """Let classes of the working directory be found, as `python -m` does."""
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)


def run() -> int:
    """Run the subcommand in `sys.argv` and return the process's exit code."""
    find_classes_here()
    try:
        ShardCLI()
    except ShardError as error:
        tell(error, debug=DEBUG_FLAG in sys.argv)
        return 1
    return 0
