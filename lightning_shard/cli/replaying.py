"""The subcommand `replay`: a recorded step of many ranks, taken again in this process.

    lightning-shard replay runs/1/steps/step-00000012 --config configs/gpt_zero3.yaml
    lightning-shard replay runs/1/steps/step-00000012 --config configs/gpt_zero3.yaml --pdb
    lightning-shard replay runs/1/steps/step-00000012 --config configs/gpt_zero3.yaml --rank 2

Model, strategy and the callbacks that change what is trained come from the configuration of the
fit that was recorded; batches and state come from the record. The exit code is 0 for reproduced,
1 for not, and 2 where nothing could be replayed.
"""

import pdb

from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_shard.cli.without_trainer import CLIWithoutTrainer
from lightning_shard.replay.replay import replay
from lightning_shard.replay.verdict import Replayed

_DESCRIPTION = "Take a recorded step of many ranks again, all of them in this process."


class ReplayCLI(CLIWithoutTrainer):
    """Reads the configuration of the recorded fit, and makes its model and strategy."""

    def __init__(self) -> None:
        super().__init__("replay", _DESCRIPTION)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        add = parser.add_argument
        add("folder", type=str, metavar="DIR", help="Folder of the recorded step.")
        add("--rank", type=int | None, default=None, help="The one rank to take, alone.")
        add("--trust", action="store_true", help="Make classes of user code in the files.")
        add("--pdb", action="store_true", help="Look at the error in pdb, where it was raised.")
        add("--json", action="store_true", help="Print JSON, for scripts.")

    def replay(self) -> Replayed:
        """Replay what the configuration says."""
        strategy = self.given_trainer.get("strategy", "auto")
        return replay(
            self.config.folder,
            self.model,
            strategy=None if strategy == "auto" else strategy,
            callbacks=self.training_callbacks,
            rank=self.config.rank,
            trust=self.config.trust,
        )


def run() -> int:
    """Run the subcommand in `sys.argv` and return the process's exit code."""
    cli = ReplayCLI()
    found = cli.replay()
    if cli.config.json:
        print(found.as_json())
    else:
        _print(found)
    if cli.config.pdb and found.error is not None:
        pdb.post_mortem(found.error.__traceback__)
    return found.exit_status


def _print(found: Replayed) -> None:
    console = Console(highlight=False)
    who = "" if found.rank is None else f", rank {found.rank} alone"
    head = Text(f"step {found.step} of {found.strategy} on {found.num_ranks} ranks{who}: ")
    colour = "green" if found.outcome == "reproduced" else "red"
    head.append(found.outcome.upper(), style=f"bold {colour}")
    head.append(", bit for bit" if found.is_bitwise else ", with other bits")
    console.print(head)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in found.lines():
        table.add_row(name, Text(value))
    console.print(table)
