"""The subcommand `prove`: the configuration of `fit`, run on one device and on ranks, compared.

    lightning-shard prove --config configs/gpt_zero3.yaml
    lightning-shard prove --config configs/gpt_3d.yaml --ranks 8 --steps 2 --json

Model, data, strategy and what the Trainer changes about training come from the configuration; its
devices, loggers, checkpoints and validations do not matter here. The exit code is 0 for equal, 1
for different, and 2 where nothing could be compared.
"""

from typing import Any

from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_shard.cli.without_trainer import CLIWithoutTrainer
from lightning_shard.proving.prove import prove
from lightning_shard.proving.verdict import Verdict

_DESCRIPTION = "Run a model on one device and on ranks inside this process, and compare the two."
_MOST_RANKS = 8  # of those that a configuration asks for; more take --ranks
_COLOURS = {"equal": "green", "different": "red", "refused": "yellow", "failed": "yellow"}
_OPTIONS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "sync_batchnorm",
    "use_distributed_sampler",
    "inference_mode",
    "detect_anomaly",
)


class ProveCLI(CLIWithoutTrainer):
    """Reads the configuration of a fit, and makes everything in it but the Trainer."""

    def __init__(self) -> None:
        super().__init__("prove", _DESCRIPTION)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        add = parser.add_argument
        add("--ranks", type=int | None, default=None, help="Ranks (default: trainer.devices).")
        add("--steps", type=int, default=3, help="Optimizer steps to compare.")
        add("--precision", type=str, default="32-true", help="Precision; float64 decides.")
        add("--shrink", type=int | None, default=None, help="Blocks to keep of each list.")
        add("--narrow", type=int | None, default=None, help="Number that divides widths.")
        add("--no-dropout", action="store_true", help="Compare with dropout off.")
        add("--json", action="store_true", help="Print JSON, for scripts.")

    def prove(self) -> Verdict:
        """Prove what the configuration says."""
        given = self.given_trainer
        options = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
        return prove(
            self.model,
            self.datamodule,
            strategy=_strategy(given.get("strategy", "auto")),
            num_ranks=self.config.ranks or _num_ranks(given),
            num_steps=self.config.steps,
            precision=self.config.precision,
            dropout=not self.config.no_dropout,
            shrink=self.config.shrink,
            narrow=self.config.narrow,
            trainer_options={**options, "callbacks": self.training_callbacks},
        )


def _strategy(given: Any) -> Any:
    return "shard_ddp" if given == "auto" else given


def _num_ranks(given: dict[str, Any]) -> int:
    """Return the ranks that a configuration is for: as many here, if they are not too many."""
    devices = given.get("devices")
    if isinstance(devices, list):
        devices = len(devices)
    text = str(devices)
    number = (int(text) if text.isdigit() else 1) * int(given.get("num_nodes") or 1)
    return min(max(number, 2), _MOST_RANKS)


def run() -> int:
    """Run the subcommand in `sys.argv` and return the process's exit code."""
    cli = ProveCLI()
    verdict = cli.prove()
    if cli.config.json:
        print(verdict.as_json())
    else:
        _print(verdict)
    return verdict.exit_status


def _print(verdict: Verdict) -> None:
    console = Console(highlight=False)
    head = Text(f"{verdict.strategy} on {verdict.num_ranks} ranks: ")
    head.append(verdict.outcome.upper(), style=f"bold {_COLOURS[verdict.outcome]}")
    if verdict.num_steps:
        head.append(f"  ({verdict.num_steps} steps, {verdict.precision}, {verdict.seconds:.1f} s)")
    console.print(head)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in verdict.lines():
        table.add_row(name, Text(value))
    console.print(table)
