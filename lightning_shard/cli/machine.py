"""The subcommands `doctor` and `strategies`: what this machine has, and what there is to choose.

Answers that need no torch come first, within a second; torch is imported for backends and devices.
`strategies` imports none at all.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_shard.cli.reporting import rows_by_name
from lightning_shard.core.options import check_num_ranks
from lightning_shard.core.schemes import BACKENDS, named_schemes
from lightning_shard.tools.doctor.host import Finding, host, lacking, launcher, size, software

_MARKS = {
    "ok": ("ok", "green"),
    "absent": ("-", "dim"),
    "warning": ("!", "yellow"),
    "failure": ("x", "bold red"),
}
_ENDING = Text(
    "A name may end in a backend, Trainer(strategy='zero3_in_process'); alone it takes nccl on "
    "GPUs, and on CPUs shm on one host and gloo over several."
)


def run(subcommand: str, given: Namespace) -> int:
    """Run a subcommand and return the process's exit code."""
    return _doctor(given) if subcommand == "doctor" else _strategies(given)


def _rooms() -> Iterator[tuple[str, Callable[[], Iterator[Finding]]]]:
    yield "Software", software
    yield "Host", host
    yield "Launcher", launcher
    from lightning_shard.tools.doctor import communication  # which imports torch

    yield "Network", communication.network
    yield "Backends", communication.backends


def _doctor(given: Namespace) -> int:
    check_num_ranks(given.ranks or 0)
    console, told = _console(), list[dict[str, Any]]()
    for title, look in _rooms():
        found = list(look())
        told += [{"room": title, **vars(one)} for one in found]
        if not given.json:
            console.print(Text(title, style="bold"), _table(found), "", sep="\n")
    profile = None if given.measure is None else _measured(given)
    if given.json:
        print(json.dumps({"findings": told, "machine": profile}, indent=1))
    elif profile is not None:
        console.print(
            Text(f"Measured: {profile['device']}", style="bold"), _figures(profile), sep="\n"
        )
    return 1 if any(one["state"] == "failure" for one in told) else 0


def _table(found: list[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, min_width=2)
    table.add_column(no_wrap=True, min_width=18)
    table.add_column(overflow="fold")
    for one in found:
        text = Text(one.found)
        if one.advice:
            text.append(f"\n{one.advice}", style="italic")
        table.add_row(Text(*_MARKS[one.state]), one.subject, text)
    return table


def _measured(given: Namespace) -> dict[str, Any]:
    from lightning_shard.tools.doctor.measuring import measured_machine

    profile = measured_machine(num_ranks=given.ranks, backend=given.backend, network=given.network)
    profile.save(given.measure)
    return dict(vars(profile))


def _figures(profile: dict[str, Any]) -> Table:
    rows = {
        "matrix products": f"{profile['flops_16'] / 1e9:,.1f} GFLOP/s in bfloat16, "
        f"{profile['flops_32'] / 1e9:,.1f} in float32",
        "memory of a device": size(profile["device_memory"]),
        "from and to it": _rate(profile["memory_bytes_per_second"]),
        "to a rank of this host": _rate(profile["node_bytes_per_second"]),
        "to another host": _rate(profile["network_bytes_per_second"]),
        "to the host's memory": _rate(profile["host_bytes_per_second"]),
        "a message": f"{profile['message_seconds'] * 1e6:.1f} us",
        "how": profile["source"],
    }
    return rows_by_name(rows.items())


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.2f} GB/s"


def _strategies(given: Namespace) -> int:
    here = {name: lacking(name) for name in BACKENDS}
    rows = [
        {
            "name": one.name,
            "class": one.scheme.class_name,
            "does": one.text,
            "needs": one.scheme.needs,
            "options": one.options,
        }
        for one in named_schemes()
    ]
    if given.json:
        backends = [
            {"name": name, "for": BACKENDS[name], "here": reason is None, "lacks": reason}
            for name, reason in here.items()
        ]
        print(json.dumps({"strategies": rows, "backends": backends}, indent=1))
        return 0
    console = _console()
    table = Table(box=None, pad_edge=False)
    for name, is_whole in (("name", True), ("class", True), ("what it does", False)):
        table.add_column(name, no_wrap=is_whole, overflow="fold")
    for row in rows:
        needs = f" Needs {row['needs']}." if row["needs"] else ""
        table.add_row(str(row["name"]), str(row["class"]), Text(f"{row['does']}{needs}"))
    console.print(table, "", _backends(here), "", _ENDING, sep="\n")
    return 0


def _backends(here: dict[str, str | None]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("backend", no_wrap=True)
    table.add_column("for")
    table.add_column("here", overflow="fold")
    for name, reason in here.items():
        told = Text("yes", "green") if reason is None else Text(f"no: {reason}", "yellow")
        table.add_row(name, BACKENDS[name], told)
    return table


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 100)
    return console
