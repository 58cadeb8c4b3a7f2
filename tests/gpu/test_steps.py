"""Steps of the engine on GPUs: communication beside computing, memory by formula, graphs."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.benchmarks.entries import CONTENDERS
from tests.benchmarks.memory import Footprint, measure_footprint
from tests.benchmarks.model import build_model, make_batch
from tests.benchmarks.overlap import hidden_shares
from tests.benchmarks.ranks import Ranks, finish, own_device
from tests.gpu.machine import num_gpus
from tests.gpu.waits import REASONS_ON_GPUS, fit_on_gpu
from tests.gpu_like.__main__ import every_fit
from tests.gpu_like.fits import CASES, COUNTED
from tests.gpu_like.reasons import unexplained
from tests.gpu_like.test_steps import may_wait
from tests.processes import run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HELD = {  # bytes of a parameter in fp32 with AdamW on each of W ranks
    "shard_ddp": lambda num_ranks: 16,
    "zero1": lambda num_ranks: 8 + 8 / num_ranks,
    "zero2": lambda num_ranks: 4 + 12 / num_ranks,
    "zero3": lambda num_ranks: 16 / num_ranks,
}


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", HELD)
def test_something_is_computed_while_gpus_communicate(name: str) -> None:
    assert Ranks(2, "cuda").run(hidden_shares, "gpt", [name])[name] > 0


@cache
def footprint(name: str) -> Footprint:
    return measure_footprint(Ranks(num_gpus(), "cuda"), "gpt", name)


@pytest.mark.parametrize("name", HELD)
def test_no_more_is_held_between_steps_than_the_formula_says(name: str) -> None:
    num_params = sum(param.numel() for param in build_model("gpt").parameters())
    assert footprint(name).held_bytes <= 1.01 * num_params * HELD[name](num_gpus())


@pytest.mark.gpus(2)
def test_the_peak_of_zero3_is_at_most_that_of_fsdp2_with_resharding() -> None:
    assert footprint("zero3").peak_bytes <= footprint("fsdp2_reshard").peak_bytes


@pytest.mark.gpus(2)
def test_each_stage_has_a_smaller_peak_than_the_one_before() -> None:
    peaks = [footprint(name).peak_bytes for name in HELD]
    assert all(more > less for more, less in pairwise(peaks))


# --- graphs: not of stage 3, whose parameters come and go where a graph has fixed addresses -------


def differentiate(contender: Any, batch: tuple[Tensor, Tensor]) -> None:
    with contender.computing():
        loss = contender.module(*batch)
        contender.optimizer.zero_grad()
        with contender.reducing():
            loss.backward()


def gradients_of(contender: Any) -> list[Tensor]:
    return [one.clone() for one in contender.gradients()]


def replay(rank: int, name: str) -> list[float]:
    """Return the largest difference of replayed and plain gradients, for three batches."""
    contender = CONTENDERS[name].make(build_model("tiny").to(own_device()))
    batches = [make_batch(step, rank, own_device()) for step in range(3)]
    expected = []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as torch's page on graphs has it: warm up on a side stream
        for batch in batches:
            differentiate(contender, batch)
            expected.append(gradients_of(contender))
    torch.cuda.current_stream().wait_stream(side)
    static = tuple(one.clone() for one in batches[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        differentiate(contender, static)
    differences = []
    for batch, plain in zip(batches, expected, strict=True):
        for into, one in zip(static, batch, strict=True):
            into.copy_(one)
        graph.replay()
        finish()
        found = zip(contender.gradients(), plain, strict=True)
        differences.append(max(float((one - other).abs().max()) for one, other in found))
    return differences


@pytest.mark.parametrize("name", ["shard_ddp", "zero1", "zero2"])
def test_a_step_is_captured_in_a_graph_and_replayed(name: str) -> None:
    assert max(Ranks(num_gpus(), "cuda").run(replay, name)) < 1e-6


STAGES = ("shard_ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
FITS = sorted({name.rpartition("/")[0] for name in every_fit()})


@pytest.mark.parametrize("name", FITS)
def test_ranks_that_share_a_gpu_wait_for_nothing_without_a_reason(name: str) -> None:
    strategy, precision = name.split("/")
    seen = fit_on_gpu(strategy, precision, "in_process")
    waits = [tuple(one) for one in seen.waits]
    assert seen.num_steps == len(COUNTED)
    assert unexplained(waits, len(COUNTED) * CASES[strategy].num_ranks, REASONS_ON_GPUS) == []
    if not may_wait(f"{name}/0"):
        assert waits == []


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", STAGES)
def test_a_rank_over_nccl_waits_for_nothing_without_a_reason(strategy: str, precision: str) -> None:
    arguments = {"name": strategy, "precision": precision, "backend": "nccl", "num_ranks": 1}
    (seen,) = run_processes(fit_on_gpu, 1, fresh=True, timeout_seconds=240, **arguments)
    assert seen.num_steps == len(COUNTED)
    assert unexplained(map(tuple, seen.waits), len(COUNTED), REASONS_ON_GPUS) == []
    if not may_wait(f"{strategy}/{precision}/0"):
        assert seen.waits == []
