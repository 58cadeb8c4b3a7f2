"""An estimate, made from a few blocks, has the figures of the whole step's dry run."""

from typing import Any

import pytest
import torch

from lightning_shard.data_parallel.offload import activations
from lightning_shard.planning.anatomy import Anatomy
from lightning_shard.planning.candidates import PlanCandidate
from lightning_shard.planning.estimate import Estimate, Estimator
from lightning_shard.planning.machine import machine_profile
from lightning_shard.planning.search import dry_run_of_candidate
from tests.strategies.models import ExampleGPT, llama
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

PLAIN: dict[str, Any] = {
    "pp": 1,
    "dp": 4,
    "tp": 1,
    "zero_stage": 0,
    "schedule": "",
    "microbatch": 3,
    "num_microbatches": 1,
}
STAGES: dict[str, Any] = {"pp": 2, "schedule": "1f1b", "num_microbatches": 4, "dp": 2}
CANDIDATES: dict[str, dict[str, Any]] = {
    "shard_ddp": {},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero2_offload": {"zero_stage": 2, "offload": "optimizer"},
    "zero3_offload": {"zero_stage": 3, "offload": "parameters"},
    "zero3, checkpointed": {"zero_stage": 3, "checkpointing": "full"},
    "zero2, activations away": {"zero_stage": 2, "activation_offload": True},
    "tensor_parallel": {"tp": 2, "zero_stage": 1},
    "pipeline": {**STAGES},
    "interleaved": {**STAGES, "schedule": "interleaved_1f1b", "zero_stage": 1},
    "hybrid": {**STAGES, "tp": 2, "zero_stage": 2, "checkpointing": "full"},
    "hybrid, activations away": {**STAGES, "tp": 2, "zero_stage": 2, "activation_offload": True},
}
_ANATOMIES: dict[tuple[str, str], Anatomy] = {}


def anatomy_of(name: str, precision: str) -> Anatomy:
    if (name, precision) not in _ANATOMIES:
        if name == "gpt":
            with torch.device("meta"):
                model: Any = ExampleGPT(num_layers=6)
        else:
            model = llama(num_layers=4)
        batch = [tensor[:2] for tensor in model.data(2).tensors]
        plan = PLANS["gpt"] if name == "gpt" else None
        _ANATOMIES[name, precision] = Anatomy(model, batch, precision, plan)
    return _ANATOMIES[name, precision]


def both(name: str, precision: str, options: dict[str, Any]) -> tuple[Estimate, Any]:
    anatomy, made = anatomy_of(name, precision), PlanCandidate(**{**PLAIN, **options})
    told = Estimator(anatomy, machine_profile("a100"), 4).estimate(made)
    return told, dry_run_of_candidate(anatomy, made)


def check(told: Estimate, run: Any) -> None:
    fullest = run.ranks[told.rank].memory
    for kind in ("parameters", "gradients", "optimizer_state", "offloaded", "gradients_in_flight"):
        held, said = vars(fullest)[kind], vars(told.memory)[kind]
        assert said == pytest.approx(held, rel=0.01, abs=64), kind
    assert told.memory.activations == pytest.approx(fullest.activations, rel=0.001)
    for axis in ("pp", "dp", "tp"):
        most = max(rank.sent[axis] for rank in run.ranks)
        assert told.sent[axis] == pytest.approx(most, rel=0.01, abs=64), axis


@pytest.fixture
def all_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors go to the host as well, of which estimates know nothing, and all leave."""
    monkeypatch.setattr(activations, "LEAST_BYTES", 1)
    monkeypatch.setattr(activations.HostActivations, "in_flight_bytes", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("all_travel")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", CANDIDATES)
def test_an_estimate_of_the_gpt_is_its_dry_run(name: str, precision: str) -> None:
    check(*both("gpt", precision, CANDIDATES[name]))


ROUNDED: dict[str, dict[str, Any]] = {
    "zero3": {},
    "selective": {"checkpointing": "selective"},
    "tensor_parallel": {"tp": 2},
    "pipeline": {**STAGES},
    "hybrid": {**STAGES, "tp": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", ROUNDED)
def test_stage_3_keeps_no_rounded_copies_of_blocks(name: str, precision: str) -> None:
    """They were estimated as under stages 0 to 2: 2 bytes a parameter of each microbatch."""
    told, run = both("gpt", precision, {**ROUNDED[name], "zero_stage": 3})
    held = run.ranks[told.rank].memory
    assert told.memory.activations == pytest.approx(held.activations, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "zero3, checkpointed", "tensor_parallel", "pipeline"])
def test_an_estimate_of_a_hugging_face_llama_is_its_dry_run(name: str) -> None:
    check(*both("llama", "32-true", CANDIDATES[name]))


@pytest.mark.slow
def test_a_candidate_that_keeps_less_is_estimated_to_keep_less() -> None:
    anatomy = anatomy_of("gpt", "32-true")
    estimator = Estimator(anatomy, machine_profile("h100"), 8)

    def peak(**options: Any) -> int:
        return estimator.estimate(PlanCandidate(**{**PLAIN, **options})).peak_bytes

    assert peak() > peak(zero_stage=1) > peak(zero_stage=2)
    assert peak(checkpointing="full", microbatch=8) < peak(microbatch=8)


@pytest.mark.slow
def test_a_slow_network_makes_a_step_longer_only_across_nodes() -> None:
    anatomy, profile = anatomy_of("gpt", "32-true"), machine_profile("h100")
    made = PlanCandidate(**{**PLAIN, "zero_stage": 1})
    inside = Estimator(anatomy, profile, 4).estimate(made)
    across = Estimator(anatomy, profile, 2).estimate(made)
    assert across.seconds > inside.seconds
    assert across.sent == inside.sent
