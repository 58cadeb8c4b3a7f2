"""Ways of writing a module and its step, on the stages of a pipeline and on a single device."""

from collections.abc import Mapping
from typing import Any, ClassVar

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.strategies.models import llama, warm_up
from tests.strategies.parity import UPSTREAM_WARNINGS, assert_parity, train
from tests.strategies.stacks import (
    ALL_PIPELINES,
    BATCH,
    NUM_BATCHES,
    OTHER_PIPELINES,
    PIPELINES,
    WIDTH,
    Block,
    Fitted,
    Stack,
    check,
    fit,
    pipeline,
    samples,
)
from tests.strategies.test_pipeline_parallel import single_device

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
    pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the"),
]


# --- the network -------------------------------------------------------------------------------


class Checkpointed(Stack):
    """Each block is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class CheckpointedInPairs(Stack):
    """What is computed again begins or ends between two stages."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for pair in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(self.both, *pair, x, use_reentrant=False)
        return self.head(x)

    def both(self, first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        return second(first(x))


class CheckpointedInside(Stack):
    """A block's own forward is computed again."""

    class block(Block):  # noqa: D106, N801
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)


class BlockWithSum(Block):
    """Takes and returns a sum beside the hidden states."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = super().forward(pair[0])
        return x, pair[1] + x.square().mean()


class SumInTuple(Stack):
    """A loss that is carried from block to block, with its gradient."""

    block = BlockWithSum

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        carried = x, torch.zeros(())
        for block in self.blocks:
            carried = block(carried)
        return F.cross_entropy(self.head(carried[0]), batch[1]) + 0.1 * carried[1]


class BlockWithDict(Block):
    """Takes keywords and returns a dictionary, of which one entry needs no gradient."""

    def forward(self, *, hidden: Tensor, total: Any = None) -> dict[str, Any]:
        x = super().forward(hidden)
        total = x.sum(1) if total is None else total + x.sum(1)
        return {"hidden": x, "total": total, "seen": x.detach().abs().mean(), "name": "block"}


class EntriesOfDict(Stack):
    """Auxiliary outputs in a dictionary, not all of which go on."""

    block = BlockWithDict

    def loss(self, batch: Any) -> Tensor:
        x, total = self.embed(batch[0]), None
        for block in self.blocks:
            out = block(hidden=x, total=total)
            x, total = out["hidden"], out["total"]
        return F.cross_entropy(self.head(x), batch[1]) + 0.1 * total.tanh().mean()


class ListOfLosses(Stack):
    """A list grows from block to block; its sum is taken in the end."""

    class block(Block):  # noqa: D106, N801
        def forward(self, x: Tensor, before: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            x = super().forward(x)
            return x, [*before, x.square().mean()]

    def loss(self, batch: Any) -> Tensor:
        x, losses = self.embed(batch[0]), []
        for block in self.blocks:
            x, losses = block(x, losses)
        return F.cross_entropy(self.head(x), batch[1]) + 0.1 * sum(losses)


class CrossBlock(Block):
    """A block that also looks at what an encoder has made."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x) + torch.tanh(self.cross(memory))


class EncoderDecoder(Stack):
    """The output of an encoder goes to every block of the decoder."""

    block = CrossBlock

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        for name in ("blocks", "head"):  # registered in the order of their use
            self._modules[name] = self._modules.pop(name)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.embed(x)
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(x.flip(1))
        for block in self.blocks:
            x = block(x, memory)
        return self.head(x)


class SkipConnection(Stack):
    """Each block takes what the embedding has made; it is sent on from stage to stage."""

    block = CrossBlock

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.embed(x)
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)


class ViewsOfBlocks(Stack):
    """The blocks' outputs are views, and so are their arguments."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x.reshape(-1, 1, WIDTH)).squeeze(1)[:, torch.arange(WIDTH)]
        return self.head(x)


class BetweenBlocks(Stack):
    """Arithmetic between the blocks: on the stage before, as far as it only needs their values."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = F.gelu(block(x)) + 0.5 * x
        return self.head(2 * x)


NETWORKS = [
    Stack,
    Checkpointed,
    CheckpointedInPairs,
    CheckpointedInside,
    SumInTuple,
    EntriesOfDict,
    ListOfLosses,
    SkipConnection,
    ViewsOfBlocks,
    BetweenBlocks,
]


@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
@pytest.mark.parametrize("style", NETWORKS)
def test_networks(style: type[Stack], num_ranks: int, schedule: str) -> None:
    check(style, num_ranks, schedule)


@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_every_block_of_a_decoder_takes_the_encoders_output(num_ranks: int, schedule: str) -> None:
    check(EncoderDecoder, num_ranks, schedule, blocks="blocks")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_checkpointing_of_hugging_face(schedule: str) -> None:
    model = build_checkpointed()
    run = train(model, strategy=pipeline(2, schedule))
    assert_parity(run, single_device("llama_8"))


