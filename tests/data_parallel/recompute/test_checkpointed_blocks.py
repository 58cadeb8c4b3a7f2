"""Blocks whose activations are computed again: same numbers, fewer bytes, nothing left behind."""

import copy
import pickle
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.data_parallel.recompute.checkpointed_blocks import checkpointed_blocks
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.costs import SavedBytes

WIDTH, BATCH = 8, 64
CHOICES: list[Any] = ["full", "selective", ["Block"], ["Linear"]]


class Block(nn.Module):
    """Draws from all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        wide = torch.tanh(self.up(self.norm(x))) * random.random()
        return x + scale * self.drop(self.down(wide * float(np.random.rand())))


class NormedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.cumulative = nn.BatchNorm1d(WIDTH, momentum=None)
        self.instance_norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.cumulative(self.batch_norm(super().forward(x)))
        return x + self.instance_norm(x.view(4, -1, WIDTH).mT).mT.reshape(x.shape)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def step(choice: Any, make: Any = Net, backwards: int = 1) -> list[Any]:
    """Return what a step computes and leaves, the random streams included."""
    seeded()
    model = make()
    with checkpointed_blocks(model, choice):
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        for number in range(backwards):
            loss.backward(retain_graph=number < backwards - 1)
    grads = [param.grad for param in model.parameters()]
    drawn = [torch.rand(1), random.random(), np.random.rand()]
    return [loss, grads, dict(model.named_buffers()), *drawn]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("block", [Block, NormedBlock])
def test_losses_gradients_statistics_and_random_streams(choice: Any, block: type[Block]) -> None:
    def make() -> Net:
        return Net(block)

    if choice == ["Block"]:
        choice = [block.__name__]
    torch.testing.assert_close(step(choice, make), step(None, make), rtol=0, atol=0)


@pytest.mark.parametrize("choice", ["full", "selective"])
def test_a_graph_that_is_kept_is_computed_again_each_time(choice: str) -> None:
    torch.testing.assert_close(step(choice, backwards=2), step(None, backwards=2), rtol=0, atol=0)


class InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mul_(2).sin()


def test_selective_refuses_what_is_changed_in_place() -> None:
    with pytest.raises(ConfigError, match=r"\(InPlaceBlock\).*changed in place.*'full'"):
        step("selective", lambda: Net(InPlaceBlock))


def calls_of_a_step(choice: Any, block: type[Block] = Block) -> list[int]:
    """Count where the blocks do not see it: what a recomputation counts there is put back."""
    model = Net(block)
    calls = Counter[nn.Module]()
    for one in model.blocks:
        one.norm.register_forward_pre_hook(lambda _, __, of=one: calls.update([of]))
    with checkpointed_blocks(model, choice):
        model(torch.randn(BATCH, WIDTH)).sum().backward()
    return [calls[one] for one in model.blocks]


def test_each_block_runs_twice() -> None:
    assert calls_of_a_step(None) == [1, 1, 1]
    assert calls_of_a_step("full") == [2, 2, 2]


class OfHuggingFace(Block):
    """Checkpoints itself, as a layer of `transformers` that was told to."""

    gradient_checkpointing = True

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, **options)


class CheckpointedNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_what_is_checkpointed_already_is_not_once_more() -> None:
    assert calls_of_a_step("full", OfHuggingFace) == [2, 2, 2]
    model = CheckpointedNet()
    with checkpointed_blocks(model, "full"):
        model(torch.randn(BATCH, WIDTH)).sum().backward()
    assert [one.calls for one in model.blocks] == [2, 2, 2]


def test_no_gradients_no_checkpoint() -> None:
    model = Net()
    with checkpointed_blocks(model, "full"), torch.no_grad():
        model(torch.randn(BATCH, WIDTH))
    assert [one.calls for one in model.blocks] == [1, 1, 1]


def test_the_module_is_what_it_was() -> None:
    model = Net()
    own = model.blocks[0].forward = lambda x: x
    names, classes = list(model.state_dict()), [type(one) for one in model.modules()]
    with checkpointed_blocks(model, "full"):
        assert list(model.state_dict()) == names
        assert [type(one) for one in model.modules()] == classes
        assert torch.equal(model.blocks[0](torch.ones(1)), torch.ones(1))
    assert model.blocks[0].forward is own
    assert "forward" not in vars(model.blocks[1])
    assert not [name for name in vars(model.blocks[1]) if name.startswith("_lightning")]


def test_copies_call_their_own_forward() -> None:
    model = Net()
    with checkpointed_blocks(model, "full"):
        made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in made:
        one(torch.randn(BATCH, WIDTH)).sum().backward()
        assert one.blocks[0].up.weight.grad is not None
    assert model.blocks[0].up.weight.grad is None


class CountingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.seen += 1
        return super().forward(x)


def test_a_block_that_changes_its_buffers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'blocks\.2' \(CountingBlock\) changes its buffer 'se"):
        step("full", lambda: Net(CountingBlock))


def test_a_class_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="activation_checkpointing names the class 'Blok'"):
        step(["Blok"])


def test_a_model_without_blocks() -> None:
    with pytest.raises(ConfigError, match="Linear has no list of repeated modules"):
        step("full", lambda: nn.Linear(WIDTH, WIDTH))


def measured(choice: Any) -> tuple[int, int]:
    """Return the bytes that a forward keeps, and those of the largest recomputation."""
    seeded()
    model = Net()
    inputs = torch.randn(BATCH, WIDTH)
    with checkpointed_blocks(model, choice):
        with SavedBytes([*model.parameters(), inputs]) as saved:
            loss = model(inputs).sum()
        with saved.backward():
            loss.backward()
    return saved.total, saved.recomputed


def test_bytes_kept_and_recomputed() -> None:
    one = 4 * BATCH * WIDTH  # bytes of an activation
    plain, nothing = measured(None)
    assert nothing == 0
    kept, recomputed = measured("full")
    assert kept == 2 * one  # the inputs of the second and third block; the first's is the batch
    assert 3 * recomputed == pytest.approx(plain - 2 * one, rel=0.05)
    selective, rest = measured("selective")
    assert selective == 2 * one + 3 * (4 * one + one)  # what the two matrix products have made
    assert rest <= recomputed
    assert kept < selective < plain
