"""Lets a Trainer take a strategy that was made for another Trainer or another root of Lightning.

`lightning_shard.ZeRO3Strategy(...)` is built on `lightning.pytorch`. Before a Trainer of
`pytorch_lightning` reads it, the same object is made anew with the same options, as one of the
class of the same name that is built on the Trainer's own root. A strategy that another Trainer has
is left to it, and a new one of the same options taken.

The private names of Lightning that this touches are here alone;
`tests/test_on_pytorch_lightning.py` fails when one changes.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial, wraps
from importlib import import_module
from typing import Any

from lightning_shard.core.registration import after_import
from lightning_shard.errors import ConfigError


def take_counterparts(lightning: str, packages: Mapping[str, str]) -> None:
    """Let the Trainers of a root of Lightning take the strategies of all."""
    connectors = import_module(f"{lightning}.trainer.connectors.accelerator_connector")
    connector = getattr(connectors, "_AcceleratorConnector", None)
    check = getattr(connector, "_check_config_and_set_final_flags", None)
    if connector is None or check is None:
        return  # a release that we do not serve is imported as if we were not there

    @wraps(check)
    def check_own(self: Any, *args: Any, **flags: Any) -> None:
        for flag in (*args, *flags.values()):
            _adopt(flag, lightning, packages)
        _refuse_misspelt(flags.get("strategy"), lightning)
        if "strategy" in flags:
            flags["strategy"] = _unused(flags["strategy"], packages)
        check(self, *args, **flags)

    connector._check_config_and_set_final_flags = check_own
    for package in packages.values():
        if package != packages[lightning]:  # for LightningCLI, which compares types
            base = f"{package}.strategies.data_parallel"
            after_import(base, partial(_derive, base, lightning))


def _refuse_misspelt(strategy: Any, lightning: str) -> None:
    """Name the strategies that are nearest to a name that no strategy has."""
    known = {*import_module(f"{lightning}.strategies").StrategyRegistry, "auto"}
    if not isinstance(strategy, str) or strategy.lower() in known:
        return
    near = get_close_matches(strategy.lower(), known, n=3)
    if near:
        raise ConfigError(
            f"The Trainer got strategy={strategy!r}, which is no strategy's name; the nearest are "
            f"{', '.join(map(repr, near))}. `lightning-shard strategies` lists those of this "
            "package."
        )


def _unused(strategy: Any, packages: Mapping[str, str]) -> Any:
    """Return a strategy that no Trainer has given its accelerator and plugins yet."""
    # A library that makes a Trainer for each call, to fit and to predict, gives them one object.
    is_own = any(_package_of(kind, packages) for kind in type(strategy).__mro__)
    if is_own and strategy.accelerator and "accelerator" not in strategy.given_options[1]:
        return strategy.with_options()
    return strategy


def _derive(base: str, lightning: str) -> None:
    """Let the strategies of a package pass for subclasses of this root's `Strategy`."""
    strategies: Any = import_module(f"{lightning}.strategies")
    strategies.Strategy.register(import_module(base).DataParallelStrategy)


def _adopt(strategy: Any, lightning: str, packages: Mapping[str, str]) -> None:
    """Turn a strategy that is built on another root into one that is built on this root."""
    for kind in type(strategy).__mro__:
        if kind.__module__.startswith(tuple(f"{one}.fabric." for one in packages.values())):
            raise ConfigError(
                f"The Trainer got {kind.__module__}.{kind.__name__}, which is a strategy of "
                f"Fabric; expected {packages[lightning]}.{kind.__name__}. Import it from there."
            )
        package = _package_of(kind, packages)
        if package is not None:
            break
    else:
        return
    if package == packages[lightning]:
        return
    if kind is not type(strategy):
        raise ConfigError(
            f"{type(strategy).__name__} derives from {package}.{kind.__name__}, which Trainers of "
            f"{lightning} do not take; expected a class derived from "
            f"{packages[lightning]}.{kind.__name__}: import {kind.__name__} from there."
        )
    home = import_module(packages[lightning] + kind.__module__.removeprefix(package))
    _become(strategy, getattr(home, kind.__name__))


def _become(strategy: Any, counterpart: Any) -> None:
    """Make an object anew, of another class, with its original constructor arguments."""
    args, options = strategy.given_options
    vars(strategy).clear()
    strategy.__class__ = counterpart
    counterpart.__init__(strategy, *args, **options)
    strategy.given_options = args, options


def _package_of(kind: type, packages: Mapping[str, str]) -> str | None:
    """Return the package that has a strategy's class; None for classes of other packages."""
    for package in packages.values():
        if kind.__module__.startswith(f"{package}.strategies."):
            return package
    return None
