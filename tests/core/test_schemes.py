"""The one list of names agrees with what is registered and what there is."""

from lightning.pytorch.strategies import StrategyRegistry

import lightning_shard
from lightning_shard.backends.registry import backend_names
from lightning_shard.core.schemes import BACKENDS, COMPRESSIONS, SCHEMES, named_schemes, names_of
from lightning_shard.data_parallel.compression import COMPRESSORS


def test_the_backends_are_those_of_the_registry_in_its_order() -> None:
    assert tuple(BACKENDS) == backend_names()


def test_the_compressions_are_those_that_there_are() -> None:
    assert list(COMPRESSIONS) == list(COMPRESSORS)


def test_every_class_is_one_of_the_package() -> None:
    assert all(hasattr(lightning_shard, one.class_name) for one in SCHEMES.values())


def test_every_name_is_one_of_a_trainer() -> None:
    names = [name for one in named_schemes() for name, _ in names_of(one.name)]
    assert len(names) == len(set(names)) >= 6 * 20
    assert set(names) <= set(StrategyRegistry)
