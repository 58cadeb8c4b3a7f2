"""Says what to pass instead where a Trainer's strategy meets Fabric, or one of the other root.

The private names of Lightning that this touches are here alone; `tests/fabric/test_registry.py`
fails when one changes.
"""

from functools import wraps
from importlib import import_module
from typing import Any

from lightning_shard.errors import ConfigError


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
