"""The table of `same_bits_table` has one checksum for a Trainer, Fabric, processes and halves."""

from pathlib import Path

import pytest

from tests.strategies.parity import ignoring
from tests.strategies.same_bits_table import Cell, Table

pytestmark = ignoring(".*sync_dist=True.*", "The dirpath has changed")


@pytest.mark.slow
def test_a_loop_has_the_bits_of_a_trainer_and_goes_on_from_other_ranks(tmp_path: Path) -> None:
    """A loop's random numbers were others, and its dropout with them."""
    table = Table("cnn", "32-true", 2, tmp_path)
    table.add([Cell("zero1", 1), Cell("fabric zero2", 1), Cell("pipeline", 2, 2)], "in_process")
    table.add_in_halves([Cell("zero3", 2), Cell("fabric zero1", 2)], "gloo")
    assert [*table.found.values()] == [5]