def build_checkpointed() -> Any:
    torch.manual_seed(7)
    model = llama(8)
    options = {"use_reentrant": False}
    model.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


# --- parameters and gradients ------------------------------------------------------------------


class Frozen(Stack):
    """Some layers do not learn."""

    frozen: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        for name in self.frozen:
            self.get_submodule(name).requires_grad_(False)


class FrozenFirst(Frozen):
    frozen = ("embed", "blocks.0", "blocks.1")


class FrozenMiddle(Frozen):
    frozen = ("blocks.1", "blocks.2")


class FrozenLast(Frozen):
    frozen = ("blocks.2", "blocks.3", "head")


class OnlyHead(Frozen):
    frozen = ("embed", "blocks")


class OnlyEmbedding(Frozen):
    frozen = ("blocks", "head")


class Unused(Stack):
    """Parameters without gradients, before the blocks, in them and after them."""

    class block(Block):  # noqa: D106, N801
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(3))

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Hooked(Stack):
    """Hooks of parameters, which see the gradient of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float]] = []

    def configure_optimizers(self) -> Any:
        for name, param in self.named_parameters():  # here: ranks of one process are copies
            if name.endswith("weight"):
                param.register_hook(self.doubled(name))
        return super().configure_optimizers()

    def doubled(self, name: str) -> Any:
        def hook(grad: Tensor) -> Tensor:
            self.seen.append((name, grad.norm().item()))
            return 2 * grad

        return hook


class Groups(Stack):
    """Two groups, a scheduler and clipping."""

    options: ClassVar = {"gradient_clip_val": 0.05}

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim < 2], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-6)
        scheduler = {"scheduler": LambdaLR(optimizer, warm_up), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class ClippedByValue(Stack):
    options: ClassVar = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class Accumulated(Stack):
    """Three batches a step; the last step of an epoch has two."""

    options: ClassVar = {"accumulate_grad_batches": 3}


class TiedAcross(Stack):
    """One matrix in the first block and the last one, so on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].layer.weight = self.blocks[0].layer.weight


class ScaledOutside(Stack):
    """A parameter of the module itself, which does not say where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]) * self.temperature, batch[1])


class DictOfStep(Stack):
    """The step returns a dictionary."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach()}


class SomeSkipped(Stack):
    """Steps that return None are skipped, as Lightning does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch_idx % 2 else loss


TRAININGS = [
    FrozenFirst,
    FrozenMiddle,
    FrozenLast,
    OnlyHead,
    OnlyEmbedding,
    Unused,
    Groups,
    ClippedByValue,
    Accumulated,
    TiedAcross,
    ScaledOutside,
    DictOfStep,
]


@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
@pytest.mark.parametrize("style", TRAININGS)
def test_trainings(style: type[Stack], num_ranks: int, schedule: str) -> None:
    check(style, num_ranks, schedule)


@pytest.mark.parametrize(("num_ranks", "schedule"), OTHER_PIPELINES)
@pytest.mark.parametrize("style", [*NETWORKS, *TRAININGS])
def test_styles_with_other_schedules(style: type[Stack], num_ranks: int, schedule: str) -> None:
    check(style, num_ranks, schedule)


class OfEveryRank(Callback):
    """Gathers what the ranks' modules have kept in `seen`."""

    def __init__(self) -> None:
        self.ranks: list[Any] = []

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        strategy = trainer.strategy
        gathered = hasattr(strategy, "collectives")
        self.ranks = strategy.collectives.all_gather_object(pl_module.seen) if gathered else []


@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_hooks_of_parameters_see_the_gradient_of_the_batch_once(
    num_ranks: int, schedule: str
) -> None:
    gather = OfEveryRank()
    alone = fit(Hooked)
    staged = fit_with(Hooked, gather, num_ranks, schedule)
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)
    seen = dict(sorted(one for rank in gather.ranks for one in rank))
    assert sum(map(len, gather.ranks)) == len(alone.model.seen)
    torch.testing.assert_close(seen, dict(sorted(alone.model.seen)), rtol=1e-4, atol=1e-7)


def fit_with(
    style: type[Stack], callback: Callback, num_ranks: int, schedule: str, **options: Any
) -> Fitted:
    class WithCallback(style):  # type: ignore[valid-type,misc]
        def callbacks(self) -> list[Callback]:
            return [callback]

    return fit(WithCallback, pipeline(num_ranks, schedule), **options)


