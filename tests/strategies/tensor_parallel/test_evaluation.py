"""Validation, test, prediction, generation and the callbacks of a run under tensor parallel."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_shard import TensorParallelStrategy
from tests.strategies.models import llama
from tests.strategies.parity import ignoring, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS
from tests.strategies.test_parity_evaluation import (
    NUM_STEPS,
    EvaluatedGPT,
    batches,
    check_evaluation,
    check_given_back,
    check_without_a_fit,
    seeded,
)
from tests.strategies.test_parity_evaluation import trainer as plain_trainer

pytestmark = ignoring()


def trainer(num_ranks: int, size: int, stage: int = 0, plan: str = "gpt", **options: Any) -> Any:
    strategy = TensorParallelStrategy(
        backend="in_process", tensor_parallel_size=size, plan=PLANS[plan], zero_stage=stage
    )
    return quiet_trainer(
        strategy=strategy, devices=num_ranks, **({"max_steps": NUM_STEPS} | options)
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("num_ranks", "size", "stage"), [(2, 2, 0), (4, 2, 3), (4, 4, 0)])
def test_fit_then_validate_test_predict_and_fit_again(
    num_ranks: int, size: int, stage: int
) -> None:
    check_evaluation(trainer(num_ranks, size, stage), num_ranks // size)


@pytest.mark.slow
def test_evaluation_without_a_fit() -> None:
    check_without_a_fit(trainer(4, 2), 2)


@pytest.mark.slow
def test_the_callers_module_is_full_and_free_after_a_fit() -> None:
    model = seeded(EvaluatedGPT)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    attributes = [sorted(vars(module)) for module in model.modules()]
    ours = trainer(4, 2, 3)
    ours.fit(model, datamodule=batches(model))
    assert {name: param.shape for name, param in model.named_parameters()} == shapes
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    check_given_back(model, ours)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("num_ranks", "size", "stage"), [(2, 2, 0), (4, 2, 3)])
def test_a_graph_that_lives_on_has_the_shape_of_its_forward(
    num_ranks: int, size: int, stage: int
) -> None:
    """Before a fit the full shape, and after it that of the part: backward failed."""
    model = seeded(EvaluatedGPT)
    text = torch.zeros(2, 8, dtype=torch.long)
    before = model(text).sum()
    fitted = trainer(num_ranks, size, stage, limit_val_batches=0)
    fitted.fit(model, datamodule=batches(model))
    after = model(text).sum()
    plain_trainer().fit(model, datamodule=batches(model))
    assert before.grad_fn is not None
    assert after.grad_fn is not None


class Writer(L.LightningModule):
    """Continues texts, greedily or by chance, with Hugging Face's `generate`."""

    def __init__(self, *, sample: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = llama().network
        self.sample = sample
        self.written: list[list[Tensor]] = []

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens: Tensor = self.network.generate(
            batch[0],
            attention_mask=torch.ones_like(batch[0]),
            max_new_tokens=6,
            do_sample=self.sample,
            pad_token_id=0,
            eos_token_id=None,
        )
        strategy = self.trainer.strategy
        if hasattr(strategy, "collectives"):
            self.written.append(strategy.collectives.all_gather_object(tokens))
        return tokens


def prompts() -> Any:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(64, (4, 5), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(text), batch_size=2)


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:.*generation")
@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("sample", [False, True])
def test_generation(sample: bool, size: int) -> None:
    full, split = Writer(sample=sample), Writer(sample=sample)
    L.seed_everything(11, verbose=False)
    expected = plain_trainer().predict(full, prompts())
    L.seed_everything(11, verbose=False)
    got = trainer(size, size, plan="llama").predict(split, prompts())
    for ranks in split.written:
        assert all(torch.equal(tokens, ranks[0]) for tokens in ranks)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_sampling_without_a_seed_writes_the_same_text_on_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sampling without a seed wrote another text on each rank."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    split = Writer(sample=True)
    trainer(2, 2, plan="llama").predict(split, prompts())
    for ranks in split.written:
        assert torch.equal(ranks[0], ranks[1])


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:You called `self.log")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize(("num_ranks", "size", "stage"), [(2, 2, 0), (4, 2, 2)])
def test_callbacks_that_watch_and_save(
    num_ranks: int, size: int, stage: int, tmp_path: Any
) -> None:
    """Ranks stop and save together; Lightning would have counted votes of the data ranks."""
    model = seeded(EvaluatedGPT)
    monitor = LearningRateMonitor("step")
    stopper = EarlyStopping("val_loss", patience=0, min_delta=100.0)
    best = ModelCheckpoint(tmp_path / "saved", "best", monitor="val_loss")
    fitted = trainer(
        num_ranks,
        size,
        stage,
        callbacks=[monitor, stopper, best],
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path),
        max_steps=-1,
        max_epochs=5,
        log_every_n_steps=1,
    )
    fitted.fit(model, datamodule=batches(model))
    assert fitted.current_epoch == 2  # the second epoch was not better by 100
    assert len(monitor.lrs) == 2
    saved = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }


class Stopping(Callback):
    """Fails in the middle of an epoch, on all ranks or on one."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and trainer.strategy.mesh_rank in self.ranks:
            raise RuntimeError("no space left")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1,), (2,)])
def test_an_exception_in_fit_ends_all_ranks_with_that_exception(ranks: tuple[int, ...]) -> None:
    model = seeded(EvaluatedGPT)
    heads = [block.num_heads for block in model.blocks]
    with pytest.raises(RuntimeError, match="no space left"):
        trainer(4, 2, callbacks=[Stopping(ranks)]).fit(model, datamodule=batches(model))
    assert [block.num_heads for block in model.blocks] == heads
    assert not [m for m in model.modules() if type(m).__module__.startswith("lightning_shard")]
