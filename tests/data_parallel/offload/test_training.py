"""Every way of training that works on the device works with state in host memory."""

from typing import Any

import pytest

from tests.data_parallel.test_training import (
    UPDATES,
    Case,
    Net,
    by_hand,
    check,
    clamp_inside,
    module_zero_grad,
    torch_clipping,
)

PLACES: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1, "offload": "optimizer"},
    "stage2": {"stage": 2, "offload": "optimizer"},
    "stage3": {"stage": 3, "offload": "optimizer"},
    "parameters": {"stage": 3, "offload": "parameters"},
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("place", PLACES)
def test_updates(name: str, place: str) -> None:
    check(UPDATES[name], num_ranks=2, **PLACES[place])


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("place", PLACES)
def test_updates_with_two_copies_of_the_state(name: str, place: str) -> None:
    check(UPDATES[name], num_ranks=4, num_copies=2, **PLACES[place])


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("update", [clamp_inside, module_zero_grad, torch_clipping, by_hand])
@pytest.mark.parametrize("place", PLACES)
def test_what_a_step_does_to_parameters_and_gradients(update: Any, place: str) -> None:
    check(Case(model=Net, update=update), num_ranks=2, **PLACES[place])
