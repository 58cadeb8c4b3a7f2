"""Measured costs against numbers counted by hand, and that measuring leaves no trace."""

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.blocks import find_blocks
from lightning_shard.pipeline_parallel.costs import measure_blocks
from lightning_shard.pipeline_parallel.partition import BlockCosts, partition_blocks
from tests.pipeline_parallel.test_blocks import (
    Net,
    bert,
    gpt2,
    linears,
    llama,
    mixtral,
    t5,
    tiny_gpt,
    torch_encoder,
    vit,
)

BATCH, LENGTH, WIDTH = 2, 8, 16
TOKENS = BATCH * LENGTH
IDS = torch.arange(TOKENS).view(BATCH, LENGTH)


def measure(model: nn.Module, run: Callable[[], object], path: str | None = None, **options: Any):
    return measure_blocks(model, find_blocks(model, path), run, **options)


class Stack(Net):
    """Linear layers of 8 x 8 between one of 4 x 8 and one of 8 x 2."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(nn.ModuleList(linears(depth)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def linear_flops(rows: int, width: int, out: int) -> int:
    return 2 * rows * width * out


def test_flops_of_linear_layers() -> None:
    model = Stack()
    x = torch.ones(5, 4)
    assert measure(model, lambda: model(x).sum()) == BlockCosts(
        before=linear_flops(5, 4, 8),
        blocks=(linear_flops(5, 8, 8),) * 3,
        after=linear_flops(5, 8, 2),
    )


def test_flops_of_the_example_model() -> None:
    """Attention counts as much on the CPU as elsewhere, which torch's own table leaves out."""
    model = tiny_gpt()
    matrices = 12 * WIDTH * WIDTH  # qkv 3, out 1, up 4, down 4
    attention = 2 * linear_flops(TOKENS, WIDTH, LENGTH)  # scores, and the mix of the values
    assert measure(model, lambda: model.loss([IDS, IDS])) == BlockCosts(
        before=0.0,
        blocks=(2 * TOKENS * matrices + attention,) * 3,
        after=linear_flops(TOKENS, WIDTH, 256),
    )


def text_step(model: nn.Module) -> Callable[[], object]:
    mask = torch.ones_like(IDS)
    return lambda: model(input_ids=IDS, attention_mask=mask, labels=IDS).loss


def image_step(model: nn.Module) -> Callable[[], object]:
    images, labels = torch.ones(BATCH, 3, 8, 8), torch.zeros(BATCH, dtype=torch.long)
    return lambda: model(images, labels=labels).loss


def encoder_step(model: nn.Module) -> Callable[[], object]:
    x = torch.ones(BATCH, LENGTH, WIDTH)
    return lambda: model(x).sum()


@pytest.mark.parametrize("what", ["flops", "memory"])
@pytest.mark.parametrize(
    ("make", "step", "path"),
    [
        (llama, text_step, None),
        (gpt2, text_step, None),
        (bert, text_step, None),
        (mixtral, text_step, None),
        (vit, image_step, None),
        (torch_encoder, encoder_step, None),
    ],
)
def test_equal_blocks_cost_the_same(
    make: Callable[[], nn.Module], step: Callable[[Any], Any], path: str | None, what: Any
) -> None:
    model = make()
    costs = measure(model, step(model), path, what=what)
    first, *others = costs.blocks[-2:]  # the first block may save its input beside its output
    assert first > 0
    assert others == [first]
    bounds = partition_blocks(
        model, find_blocks(model), num_stages=3, split=what, measured=costs
    ).bounds
    assert bounds == (0, 1, 2, 3)


def test_an_encoder_counts_before_the_blocks_of_its_decoder() -> None:
    model = t5()
    model.config.decoder_start_token_id = 0
    costs = measure(model, lambda: model(input_ids=IDS, labels=IDS).loss, "decoder.block")
    encoder_block = linear_flops(TOKENS, 16, 4 * 16 + 2 * 32) + 2 * linear_flops(TOKENS, 16, LENGTH)
    assert costs.before == 3 * encoder_block
    assert costs.after == linear_flops(TOKENS, 16, 40)


def test_the_flops_of_experts_are_counted() -> None:
    """Each token goes to two of them, each with a gate, an up and a down matrix."""
    model = mixtral()
    costs = measure(model, text_step(model))
    attention = linear_flops(TOKENS, 16, 4 * 16) + 2 * linear_flops(TOKENS, 16, LENGTH)
    experts = linear_flops(2 * TOKENS, 16, 3 * 32)
    assert costs.blocks[1] == attention + linear_flops(TOKENS, 16, 4) + experts


def test_memory_of_linear_layers() -> None:
    """Each saves its input: of a block, what the one before gave."""
    model = Stack()
    model.blocks[2].requires_grad_(False)
    x = torch.ones(5, 4)
    trained, frozen = 16, 4
    assert measure(model, lambda: model(x).sum(), what="memory") == BlockCosts(
        before=4 * 5 * 4 + trained * (4 * 8 + 8),
        blocks=(
            4 * 5 * 8 + trained * (8 * 8 + 8),
            4 * 5 * 8 + trained * (8 * 8 + 8),
            frozen * (8 * 8 + 8),
        ),
        after=4 * 5 * 8 + trained * (8 * 2 + 2),
    )


