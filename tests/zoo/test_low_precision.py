"""Losses of quantised models on several ranks beside one device, and what a rank holds."""

from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_shard as ls
from tests.checkpoint.sharded.runs import quiet_trainer
from tests.zoo import low_precision as models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.zoo,
    pytest.mark.timeout(600),  # the first import of these packages takes long
    pytest.mark.filterwarnings("ignore"),  # those of the packages
]

NUM_STEPS, GLOBAL_BATCH = 5, 8
FOLDER = Path(mkdtemp()) / "llama"
MODELS: dict[str, Any] = {
    "four bits": models.four_bits,
    "eight bits": models.eight_bits,
    "inner tensors": models.inner_tensors,
    "documented": partial(models.from_pretrained, FOLDER, checkpointing=True),
    "documented, not checkpointed": partial(models.from_pretrained, FOLDER, checkpointing=False),
    "documented, a head in full": partial(
        models.from_pretrained, FOLDER, checkpointing=False, modules_to_save=["lm_head"]
    ),
}
RANKS: dict[str, Any] = {"backend": "in_process", "announce": False}
SCHEMES: dict[str, Any] = {
    "shard_ddp": partial(ls.DDPStrategy, num_ranks=2, **RANKS),
    "zero1": partial(ls.ZeRO1Strategy, num_ranks=2, **RANKS),
    "zero2": partial(ls.ZeRO2Strategy, num_ranks=2, **RANKS),
    "zero3": partial(ls.ZeRO3Strategy, num_ranks=4, **RANKS),
    "tensor_parallel": partial(ls.TensorParallelStrategy, num_ranks=2, **RANKS),
    "pipeline": partial(ls.PipelineParallelStrategy, num_ranks=2, num_microbatches=2, **RANKS),
}


class Texts(L.LightningModule):
    """A language model, and the loss of each step averaged over the ranks."""

    def __init__(self, network: nn.Module, lr: float) -> None:
        super().__init__()
        self.network, self.lr, self.losses = network, lr, list[float]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(input_ids=batch[0], labels=batch[0]).loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"].detach().clone()
        self.losses.append(float(self.trainer.strategy.reduce(loss, reduce_op="mean")))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    def train_dataloader(self) -> Any:
        stream = torch.Generator().manual_seed(3)
        shape = GLOBAL_BATCH * NUM_STEPS, models.CONTEXT
        data = TensorDataset(torch.randint(models.VOCABULARY, shape, generator=stream))
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(data, **place, shuffle=False)
        return DataLoader(data, batch_size=GLOBAL_BATCH // place["num_replicas"], sampler=sampler)


def train(make: Any, strategy: Any, lr: float = 0.5, path: Path | None = None) -> Texts:
    """Train for an epoch, or after a checkpoint at `path` for a second one."""
    torch.manual_seed(11)
    module = Texts(make(), lr)
    trainer = quiet_trainer(strategy, max_epochs=1 if path is None else 2, max_steps=-1)
    trainer.fit(module, ckpt_path=path, weights_only=False)
    assert len(module.losses) == NUM_STEPS
    return module


@cache
def on_one_device(name: str) -> Texts:
    strategy = ls.DDPStrategy(num_ranks=1, **RANKS)  # under Lightning's own layers pack anew
    return train(MODELS[name], strategy if name.startswith("documented") else "auto")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_layers_train_near_one_device(recipe: str, scheme: str) -> None:
    """A Float8Linear was nothing to split; activations' scales are a rank's own."""
    make = partial(models.float8, recipe)
    alone, module = train(make, "auto", lr=0.05), train(make, SCHEMES[scheme](), lr=0.05)
    difference = torch.tensor(module.losses) / torch.tensor(alone.losses) - 1
    assert difference.abs().max() < 5e-3


def compiled(what: str) -> nn.Module:
    network = models.float8("tensorwise")
    for one in [network] if what == "module" else network.get_submodule("model.layers").children():
        one.compile()
    return network


@pytest.mark.parametrize("scheme", ["shard_ddp", "zero3", "tensor_parallel"])
@pytest.mark.parametrize("what", ["module", "blocks"])
def test_compiled_float8_layers_train_as_uncompiled(what: str, scheme: str) -> None:
    """But for the compiler's own rounding."""
    kind = type(SCHEMES[scheme]())
    runs = [
        train(make, kind(num_ranks=2, **RANKS), lr=0.05).losses[:3]
        for make in (partial(models.float8, "tensorwise"), partial(compiled, what))
    ]
    torch.testing.assert_close(*map(torch.tensor, runs), rtol=4e-4, atol=0)


HYBRIDS: dict[str, dict[str, Any]] = {
    "shards": {},
    "copies": {"data_parallel_size": (2, 2)},
    "layers": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2, "num_microbatches": 2},
}


