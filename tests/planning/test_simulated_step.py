"""What a trace says is alive at most is what is alive at most in a real step."""

from typing import Any

import pytest
import torch

from lightning_shard import DDPStrategy
from lightning_shard.planning.dry_run import trace_of
from lightning_shard.planning.simulated_step import LiveBytes
from tests.strategies.models import MODELS, ExampleGPT


def most_alive(model: Any, batch: Any) -> int:
    """Return the most bytes of a real second step, whose gradients are there already."""
    model.log = lambda *_, **__: None
    model.training_step(batch, 0).backward()
    with LiveBytes() as live:
        model.training_step(batch, 0).backward()
    return live.most


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_a_real_step_has_at_most_what_was_said(name: str) -> None:
    from tests.strategies.models import PIPELINE_MODELS, SPLIT_MODELS

    model: Any = (MODELS | SPLIT_MODELS | PIPELINE_MODELS)[name]()
    data = model.data(8).tensors
    batch = [tensor[:8] for tensor in data]
    told = trace_of(DDPStrategy(), model, batch, world_size=1, precision="32-true")
    assert told.most == pytest.approx(most_alive(model, batch), rel=0.1)


def test_a_tensor_is_counted_while_it_is_alive_and_a_view_never() -> None:
    with LiveBytes() as live:
        made = torch.zeros(1000)
        view = made[:10]
        assert live.alive == 4000
        doubled = view * 2
        assert live.alive == 4040
        del doubled
        assert live.alive == 4000
        del made
        assert live.alive == 4000  # which the view holds
        del view
    assert live.alive == 0
    assert live.most == 4040


@pytest.mark.slow
def test_checkpointed_blocks_keep_little_and_make_it_again() -> None:
    with torch.device("meta"):
        model = ExampleGPT(num_layers=4)
    text = torch.zeros(4, 16, dtype=torch.long)
    plain, again = (
        trace_of(
            DDPStrategy(activation_checkpointing=choice),
            model,
            [text, text],
            world_size=1,
            precision="32-true",
        )
        for choice in (None, "full")
    )
    assert again.saved < again.most < plain.most
    assert again.moved > plain.moved
