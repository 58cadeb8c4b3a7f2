"""`zero3` with a second copy of parameters in each node, from forward to backward."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import ZeRO2Strategy, ZeRO3Strategy
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.groups import with_secondary
from lightning_shard.testing import run_ranks
from tests.fabric.nets import Net, adam, batch_of, on_ranks, weights_of
from tests.groups import all_ranks
from tests.processes import run_processes
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    assert_bitwise_equal,
    build,
    ignore_upstream_warnings,
    ignoring,
    quiet_trainer,
    train,
)

pytestmark = ignoring("offload=.*saves nothing on CPU ranks")

RANKS, NODE, WIDTH, NUM_BLOCKS = 4, 2, 16, 3


def strategy(**options: Any) -> ZeRO3Strategy:
    return ZeRO3Strategy(**{"backend": "in_process", "bucket_mb": SMALL_BUCKET_MB, **options})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Blocks(L.LightningModule):
    """Three blocks under a head, trained in one of several ways."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(NUM_BLOCKS)), nn.Linear(16, 1)
        self.way = way
        self.automatic_optimization = way != "manual"
        if way == "frozen":
            self.blocks.requires_grad_(False)
            self.blocks[1].layer.bias.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        x = batch[0]
        loss = self(x).square().mean()
        if self.way == "twice":
            loss = loss + self(self.blocks[0](x)).abs().mean()
        if self.way == "no_grad":
            with torch.no_grad():
                factor = self(2 * x).mean()
            loss = factor * loss
        if self.way == "manual":
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            optimizer.step()
            self.manual_backward(self(x).mean())
            optimizer.step()
        if self.way == "in step":
            with torch.no_grad():
                self.blocks[1].layer.weight.mul_(0.9)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        with torch.enable_grad():
            self.log("val", self(batch[0]).mean())

    def on_before_backward(self, loss: Tensor) -> None:
        weight = self.blocks[1].layer.weight
        if self.way == "scaled":
            weight.data.mul_(0.9)
        if self.way == "moved":  # with the same sum of bits
            with torch.no_grad():
                weight.copy_(weight.flip(0))
        if self.way == "array":
            weight.detach().numpy()[-1] = 0.5

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)

    def batches(self) -> DataLoader[Any]:
        values = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(values), batch_size=2)


WAYS = ("plain", "twice", "no_grad", "frozen", "manual", "in step", "scaled", "moved", "array")


@dataclass
class Sent(L.Callback):
    """What rank 0 gathers over all ranks and in its node, step by step, and keeps.

    Attributes:
        gathered: Elements over all ranks, in the node.
        kept: Bytes of the second copy when a backward begins, and after it.
    """

    gathered: list[tuple[int, int]] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    before: tuple[int, int] = (0, 0)

    def _held(self, trainer: L.Trainer) -> int:
        parts = [flat.secondary for flat in trainer.strategy.engine.flats]
        kept = [one._kept[0].nbytes for one in parts if one is not None and one.is_kept]
        return sum(kept)

    def _counts(self, trainer: L.Trainer) -> tuple[int, int]:
        groups = trainer.strategy.gradient_groups
        of_all = groups.dp.traffic["all_gather"].elements
        near = groups.secondary
        return of_all, 0 if near is None else near.traffic["all_gather"].elements

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.before = self._counts(trainer)

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        self.begun = self._held(trainer)

    def on_after_backward(self, trainer: L.Trainer, *_: Any) -> None:
        self.kept.append((self.begun, self._held(trainer)))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now = self._counts(trainer)
        self.gathered.append((now[0] - self.before[0], now[1] - self.before[1]))


