"""The strategy names that Fabric knows: those of a Trainer, of which some are refused with advice.

A strategy's module is imported when a Fabric asks for the name. Where a Trainer's strategy meets
Fabric, or one of the other root, the error says what to pass instead; the private names of
Lightning that this touches are here alone, and `tests/fabric/test_registry.py` fails when one
changes.
"""

from functools import wraps
from importlib import import_module
from typing import Any, NoReturn

from lightning_shard.backends.registry import backend_names
from lightning_shard.core.schemes import NamedStrategy, named_schemes, names_of
from lightning_shard.errors import ConfigError

SERVED = ("shard_ddp", "zero1", "zero2", "zero3", "shard_fsdp")
"""The schemes that work under Fabric."""

_ADVICE = {
    "tensor_parallel": "a Trainer splits the layers; under Fabric use 'zero3', which shards them",
    "context_parallel": "a Trainer gives ranks of a sequence the same batches; under Fabric use "
    "'zero3' with activation_checkpointing",
    "pipeline_parallel": "a Trainer runs the microbatches of its training_step; under Fabric use "
    "'zero3', which shards the layers",
    "hybrid_parallel": "a Trainer splits the model and runs its microbatches; under Fabric use "
    "'zero3', which shards it",
    "shard_auto": "a Trainer's fit has the batch that it plans with; under Fabric use 'zero2', or "
    "what `lightning-shard plan` recommends",
    "local_sgd": "a Trainer counts the steps between two exchanges; under Fabric use 'shard_ddp' "
    "with compression='int8', or fabric.no_backward_sync",
    "async_sgd": "a Trainer counts the steps of each rank; under Fabric use 'shard_ddp'",
    "elastic": "a Trainer's loop is what goes on after a rank is lost; under Fabric use 'zero2', "
    "and restart from what fabric.save has written",
}


class Refused:
    """Stands in the registry for a scheme that Fabric cannot run.

    Args:
        name: The name under which it stands there.
        scheme: Scheme that the name means.
    """

    def __init__(self, name: str, scheme: str) -> None:
        self._name, self._scheme = name, scheme

    def __call__(self, **_: Any) -> NoReturn:
        """Raise ConfigError with the advice for the scheme."""
        raise ConfigError(
            f"Fabric(strategy={self._name!r}): got a scheme that works with a Trainer only, "
            f"expected one of {', '.join(map(repr, SERVED))}, which may end in a backend "
            f"({', '.join(f'_{name}' for name in backend_names())}): {_ADVICE[self._scheme]}."
        )


def register_strategies(lightning: str, package: str) -> None:
    """Make every name usable as `Fabric(strategy=name)`; a second call changes nothing.

    Args:
        lightning: Root of Fabric: "lightning.fabric" or "lightning_fabric".
        package: Package whose strategies are built on that root.
    """
    registry = import_module(f"{lightning}.strategies").STRATEGY_REGISTRY
    for scheme in named_schemes():
        for name, backend in names_of(scheme.name):
            if name in registry:
                continue
            if scheme.name in _ADVICE:
                registry.register(name, Refused(name, scheme.name), "For a Trainer only.")
                continue
            made = NamedStrategy(package, scheme.scheme.class_name)
            registry.register(name, made, f"See {package}.", backend=backend, **scheme.options)


def refuse_misplaced(lightning: str, package: str) -> None:
    """Let the Fabric of a root refuse strategies that are not built on it, by name.

    Args:
        lightning: Root of Fabric: "lightning.fabric" or "lightning_fabric".
        package: Package whose strategies are built on that root.
    """
    connector = getattr(import_module(f"{lightning}.connector"), "_Connector", None)
    check = getattr(connector, "_check_config_and_set_final_flags", None)
    if connector is None or check is None:
        return  # a release that we do not serve is imported as if we were not there

    @wraps(check)
    def check_own(self: Any, *args: Any, **flags: Any) -> None:
        for flag in (*args, *flags.values()):
            _refuse(flag, package)
        check(self, *args, **flags)

    connector._check_config_and_set_final_flags = check_own


def _refuse(strategy: Any, package: str) -> None:
    for kind in type(strategy).__mro__:
        home, ours = kind.__module__, package.partition(".")[0] + "."
        is_ours = home.startswith(ours) and (".strategies." in home or ".fabric." in home)
        if is_ours and not home.startswith(f"{package}."):
            name, offered = kind.__name__, import_module(package)
            advice = f"Import {name} from there, or pass its name" if hasattr(offered, name) else ""
            raise ConfigError(
                f"Fabric got a strategy of the class {home}.{name}, which is built on another "
                f"runner; expected one of {package}. "
                f"{advice or 'Pass the name of one that is there'} (strategy='zero3')."
            )
        if is_ours:
            return
