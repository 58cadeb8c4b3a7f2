"""What is asked of modules of any kind: their sizes, TorchScript's, random numbers that they draw.

TorchScript's modules within a model take no hooks, and cannot be changed.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from lightning_shard.errors import ConfigError


@contextmanager
def random_streams_kept(cuda: Sequence[int] = ()) -> Iterator[None]:
    """Put torch's, NumPy's and Python's random numbers back, and those of GPUs of these numbers."""
    python, arrays = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def gpus_of(module: nn.Module) -> list[int]:
    """Return the numbers of the GPUs on which a module's parameters lie."""
    return sorted({param.device.index or 0 for param in module.parameters() if param.is_cuda})


def generator_states(gpus: Sequence[int]) -> list[Tensor]:
    """Return the states of torch's generators, of the CPU and of GPUs of these numbers."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]


def largest_layers(model: nn.Module, num_layers: int = 3) -> str:
    """Name in a sentence the layers with the most parameters of their own, the largest first."""
    sizes = {
        name: sum(param.numel() for param in module.parameters(recurse=False))
        for name, module in model.named_modules()
    }
    largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
    if not largest:
        return "It has no layer with parameters."
    named = [
        f"{name!r} ({type(model.get_submodule(name)).__name__}, {sizes[name]:,} parameters)"
        for name in largest[:num_layers]
    ]
    return f"Its largest layers are {', '.join(named)}."


def num_parameters(module: nn.Module) -> int:
    """Return the number of elements of a module's parameters, shared ones counted once."""
    return sum(param.numel() for param in module.parameters())


def is_scripted(module: nn.Module) -> bool:
    """Whether a module was scripted or traced."""
    return isinstance(module, ScriptModule)


def hookable(module: nn.Module) -> list[nn.Module]:
    """Return the module and those in it, without those of TorchScript."""
    return [one for one in module.modules() if not is_scripted(one)]


def refuse_scripted_parts(model: nn.Module, what: str) -> None:
    """Raise if a model has a module of TorchScript, which `what`, such as "a pipeline", refuses."""
    for name, module in model.named_modules():
        if is_scripted(module):
            raise ConfigError(
                f"{name!r} is a module of TorchScript, which {what} cannot change; expected "
                f"modules of Python. Leave torch.jit.script or torch.jit.trace out, or use "
                f"strategy='zero3', which takes it as it is."
            )
