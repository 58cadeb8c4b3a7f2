"""Folders in a run: to the bit, nothing gathered, other hooks, misfits, evaluation, top-k."""

import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_shard import AsyncSGDStrategy, ElasticStrategy, LocalSGDStrategy, ZeRO3Strategy
from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.run_folders import RunFolders
from lightning_shard.checkpoint.sharded.folder import StoredFolder, StoredTensor
from lightning_shard.errors import CheckpointError, ConfigError
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from tests.checkpoint.sharded.runs import LAYOUTS, SAVED_AFTER, Model, fit, quiet_trainer, saving
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice(
    "Be aware that when using `ckpt_path`",
    "The dirpath has changed",
    "A step uses 1 parameters outside of their stage",
    "A training step changes buffers",
    "Using ModelCheckpoint with manual optimization",
)
RANKS: dict[str, Any] = {"backend": "in_process", "num_ranks": 2, "announce": False}


def sharded(layout: str) -> Any:
    return LAYOUTS[layout](checkpoint_format="sharded")


def made(kind: Callable[..., Model] = Model, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**options)


SLOW = pytest.mark.slow


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "layout",
    [
        "zero3-4",
        pytest.param("tensor-4", marks=SLOW),
        "pipeline-2",
        pytest.param("hybrid-8", marks=SLOW),
    ],
)
def test_an_unchanged_layout_goes_on_to_the_bit_with_dropout(layout: str, tmp_path: Path) -> None:
    whole = made(dropout=0.3)
    path = saving(sharded(layout), tmp_path, whole)
    torch.manual_seed(99)  # as in another process
    again = fit(sharded(layout), made(dropout=0.3), ckpt_path=path)
    assert again.losses == whole.losses[SAVED_AFTER:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


STEPS_OF_CHECKPOINTS = (
    "lightning_module_state_dict",
    "optimizer_state",
    "save_checkpoint",
    "load_checkpoint",
    "load_model_state_dict",
    "read_weights",
    "load_optimizer_state_dict",
)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("layout", ["zero3-4", "tensor-4"])
def test_nothing_is_gathered_while_saving_and_loading(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, gathered, entered = list[str](), list[str](), set[str]()

    def counting(name: str) -> None:
        owner = RunFolders if name == "read_weights" else DataParallelStrategy
        real = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            inside.append(name)
            entered.add(name)
            try:
                return real(*args, **kwargs)
            finally:
                inside.remove(name)

        monkeypatch.setattr(owner, name, called)

    def watching(name: str) -> Any:
        real = getattr(Collectives, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            gathered.extend(inside[:1])
            return real(*args, **kwargs)

        return called

    for name in STEPS_OF_CHECKPOINTS:
        counting(name)
    for name in ("all_gather", "broadcast", "all_reduce"):
        monkeypatch.setattr(Collectives, name, watching(name))
    path = saving(sharded(layout), tmp_path, made())
    fit(sharded(layout), made(), ckpt_path=path)
    assert entered == set(STEPS_OF_CHECKPOINTS)
    assert not gathered


@pytest.mark.slow
def test_saved_after_the_fit(tmp_path: Path) -> None:
    for layout in ("zero3-4", "pipeline-2"):
        model = made()
        trainer = quiet_trainer(sharded(layout))
        trainer.fit(model)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        full = quiet_trainer(LAYOUTS[layout]())
        other = made()
        full.fit(other)
        full.save_checkpoint(tmp_path / "full.ckpt")
        for path in (tmp_path / "last.ckpt", tmp_path / "full.ckpt"):
            again = fit(LAYOUTS["zero1-3"](), made(), ckpt_path=path, max_steps=6)
            assert len(again.losses) == 2
            model.losses += again.losses
        torch.testing.assert_close(model.losses[-2:], model.losses[-4:-2], rtol=0, atol=0)


@pytest.mark.parametrize(
    "layout", ["zero3-4", *(pytest.param(name, marks=SLOW) for name in ("tensor-4", "pipeline-2"))]
)
def test_evaluation_of_a_folder(layout: str, tmp_path: Path) -> None:
    trained = made()
    path = saving(sharded("zero2-2"), tmp_path, trained)
    full = saving(LAYOUTS["zero2-2"](), tmp_path / "full", made())

    class Validated(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def loss(ckpt_path: Path) -> float:
        trainer = quiet_trainer(LAYOUTS[layout](), limit_val_batches=2)
        (metrics,) = trainer.validate(made(Validated), ckpt_path=ckpt_path, verbose=False)
        return metrics["loss"]

    assert loss(path) == loss(full)


class Renamed(Model):
    """A model of which old checkpoints called the head otherwise."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Rename what was renamed."""
        state = checkpoint["state_dict"]
        for name in [name for name in state if name.startswith("head.")]:
            state[name] = state.pop(name) * 1.0


class Converting(nn.Linear):
    """A layer that loads its weight negated."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.slow
def test_hooks_of_the_module_are_given_full_tensors(tmp_path: Path) -> None:
    whole = made()
    path = saving(sharded("zero3-4"), tmp_path, whole)
    again = fit(sharded("zero3-4"), made(Renamed), ckpt_path=path)
    torch.testing.assert_close(again.losses, whole.losses[SAVED_AFTER:], rtol=1e-5, atol=0)

    class Negated(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = Converting(8, 1)

    negated = fit(sharded("zero3-4"), made(Negated), ckpt_path=path, max_steps=2)
    saved = torch.load(saving(LAYOUTS["zero3-4"](), tmp_path / "full", made()), weights_only=False)
    torch.testing.assert_close(
        negated.head.weight.detach(), -saved["state_dict"]["head.weight"], rtol=0, atol=0
    )


class Wider(Model):
    """A model with another head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)


class OneGroup(Model):
    """A model with an optimizer of other groups."""

    def configure_optimizers(self) -> Any:
        """Return Adam in one group."""
        return torch.optim.Adam(self.parameters())


class OtherGroups(Model):
    """A model whose second group holds what the first held."""

    def configure_optimizers(self) -> Any:
        """Return Adam in two groups of as many parameters."""
        params = list(self.parameters())
        groups = [{"params": params[-2:]}, {"params": params[:-2]}]
        return torch.optim.Adam(groups)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Wider, r"'head.weight' has shape \(1, 8\), expected \(3, 8\)"),
        (OneGroup, r"groups of \[2, 11\] parameters, expected \[13\]"),
        (OtherGroups, "group 0 of the state of Adam holds"),
    ],
)
def test_misfits_are_told_before_anything_changes(
    kind: type[Model], message: str, tmp_path: Path
) -> None:
    path = saving(sharded("zero3-4"), tmp_path, made())
    model = made(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        fit(sharded("zero3-3"), model, ckpt_path=path)
    for name, value in before.items():
        assert torch.equal(value, model.state_dict()[name])


def test_the_best_and_the_last_folder_are_kept(tmp_path: Path) -> None:
    writer = ModelCheckpoint(
        tmp_path, "{step}", monitor="step", mode="max", save_top_k=2, save_last=True,
        every_n_train_steps=1,
    )  # fmt: skip
    model = fit(sharded("zero2-2"), made(), callbacks=[writer], enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "last.ckpt", "step=3.ckpt", "step=4.ckpt"
    ]  # fmt: skip
    again = fit(sharded("zero2-2"), made(), ckpt_path=tmp_path / "last.ckpt", max_steps=5)
    assert len(model.losses) == 4
    assert len(again.losses) == 1


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "strategy",
    [
        lambda **o: LocalSGDStrategy(**RANKS, sync_every=2, **o),
        lambda **o: AsyncSGDStrategy(**RANKS, staleness_bound=0, **o),
        lambda **o: ElasticStrategy(**RANKS, scheme="zero2", **o),
        lambda **o: LAYOUTS["shard_ddp-2"](compression="topk", **o),
    ],
    ids=["local_sgd", "async_sgd", "elastic", "topk"],
)
def test_schemes_with_state_of_their_own(strategy: Any, tmp_path: Path) -> None:
    path = saving(strategy(checkpoint_format="sharded"), tmp_path / "sharded", made())
    full = saving(strategy(), tmp_path / "full", made())
    assert path.is_dir()
    again = fit(strategy(), made(), ckpt_path=path)
    expected = fit(strategy(), made(), ckpt_path=full)
    torch.testing.assert_close(again.losses, expected.losses, rtol=1e-6, atol=0)


