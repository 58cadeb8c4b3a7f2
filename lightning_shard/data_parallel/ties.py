"""Memory that user code lets two parameters share in mid-run: refused once they have come apart.

    decoder.weight.data = encoder.weight.data.t()     on one device a step changes both from now on

Ranks have a place for each parameter, so that a copy is taken of what is assigned. As long as both
keep their values, or the assignment comes again before the next step, as a teacher's that is never
trained, that is the same; else this says so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.shared_memory import overlapping
from lightning_shard.errors import ConfigError

FullParameters = Callable[..., Iterable[tuple[nn.Parameter, Tensor]]]


@dataclass(frozen=True, eq=False)
class _Tie:
    """Elements that two parameters have in common.

    Attributes:
        params: The two parameters.
        places: For each, where the elements lie in the flattened full tensor: shape (N,), int64.
    """

    params: tuple[nn.Parameter, nn.Parameter]
    places: tuple[Tensor, Tensor]

    def holds(self, values: Mapping[nn.Parameter, Tensor]) -> bool:
        """Whether the elements are equal in these full values."""
        one, other = (
            values[param].flatten()[places.to(values[param].device)]
            for param, places in zip(self.params, self.places, strict=True)
        )
        return torch.allclose(one, other.to(one.device), rtol=0, atol=0, equal_nan=True)


class Ties:
    """The parameters of a model that user code has tied by their memory.

    Args:
        model: The model, for names.
        rank: Global rank of this process, for error messages.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank
        self._standing: list[_Tie] = []
        self._new: list[_Tie] = []

    @property
    def are_any(self) -> bool:
        """Whether any parameters are tied."""
        return bool(self._standing)

    def note_shown(self, shown: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Note which parameters have memory in common.

        Args:
            shown: Parameters and the full tensors that they show.
        """
        for (param, one), (other, two) in overlapping(shown):
            places = _common(_positions(one), _positions(two))
            self._new.append(_Tie((param, other), places))

    def note_view(self, param: nn.Parameter, other: nn.Parameter, positions: Tensor) -> None:
        """Note that a parameter was given a view of another one.

        Args:
            param: The parameter that the view was assigned to.
            other: The parameter that was viewed.
            positions: Where each element of `param` lies in the flattened `other`.
        """
        places = torch.arange(positions.numel())
        self._new.append(_Tie((param, other), (places, positions.flatten())))

    def renew(self, assigned: AbstractSet[nn.Parameter]) -> None:
        """Forget the earlier ties of parameters that were assigned; what was noted stands now."""
        if assigned and self._standing:
            self._standing = [
                tie for tie in self._standing if not any(one in assigned for one in tie.params)
            ]
        self._standing += self._new
        self._new = []

    def check(
        self, full_parameters: FullParameters, formats: Mapping[nn.Parameter, torch.dtype]
    ) -> None:
        """Raise ConfigError if tied parameters have come apart; each rank must call.

        Args:
            full_parameters: Brings parameters together, as far as this rank gets them.
            formats: In which parameters are compared; an optimizer's have digits of their own.
        """
        for tie in self._standing if self._model.training else ():
            if all(param.requires_grad for param in tie.params):
                raise self._refusal(*tie.params)  # an update would change each by itself
        tied = {param for tie in self._standing for param in tie.params}
        others = set(self._model.parameters()) - tied
        values = {
            param: value.to(formats.get(param, value.dtype))
            for param, value in full_parameters(everywhere=True, without=others)
        }
        for tie in self._standing:
            if all(param in values for param in tie.params) and not tie.holds(values):
                raise self._refusal(*tie.params)

    def _refusal(self, param: nn.Parameter, other: nn.Parameter) -> ConfigError:
        names = {one: name for name, one in self._model.named_parameters()}
        first, second = names.get(param, "of a copy"), names.get(other, "of a copy")
        return ConfigError(
            f"Rank {self._rank}: the parameters {first!r} and {second!r} were put on one memory, "
            f"as by a.data = b.data, where on one device a change of one changes both; the ranks "
            f"have a place for each, and update it by itself. Expected memory of their own, or "
            f"one parameter in both places. Assign a copy, a.data = b.data.clone(), or tie them "
            f"before the fit: a.weight = b.weight."
        )


def _positions(tensor: Tensor) -> Tensor:
    """Return where each element lies in the storage, in elements: shape (numel,)."""
    places: Tensor = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.flatten() + int(tensor.storage_offset())


def _common(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the values that both have lie in the first, and in the second."""
    mine, theirs = torch.isin(one, other).nonzero().flatten(), torch.isin(other, one).nonzero()
    theirs = theirs.flatten()
    return mine[one[mine].argsort()], theirs[other[theirs].argsort()]