class NormsLogged(Stack):
    """Gradients are looked at before the optimizer's step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for name, param in self.named_parameters():
            if param.grad is not None and param.numel():
                self.log(f"norm/{name}", param.grad.norm())


def test_each_rank_logs_the_gradients_of_its_stages() -> None:
    alone, staged = fit(NormsLogged), fit(NormsLogged, pipeline(2, "1f1b"))
    expected = alone.trainer.callback_metrics
    assert set(staged.trainer.callback_metrics) == {
        f"norm/{name}"
        for name, _ in alone.model.named_parameters()
        if name.startswith(("embed", "blocks.0", "blocks.1"))
    }
    for name, value in staged.trainer.callback_metrics.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-7)


# --- the batch ---------------------------------------------------------------------------------


class Texts(Dataset[Any]):
    """Padded samples with masks, strings and numbers."""

    def __len__(self) -> int:
        return BATCH * NUM_BATCHES - 5  # the last batch is smaller, and of an odd size

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, classes = (part[index] for part in samples())
        mask = torch.arange(WIDTH) < 3 + index % 5
        return {"x": inputs, "y": classes, "mask": mask, "name": f"text {index}"}


class MaskedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor, *, scale: float) -> Tensor:
        return x + scale * (super().forward(x) - x) * mask


class Dictionaries(Stack):
    """Batches are dictionaries; the blocks take masks of them and numbers."""

    block = MaskedBlock

    def dataset(self) -> Any:
        return Texts()

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset(), BATCH, collate_fn=self.collate)

    @staticmethod
    def collate(parts: list[dict[str, Any]]) -> dict[str, Any]:
        tensors = {key: torch.stack([part[key] for part in parts]) for key in ("x", "y", "mask")}
        names = [part["name"] for part in parts]
        return tensors | {"names": names, "scale": 0.5, "table": torch.eye(4), "kind": "text"}

    def loss(self, batch: Mapping[str, Any]) -> Tensor:
        assert len(batch["names"]) == len(batch["x"])
        assert batch["kind"] == "text"
        x = self.embed(batch["x"] @ batch["table"])
        for block in self.blocks:
            x = block(x, batch["mask"], scale=batch["scale"])
        return F.cross_entropy(self.head(x), batch["y"])


@pytest.mark.parametrize(("num_ranks", "schedule"), ALL_PIPELINES)
def test_dictionaries_with_masks_and_strings(num_ranks: int, schedule: str) -> None:
    check(Dictionaries, num_ranks, schedule, num_microbatches=2 * num_ranks)


# --- random numbers ----------------------------------------------------------------------------


class Noisy(Stack):
    """Noise and a time for each sample, drawn in the step, which is also the target."""

    class block(Block):  # noqa: D106, N801
        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return super().forward(x + time)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise, time = torch.randn_like(batch[0]), torch.rand(len(batch[0]), 1)
        self.seen.append((noise.sum().item(), time.sum().item()))
        x = self.embed(batch[0] + noise)
        for block in self.blocks:
            x = block(x, time)
        return F.mse_loss(self.head(x), noise[:, :3] * time)


@pytest.mark.parametrize(("num_ranks", "schedule"), ALL_PIPELINES)
def test_a_step_draws_the_same_on_every_stage(num_ranks: int, schedule: str) -> None:
    gather = OfEveryRank()
    fit_with(Noisy, gather, num_ranks, schedule, max_epochs=1)
    drawn = [set(rank) for rank in gather.ranks]
    assert all(one == drawn[0] for one in drawn)
    assert len(drawn[0]) == NUM_BATCHES * 2 * num_ranks  # differs between microbatches


class Dropping(Stack):
    """Keeps the random numbers that its blocks draw."""

    class block(Block):  # noqa: D106, N801
        seen: list[tuple[float, ...]]

        def forward(self, x: Tensor) -> Tensor:
            kept = F.dropout(torch.ones(64), 0.5)
            if not x.is_meta and type(x) is Tensor:
                self.seen.append(tuple(kept.tolist()))
            return super().forward(x) * kept[:WIDTH]

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, ...]] = []
        for block in self.blocks:
            block.__dict__["seen"] = self.seen


@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_stages_repeated_each_others_dropout(num_ranks: int, schedule: str) -> None:
    """Each draws of its own, in every microbatch."""
    gather = OfEveryRank()
    fit_with(Dropping, gather, num_ranks, schedule, max_epochs=1)
    drawn = [one for rank in gather.ranks for one in rank]
    microbatches = NUM_BATCHES * 2 * num_ranks
    assert len(drawn) == 4 * microbatches
    assert len(set(drawn)) == len(drawn)


class CheckpointedDropout(Checkpointed):
    """What is computed again has to draw the same again."""

    class block(Block):  # noqa: D106, N801
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()


class PlainDropout(CheckpointedDropout):
    forward = Stack.forward


@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_checkpointing_draws_the_same_dropout_again(num_ranks: int, schedule: str) -> None:
    plain = fit(PlainDropout, pipeline(num_ranks, schedule))
    checkpointed = fit(CheckpointedDropout, pipeline(num_ranks, schedule))
    assert plain.curve.losses == checkpointed.curve.losses
    torch.testing.assert_close(plain.weights, checkpointed.weights, rtol=0, atol=0)
