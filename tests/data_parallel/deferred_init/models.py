"""Models that are built in every way, and what they hold when they are built on the CPU."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.deferred_init.recorder import recording
from lightning_shard.data_parallel.deferred_init.tape import buffer_recipe, recipe_of


class Odd(nn.Module):
    """What modules do to their tensors when they are constructed."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Linear(8, 8)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.token = nn.Parameter(torch.randn(3, 4) * 0.1)
        self.table = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.norm = nn.BatchNorm2d(4)
        self.lstm = nn.LSTM(4, 5, 2)
        self.last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.embedding = nn.Embedding(10, 4, padding_idx=1)
        self.sparse = nn.Linear(10, 10)
        nn.init.sparse_(self.sparse.weight, 0.3)
        own = torch.Generator().manual_seed(3)
        self.drawn_apart = nn.Parameter(torch.empty(5, 5))
        nn.init.normal_(self.drawn_apart, generator=own)
        self.truncated = nn.Linear(33, 65)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.teacher = copy.deepcopy(self.orthogonal)
        self.half = nn.Linear(3, 3).half()
        self.turned = nn.Parameter(self.orthogonal.weight.detach().clone().t())
        self.scale = float(torch.ones(3).sum())
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).view(1, 4, 4))
        self.register_buffer("noise", torch.rand(3), persistent=False)
        self.register_buffer("chosen", torch.multinomial(torch.ones(5), 3))
        rates = torch.distributions.Gamma(torch.full((7,), 0.3), 1.0).sample()
        self.gamma = nn.Parameter(rates)  # which draws as often as its values ask
        self.listed = torch.randn(3).tolist()
        self.register_buffer("doubled", torch.from_numpy(torch.randn(3).numpy() * 2))
        self.register_buffer("as_listed", torch.tensor(self.listed))
        self.after = nn.Linear(3, 3)


def built_with(build: Callable[[], nn.Module], *, to_meta: bool) -> nn.Module:
    """Build a module on meta; by the context, or by torch's inside it."""
    with recording(to_meta=to_meta):
        if to_meta:
            return build()
        with torch.device("meta"):
            return build()


def values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the values of a module's tensors by name, also of those on meta."""
    for name, param in module.named_parameters():
        recipe = recipe_of(param)
        yield name, param if recipe is None else recipe.read(param.dtype)
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            made = buffer_recipe(part, name, buffer)
            yield f"{path}.{name}", buffer if made is None else made.read(buffer.dtype)
