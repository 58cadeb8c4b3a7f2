"""Plans of quantised models, and of optimizers of few bits, beside dry runs and beside fits."""

from typing import Any

import pytest
import torch

import lightning_shard as ls
from lightning_shard.planning.anatomy import Anatomy
from lightning_shard.planning.candidates import PlanCandidate
from lightning_shard.planning.estimate import Estimator
from lightning_shard.planning.machine import machine_profile
from lightning_shard.planning.search import dry_run_of_candidate
from tests.checkpoint.sharded.runs import quiet_trainer
from tests.planning.test_estimates import PLAIN, STAGES, check
from tests.zoo import low_precision as models
from tests.zoo.test_low_precision import MODELS, Held, Texts
from tests.zoo.test_optimizers import maker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.zoo,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

BATCH = [torch.zeros(2, models.CONTEXT, dtype=torch.long)]
CANDIDATES: dict[str, dict[str, Any]] = {
    "shard_ddp": {},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "pipeline": STAGES,
}


@pytest.mark.parametrize("name", ["four bits", "eight bits", "inner tensors"])
def test_an_estimate_of_a_quantised_base_is_its_dry_run(name: str) -> None:
    """Of torchao's a plan failed; gathers of frozen weights were counted under stages 1 and 2."""
    network = MODELS[name]()
    if name == "inner tensors":  # whose backward goes through all layers, as that of adapters does
        network.get_input_embeddings().requires_grad_(True)
    anatomy = Anatomy(Texts(network, 0.5), BATCH, "32-true", None)
    estimator = Estimator(anatomy, machine_profile("h100"), 4)
    for options in CANDIDATES.values():
        made = PlanCandidate(**{**PLAIN, **options})
        check(estimator.estimate(made), dry_run_of_candidate(anatomy, made))


class TextsOf(Texts):
    """Trains by a named optimizer."""

    def __init__(self, name: str) -> None:
        super().__init__(models.llama(), 1e-3)
        self.name = name

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return maker(self.name)(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "name", ["bitsandbytes.AdamW8bit", "torchao.AdamW8bit", "torchao.AdamWFp8", "torchao.AdamW4bit"]
)
def test_a_plan_counts_the_state_that_a_fit_holds(
    name: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted Adam's two values in float32; tables, of 1 KiB for each moment, come besides."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    anatomy, held = Anatomy(TextsOf(name), BATCH, "32-true", None), Held()
    made = PlanCandidate(**{**PLAIN, "zero_stage": stage})
    told = Estimator(anatomy, machine_profile("h100"), 4).estimate(made).memory.optimizer_state
    kind = {2: ls.ZeRO2Strategy, 3: ls.ZeRO3Strategy}[stage]
    strategy = kind(num_ranks=4, backend="in_process", announce=False)
    quiet_trainer(strategy, max_steps=1, callbacks=[held]).fit(TextsOf(name))
    assert told == pytest.approx(held.bytes.optimizer_state, rel=0.08)