@pytest.mark.parametrize("split", HYBRIDS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_weights_of_float8_layers_travel_as_the_layers_round_them(recipe: str, split: str) -> None:
    """To the bit where a scale is the whole weight's; else backward rounds twice."""
    runs = []
    for chosen in (None, "float8"):
        options = {"zero_stage": 3, "gather_dtype": chosen, "num_ranks": 4}
        strategy = ls.HybridParallelStrategy(**HYBRIDS[split], **options, **RANKS)
        module = train(partial(models.float8, recipe), strategy, lr=0.05)
        weights = {key: one.detach() for key, one in module.named_parameters()}
        runs.append((torch.tensor(module.losses), weights))
    (expected, before), (losses, after) = runs
    torch.testing.assert_close(losses, expected, rtol=5e-4, atol=0)
    if recipe == "tensorwise":
        assert torch.equal(losses, expected)
        torch.testing.assert_close(after, before, rtol=0, atol=0)


class Saves(L.Callback):
    """Saves when an epoch is over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


class LooseTexts(Texts):
    """Loads what fits of a file."""

    strict_loading = False


@pytest.mark.parametrize("kind", [Texts, LooseTexts])
@pytest.mark.parametrize("layout", ["full", "sharded"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["four bits", "eight bits", "inner tensors"])
def test_a_file_of_another_base_has_its_scales_too(
    name: str, scheme: str, layout: str, kind: Any, tmp_path: Path
) -> None:
    """Scales of 4 bits were unexpected names; without them codes had those of the module's base."""
    path = tmp_path / "a.ckpt"
    torch.manual_seed(11)
    trainer = quiet_trainer(
        SCHEMES[scheme](checkpoint_format=layout),
        max_epochs=1,
        max_steps=-1,
        callbacks=[Saves(path)],
    )
    trainer.fit(Texts(MODELS[name](), 0.5))
    losses = []
    for seed in (11, 77):
        torch.manual_seed(seed)
        module = kind(MODELS[name](), 0.5)
        trainer = quiet_trainer(SCHEMES[scheme](), max_epochs=2, max_steps=-1)
        trainer.fit(module, ckpt_path=path, weights_only=False)
        losses.append(torch.tensor(module.losses))
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)


class LateTexts(Texts):
    """Loads its model when the ranks are there."""

    def __init__(self, network: nn.Module, lr: float) -> None:
        super().__init__(nn.Identity(), lr)

    def configure_model(self) -> None:
        if isinstance(self.network, nn.Identity):
            torch.manual_seed(11)
            self.network = MODELS["documented"]()


@pytest.mark.parametrize("scheme", ["zero2", "zero3"])
def test_four_bits_are_loaded_in_configure_model(scheme: str) -> None:
    module = LateTexts(nn.Identity(), 0.5)
    quiet_trainer(SCHEMES[scheme](), max_steps=NUM_STEPS).fit(module)
    expected = torch.tensor(on_one_device("documented").losses)
    torch.testing.assert_close(torch.tensor(module.losses), expected)


class LateHeld(LateTexts):
    """Notes which elements of the base that was loaded there are still there in the first step."""

    def configure_model(self) -> None:
        super().configure_model()
        packed = [one for one in self.parameters() if one.dtype == torch.uint8]
        self.bytes_loaded = sum(one.untyped_storage().nbytes() for one in packed)
        self.loaded = [StorageWeakRef(one.untyped_storage()) for one in packed]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_left = sum(not one.expired() for one in self.loaded)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        super().on_train_batch_end(outputs)
        self.held = self.trainer.strategy.held_bytes()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_base_that_a_rank_has_loaded_is_gone_before_the_first_step(num_ranks: int) -> None:
    """But for its shard."""
    module = LateHeld(nn.Identity(), 0.5)
    quiet_trainer(ls.ZeRO3Strategy(num_ranks=num_ranks, **RANKS), max_steps=1).fit(module)
    assert module.num_left == 0
    others = [one for one in module.parameters() if one.dtype != torch.uint8]
    full = module.bytes_loaded + sum(one.nbytes for one in others)
    assert module.held.parameters <= full / num_ranks * 1.01


class Held(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.bytes = trainer.strategy.held_bytes()


@pytest.mark.parametrize("scheme", ["zero2", "zero3"])
@pytest.mark.parametrize("name", ["four bits", "eight bits", "inner tensors", "documented"])
def test_a_dry_run_counts_a_quantised_base(name: str, scheme: str) -> None:
    """Layers of bitsandbytes raised, and torchao's were counted in float32."""
    batch = [torch.zeros(2, models.CONTEXT, dtype=torch.long)]
    texts, strategy = Texts(MODELS[name](), 0.5), SCHEMES[scheme]()
    found = strategy.dry_run(texts, batch, world_size=4 if scheme == "zero3" else 2)
    held = Held()
    quiet_trainer(SCHEMES[scheme](), max_steps=1, callbacks=[held]).fit(texts)
    memory = found.ranks[0].memory
    assert memory.parameters == held.bytes.parameters
    assert memory.gradients == held.bytes.gradients


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("name", ["four bits", "eight bits", "inner tensors", "documented"])
def test_adapters_go_on_on_another_number_of_ranks(
    name: str, before: int, after: int, tmp_path: Path
) -> None:
    """Scales of a frozen base stood in a file of what is trained, which nobody could load."""
    options = {"save_trainable_only": True, **RANKS}
    strategies = [ls.ZeRO3Strategy(num_ranks=one, **options) for one in (before, after)]
    alone = ls.DDPStrategy(num_ranks=1, **options)
    path = tmp_path / "alone.ckpt"
    for strategy, where in ((alone, path), (strategies[0], tmp_path / "a.ckpt")):
        torch.manual_seed(11)
        saves = [Saves(where)]
        trainer = quiet_trainer(strategy, max_epochs=1, max_steps=-1, callbacks=saves)
        trainer.fit(Texts(MODELS[name](), 0.5))
    expected = train(MODELS[name], ls.DDPStrategy(num_ranks=1, **options), path=path)
    got = train(MODELS[name], strategies[1], path=tmp_path / "a.ckpt")
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(expected.losses))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_base_trains_as_on_one_device(name: str, scheme: str) -> None:
    """Torchao's base was refused, and others in a pipeline; Hugging Face's failed in a step."""
    alone, module = on_one_device(name), train(MODELS[name], SCHEMES[scheme]())
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(alone.losses))
    after = dict(module.named_parameters())
    assert after.keys() == dict(alone.named_parameters()).keys()
    for key, expected in alone.named_parameters():
        if expected.requires_grad:
            torch.testing.assert_close(after[key], expected, rtol=1e-4, atol=1e-5)
