"""What a feature is: a function, and the strategies that refuse it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_shard.errors import ShardError
from tests.features.columns import COLUMNS, Here
from tests.features.network import Report

Trial = Callable[[Here], Report]
# Ours, and Lightning's own of what it does not do with several ranks, whatever the strategy.
REFUSALS = (ShardError, MisconfigurationException, ValueError, RuntimeError)


@dataclass(frozen=True, kw_only=True, eq=False)
class Feature:
    """A row of the table.

    Attributes:
        title: As Lightning's documentation calls it.
        group: The heading that it stands under.
        run: Uses the feature and returns what it has done.
        refused: What the error says, by strategy.
        broken: What goes wrong and is not refused, by strategy; the page says so.
        rtol: How near numbers are to one device's; half formats round sums in their order.
        own: Strategies under which numbers differ by design: only what is not a number is compared.
        why: Why they do, where it is not that ranks train on their own.
    """

    title: str
    group: str
    run: Trial
    refused: Mapping[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    rtol: float = 1e-5
    why: str = ""

    def __post_init__(self) -> None:
        unknown = {*self.refused, *self.own, *self.broken} - COLUMNS.keys()
        assert not unknown, f"{self.title}: {unknown} are no columns"

    @property
    def name(self) -> str:
        """The title, in one word."""
        return self.title.replace(" ", "_").replace("`", "")

    def check(self, here: Here, expected: Callable[["Feature"], Report]) -> None:
        """Try the feature under a strategy, and compare with what one device does, or was said."""
        column = here.column.name
        if column in self.refused:
            with pytest.raises(REFUSALS, match=self.refused[column]):
                self.run(here)
            return
        comparison = Comparison(rtol=self.rtol, own=column in self.own)
        if column in self.broken:
            with pytest.raises(Exception, match=self.broken[column]):
                comparison.check(self.run(here), expected(self))
            return
        comparison.check(self.run(here), expected(self))


FEATURES: list[Feature] = []


def add(
    group: str,
    title: str,
    run: Trial,
    *,
    refused: Mapping[str, str] | None = None,
    own: Iterable[str] = (),
    broken: Mapping[str, str] | None = None,
    rtol: float = 1e-5,
    why: str = "",
) -> None:
    """Add a row."""
    assert title not in {feature.title for feature in FEATURES}, title
    row = Feature(
        title=title,
        group=group,
        run=run,
        refused=refused or {},
        own=tuple(own),
        broken=broken or {},
        rtol=rtol,
        why=why,
    )
    FEATURES.append(row)


def feature(group: str, title: str, **expected: Any) -> Callable[[Trial], Trial]:
    """Add the function below as a row."""

    def add_it(run: Trial) -> Trial:
        add(group, title, run, **expected)
        return run

    return add_it


def by(columns: str | tuple[str, ...], message: str) -> dict[str, str]:
    """Say that these strategies refuse with such a message."""
    return dict.fromkeys([columns] if isinstance(columns, str) else columns, message)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How what was done is compared with what one device does.

    Attributes:
        own: Whether numbers are only to be finite.
    """

    rtol: float
    own: bool

    def check(self, got: Any, expected: Any, path: str = "") -> None:
        """Compare, and raise an AssertionError that says what differs."""
        if isinstance(expected, Mapping):
            assert got.keys() == expected.keys(), f"{path}: {list(got)}, expected {list(expected)}"
            for key, value in expected.items():
                self.check(got[key], value, f"{path}.{key}")
        elif isinstance(expected, (list, tuple)):
            assert len(got) == len(expected), f"{path}: {got}, expected {expected}"
            for index, value in enumerate(expected):
                self.check(got[index], value, f"{path}[{index}]")
        elif isinstance(expected, (Tensor, float)):
            self._check_numbers(torch.as_tensor(got), torch.as_tensor(expected), path)
        else:
            assert got == expected, f"{path}: {got!r}, expected {expected!r}"

    def _check_numbers(self, got: Tensor, expected: Tensor, path: str) -> None:
        assert got.shape == expected.shape, f"{path}: {got.shape}, expected {expected.shape}"
        assert got.dtype == expected.dtype, f"{path}: {got.dtype}, expected {expected.dtype}"
        if self.own:
            assert bool(got.isfinite().all()), f"{path}: {got}"
            return
        atol = self.rtol / 50  # of weights near zero
        torch.testing.assert_close(
            got, expected, rtol=self.rtol, atol=atol, msg=lambda found: f"{path}: {found}"
        )
