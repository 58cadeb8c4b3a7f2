"""A checkpoint of a pipeline is a single device's file, both ways."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_shard import PipelineParallelStrategy
from tests.checkpoint.scheme_files import (
    FILTERS,
    Save,
    assert_goes_on,
    assert_same,
    assert_same_files,
    assert_shards_are_left,
    saving,
    trainer_of,
)
from tests.strategies.models import ConvNet, Trained
from tests.strategies.parity import Curve, GlobalBatches, build

pytestmark = [
    *FILTERS,
    pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]


class Normed(nn.Sequential):
    """A layer with a batch norm, whose statistics are of its stage."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())


class BatchNorms(Trained):
    """A batch norm before the blocks, one in each and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12))
        self.blocks = nn.ModuleList(Normed(12) for _ in range(8))
        self.outlet = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 10))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.inlet(batch[0].flatten(1))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.outlet(x), batch[1])

    data = staticmethod(ConvNet.data)


def build_double(name: str) -> Trained:
    """Return a model in float64: Lightning restores weights before it converts the module."""
    if name != "norms":
        model = build(name).double()
        if name.startswith("gpt2"):
            model.network.loss_function = _next_token_loss
        return model
    torch.manual_seed(7)
    return BatchNorms().double()


def _next_token_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """Hugging Face's is computed in float32, whose last digit comes out one way or the other."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@dataclass(frozen=True)
class Scheme:
    """A pipeline of so many ranks of this process, or another strategy."""

    strategy: str
    num_ranks: int
    num_microbatches: int | None = None

    def __str__(self) -> str:
        return f"{self.strategy}x{self.num_ranks}"

    def trainer(self, model: str, **options: Any) -> L.Trainer:
        strategy: Any = self.strategy
        if strategy not in ("auto", "zero3_in_process"):
            strategy = PipelineParallelStrategy(
                backend="in_process", schedule=strategy, num_microbatches=self.num_microbatches
            )
        return trainer_of(strategy, self.num_ranks, **options)


PLAIN = Scheme("auto", 1)
ZERO3 = Scheme("zero3_in_process", 2)
PP2, PP4, ZBV = Scheme("1f1b", 2), Scheme("1f1b", 4), Scheme("zbv", 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    return saving(tmp_path_factory, build_double)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        ("gpt2", PP2),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("layers", PP2),
                ("layers", PP4),
                ("layers", ZBV),
                ("gpt2_8", ZBV),
                ("gpt2_8", PP4),
                ("norms", Scheme("1f1b", 2, 1)),
                ("norms", Scheme("gpipe", 4, 1)),
            )
        ),
        # One microbatch: as any split of a batch, several have several statistics.
        ("norms", Scheme("zbv", 2, 1)),
    ],
    ids=str,
)
def test_the_file_is_that_of_a_single_device(model: str, scheme: Scheme, saved: Save) -> None:
    assert_same_files(saved(model, scheme), saved(model, PLAIN))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((one, PLAIN) for one in (PP2, PP4, ZBV)),
        *((PLAIN, one) for one in (PP2, PP4, ZBV)),
        (PP4, PP2),
        (PP2, ZBV),
        (ZERO3, PP4),
        (PP4, ZERO3),
    ],
    ids=str,
)
@pytest.mark.slow
def test_resume(before: Scheme, after: Scheme, saved: Save) -> None:
    file = saved("layers", before).first_epoch
    assert_goes_on(build_double("layers"), "layers", file, after, saved("layers", PLAIN))


@pytest.mark.parametrize("name", ["layers", pytest.param("gpt2_8", marks=pytest.mark.slow)])
def test_one_curve_through_many_schemes(name: str, tmp_path: Path) -> None:
    """An epoch of two steps on each, every run from the file of the one before."""
    schemes = (PP4, PP2, PLAIN, ZERO3, ZBV, PP4)
    full, expected = build_double(name), Curve()
    PLAIN.trainer(name, callbacks=[expected], max_steps=2 * len(schemes)).fit(
        full, datamodule=GlobalBatches(full, 2)
    )
    curves, file, model = [], None, full
    for number, scheme in enumerate(schemes):
        model, curve = build_double(name), Curve()
        writer = ModelCheckpoint(tmp_path / str(number), "last", every_n_train_steps=2)
        options: Any = {"callbacks": [curve, writer], "enable_checkpointing": True}
        scheme.trainer(name, max_steps=2 * (number + 1), **options).fit(
            model, datamodule=GlobalBatches(model, 2), ckpt_path=file
        )
        file = tmp_path / str(number) / "last.ckpt"
        curves.append(curve)
    assert_same([loss for curve in curves for loss in curve.losses], expected.losses)
    assert_same([norm for curve in curves for norm in curve.norms], expected.norms)
    assert_same(dict(model.state_dict()), dict(full.state_dict()))


@pytest.mark.slow
def test_plain_torch_and_lightning_load_the_weights(saved: Save, tmp_path: Path) -> None:
    run = saved("norms", Scheme("zbv", 2, 1))
    model = build_double("norms")
    model.load_state_dict(torch.load(run.last_epoch, weights_only=True)["state_dict"])
    assert_same(dict(model.state_dict()), dict(run.model.state_dict()))
    loaded = BatchNorms.load_from_checkpoint(run.last_epoch).double()
    loss = loaded.eval().loss([torch.ones(2, 1, 8, 8).double(), torch.tensor([1, 2])])
    assert loss.isfinite()


@pytest.mark.parametrize("scheme", [PP2, ZBV], ids=str)
def test_a_failed_fit_leaves_nothing_that_can_be_mistaken_for_a_full_model(
    scheme: Scheme, tmp_path: Path
) -> None:
    assert_shards_are_left("layers", scheme, ZERO3, tmp_path / "broken.ckpt")
