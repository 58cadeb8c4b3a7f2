"""The registry of the communication backends, by name, and NCCL: torch's own for CUDA devices."""

import sys
from difflib import get_close_matches
from typing import ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends.base import Backend, GlooBackend
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.debug_wrapper import debug_name
from lightning_shard.backends.in_process import InProcessBackend
from lightning_shard.backends.mpi.backend import MPIBackend
from lightning_shard.backends.shm.backend import ShmBackend
from lightning_shard.errors import ConfigError

_DEFAULT_OF_DEVICE_TYPE = {"cuda": "nccl", "cpu": "gloo"}
_SHARING_MEMORY = "shm"


class NCCLBackend(Backend):
    """CUDA tensors over NVLink, PCIe or the network."""

    name: ClassVar[str] = "nccl"
    device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    matches_tags: ClassVar[bool] = False

    @override
    def unavailable_reason(self) -> str | None:
        if not (dist.is_available() and dist.is_nccl_available()):
            return "this torch was built without NCCL. Install a CUDA wheel from pytorch.org."
        if not torch.cuda.is_available():
            return (
                "no CUDA device is visible. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or train on "
                "CPUs with backend='gloo'."
            )
        return None


_BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (NCCLBackend(), GlooBackend(), MPIBackend(), ShmBackend(), InProcessBackend())
}


def backend_names() -> tuple[str, ...]:
    """Return the known names, whether or not each can run here."""
    return tuple(_BACKENDS)


def get_backend(name: str) -> Backend:
    """Return the backend of this name, or raise ConfigError."""
    if name in _BACKENDS:
        return _BACKENDS[name]
    near = get_close_matches(name, _BACKENDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"Unknown backend {name!r}; expected one of {', '.join(_BACKENDS)}, or 'auto'.{hint}"
    )


def collectives_over(group: dist.ProcessGroup, usual: Backend) -> Collectives:
    """Wrap a group, which may be a user's own, in the algorithms that suit the backend it has."""
    there = dist.get_backend(group)  # "shm", with the debug check "checked_shm"
    fitting = [one for one in (usual, *_BACKENDS.values()) if one.name in there]
    return (fitting or [usual])[0].collectives(group)


def auto_backend(device: torch.device, *, are_neighbours: bool = False) -> Backend:
    """Return the usual backend for real processes with tensors on `device`, or that of their group.

    Ranks that are neighbours, several on one host, may share its memory.
    """
    if device.type not in _DEFAULT_OF_DEVICE_TYPE:
        raise ConfigError(
            f"No backend for tensors on {device}; expected a device of type "
            f"{' or '.join(_DEFAULT_OF_DEVICE_TYPE)}. Pass accelerator='cpu' or 'gpu'."
        )
    sharing = _BACKENDS[_SHARING_MEMORY]
    if dist.is_initialized():
        are_neighbours = dist.get_backend() in (sharing.name, debug_name(sharing.name))
    if are_neighbours and device.type in sharing.device_types and _can_share_memory(sharing):
        return sharing
    return _BACKENDS[_DEFAULT_OF_DEVICE_TYPE[device.type]]


def _can_share_memory(sharing: Backend) -> bool:
    """Whether it runs here, and no limit (`ulimit -v`) is on the addresses that it reserves."""
    if sys.platform == "win32" or sharing.unavailable_reason() is not None:
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
