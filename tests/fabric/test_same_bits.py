"""Under Fabric `same_bits=True` gives a loop the same bits on one rank, two, four and eight."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_shard import ConfigError
from tests.fabric.loops import fabric_of, strategy_of
from tests.strategies.models import MODELS, warm_up
from tests.strategies.parity import STRATEGIES, ignoring
from tests.strategies.test_same_bits import (
    BATCH,
    CLIP,
    MICRO_BATCHES,
    NUM_STEPS,
    Centred,
    Images,
    checksum,
)

pytestmark = ignoring()


KINDS: dict[str, Callable[[], Any]] = {"images": Images, "centred": Centred, **MODELS}


def loop(
    fabric: Fabric, name: str, num_own: int, *, waits: bool = True, num_workers: int = 0
) -> str:
    """Train, and return the digest of all that is left; each rank must call."""
    torch.manual_seed(3)
    module = KINDS[name]()
    plain = torch.optim.AdamW(module.parameters(), lr=0.01)
    model, optimizer = fabric.setup(module, plain)
    model.mark_forward_method("loss")
    schedule = LambdaLR(plain, warm_up)
    data = module.data(MICRO_BATCHES * BATCH * NUM_STEPS)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=num_workers)
    norms = []
    for number, batch in enumerate(fabric.setup_dataloaders(loader)):
        ends = (number + 1) % num_own == 0
        with fabric.no_backward_sync(model, enabled=waits and not ends):
            noise = torch.randn(())
            loss = model.loss(batch) * (1 + 0.1 * noise)
            fabric.backward(loss / num_own)
        if ends:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=CLIP))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return checksum(norms, model.state_dict(), optimizer.state_dict()["state"])


def run(
    name: str, strategy: str, num_ranks: int, *, precision: Any = "32-true", **options: Any
) -> str:
    """Train on ranks of this process."""
    seed_everything(7)
    num_own = MICRO_BATCHES // num_ranks
    kind = strategy_of(strategy, same_bits=True, num_micro_batches=num_own)
    fabric = fabric_of(kind, num_ranks, precision=precision)
    found: str = fabric.launch(loop, name, num_own, **options)
    return found


def test_a_loop_has_the_bits_of_one_rank() -> None:
    """Fabric refused the option: nobody counted the micro-batches of a loop."""
    assert len({run("centred", "zero1", 1), run("centred", "zero2", 2, waits=False)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["images", "centred", "gpt", "llama"])
def test_every_stage_and_size_has_the_same_bits(model: str) -> None:
    """One digest of weights, buffers, optimizer state and norms for all of them."""
    cases = [(strategy, size) for strategy in STRATEGIES for size in (1, 2, 4, 8)]
    assert len({run(model, *one) for one in cases}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_narrow_formats_have_the_same_bits(precision: Any) -> None:
    """Sums of narrow gradients are made in fp32, and rounded once."""
    cases = [("shard_ddp", 1), ("zero1", 2), ("zero2", 4), ("zero3", 8)]
    assert len({run("gpt", *one, precision=precision) for one in cases}) == 1


def clips_by_hand(fabric: Fabric, num_own: int) -> str:
    """Train a step whose gradients get noise and are clipped by torch's own function."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(31, 67), nn.ReLU(), nn.Linear(67, 5))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(MICRO_BATCHES * BATCH, 31))
    for (batch,) in fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH)):
        fabric.backward(model(batch).square().sum() / num_own)
    for one in model.parameters():
        assert one.grad is not None
        one.grad.add_(torch.randn_like(one.grad), alpha=0.01)
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
    optimizer.step()
    norms += [one.norm() for one in model.parameters()]
    norms += [one.grad.square().sum() for one in model.parameters() if one.grad is not None]
    return checksum(norms, model.state_dict())


def test_norms_and_noise_of_a_loop_have_the_bits_of_one_rank() -> None:
    """They were those of the shards, whose number showed in their bits."""
    found = set()
    for strategy, num_ranks in (("shard_ddp", 1), ("zero1", 2), ("zero2", 4), ("zero3", 8)):
        num_own = MICRO_BATCHES // num_ranks
        kind = strategy_of(strategy, same_bits=True, num_micro_batches=num_own)
        found.add(fabric_of(kind, num_ranks).launch(clips_by_hand, num_own))
    assert len(found) == 1


def refused(match: str, train: Any, *, num_ranks: int = 2, **options: Any) -> None:
    """Expect a launch to be refused."""
    fabric = fabric_of(strategy_of("zero1", same_bits=True, **options), num_ranks)
    with pytest.raises(ConfigError, match=match):
        fabric.launch(train)


def test_loops_that_cannot_have_the_same_bits_are_refused() -> None:
    """Each is refused by name."""

    def two_modules(fabric: Fabric) -> None:
        first = fabric.setup_module(nn.Linear(2, 2))
        second = fabric.setup_module(nn.Linear(2, 2))
        assert first is not second

    def synchronised(fabric: Fabric) -> None:
        fabric.setup_module(nn.SyncBatchNorm(2))

    def steps(fabric: Fabric, *, num_backwards: int, waits: bool = False) -> None:
        module = nn.Linear(2, 2)
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(num_backwards):
            with fabric.no_backward_sync(model, enabled=waits):
                fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()

    def uneven(fabric: Fabric) -> None:
        fabric.setup_dataloaders(DataLoader(torch.ones(10, 2), batch_size=4))

    class Stream(IterableDataset[Any]):
        """Gives every rank the same samples."""

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(8, 2))

    def streams(fabric: Fabric) -> None:
        fabric.setup_dataloaders(DataLoader(Stream(), batch_size=4))

    refused("a dataset with a length", streams)
    refused("a second module is set up", two_modules)
    refused("batch norms are synchronised", synchronised)
    refused("backward 2 of a step", lambda fabric: steps(fabric, num_backwards=2))
    refused(
        "outside of no_backward_sync", lambda fabric: steps(fabric, num_backwards=1, waits=True)
    )
    refused(
        "steps after 1 backwards",
        lambda fabric: steps(fabric, num_backwards=1),
        num_micro_batches=2,
    )
    refused("would have fewer samples", uneven)
    refused("3 ranks have 1 micro-batches", uneven, num_ranks=3)
    with pytest.raises(ConfigError, match="counts the backwards of a step"):
        strategy_of("zero1", num_micro_batches=2)
