"""A plan counts states in blocks and frozen bases in few bits, and says what such would bring."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lightning_shard
from lightning_shard.optim.blockwise import bytes_in_blocks
from lightning_shard.planning.anatomy import Anatomy
from lightning_shard.planning.candidates import PlanCandidate
from lightning_shard.planning.estimate import Estimator
from lightning_shard.planning.machine import machine_profile
from lightning_shard.planning.search import dry_run_of_candidate
from tests.optim.blockwise_optimizers import OPTIMIZERS, table
from tests.optim.test_blockwise import Wide, parts_of, style
from tests.planning.test_estimates import PLAIN, STAGES, check
from tests.strategies.test_quantised import WIDTH, Net

FAST = machine_profile("h100")
SLOW = replace(FAST, network_bytes_per_second=1e4)
ONE_SAMPLE: Any = [torch.empty(1, 4), torch.zeros(1, dtype=torch.long)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_in_blocks_is_counted_as_one_device_has_it(kind: str) -> None:
    optimizer = style(kind, Wide)().configure_optimizers()
    counted = sum(bytes_in_blocks([optimizer]).values())
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    parts = parts_of(dict(optimizer.state))
    assert counted == sum(one.nbytes for one in parts if one.ndim and one.numel() != len(table()))


def test_a_large_parameter_without_elements_is_counted_by_fewer() -> None:
    """Blocks that do not end with a parameter leave its state as it is, as torchao has it."""
    sizes = [2**30 + 8, 2**30, 48]
    params = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    counted = bytes_in_blocks([OPTIMIZERS["one tensor"](params, lr=0.1)])
    per_element = [counted[one] / one.numel() for one in params]
    assert per_element == pytest.approx([4, 1 + 4 / 16, 4])


class OfMatrices(torch.optim.Optimizer):
    """Keeps a code for each element of matrices, and a scale for each block, and takes no more."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                rows, columns = param.shape
                state = self.state[param]
                state["codes"] = torch.zeros(rows, columns, dtype=torch.uint8)
                state["scales"] = torch.zeros(rows * columns // 64)


def test_state_is_counted_for_tensors_of_as_many_dimensions() -> None:
    """It was tried with vectors, and a plan said that the training step had raised."""
    shapes = [(64, 3), (2**16, 2**10), (0, 4)]
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    counted = bytes_in_blocks([OfMatrices(params, {"lr": 0.1})])
    numels = [one.numel() for one in params[:2]]
    assert [counted[one] for one in params[:2]] == [numel + numel // 64 * 4 for numel in numels]
    assert params[2] not in counted


def test_a_plan_counts_the_state_of_the_modules_optimizer() -> None:
    """It was Adam's two values in float32, whichever optimizer the module makes."""
    states = []
    for model in (Wide(), style("entries", Wide)()):
        found = lightning_shard.plan(model, ONE_SAMPLE, devices=2, precision="32-true")
        states.append({one.candidate: one.memory.optimizer_state for one in found.estimates})
        chosen = found.recommendation
        assert chosen is not None
        full = max(states[-1].values()) / (2 if chosen.candidate.zero_stage else 1)
        assert chosen.memory.optimizer_state == pytest.approx(full, rel=0.01)  # of a dry run
    shares = [states[1][made] / state for made, state in states[0].items() if state]
    assert [min(shares), max(shares)] == pytest.approx([0.157, 0.157], abs=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"zero_stage": 2}, {"zero_stage": 3}, STAGES])
def test_a_base_made_of_several_tensors_is_counted_as_in_a_dry_run(options: Any) -> None:
    """A plan failed: its copy on meta had the inner tensors, by names that no module has."""
    anatomy = Anatomy(Net("several"), [torch.empty(2, WIDTH)], "32-true", None)
    made = PlanCandidate(**{**PLAIN, **options})
    told = Estimator(anatomy, FAST, 4).estimate(made)
    assert told.memory.parameters < 4 * sum(one.numel() for one in anatomy.module.parameters())
    check(told, dry_run_of_candidate(anatomy, made))


def advice(model: Any, **options: Any) -> str:
    found = lightning_shard.plan(
        model, ONE_SAMPLE, **{"devices": 2, "precision": "32-true", "machine": FAST, **options}
    )
    assert all(line in str(found).replace("\n", " ") for line in found.low_precision)
    assert found.to_dict()["low_precision"] == list(found.low_precision)
    return "; ".join(found.low_precision)


@pytest.mark.slow
def test_what_does_not_fit_is_told_what_holds_less() -> None:
    limit = 2**20
    assert "AdamW8bit" not in advice(style("entries", Wide)(), device_memory=1000)
    assert advice(Wide()) == ""
    told = advice(Wide(), device_memory=limit)
    assert told.startswith("optimizer: {class_path: bitsandbytes.optim.AdamW8bit}: ")
    frozen = Wide()
    frozen.head.requires_grad_(False)
    assert "BitsAndBytesConfig(load_in_4bit=True): " in advice(frozen, device_memory=1000)


@pytest.mark.slow
def test_what_waits_for_links_is_told_what_sends_less() -> None:
    told = advice(Wide(), nodes=2, machine=SLOW, device_memory=2**30)
    assert "compression: int4" in told
    assert "% of a step is waiting for links between nodes" in told
    assert advice(Wide(), machine=SLOW, device_memory=2**30) == ""  # one node
