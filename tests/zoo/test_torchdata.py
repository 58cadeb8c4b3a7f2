"""torchdata's `StatefulDataLoader`: a resumed fit sees the samples of one that was not broken."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.interrupted import SCHEMES, SaveAt, fit
from tests.strategies.trainer.test_place_in_data import BATCH, Seeing, samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore"),  # those of the package
]


@pytest.mark.parametrize(("at", "workers"), [(2, 0), (8, 0), (2, 2), (8, 2)])
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero2", "zero3"])
def test_a_shuffled_stateful_loader_goes_on_in_mid_epoch(
    scheme: str, at: int, workers: int, tmp_path: Path
) -> None:
    """30 of 40 samples were seen, 10 of them twice."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Any:
        return Seeing(
            lambda: StatefulDataLoader(samples(), BATCH, shuffle=True, num_workers=workers)
        )

    whole = fit(SCHEMES[scheme](), 10, [SaveAt(tmp_path / "a", at)], make_module=make)
    broken = fit(SCHEMES[scheme](), 10, resume=tmp_path / "a", make_module=make, seed=77)
    assert broken.seen == whole.seen[at:]
