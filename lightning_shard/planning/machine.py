"""What a node can do: arithmetic, memory and links, from published figures or measured here.

A profile is a JSON file. The published ones lie in `machines/`, each with its source, and are peaks
of data sheets, so that an estimate of a step's time made with them is a lower bound.
"""

import json
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, TypeAlias

from lightning_shard.core.options import AtLeastOne, Limit, check_fields
from lightning_shard.errors import ConfigError

_AboveZero: TypeAlias = Annotated[float, Limit("above 0", lambda number: number > 0)]
_PUBLISHED = files("lightning_shard.planning") / "machines"


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """One kind of node.

    Attributes:
        name: Name of the profile.
        source: Where the figures come from.
        device: The device that a rank has.
        devices_per_node: Devices that share the fast links.
        device_memory: Bytes of memory of one device.
        flops_16: Operations a second in bfloat16 and float16 matrix products, dense.
        flops_32: Operations a second in those of float32.
        memory_bytes_per_second: Bytes a second from and to a device's memory.
        node_bytes_per_second: Bytes a second that a device sends inside its node.
        network_bytes_per_second: Bytes a second that a device sends to other nodes, its share of
            the node's adapters.
        host_bytes_per_second: Bytes a second between a device and its host's memory.
        message_seconds: Seconds that a message takes before its first byte arrives.
    """

    name: str
    source: str
    device: str
    devices_per_node: AtLeastOne
    device_memory: AtLeastOne
    flops_16: _AboveZero
    flops_32: _AboveZero
    memory_bytes_per_second: _AboveZero
    node_bytes_per_second: _AboveZero
    network_bytes_per_second: _AboveZero
    host_bytes_per_second: _AboveZero
    message_seconds: _AboveZero

    def __post_init__(self) -> None:
        """Refuse figures that no machine has."""
        check_fields(self)

    def flops(self, precision: str) -> float:
        """Return the operations a second of matrix products in a Lightning precision."""
        return self.flops_32 if precision.startswith(("32", "64")) else self.flops_16

    def bytes_per_second(self, *, inside_node: bool) -> float:
        """Return what a rank sends a second, inside its node or to others."""
        return self.node_bytes_per_second if inside_node else self.network_bytes_per_second

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def published() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return sorted(one.name.removesuffix(".json") for one in _PUBLISHED.iterdir())


def machine_profile(name_or_path: str | Path) -> MachineProfile:
    """Read a profile.

    Args:
        name_or_path: Name of a published profile, or the path of a file.

    Raises:
        ConfigError: There is no such profile or file, or it has other entries.
    """
    text = str(name_or_path)
    place = _PUBLISHED / f"{text}.json" if text in published() else Path(text)
    if not place.is_file():
        raise ConfigError(
            f"There is no machine profile {text!r}; expected one of {', '.join(published())}, or "
            f"the path of a file with the entries of one of these."
        )
    wanted = {field.name for field in fields(MachineProfile)}
    try:
        entries = json.loads(place.read_text(encoding="utf-8"))
        differing = wanted.symmetric_difference(entries)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"The machine profile {text!r} is no JSON object: {error}.") from error
    if differing:
        raise ConfigError(
            f"The machine profile {text!r} has entries too many or too few: "
            f"{', '.join(sorted(differing))}; expected exactly {', '.join(sorted(wanted))}."
        )
    try:
        return MachineProfile(**entries)
    except ConfigError as error:
        raise ConfigError(f"The machine profile {text!r} is of no machine: {error}") from error