def fit(way: str, *, num_steps: int = 3, sent: Sent | None = None, **options: Any) -> Blocks:
    model = Blocks(way)
    trainer = quiet_trainer(
        strategy=strategy(**options),
        devices=RANKS,
        max_steps=num_steps,
        gradient_clip_val=None,
        callbacks=[] if sent is None else [sent],
        val_check_interval=2,
        use_distributed_sampler=True,
        accumulate_grad_batches=1 if way == "manual" else 2,
    )
    trainer.fit(model, model.batches(), model.batches())
    return model


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "options", [{}, {"quantized_gathers": "int8"}, {"activation_checkpointing": ["Block"]}], ids=str
)
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_to_the_bit_those_without_it(way: str, options: dict[str, Any]) -> None:
    """Also where weights are edited between forward and backward, which then gathers from all."""
    plain, near = (fit(way, reshard_after_forward=size, **options) for size in (None, NODE))
    for name, value in plain.state_dict().items():
        assert torch.equal(near.state_dict()[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {"offload": "optimizer"},
        {"prefetch": 0},
        {"quantized_gathers": "int8", "compression": "int4"},
        {"same_bits": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["gpt", "lstm", "conv", "t5", "mixture"])
def test_models_train_to_the_bit(model: str, options: dict[str, Any]) -> None:
    given = {**options}
    precision = given.pop("precision", "32-true")
    runs = [
        train(
            build(model),
            strategy=strategy(reshard_after_forward=size, **given),
            devices=RANKS,
            precision=precision,
            num_steps=3,
        )
        for size in (None, NODE)
    ]
    assert_bitwise_equal(*runs)


BLOCK = WIDTH * WIDTH + WIDTH
GATHERED = NUM_BLOCKS * BLOCK
HEAD = WIDTH + 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "no_grad", "manual"])
def test_backward_sends_no_parameter_to_another_node(way: str) -> None:
    """Forward gathers the blocks over all ranks, each backward over a node, by the ring's count."""
    sent, plain = Sent(), Sent()
    fit(way, num_steps=1, sent=sent, reshard_after_forward=NODE)
    fit(way, num_steps=1, sent=plain)
    over_all, near = GATHERED * (RANKS - 1) // RANKS, GATHERED * (NODE - 1) // NODE
    num_near = 2 if way == "manual" else 1  # the second one of a retained graph needs none
    assert [one for _, one in sent.gathered] == [num_near * near] * len(sent.gathered)
    fewer = {before[0] - now[0] for before, now in zip(plain.gathered, sent.gathered, strict=True)}
    assert fewer == {num_near * over_all}


def test_a_rank_keeps_its_part_of_the_blocks_until_backward() -> None:
    sent = Sent()
    fit("plain", sent=sent, reshard_after_forward=NODE)
    assert sent.kept == [(4 * GATHERED // NODE, 0)] * len(sent.kept)


def trained(fabric: Fabric) -> Any:
    """Take two losses backward in each step, the second after an update of the weights by hand."""
    module = Net()
    model, optimizer = fabric.setup(module, adam(module))
    for number in range(3):
        first, second = (model(batch_of(fabric, 2 * number + one)).square() for one in range(2))
        fabric.backward(first.mean(), retain_graph=True)
        model(batch_of(fabric, 9))
        fabric.backward(second.mean())
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.parametrize("quantized", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_fabric_trains_to_the_bit(quantized: str | None) -> None:
    options: dict[str, Any] = {"devices": RANKS, "quantized_gathers": quantized}
    plain, near = (
        on_ranks("zero3", trained, **options, reshard_after_forward=size) for size in (None, NODE)
    )
    for name, value in plain.items():
        assert torch.equal(near[name], value), name


def weights_over_gloo() -> dict[str, Tensor]:
    ignore_upstream_warnings()
    return fit("twice", backend="gloo", reshard_after_forward=NODE).state_dict()


@pytest.mark.slow
def test_real_processes_train_as_those_of_one_process() -> None:
    over_gloo = run_processes(weights_over_gloo, RANKS)[0]
    for name, value in fit("twice").state_dict().items():
        assert torch.equal(over_gloo[name], value), name


def test_a_dry_run_counts_what_is_kept_and_sent() -> None:
    """Two units of three are full at once beside the copy, and the copy's gathers are counted."""
    batch = [torch.randn(2, WIDTH)]
    plain, near = (
        strategy(backend="auto", reshard_after_forward=size)
        .dry_run(Blocks(), batch, world_size=RANKS)
        .ranks[0]
        for size in (None, NODE)
    )
    more = near.memory.gathered - plain.memory.gathered
    assert more == 4 * GATHERED // NODE
    fewer = GATHERED * (RANKS - 1) // RANKS - GATHERED * (NODE - 1) // NODE
    agreed = plain.sent_elements["dp"] - near.sent_elements["dp"] - fewer
    assert -2 * NUM_BLOCKS <= agreed <= 0  # elements, of a byte each, of which backwards agree


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZeRO2Strategy(reshard_after_forward=2), "got ZeRO stage 2.*Leave it out"),
        (lambda: ZeRO3Strategy(reshard_after_forward=1), "must be .* of at least 2"),
        (
            lambda: ZeRO3Strategy(reshard_after_forward=2, offload="parameters"),
            "got offload='parameters'.*Leave one of them out",
        ),
        (
            lambda: fit("plain", reshard_after_forward=3),
            r"4 ranks share.*expected a divisor.*\[2\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


class _OnNodes:
    """A strategy of two nodes, of which the first has three of four ranks."""

    local_ranks = SimpleNamespace(timeout=None)
    num_nodes = 2

    def __init__(self, rank: int) -> None:
        self.node_rank = rank // 3


def test_groups_that_cross_nodes_are_told(recwarn: pytest.WarningsRecorder) -> None:
    def made(rank: int) -> Any:
        return with_secondary(DataGroups.of(all_ranks()), NODE, _OnNodes(rank)).secondary.size

    assert run_ranks(made, RANKS) == [NODE] * RANKS
    assert "1 of 2 groups of reshard_after_forward=2" in str(recwarn.list[0].message)