def test_an_incomplete_folder_is_no_checkpoint(tmp_path: Path) -> None:
    path = saving(sharded("zero2-2"), tmp_path, made())
    (path / ".metadata").unlink()
    (path / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match=r"without \.metadata"):
        fit(sharded("zero2-2"), made(), ckpt_path=path)
    shutil.rmtree(path)


def test_a_damaged_file_of_a_folder(tmp_path: Path) -> None:
    path = saving(sharded("zero2-2"), tmp_path, made())
    file = path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is damaged"):
        fit(sharded("zero2-2"), made(), ckpt_path=path)


def test_weights_alone(tmp_path: Path) -> None:
    writer = ModelCheckpoint(tmp_path, "weights", save_weights_only=True, every_n_train_steps=2)
    model = fit(sharded("zero3-4"), made(), callbacks=[writer], enable_checkpointing=True)
    keys = dcp.FileSystemReader(str(tmp_path / "weights.ckpt")).read_metadata().state_dict_metadata
    assert all(key.startswith("state_dict.") for key in keys)
    state = {"state_dict": {name: torch.zeros_like(v) for name, v in model.state_dict().items()}}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(state, checkpoint_id=tmp_path / "weights.ckpt")
    assert isinstance(state["state_dict"]["head.weight"], Tensor)
    assert isinstance(model, L.LightningModule)


