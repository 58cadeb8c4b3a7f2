"""The subcommands `prove` and `replay`, which make Trainers of a fit's configuration themselves.

    lightning-shard prove --config configs/gpt_3d.yaml --ranks 8 --steps 2 --json
    lightning-shard replay runs/1/steps/step-00000012 --config configs/gpt_zero3.yaml --pdb

Model, data, strategy and what the Trainer changes about training come from the configuration; its
devices, loggers, checkpoints and validations do not matter here. The exit code is 0 for equal or
reproduced, 1 for not, and 2 where nothing could be compared or replayed.
"""

import pdb
import sys
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from rich.text import Text
from typing_extensions import override

from lightning_shard.cli.parsers import CONFIGURED, LIGHTNINGS
from lightning_shard.cli.reporting import rows_by_name
from lightning_shard.cli.shard_cli import ShardCLI, find_classes_here
from lightning_shard.replay.replay import replay
from lightning_shard.tools.proving.prove import prove
from lightning_shard.tools.proving.runs import TAKEN

# Lightning's own callbacks look on, but for these.
_TRAINING = (
    lightning_callbacks.BaseFinetuning,
    lightning_callbacks.GradientAccumulationScheduler,
    lightning_callbacks.StochasticWeightAveraging,
    lightning_callbacks.WeightAveraging,
)
_WATCHING = (
    "lightning.pytorch.",
    "pytorch_lightning.",
    "lightning_shard.profiling.",
    "lightning_shard.replay.",
)
_MOST_RANKS = 8  # of those that a configuration asks for; more take --ranks
_COLOURS = {"equal": "green", "different": "red", "refused": "yellow", "failed": "yellow"}


class CLIWithoutTrainer(ShardCLI):
    """Reads the configuration of a fit, and makes everything in it but the Trainer."""

    def __init__(self, name: str) -> None:
        self._name = name
        find_classes_here()
        with patch.object(sys, "argv", [sys.argv[0], *sys.argv[2:]]):
            super().__init__(
                run=False,
                save_config_callback=None,
                parser_kwargs={"prog": f"lightning-shard {name}", "description": LIGHTNINGS[name]},
            )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        # saved configurations of `fit` have these
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="Not used.")
        parser.add_argument("--weights_only", type=bool | None, default=None, help="Not used.")
        for option, settings in CONFIGURED[self._name].items():
            parser.add_argument(option, **settings)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Return nothing: the subcommand makes Trainers of its own."""
        return None

    @property
    def given_trainer(self) -> dict[str, Any]:
        """What the configuration says of the Trainer."""
        return dict(self._get(self.config_init, "trainer", default={}))

    @property
    def training_callbacks(self) -> list[Callback]:
        """The callbacks that may change what is trained."""
        given = self.given_trainer.get("callbacks")
        listed = given if isinstance(given, list) else [given] if given is not None else []
        return [
            one
            for one in listed
            if isinstance(one, _TRAINING) or not f"{type(one).__module__}.".startswith(_WATCHING)
        ]


def _num_ranks(given: dict[str, Any]) -> int:
    """Return the ranks that a configuration is for: as many here, if they are not too many."""
    devices = given.get("devices")
    text = str(len(devices) if isinstance(devices, list) else devices)
    number = (int(text) if text.isdigit() else 1) * int(given.get("num_nodes") or 1)
    return min(max(number, 2), _MOST_RANKS)


def _run_prove() -> int:
    cli = CLIWithoutTrainer("prove")
    given, config = cli.given_trainer, cli.config
    strategy = given.get("strategy", "auto")
    options = {
        name: given[name] for name in TAKEN if name != "callbacks" and given.get(name) is not None
    }
    verdict = prove(
        cli.model,
        cli.datamodule,
        strategy="shard_ddp" if strategy == "auto" else strategy,
        num_ranks=_num_ranks(given) if config.ranks is None else config.ranks,
        num_steps=config.steps,
        precision=config.precision,
        dropout=not config.no_dropout,
        shrink=config.shrink,
        narrow=config.narrow,
        trainer_options={**options, "callbacks": cli.training_callbacks},
        to_the_bit=config.to_the_bit,
    )
    if config.json:
        print(verdict.as_json())
        return verdict.exit_status
    head = Text(f"{verdict.strategy} on {verdict.num_ranks} ranks: ")
    head.append(verdict.outcome.upper(), style=f"bold {_COLOURS[verdict.outcome]}")
    if verdict.num_steps:
        head.append(f"  ({verdict.num_steps} steps, {verdict.precision}, {verdict.seconds:.1f} s)")
    _print(head, verdict.lines())
    return verdict.exit_status


def _run_replay() -> int:
    cli = CLIWithoutTrainer("replay")
    config, strategy = cli.config, cli.given_trainer.get("strategy", "auto")
    found = replay(
        config.folder,
        cli.model,
        strategy=None if strategy == "auto" else strategy,
        callbacks=cli.training_callbacks,
        rank=config.rank,
        trust=config.trust,
    )
    if config.json:
        print(found.as_json())
    else:
        who = "" if found.rank is None else f", rank {found.rank} alone"
        head = Text(f"step {found.step} of {found.strategy} on {found.num_ranks} ranks{who}: ")
        colour = "green" if found.outcome == "reproduced" else "red"
        head.append(found.outcome.upper(), style=f"bold {colour}")
        head.append(", bit for bit" if found.is_bitwise else ", with other bits")
        _print(head, found.lines())
    if config.pdb and found.error is not None:
        pdb.post_mortem(found.error.__traceback__)
    return found.exit_status


def _print(head: Text, lines: Iterable[tuple[str, str]]) -> None:
    console = Console(highlight=False)
    console.print(head)
    console.print(rows_by_name(lines))


RUN = {"prove": _run_prove, "replay": _run_replay}
"""By subcommand what runs it."""