class Checkpointed(nn.Module):
    def __init__(self, is_on: bool) -> None:
        super().__init__()
        self.up, self.down, self.is_on = nn.Linear(8, 64), nn.Linear(64, 8), is_on

    def compute(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.is_on else self.compute(x)


def test_activation_checkpointing_saves_memory() -> None:
    model = Stack()
    model.blocks = nn.ModuleList(Checkpointed(is_on) for is_on in (False, False, True, True))
    x = torch.ones(5, 4)
    costs = measure(model, lambda: model(x).sum(), what="memory").blocks
    assert costs[1] - costs[3] == 4 * 5 * 64


def test_blocks_that_are_called_twice_count_twice() -> None:
    model = Stack()
    x = torch.ones(5, 4)
    once = measure(model, lambda: model(x).sum())
    twice = measure(model, lambda: model(x).sum() + model(x).sum())
    assert twice.blocks == tuple(2 * cost for cost in once.blocks)


def test_a_model_without_values_is_measured() -> None:
    with torch.device("meta"):
        model = Stack()
    x = torch.ones(5, 4)
    cpu = Stack()
    assert measure(model, lambda: model(x).sum()) == measure(cpu, lambda: cpu(x).sum())


def test_a_batch_may_be_on_a_device_where_the_model_is_not_yet() -> None:
    model = Stack()
    x = torch.ones(5, 4, device="meta")
    costs = measure(model, lambda: model(x).sum(), device=torch.device("meta"))
    assert costs.blocks == (linear_flops(5, 8, 8),) * 3


class Asking(Stack):
    """A step that looks at its values, and remembers that it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.mean = MeanMetric()
        self.seen: list[float] = []
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))
        self.history = torch.zeros(())

    def step(self, x: Tensor, asks: bool) -> Tensor:
        self.calls += 1
        self.history += 1
        self.total = self.total + 1
        noise = torch.rand(8) + random.random() + np.random.rand()
        loss = self.head(F.dropout(self.norm(self.embed(x)) + noise)).sum()
        loss = loss + self(x).sum()
        self.mean.update(loss)
        loss.backward()
        if asks:
            self.seen.append(loss.item())
        return loss


def traces(model: Asking) -> Any:
    random_states = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
    attributes = [
        {
            key: copy.copy(value)
            for key, value in vars(module).items()
            if not callable(value) and not isinstance(value, Tensor)
        }
        for module in model.modules()
    ]
    tensors = [model.history, model.mean.mean_value, model.mean.weight, *model.buffers()]
    return random_states, attributes, [(id(one), one.tolist()) for one in tensors]


@pytest.mark.parametrize("what", ["flops", "memory"])
@pytest.mark.parametrize("asks", [False, True])
def test_measuring_leaves_no_trace(asks: bool, what: Any) -> None:
    model = Asking()
    before, params = traces(model), [(id(p), p.tolist()) for p in model.parameters()]
    x = torch.ones(5, 4)
    costs = measure(model, lambda: model.step(x, asks), what=what)
    assert len(costs.blocks) == 3
    assert str(traces(model)) == str(before)
    assert [(id(p), p.tolist()) for p in model.parameters()] == params
    assert all(p.grad is None for p in model.parameters())
    assert not model.blocks[0]._forward_pre_hooks


def test_a_step_that_asks_for_values_costs_the_same() -> None:
    model, x = Asking(), torch.ones(5, 4)
    asked, not_asked = (measure(model, lambda asks=asks: model.step(x, asks)) for asks in (1, 0))
    assert asked == not_asked


def test_a_step_that_asks_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = Asking()
    with pytest.raises(ConfigError, match="Blocks are measured in a step of Asking, which failed"):
        measure(model, lambda: model.step(torch.ones(5, 4), asks=True))


def test_a_step_that_fails_shows_its_own_error() -> None:
    model = Stack()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measure(model, lambda: model(torch.ones(5, 3)))
    assert not model.blocks[0]._forward_pre_hooks


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("what", ["flops", "memory"])
def test_compiled_blocks_are_measured_as_written(what: Any, asks: bool) -> None:
    torch.compiler.reset()  # or code that was not compiled once never is
    compiled: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def step(model: nn.Module) -> Callable[[], object]:
        return lambda: model(x).sum().item() if asks else model(x)

    model, plain, x = Stack(), Stack(), torch.ones(5, 4)
    model.blocks[1] = torch.compile(model.blocks[1], backend=compiler)
    costs = measure(model, step(model), "blocks", what=what)
    assert costs == measure(plain, step(plain), what=what)
    assert not compiled


def test_what_fails_without_values_only_is_not_logged() -> None:
    """Mixtral's experts do, as torch would say in a page of its own."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        model = mixtral()
        measure(model, text_step(model))
    finally:
        logger.removeHandler(handler)
    assert not records
    assert not logger.disabled
