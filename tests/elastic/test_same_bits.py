"""An elastic job that loses and gains ranks ends with the bits of one that did not."""

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ConfigError
from lightning_shard.testing import Fault
from tests.elastic.runs import Classifier, Journal, fit
from tests.strategies.elastic.test_elastic import random_faults
from tests.strategies.parity import ignoring
from tests.strategies.test_same_bits import checksum

pytestmark = ignoring(".*smaller than the logging interval", ".*sync_dist=True.*")
CLIP = 0.1  # below every norm, so always active
STEPS = 6  # of 4 micro-batches of 4 samples, whose epoch has 100


class Noisy(Classifier):
    """Has dropout and a batch norm."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Journal())
        self.middle = nn.Sequential(nn.BatchNorm1d(24), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        """Map points, (N, 8), to logits, (N, 4)."""
        return self.head(torch.tanh(self.middle(self.hidden(x))))


def trained(faults: Any = (), *, batches: int = STEPS, **options: Any) -> str:
    """Return the digest of what a job leaves."""
    module = Noisy()
    limits = {"limit_train_batches": batches, "limit_val_batches": 0, "gradient_clip_val": CLIP}
    given = {"scheme": "zero2", "trainer_options": limits, **options}
    _, trainer = fit(faults, module=module, same_bits=True, **given)
    return checksum(module.state_dict(), trainer.global_step)


@cache
def undisturbed() -> str:
    """The same training on ranks that stay."""
    return trained()


@pytest.mark.parametrize("scheme", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_job_that_loses_and_gains_ranks_has_the_bits_of_one_that_did_not(scheme: Any) -> None:
    """Three ranks share four micro-batches; each step was another sum on them."""
    faults = [Fault(2, 3, "drop", at_step=4), Fault(4, 1, "add", at_step=8)]
    assert trained(faults, scheme=scheme) == undisturbed()


def test_operations_are_as_before_after_a_job_that_has_lost_a_rank() -> None:
    """The lost one went on asking for deterministic operations, and later fits had others."""
    trained([Fault(2, 3, "drop", at_step=4)])
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "seed", [pytest.param(one, marks=() if one == 1 else pytest.mark.slow) for one in range(20)]
)
def test_random_losses_and_newcomers_keep_the_bits(seed: int) -> None:
    """Whatever happens when, also to rank 0; a step begun again was taken for a second closure."""
    chance = random.Random(seed)
    scheme, every = chance.choice(["zero2", "zero3"]), chance.choice([1, 2, 3, 5])
    faults = [one for one in random_faults(seed) if (one.at_step or 0) < 2 * STEPS - 1]
    assert trained(faults, scheme=scheme, snapshot_every=every) == undisturbed()


def test_steps_with_fewer_samples_are_refused() -> None:
    """A last step of 4 of 16 samples would have other micro-batches."""
    with pytest.raises(ConfigError, match="samples in steps of 16"):
        fit(module=Noisy(), same_bits=True, scheme="zero2")


@pytest.mark.slow
def test_ranks_that_do_not_divide_a_step_have_the_bits_of_those_that_do() -> None:
    """Two of three ranks have a micro-batch too many, which counts for nothing."""
    given: dict[str, Any] = {"global_batch_size": 16, "batches": 2 * STEPS}
    assert trained(num_ranks=3, **given) == undisturbed()
    assert trained(num_ranks=2, scheme="zero3", **given) == undisturbed()
