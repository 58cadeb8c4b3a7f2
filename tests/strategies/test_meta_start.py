"""Runs of modules that are built on meta: they are those of modules that are built on the CPU."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_shard import ConfigError, ZeRO2Strategy, ZeRO3Strategy
from tests.benchmarks.memory import EXACT_ALLOCATION
from tests.checkpoint.kept_runs import RUNS, Regressor
from tests.checkpoint.sharded.runs import LAYOUTS, quiet_trainer
from tests.checkpoint.sharded.runs import Model as Regression
from tests.data_parallel.deferred_init.counting import AliveBytes
from tests.examples.commands import ignoring_advice
from tests.processes import run_processes
from tests.strategies.meta_starts import rise_at_start
from tests.strategies.test_pretrained import Pretrained, build

pytestmark = ignoring_advice()


QUICK = ("zero3-4",)


class Later(Regression):
    """Builds in `configure_model` what the other builds at once."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.losses: list[Any] = []

    def configure_model(self) -> None:
        if hasattr(self, "scale"):
            return
        with torch.device("meta"):
            built = Regression()
        for name, part in built.named_children():
            self.add_module(name, part)
        self.scale = built.scale
        self.register_buffer("shift", built.shift)


def start(layout: str, how: str, **options: Any) -> Regression:
    """Fit a model that is built in one of three ways from one seed."""
    L.seed_everything(4, verbose=False)
    strategy = LAYOUTS[layout]()
    trainer = quiet_trainer(strategy, max_steps=2, **options)
    with trainer.init_module(empty_init=how == "meta"):
        model = Later() if how == "later" else Regression()
    on_meta = [param.is_meta for param in model.parameters()]
    assert any(on_meta) == (how == "meta")
    trainer.fit(model)
    return model


