"""What a rank holds within a step of the recipe is what the formula says."""

import pytest

from tests.zoo.peaks import peak

pytestmark = [
    pytest.mark.slow,
    pytest.mark.zoo,
    pytest.mark.timeout(600),  # the first import of these packages takes long
    pytest.mark.filterwarnings("ignore"),  # those of the packages
]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_step_holds_shards_and_two_layers_at_once(num_ranks: int) -> None:
    found, expected = peak(num_ranks)
    assert 0.95 * expected <= found.most <= expected
