"""Checks by loss and gradients that ranks which share every layer compute the same.

A part of a weight that is used without its layer, or a plan that cuts where the module mixes
features: each makes a wrong number that differs between the ranks. It shows in the loss and in the
gradients of parameters that are not split. Like the batches, those of steps 0, 1, 2, 4,
8 ... are compared.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError

_SAMPLES = 16  # elements of a gradient that are looked at, evenly spaced
# Ranks that compute alike differ by nothing, or by what accelerators do in another order each time.
_LOSS_TOLERANCE = {"cpu": 1e-6}  # relative
_LOSS_TOLERANCE_ELSEWHERE = 1e-4
_GRADIENT_TOLERANCE = 5e-2  # of a gradient's largest element: a part of it differs by about as much
_FLOOR = 1e-4  # of the largest of all gradients: smaller ones may be rounding noise


class SameResults:
    """Compares the results of the ranks of a tensor-parallel group.

    Args:
        group: Group of the tensor-parallel ranks.
        ranks: Global rank of each of the group's ranks.
        device: Where the numbers that ranks exchange lie.
    """

    def __init__(self, group: Collectives, ranks: tuple[int, ...], device: torch.device) -> None:
        self._group, self._ranks, self._device = group, ranks, device
        self._seen: Counter[str] = Counter()

    def is_due(self, what: str) -> bool:
        """Count one more result of the kind `what`; return whether to compare it."""
        index = self._seen[what]
        self._seen[what] += 1
        return not index & (index - 1)

    def check_loss(self, loss: Tensor) -> None:
        """Compare a loss; each rank of the group must call.

        Raises:
            ConfigError: The losses differ; raised on every rank.
        """
        every = self._every(loss.detach().to(self._device, torch.float64).view(1))
        tolerance = _LOSS_TOLERANCE.get(self._device.type, _LOSS_TOLERANCE_ELSEWHERE)
        tolerance = max(tolerance, 2 * torch.finfo(loss.dtype).eps)
        if not _is_alike(every, tolerance * every.abs().amax()):
            raise ConfigError(
                f"{self._begin()} compute the same loss, but it is {_listed(every[:, 0])}. Where "
                f"training_step uses a weight that is split, call its layer instead, or leave the "
                f"layer out of the plan. Random numbers that training_step draws have to be the "
                f"same on these ranks, too."
            )

    @torch.no_grad()
    def check_gradients(self, names: Sequence[str], params: Sequence[nn.Parameter]) -> None:
        """Compare gradients by some of their elements; each rank of the group must call.

        Args:
            names: Names of the parameters.
            params: Parameters that are full on each rank.

        Raises:
            ConfigError: A gradient differs; raised on every rank, with the first one.
        """
        samples = [_sample(param).to(self._device, torch.float64) for param in params]
        sizes = [len(sample) for sample in samples]
        if not any(sizes):
            return
        every = self._every(torch.cat(samples))
        floor = _FLOOR * every.abs().amax()
        for name, of_one in zip(names, torch.split(every, sizes, dim=1), strict=True):
            scale = of_one.abs().amax().clamp_min(floor) if of_one.numel() else floor
            if not _is_alike(of_one, _GRADIENT_TOLERANCE * scale):
                worst = int((of_one - of_one[0]).abs().amax(0).argmax())
                raise ConfigError(
                    f"{self._begin()} have the same gradient of {name}, which is not split, but "
                    f"an element of it is {_listed(of_one[:, worst])}. A module that works between "
                    f"two split layers has to be in the plan as 'replicated_with_grad_allreduce'; "
                    f"layers whose weight or result is used elsewhere have to be left out of it."
                )

    def _every(self, own: Tensor) -> Tensor:
        """Return the numbers of all ranks, shape (W, N)."""
        flat = own.new_empty(self._group.size * own.numel())
        self._group.all_gather(flat, own).wait()
        return flat.view(self._group.size, -1)

    def _begin(self) -> str:
        ranks = ", ".join(map(str, self._ranks))
        return f"Rank {self._ranks[self._group.rank]}: the ranks {ranks} share every layer and must"


def _is_alike(every: Tensor, tolerance: Tensor) -> bool:
    """Whether the ranks' numbers, shape (W, N), are the same; overflows are not compared."""
    spread = (every - every[0]).abs()
    return bool((spread <= tolerance).all()) or not bool(every.isfinite().all())


def _sample(param: nn.Parameter) -> Tensor:
    flat = (torch.zeros_like(param) if param.grad is None else param.grad).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)]


def _listed(numbers: Tensor) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers.tolist())
