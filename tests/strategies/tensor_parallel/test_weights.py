"""Code that reads the weights of split layers sees them whole while a step runs."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import HybridParallelStrategy, TensorParallelStrategy
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()
WIDTH, LENGTH, VOCABULARY = 8, 6, 12
PLAN = {
    "tokens": "embedding_rowwise",
    "positions": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Block(nn.Module):
    """Asks its layers how large they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert self.up.weight.shape == (2 * WIDTH, WIDTH)
        assert len(self.up.bias) == self.down.weight.size(1) == 2 * WIDTH
        x = x.to(self.up.weight.dtype)
        return x + self.down(torch.tanh(self.up(x)))


class Positioned(L.LightningModule):
    """Refuses what is longer than its table of positions, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] > self.positions.weight.shape[0]:
            raise ValueError(f"{ids.shape[1]} positions are too many.")
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch[0])

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.square().mean() + x[..., 0].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        ids = torch.randint(VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(ids), batch_size=4)

    val_dataloader = train_dataloader


class TiedByHand(Positioned):
    """Uses the table of tokens once more, with no layer between."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        assert isinstance(self.tokens.weight, nn.Parameter)
        logits = x @ self.tokens.weight.T
        penalty = self.blocks[0].up.weight.square().sum() + self.blocks[1].down.weight.norm()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 0.01 * penalty


def fit(style: type[Positioned], strategy: Any = "auto") -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = style()
    trainer = quiet_trainer(
        strategy=strategy, max_steps=-1, max_epochs=2, accumulate_grad_batches=1,
        use_distributed_sampler=False, gradient_clip_val=None,
    )  # fmt: skip
    trainer.fit(model)
    return model.state_dict()


def strategies() -> dict[str, Any]:
    tensor = {"backend": "in_process", "plan": PLAN}
    return {
        "tensor": TensorParallelStrategy(num_ranks=2, **tensor),
        "hybrid": HybridParallelStrategy(
            num_ranks=4, pipeline_parallel_size=2, tensor_parallel_size=2, **tensor
        ),
    }


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the")
@pytest.mark.parametrize(
    ("style", "name"), [(Positioned, "tensor"), (Positioned, "hybrid"), (TiedByHand, "tensor")]
)
def test_code_that_reads_the_shape_of_a_split_weight_sees_the_full_one(
    style: type[Positioned], name: str
) -> None:
    """Code that read the shape of a split weight saw a part."""
    torch.testing.assert_close(fit(style, strategies()[name]), fit(style), rtol=1e-5, atol=2e-7)


class Attending(Positioned):
    """Lets torch's attention look at positions of another width; a penalty asks for all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.cross = nn.MultiheadAttention(
            WIDTH, 2, dropout=0.0, kdim=4, vdim=4, batch_first=True, bias=False
        )

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        seen = self.cross(self.encoder(x), x[..., :4].contiguous(), x[..., 4:].contiguous())[0]
        assert self.cross.out_proj.weight.shape == (WIDTH, WIDTH)
        penalty = torch.stack([param.square().sum() for param in self.parameters()]).sum()
        return super().loss(seen, ids) + 0.01 * penalty


def test_the_weights_of_torch_s_attention_look_full_in_a_step() -> None:
    """A penalty over all parameters was of each rank's part: the ranks' losses differed."""
    run = fit(Attending, TensorParallelStrategy(num_ranks=2, backend="in_process"))
    torch.testing.assert_close(run, fit(Attending), rtol=1e-5, atol=2e-7)
