"""Which modules of a model are mixtures of experts, by the shapes of their parameters.

batched   a module whose every parameter has the experts as its first dimension, such as those of
          Hugging Face: weights of shape (E, out, in), biases of shape (E, out). It has a number E,
          or is called, like experts; where nothing is, it stands beside a router.
listed    a `ModuleList` of E equal modules beside a router, a parameter of two dimensions one of
          which is E. Where others are, it is called like experts, as a `ModuleDict` always is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_shard.errors import ConfigError

ADVICE = "Leave expert_parallel_size out, and use zero_stage=3 to share out parameters."


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixture:
    """Experts of a model.

    Attributes:
        name: Path of the experts in the model.
        module: The module whose forward is given tokens: the experts', or that which has the list.
        experts: The listed experts; none where they are batched.
    """

    name: str
    module: nn.Module
    num_experts: int
    experts: Sequence[nn.Module] = ()

    @property
    def is_batched(self) -> bool:
        """Whether each parameter has all experts."""
        return not self.experts


def find_mixtures(model: nn.Module) -> list[Mixture]:
    """Return the mixtures of a model, in the order of its modules."""
    may_be = [
        Mixture(name=name, module=module, num_experts=num)
        for name, module in model.named_modules()
        if (num := _num_batched(module)) > 1
    ]
    batched = [one for one in may_be if _is_called_experts(one.name, one.module) or _counts(one)]
    listed = _listed(model, {one.module for one in batched})
    sure = [one for one in listed if _is_called_experts(one.name, *one.experts)]
    if batched or sure:  # the others are heads, say, as many as there are experts
        return [*batched, *sure]
    return listed or [one for one in may_be if _has_router(model, one)]


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _listed(model: nn.Module, known: set[nn.Module]) -> list[Mixture]:
    """Return what may be mixtures of lists, without those that have others."""
    found: list[Mixture] = []
    for name, module in reversed(list(model.named_modules())):  # inner lists first
        may_be = isinstance(module, nn.ModuleList) or (
            isinstance(module, nn.ModuleDict) and _is_called_experts(name, *module.children())
        )
        if not may_be or any(one in known for one in module.modules()):
            continue
        parent, experts = _parent(model, name), tuple(module.children())
        one = Mixture(name=name, module=parent, num_experts=len(experts), experts=experts)
        if _are_equal(experts) and _has_router(model, one):
            found.append(one)
            known.add(module)
    return found[::-1]


def _is_called_experts(name: str, *modules: nn.Module) -> bool:
    """Whether the name of modules, or of their class, says that they are experts."""
    names = (name.rpartition(".")[-1], *(type(one).__name__ for one in modules))
    return any("expert" in one.lower() for one in names)


def check_mixtures(mixtures: Sequence[Mixture], model: nn.Module, num_ranks: int) -> None:
    """Refuse a model whose experts `num_ranks` ranks cannot share, or that has none."""
    if not mixtures:
        raise ConfigError(
            f"expert_parallel_size={num_ranks} shares out the experts of mixtures, but "
            f"{type(model).__name__} has none: no module named like experts, or beside a router "
            f"with as many rows, whose parameters all have the experts first, and no ModuleList of "
            f"equal modules beside such a router. {ADVICE}"
        )
    for one in mixtures:
        if one.num_experts % num_ranks:
            fitting = [num for num in range(2, one.num_experts + 1) if one.num_experts % num == 0]
            raise ConfigError(
                f"{one.name!r} has {one.num_experts} experts, which {num_ranks} ranks cannot share "
                f"out evenly; expected an expert_parallel_size of "
                f"{', '.join(map(str, fitting))}. {ADVICE}"
            )
        _check_buffers(one)
        _check_frozen(one)
    _check_ties(mixtures, model, num_ranks)
    if len({one.is_batched for one in mixtures}) > 1:
        first, other = (
            next(one for one in mixtures if one.is_batched is kind) for kind in (True, False)
        )
        raise ConfigError(
            f"{type(model).__name__} has experts in tensors ({first.name!r}) and in lists "
            f"({other.name!r}), expected one kind. {ADVICE}"
        )
    modules = [one.module for one in mixtures]
    twice = next((one for one in mixtures if modules.count(one.module) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{type(twice.module).__name__} has several lists of experts, such as {twice.name!r}, "
            f"expected one in each module. {ADVICE}"
        )


def _check_buffers(mixture: Mixture) -> None:
    for number, expert in enumerate(mixture.experts):
        for name, _ in expert.named_buffers():
            raise ConfigError(
                f"The expert {mixture.name}.{number} has the buffer {name!r}, which would only be "
                f"kept up to date on the rank that has the expert; expected experts without "
                f"buffers. Leave expert_parallel_size out, or exchange batch norms for layer norms."
            )


def _check_frozen(mixture: Mixture) -> None:
    """Refuse experts of which some are trained: ranks would hold other parameters in shards."""
    kinds = [[param.requires_grad for param in one.parameters()] for one in mixture.experts]
    other = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is None:
        return
    at = next(n for n, kind in enumerate(kinds[0]) if kind != kinds[other][n])
    name, param = list(mixture.experts[other].named_parameters())[at]
    first, second = ("trained", "frozen") if not param.requires_grad else ("frozen", "trained")
    raise ConfigError(
        f"{mixture.name}.0.{name} is {first} and {mixture.name}.{other}.{name} is {second}, but "
        f"ranks that share experts have other ones of them; expected that all experts train the "
        f"same parameters. Freeze all or none, or leave expert_parallel_size out."
    )


def _check_ties(mixtures: Sequence[Mixture], model: nn.Module, num_ranks: int) -> None:
    """Refuse parameters of experts that are used where not all ranks have them."""
    users: dict[nn.Parameter, dict[object, str]] = {}
    holders: dict[nn.Module, object] = {}
    for one in mixtures:
        for number, expert in enumerate(one.experts):
            rank = number * num_ranks // one.num_experts
            holders |= dict.fromkeys(expert.modules(), (id(one), rank))
        if one.is_batched:
            holders[one.module] = "experts in tensors"
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is not None:
                full_name = f"{path}.{name}".lstrip(".")
                users.setdefault(param, {}).setdefault(holders.get(module), full_name)
    for found in users.values():
        if len(found) > 1 and any(holder is not None for holder in found):
            first, second = list(found.values())[:2]
            raise ConfigError(
                f"{first!r} and {second!r} are one parameter, but with "
                f"expert_parallel_size={num_ranks} they would be on different ranks, each of which "
                f"has some experts; expected experts that share nothing with others. {ADVICE}"
            )


def _num_batched(module: nn.Module) -> int:
    """Return the number of experts that a module has in its own parameters; 0 for none."""
    params = list(module.parameters(recurse=False))
    if not any(param.ndim == 3 for param in params) or (
        list(module.children())
        and any(True for child in module.children() for _ in child.parameters())
    ):
        return 0
    sizes = {param.shape[0] if param.ndim > 1 else 0 for param in params}
    return 0 if len(sizes) > 1 else next(iter(sizes))


def _counts(mixture: Mixture) -> bool:
    """Whether a module says itself that it has so many experts."""
    own, number = vars(mixture.module), mixture.num_experts
    return any("expert" in name and value == number for name, value in own.items())


def _are_equal(modules: Sequence[nn.Module]) -> bool:
    """Whether modules are of one class, with parameters of the same shapes and formats."""
    if len(modules) < 2 or len({id(one) for one in modules}) < len(modules):
        return False
    forms = [
        (type(one), [(n, p.shape, p.dtype) for n, p in one.named_parameters()]) for one in modules
    ]
    return bool(forms[0][1]) and all(one == forms[0] for one in forms)


def _has_router(model: nn.Module, mixture: Mixture) -> bool:
    """Whether the module that has experts has a parameter that tells them apart."""
    own = set(model.get_submodule(mixture.name).parameters())
    return any(
        param.ndim == 2 and mixture.num_experts in param.shape
        for param in _parent(model, mixture.name).parameters()
        if param not in own
    )
