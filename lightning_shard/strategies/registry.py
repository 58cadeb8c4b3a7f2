"""The strategy names: each scheme alone and with each backend as a suffix.

A strategy's module is imported when a Trainer asks for the name.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightning_shard.schemes import named_schemes, names_of


@dataclass(frozen=True)
class NamedStrategy:
    """Makes a strategy of a package that has the classes, `lightning_shard` for example."""

    package: str
    strategy: str

    def __call__(self, **options: Any) -> Any:
        """Make the strategy."""
        return getattr(import_module(self.package), self.strategy)(**options)


def register_strategies(lightning: str, package: str) -> None:
    """Make every name usable as `Trainer(strategy=name)`; a second call changes nothing.

    Args:
        lightning: Root of Lightning: "lightning.pytorch" or "pytorch_lightning".
        package: Package whose strategies are built on that root.
    """
    registry = import_module(f"{lightning}.strategies").StrategyRegistry
    for one in named_schemes():
        strategy = NamedStrategy(package, one.scheme.class_name)
        for name, backend in names_of(one.name):
            if name not in registry:
                description = f"See {package}.{one.scheme.class_name}."
                registry.register(name, strategy, description, backend=backend, **one.options)
