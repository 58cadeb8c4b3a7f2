"""The format number of what only this package's strategies read in a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard import DDPStrategy
from lightning_shard.checkpoint.section import CHECKPOINT_KEY, FORMAT, section_of, writable_section
from lightning_shard.errors import CheckpointError
from tests.checkpoint.kept_runs import RANKS, SAVED_AFTER, fit
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice("The dirpath has changed")


def test_what_is_written_has_a_number_and_is_read_again() -> None:
    checkpoint: dict[str, Any] = {}
    writable_section(checkpoint)["elastic"] = 7
    writable_section(checkpoint)["compression"] = 8
    expected = {"format": FORMAT, "elastic": 7, "compression": 8}
    assert checkpoint == {CHECKPOINT_KEY: expected}
    assert section_of(checkpoint) == expected


@pytest.mark.parametrize("section", [{}, {"elastic": 7}])
def test_a_section_without_a_number_is_of_the_first_format(section: dict[str, Any]) -> None:
    assert section_of({CHECKPOINT_KEY: section}) == section
    assert section_of({}) == {}


@pytest.mark.parametrize("number", [FORMAT + 1, "3"])
def test_a_newer_format_is_refused_with_what_to_do(number: Any) -> None:
    with pytest.raises(
        CheckpointError, match=rf"format {number!r}, expected at most {FORMAT}.*pip install"
    ):
        section_of({CHECKPOINT_KEY: {"format": number}})


def test_a_run_does_not_resume_from_a_newer_format(tmp_path: Path) -> None:
    """A run resumed from a newer format as if it knew it."""

    def strategy() -> DDPStrategy:
        return DDPStrategy(**RANKS, compression="int8")

    fit(strategy(), tmp_path)
    saved = tmp_path / f"step={SAVED_AFTER}.ckpt"
    checkpoint = torch.load(saved, weights_only=False)
    assert checkpoint[CHECKPOINT_KEY]["format"] == FORMAT
    checkpoint[CHECKPOINT_KEY]["format"] = FORMAT + 1
    torch.save(checkpoint, saved)
    with pytest.raises(CheckpointError, match="a newer lightning-shard has written it"):
        fit(strategy(), tmp_path / "resumed", resume=saved)
