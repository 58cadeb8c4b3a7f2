"""The subcommands `consolidate` and `describe`: what they print, and their exit codes."""

import json
import sys
from argparse import Namespace
from math import prod
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text
from rich.tree import Tree

from lightning_shard.checkpoint.conversion.consolidating import (
    Consolidated,
    Consolidation,
    consolidate,
)
from lightning_shard.checkpoint.conversion.source import describe
from lightning_shard.cli.parsers import DTYPES
from lightning_shard.cli.reporting import rows_by_name


def run(subcommand: str, arguments: Namespace) -> int:
    """Run a subcommand and return the process's exit code."""
    return _consolidate(arguments) if subcommand == "consolidate" else _describe(arguments)


def _consolidate(arguments: Namespace) -> int:
    options = Consolidation(
        to=arguments.format,
        weights_only=arguments.weights_only,
        dtype=None if arguments.dtype is None else getattr(torch, DTYPES[arguments.dtype]),
        prefix=arguments.prefix,
        max_shard_bytes=arguments.max_shard_size,
        trust=arguments.trust,
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(arguments.output)
        outcome = consolidate(
            arguments.source,
            arguments.output,
            options,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    _tell(outcome, arguments.output)
    return 0


def _tell(outcome: Consolidated, output: str) -> None:
    if outcome.left_out:
        names = ", ".join(outcome.left_out[:5])
        print(
            f"lightning-shard: {len(outcome.left_out)} entries of the state_dict are no tensors "
            f"and were left out: {names}",
            file=sys.stderr,
        )
    print(f"{output}: {outcome.num_tensors} tensors, {decimal(outcome.num_bytes)}")


def _describe(arguments: Namespace) -> int:
    told = describe(arguments.path, check=arguments.verify)
    if arguments.json:
        print(json.dumps(told, indent=1))
    else:
        _print(told, arguments.depth)
    return 1 if told["missing"] or told["damaged"] else 0


def _print(told: dict[str, Any], depth: int) -> None:
    console = Console(highlight=False)
    console.print(rows_by_name(_rows(told)))
    tree = Tree("modules")
    _grow(tree, told["weights"]["tensors"], depth)
    console.print(tree)


def _rows(told: dict[str, Any]) -> list[tuple[str, str]]:
    weights, step = told["weights"], told["global_step"]
    progress = "" if step is None else f"epoch {told['epoch']}, global step {step}"
    dtypes = ", ".join(f"{count:,} {name}" for name, count in weights["dtypes"].items())
    rows = [
        ("path", told["path"]),
        ("format", told["what"]),
        ("size", f"{decimal(told['bytes'])} in {told['files']} files"),
        ("written by", _writer(told)),
        ("versions", ", ".join(f"{name} {one}" for name, one in told["versions"].items())),
        ("progress", progress),
        ("weights", f"{dtypes}; {decimal(weights['bytes'])}"),
        ("no tensors", ", ".join(weights["others"])),
        *((f"optimizer {at}", _optimizer(one)) for at, one in enumerate(told["optimizers"])),
        *((one.pop("callback"), _pairs(one)) for one in told["metrics"]),
        ("hyperparameters", _pairs(told["hyper_parameters"])),
        ("kept besides", ", ".join(told["kept"])),
        ("complete", _state(told)),
    ]
    return [(name, value) for name, value in rows if value]


def _writer(told: dict[str, Any]) -> str:
    ranks = f"{told['ranks']} ranks" if told["ranks"] else ""
    mesh = _pairs(told["mesh"]) if told["mesh"] else ""
    return ", ".join(filter(None, (told["scheme"], ranks, mesh)))


def _optimizer(one: dict[str, Any]) -> str:
    groups = "; ".join(
        f"group of {group['parameters']} parameters, lr {group.get('lr')}"
        for group in one["groups"]
    )
    return f"{groups}; keeps {', '.join(one['keeps']) or 'nothing'}; {decimal(one['bytes'])}"


def _state(told: dict[str, Any]) -> str:
    if told["damaged"]:
        return f"DAMAGED: {told['damaged']}"
    if told["missing"]:
        return f"NOT COMPLETE: {'; '.join(told['missing'])}"
    return "yes, as its checksums say" if told["verified"] else "yes, by lengths (see --verify)"


def _pairs(values: Any) -> str:
    if not isinstance(values, dict):
        return str(values)
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)


def _grow(tree: Tree, tensors: dict[str, Any], depth: int) -> None:
    """Add the modules with their numbers of elements, down to a depth."""
    children: dict[str, dict[str, Any]] = {}
    for name, one in tensors.items():
        first, _, rest = name.partition(".")
        children.setdefault(first, {})[rest] = one
    for name, inside in children.items():
        elements = sum(prod(one["shape"]) for one in inside.values())
        kinds = ", ".join(sorted({one["dtype"] for one in inside.values()}))
        shape = inside[""]["shape"] if set(inside) == {""} else ""
        branch = tree.add(Text(f"{name} {shape} {elements:,} {kinds}".replace("  ", " ")))
        below = {rest: one for rest, one in inside.items() if rest}
        if below and depth > 1:
            _grow(branch, below, depth - 1)
