"""Each planted mistake is found, and named by step, tensor and cause."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_shard import prove
from lightning_shard.tools.proving.changes import without_dropout
from lightning_shard.tools.proving.verdict import Verdict
from tests.tools.proving.more_planted import (
    MORE_PLANTED,
    InitialisesOnRank0,
    Perplexity,
    SumsGradients,
)
from tests.tools.proving.planted import PLANTED, Planted, RateOfOwnLoss, TiedByMemory, loader

ALL = PLANTED | MORE_PLANTED


def _prove(planted: Planted) -> Verdict:
    return prove(
        planted.module(), planted.data(), strategy=planted.strategy, trainer_options=planted.options
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ALL)
def test_a_planted_mistake_is_named(name: str) -> None:
    planted = ALL[name]
    verdict = _prove(planted)
    assert verdict.outcome == "different", str(verdict)
    assert verdict.first is not None
    assert verdict.cause is not None
    place = verdict.first.place
    got = (place.step, place.kind, place.name, verdict.cause.name)
    expected = (planted.step, planted.kind, planted.name, planted.cause)
    assert got == expected, str(verdict)
    if planted.rank is not None:
        assert verdict.first.rank == planted.rank


def test_memory_that_two_parameters_share_is_refused_and_told() -> None:
    verdict = _prove(
        Planted(module=TiedByMemory, kind="weight", name="embedding.weight", cause="shared memory")
    )
    assert verdict.outcome == "refused"
    assert "share memory" in str(verdict)


def test_weights_that_one_rank_initialises_are_refused_and_told() -> None:
    verdict = prove(InitialisesOnRank0(), loader())
    assert verdict.outcome == "refused"
    assert "different values of 'head.weight'" in str(verdict)


def test_rates_of_each_ranks_own_loss_are_refused_and_told() -> None:
    verdict = prove(RateOfOwnLoss(), loader())
    assert verdict.outcome == "refused"
    assert "lr of group 0 of AdamW" in str(verdict)


def test_a_synchronised_log_is_not_called_unsynchronised() -> None:
    """A synchronised log was called unsynchronised."""
    assert "sync_dist=True or as a metric" in str(prove(Perplexity(), loader()))


def test_a_hook_that_adds_up_over_ranks_is_not_said_to_use_its_own_samples() -> None:
    """A hook that adds up over ranks was said to use its own samples."""
    verdict = prove(SumsGradients(), loader())
    assert verdict.cause is not None
    assert "the number of ranks, or a collective call" in verdict.cause.because


@pytest.mark.slow
def test_an_exact_run_drew_numpys_numbers_of_the_run_before() -> None:
    state = np.random.get_state()[1].tolist()
    verdicts = [prove(MORE_PLANTED["mixup by numpy"].module(), loader()) for _ in range(2)]
    first, second = (verdict.first for verdict in verdicts)
    assert first is not None
    assert second is not None
    assert torch.equal(first.got, second.got)
    assert np.random.get_state()[1].tolist() == state


def test_without_dropout_attention_and_recurrent_layers_drop_nothing() -> None:
    module = nn.Sequential(
        nn.LSTM(4, 4, num_layers=2, dropout=0.5), nn.TransformerEncoderLayer(4, 2)
    )
    without_dropout(module)
    assert module[0].dropout == 0.0
    assert module[1].self_attn.dropout == 0.0
    assert module[1].dropout1.p == 0.0
