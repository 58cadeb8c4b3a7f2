"""Embeddings whose rows depend on the batch, and optimizers of sparse gradients, are refused."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_shard import AsyncSGDStrategy, ConfigError, LocalSGDStrategy
from tests.strategies.decoders import (
    DECODER_SCHEMES,
    VOCABULARY,
    WIDTH,
    Decoder,
    assert_as_alone,
    fit_decoder,
)
from tests.strategies.parity import ignoring
from tests.strategies.stacks import fit

pytestmark = ignoring(".*microbatches are fewer than the")
OF_WHOLE_BATCHES = ("tensor", "context")


class Renormed(Decoder):
    options_of_rows: ClassVar[dict[str, Any]] = {"max_norm": 1.0}

    def build(self) -> None:
        self.embed = nn.Embedding(VOCABULARY, WIDTH, **self.options_of_rows)


class Counted(Renormed):
    options_of_rows: ClassVar[dict[str, Any]] = {"scale_grad_by_freq": True}


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("scheme", DECODER_SCHEMES)
@pytest.mark.parametrize("style", [Renormed, Counted])
def test_an_embedding_that_looks_at_a_batch_sees_all_of_it_or_is_refused(
    style: type[Renormed], scheme: str
) -> None:
    """An embedding that looks at a batch saw a rank's part."""
    if scheme in OF_WHOLE_BATCHES:
        assert_as_alone(style, scheme)
        return
    name = next(iter(style.options_of_rows))
    with pytest.raises(ConfigError, match=rf"'embed' has {name}=.*, which counts or changes"):
        fit_decoder(style, scheme)


class FrozenCounted(Counted):
    def build(self) -> None:
        super().build()
        self.embed.requires_grad_(False)


def test_counts_of_a_frozen_embedding_matter_to_nobody() -> None:
    assert_as_alone(FrozenCounted, "zero2")


class Sparse(Decoder):
    def build(self) -> None:
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.embed.parameters(), lr=0.01)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", DECODER_SCHEMES)
def test_an_optimizer_of_sparse_gradients_is_refused_before_its_first_step(scheme: str) -> None:
    """An optimizer of sparse gradients failed in its first step."""
    with pytest.raises(ConfigError, match=r"SparseAdam (takes sparse gradients|does not update)"):
        fit_decoder(Sparse, scheme)


@pytest.mark.parametrize(
    "strategy",
    [
        LocalSGDStrategy(backend="in_process", sync_every=1),
        AsyncSGDStrategy(backend="in_process", staleness_bound=0),
    ],
)
@pytest.mark.parametrize("style", [Renormed, Sparse])
def test_ranks_of_their_own_pace_are_no_exception(strategy: Any, style: type[Decoder]) -> None:
    with pytest.raises(ConfigError, match=r"counts or changes the rows|SparseAdam takes sparse"):
        fit(style, strategy, devices=2)