@pytest.mark.parametrize("how", ["meta", "later"])
@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in LAYOUTS]
)
def test_a_model_built_on_meta_trains_as_one_built_on_the_cpu(layout: str, how: str) -> None:
    expected, trained = start(layout, "normal"), start(layout, how)
    for name, value in expected.state_dict().items():
        assert torch.equal(trained.state_dict()[name], value), name
    frozen = [name for name, one in trained.named_parameters() if not one.requires_grad]
    assert frozen == ["embed.bias"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local_sgd", "async_sgd", "elastic", "zero2", "shard_ddp_topk"])
def test_every_other_strategy_trains_a_model_that_was_built_on_meta(name: str) -> None:
    ends = []
    for empty in (False, True):
        L.seed_everything(4, verbose=False)
        trainer = quiet_trainer(RUNS[name](), max_steps=2)
        with trainer.init_module(empty_init=empty):
            model = Regressor()
        trainer.fit(model)
        ends.append(model.state_dict())
    assert all(torch.equal(ends[1][one], value) for one, value in ends[0].items())


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(3, "parameters"), *(pytest.param(n, "optimizer", marks=pytest.mark.slow) for n in (2, 3))],
)
@pytest.mark.filterwarnings("ignore:.*offload")
def test_shards_of_a_model_built_on_meta_lie_in_host_memory(stage: int, offload: Any) -> None:
    kind = {2: ZeRO2Strategy, 3: ZeRO3Strategy}[stage]
    ends = []
    for empty in (False, True):
        L.seed_everything(4, verbose=False)
        strategy = kind(backend="in_process", num_ranks=2, offload=offload, announce=False)
        trainer = quiet_trainer(strategy, max_steps=2)
        with trainer.init_module(empty_init=empty):
            model = Regressor()
        trainer.fit(model)
        ends.append(model.state_dict())
    assert all(torch.equal(ends[1][one], value) for one, value in ends[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_a_model_built_on_meta_trains_alike_in_low_precision(precision: str) -> None:
    expected, trained = (start("zero3-4", how, precision=precision) for how in ("normal", "meta"))
    for name, value in expected.state_dict().items():
        assert torch.equal(trained.state_dict()[name], value), name


class Peak(Callback):
    """Counts what each rank has made between the set-up of a run and the start of its fit."""

    def __init__(self) -> None:
        self.above: list[int] = []
        self.allowed: list[int] = []

    def __deepcopy__(self, memo: object) -> "Peak":
        copied = Peak()
        copied.above, copied.allowed = self.above, self.allowed
        return copied

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._alive = AliveBytes()
        self._alive.__enter__()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._alive.__exit__(None, None, None)
        flats = [unit.flats for unit in trainer.strategy.engine.units]
        shards = sum(flat.shard.nbytes for unit in flats for flat in unit)
        units = [sum(flat.layout.full_numel * 4 for flat in unit) for unit in flats]
        self.above.append(self._alive.peak - shards)
        self.allowed.append(max(units))


def test_no_rank_holds_more_than_its_shards_and_one_unit_when_it_starts() -> None:
    peak = Peak()
    trainer = quiet_trainer(
        ZeRO3Strategy(backend="in_process", num_ranks=4, bucket_mb=0.01, announce=False),
        max_steps=0,
        callbacks=[peak],
    )
    with trainer.init_module(empty_init=True):
        model = Regression()
        model.blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    trainer.fit(model)
    assert len(peak.above) == 4
    small = 2048  # what is no parameter, as the state of a generator is not: a few numbers
    for above, allowed in zip(peak.above, peak.allowed, strict=True):
        assert 0 < above <= allowed + small
        assert allowed < 64 * 65 * 8 * 4 / 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_resident_set_of_a_process_rises_by_its_shards_and_one_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in EXACT_ALLOCATION.items():
        monkeypatch.setenv(name, value)
    for found in run_processes(rise_at_start, 2, fresh=True, on_meta=True):
        assert found["shards"] < found["rise"] < found["shards"] + 1.75 * found["unit"]
    for found in run_processes(rise_at_start, 2, fresh=True, on_meta=False):
        assert found["rise"] > 3 * found["shards"]


@pytest.mark.slow
def test_a_folder_of_safetensors_is_read_into_shards(tmp_path: Path) -> None:
    stored = build("tied")
    stored.save_pretrained(tmp_path)
    peak = Peak()
    module = Pretrained("tied", tmp_path)
    strategy = LAYOUTS["zero3-4"]()
    quiet_trainer(strategy, max_steps=1, callbacks=[peak]).fit(module)
    for above, allowed in zip(peak.above, peak.allowed, strict=True):
        assert above <= allowed + 2**14
    for one, other in zip(module.network.parameters(), stored.parameters(), strict=True):
        assert torch.equal(one, other)
    assert module.network.lm_head.weight is module.network.model.embed_tokens.weight
    rotary = (one.model.rotary_emb.inv_freq for one in (module.network, stored))
    assert torch.equal(*rotary)


def test_from_pretrained_in_configure_model_gives_what_it_gives_elsewhere(tmp_path: Path) -> None:
    import transformers

    stored = build("tied")
    stored.save_pretrained(tmp_path)

    class FromPretrained(Pretrained):
        def configure_model(self) -> None:
            if self.network is None:
                self.network = transformers.AutoModelForCausalLM.from_pretrained(self.folder)
                self.network.train()

    module = FromPretrained("tied", tmp_path)
    quiet_trainer(LAYOUTS["zero3-3"](), max_steps=1).fit(module)
    for one, other in zip(module.network.parameters(), stored.parameters(), strict=True):
        assert torch.equal(one, other)
    rotary = (one.model.rotary_emb.inv_freq for one in (module.network, stored))
    assert torch.equal(*rotary)


@pytest.mark.slow
def test_a_model_on_meta_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    trainer = quiet_trainer(LAYOUTS["zero3-3"](), max_steps=2)
    normal = Regression()
    trainer.fit(normal)
    trainer.save_checkpoint(path)
    ends = []
    for empty in (False, True):
        trainer = quiet_trainer(LAYOUTS["zero3-3"](), max_steps=4)
        with trainer.init_module(empty_init=empty):
            model = Regression()
        trainer.fit(model, ckpt_path=path)
        ends.append(model.state_dict())
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), name


def test_an_evaluation_may_begin_on_meta() -> None:
    results = []
    for empty in (False, True):
        L.seed_everything(4, verbose=False)
        trainer = quiet_trainer(LAYOUTS["zero3-3"](), limit_val_batches=1)
        with trainer.init_module(empty_init=empty):
            model = Regression()
        trainer.validate(model, verbose=False)
        results.append(model.state_dict())
    assert all(torch.equal(results[1][name], value) for name, value in results[0].items())


def test_a_fit_names_what_has_no_values() -> None:
    trainer = quiet_trainer(LAYOUTS["zero3-3"](), max_steps=1)
    with trainer.init_module(empty_init=True):
        model = Regression()
        model.token = nn.Parameter(torch.empty(3))
    with pytest.raises(ConfigError, match="'token' of Model on meta would be"):
        trainer.fit(model)
