"""What subcommands print of a run: a table, or by `report` a page; torch is not imported."""

from argparse import Namespace
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from lightning_shard.core.reporting.page import write_report
from lightning_shard.errors import ConfigError, ShardError


def rows_by_name(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table without borders, of names and what is said of each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def run(subcommand: str, given: Namespace) -> int:
    """Run `report` and return the exit code."""
    folders = ", ".join((given.run_folder, *given.others))
    try:
        print(write_report(given.run_folder, given.output, given.others))
    except ShardError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"A record of {folders} is not as callbacks write it ({type(error).__name__}: {error})."
            f" Report the run with the version that has trained it; --debug shows where."
        ) from error
    return 0
