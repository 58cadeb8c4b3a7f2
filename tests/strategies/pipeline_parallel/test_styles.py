"""Ways of writing a network and its batches, on the stages of a pipeline and on a single device."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.strategies.models import llama
from tests.strategies.parity import assert_parity, ignoring, train
from tests.strategies.pipeline_parallel.test_pipeline_parallel import single_device
from tests.strategies.stacks import (
    ALL_PIPELINES,
    BATCH,
    NUM_BATCHES,
    PIPELINES,
    WIDTH,
    Block,
    Stack,
    check,
    pipeline,
    samples,
)

pytestmark = ignoring(".* microbatches are fewer than the")


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


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("num_ranks", "schedule"), ALL_PIPELINES)
@pytest.mark.parametrize("style", NETWORKS)
def test_networks(style: type[Stack], num_ranks: int, schedule: str) -> None:
    check(style, num_ranks, schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_every_block_of_a_decoder_takes_the_encoders_output(num_ranks: int, schedule: str) -> None:
    check(EncoderDecoder, num_ranks, schedule, blocks="blocks")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
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
