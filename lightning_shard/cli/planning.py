"""The subcommand `plan`: the config's module on meta, one batch of its data, and the search.

The config is that of `fit`. Its trainer is replaced by one for a single CPU, since nothing runs;
its precision and its number of samples are what the search starts from.
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from rich.console import Console
from typing_extensions import override

from lightning_shard.cli.shard_cli import ConfiguredCLI, find_classes_here
from lightning_shard.errors import ConfigError
from lightning_shard.planning.machine import machine_profile
from lightning_shard.planning.plan import Plan
from lightning_shard.planning.search import plan

_ONE_CPU = (
    "--trainer.strategy=auto",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.num_nodes=1",
    "--trainer.logger=false",
)


class _Configured(ConfiguredCLI):
    """A config's module, on meta unless asked otherwise, and its data."""

    def __init__(self, config: str, *, on_meta: bool) -> None:
        self._on_meta = on_meta
        super().__init__(
            args=[f"--config={config}", *_ONE_CPU],
            save_config_callback=None,
            parser_kwargs={"prog": "lightning-shard plan"},
            run=False,
        )

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        self.parser.add_instantiator(self._instantiate_module, LightningModule, subclasses=True)

    def _instantiate_module(
        self, module_class: type[LightningModule], *args: Any, **kwargs: Any
    ) -> LightningModule:
        with torch.device("meta" if self._on_meta else "cpu"):
            return module_class(*args, **kwargs)


def _first_batch(cli: ConfiguredCLI) -> Any:
    source: Any = cli.datamodule if cli.datamodule is not None else cli.model
    if cli.datamodule is not None:
        source.prepare_data()
        source.setup("fit")
    for batch in source.train_dataloader():
        return batch
    raise ConfigError(f"The loader of {type(source).__name__} has no batch, expected one at least.")


def _planned(given: Namespace) -> Plan:
    machine = machine_profile(given.machine)
    find_classes_here()
    with patch.object(sys, "argv", sys.argv[:1]):  # which Lightning warns of beside `args`
        cli = _Configured(given.config, on_meta=not given.values)
    cli.model.trainer = cli.trainer  # whose callbacks and options the strategies are asked about
    return plan(
        cli.model,
        _first_batch(cli),
        devices=given.devices,
        nodes=given.nodes,
        device_memory=given.device_memory,
        global_batch=given.global_batch,
        machine=machine,
        precision=given.precision or str(cli.trainer.precision),
        tensor_plan=given.tensor_plan,
    )


def run(subcommand: str, given: Namespace) -> int:
    """Run `plan` and return the exit code: 1 where nothing fits."""
    found = _planned(given)
    if given.yaml is not None and found.recommendation is not None:
        Path(given.yaml).write_text(found.to_yaml(), encoding="utf-8")
    if given.picture is not None:
        found.save_picture(given.picture)
    console = Console()
    if given.json:
        print(found.to_json())
    elif console.is_terminal:
        console.print(found.table(every=given.all))
    else:
        print(found.text(every=given.all))
    return 0 if found.recommendation is not None else 1
