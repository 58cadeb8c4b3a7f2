"""The registry of the communication backends, by name."""

from difflib import get_close_matches

import torch

from lightning_shard.backends.base import Backend
from lightning_shard.backends.gloo import GlooBackend
from lightning_shard.backends.in_process import InProcessBackend
from lightning_shard.backends.mpi import MPIBackend
from lightning_shard.backends.nccl import NCCLBackend
from lightning_shard.backends.shm import ShmBackend
from lightning_shard.errors import ConfigError

_BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (NCCLBackend(), GlooBackend(), MPIBackend(), ShmBackend(), InProcessBackend())
}
_DEFAULT_OF_DEVICE_TYPE = {"cuda": "nccl", "cpu": "gloo"}


def backend_names() -> tuple[str, ...]:
    """Return the known names, whether or not each can run here."""
    return tuple(_BACKENDS)


def get_backend(name: str) -> Backend:
    """Return the backend of this name.

    Raises:
        ConfigError: No backend is called that.
    """
    if name in _BACKENDS:
        return _BACKENDS[name]
    near = get_close_matches(name, _BACKENDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"Unknown backend {name!r}; expected one of {', '.join(_BACKENDS)}, or 'auto'.{hint}"
    )


def auto_backend(device: torch.device) -> Backend:
    """Return the usual backend for real processes with tensors on `device`.

    Raises:
        ConfigError: No backend of this package moves tensors of such a device.
    """
    if device.type not in _DEFAULT_OF_DEVICE_TYPE:
        raise ConfigError(
            f"No backend for tensors on {device}; expected a device of type "
            f"{' or '.join(_DEFAULT_OF_DEVICE_TYPE)}. Pass accelerator='cpu' or 'gpu'."
        )
    return _BACKENDS[_DEFAULT_OF_DEVICE_TYPE[device.type]]