class Two(Model):
    """Two optimizers by hand, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.never = nn.Linear(3, 3)

    def configure_optimizers(self) -> Any:
        """Return an optimizer of each kind."""
        first = [*self.embed.parameters(), *self.never.parameters()]
        rest = [*self.blocks.parameters(), *self.head.parameters()]
        return [torch.optim.Adam(first, lr=1e-2), torch.optim.SGD(rest, lr=1e-2, momentum=0.9)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Step both."""
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return {"loss": loss.detach()}


class Tied(Model):
    """A weight at two places, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 8)
        self.other.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Use the weight twice."""
        x, y = batch
        hidden = self.norm(self.blocks(self.embed(x) + self.other(x)))
        return (self.scale * self.head(hidden) + self.shift - y).square().mean()


class LineSearch(Model):
    """An optimizer with lists in its state."""

    def configure_optimizers(self) -> Any:
        """Return LBFGS."""
        params = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.LBFGS(params, lr=1e-2, max_iter=2, history_size=3)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("kind", "layout", "precision"),
    [
        (Tied, "pipeline-2", "32-true"),
        (LineSearch, "shard_ddp-2", "32-true"),
        (Model, "zero3-3", "bf16-mixed"),
        pytest.param(Tied, "zero3-4", "32-true", marks=SLOW),
        pytest.param(Model, "zero1-3", "bf16-true", marks=SLOW),
        pytest.param(Model, "tensor-4", "bf16-mixed", marks=SLOW),
    ],
)
def test_other_models_optimizers_and_formats(
    kind: type[Model], layout: str, precision: str, tmp_path: Path
) -> None:
    whole = made(kind)
    path = saving(sharded(layout), tmp_path, whole, precision=precision)
    again = fit(LAYOUTS[layout](), made(kind), ckpt_path=path, precision=precision)
    assert again.losses == whole.losses[-len(again.losses) :]


def test_two_optimizers_by_hand(tmp_path: Path) -> None:
    writer = ModelCheckpoint(  # after two batches, of two steps each
        tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1, save_on_train_epoch_end=False
    )
    options = {"callbacks": [writer], "enable_checkpointing": True, "max_steps": 8}
    whole = fit(sharded("zero3-3"), made(Two), **options)
    path = tmp_path / "step=4.ckpt"
    again = fit(LAYOUTS["zero1-3"](), made(Two), ckpt_path=path, max_steps=8)
    torch.testing.assert_close(again.losses, whole.losses[-2:], rtol=1e-5, atol=0)


def test_a_plugin_that_a_folder_would_pass_over_is_refused(tmp_path: Path) -> None:
    class Mine(TorchCheckpointIO):
        pass

    trainer = quiet_trainer(sharded("zero2-2"), plugins=[Mine()])
    trainer.fit(made())
    with pytest.raises(ConfigError, match="without a CheckpointIO, got Mine"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


class Unpicklable(L.Callback):
    """Keeps something that nobody can pickle."""

    def state_dict(self) -> dict[str, Any]:
        """Return a function without a name."""
        return {"key": lambda: None}


@pytest.mark.parametrize("async_save", [False, True])
def test_ranks_do_not_wait_for_one_that_cannot_pickle(async_save: bool, tmp_path: Path) -> None:
    """Ranks waited for one that could not pickle."""
    strategy = ZeRO3Strategy(
        backend="in_process", num_ranks=2, checkpoint_format="sharded", async_save=async_save
    )
    writer = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    with pytest.raises(CheckpointError, match=r"was not saved: .*pickle"):
        fit(strategy, callbacks=[writer, Unpicklable()], enable_checkpointing=True)
    assert os.listdir(tmp_path) == []


def test_a_rank_that_reads_a_damaged_file_before_its_peer_has_verified_it_names_it(
    tmp_path: Path,
) -> None:
    """A rank that read a damaged file before its peer verified it did not name it."""
    path = saving(sharded("zero3-4"), tmp_path, made())
    folder = StoredFolder(path)
    (path / "__1_0.distcp").write_bytes(b"")
    weights = folder.nested("state_dict")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is damaged: it has 0 bytes"):
        deque(map(StoredTensor.read, weights.values()), maxlen=0)
