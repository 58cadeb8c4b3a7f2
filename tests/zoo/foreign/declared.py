"""What a use of a package is: a function, what it calls, and the strategies that refuse it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.features.columns import COLUMNS, Here
from tests.features.declared import Feature, Trial

STRATEGIES = ("shard_ddp", "zero2", "zero3", "tensor_parallel", "pipeline_parallel")
STRATEGY_COLUMNS = {name: COLUMNS[name] for name in STRATEGIES}


@dataclass(frozen=True, kw_only=True, eq=False)
class Use(Feature):
    """A model of a package, trained and used as the package's own guide does.

    Attributes:
        calls: What of the package is called; the page says so.
        whole: Strategies that are told not to cut batches, `num_microbatches=1`.
    """

    calls: str
    rtol: float = 1e-4
    whole: tuple[str, ...] = ()

    def here(self, column: str, folder: Path) -> Here:
        """Return where the use is tried under a strategy."""
        told = STRATEGY_COLUMNS[column]
        if column in self.whole:
            told = replace(told, options=(("num_microbatches", 1),))
        return Here(told, folder)


USES: list[Use] = []


def use(package: str, model: str, calls: str, **expected: Any) -> Callable[[Trial], Trial]:
    """Add the function below as a row."""

    def add_it(run: Trial) -> Trial:
        USES.append(Use(group=package, title=model, run=run, calls=calls, **expected))
        return run

    return add_it


def strategy_name(here: Here) -> str:
    """Return the strategy as its name, which packages keep in their files."""
    return "auto" if here.column.make is None else f"{here.column.name}_in_process"
