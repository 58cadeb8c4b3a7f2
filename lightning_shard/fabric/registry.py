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
from lightning_shard.core.schemes import SCHEMES, NamedStrategy, Scheme, named_schemes, names_of
from lightning_shard.errors import ConfigError

SERVED = tuple(name for name, scheme in SCHEMES.items() if not scheme.under_fabric)
"""The schemes that work under Fabric."""


class Refused:
    """Stands in the registry for a scheme that Fabric cannot run."""

    def __init__(self, name: str, scheme: Scheme) -> None:
        self._name, self._scheme = name, scheme

    def __call__(self, **_: Any) -> NoReturn:
        """Raise ConfigError with the advice for the scheme."""
        raise ConfigError(
            f"Fabric(strategy={self._name!r}): got a scheme that works with a Trainer only, "
            f"expected one of {', '.join(map(repr, SERVED))}, which may end in a backend "
            f"({', '.join(f'_{name}' for name in backend_names())}): {self._scheme.under_fabric}."
        )


def register_strategies(lightning: str, package: str) -> None:
    """Make every name usable as `Fabric(strategy=name)`; a second call changes nothing."""
    registry = import_module(f"{lightning}.strategies").STRATEGY_REGISTRY
    for one in named_schemes():
        made = NamedStrategy(package, one.scheme.class_name)
        for name, backend in names_of(one.name):
            if name in registry:
                continue
            if one.scheme.under_fabric:
                registry.register(name, Refused(name, one.scheme), "For a Trainer only.")
            else:
                registry.register(name, made, f"See {package}.", backend=backend, **one.options)


def refuse_misplaced(lightning: str, package: str) -> None:
    """Let the Fabric of a root refuse strategies that are not built on it, by name."""
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
