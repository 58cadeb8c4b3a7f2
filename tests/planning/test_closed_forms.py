"""The 512-GPU layout of a 100B-parameter GPT against formulas: 8 stages x 8 tensor x 8 data."""

from functools import cache

import pytest

from examples.dry_run_100b import CONTEXT, NUM_LAYERS, VOCABULARY, WIDTH, dry_run
from lightning_shard.planning.report import DryRun

pytestmark = pytest.mark.slow  # the plan itself takes half a minute

L, H, S, V = NUM_LAYERS, WIDTH, CONTEXT, VOCABULARY
P, T, D, M = 8, 8, 8, 64
INNER = range(1, P - 1)  # stages with neither embedding nor output layer
BLOCKS = L // P
# Of one rank: matrices, and vectors; biases of columns are cut, those of rows and norms are not.
MATRICES = BLOCKS * 12 * H * H // T
VECTORS = BLOCKS * (7 * H // T + 6 * H)
HALF, SINGLE = 2, 4
SHARE = (D - 1) / D


@cache
def run(precision: str) -> DryRun:
    return dry_run(precision=precision)


def test_parameters() -> None:
    """arXiv:2104.04473, equation 2; it leaves the last norm out."""
    formula = 12 * L * H**2 * (1 + 13 / (12 * H) + (V + S) / (12 * L * H))
    told = run("bf16-mixed")
    assert told.mesh.world_size == 512
    assert told.num_parameters == round(formula) + 2 * H
    assert {told.ranks[stage].num_parameters for stage in INNER} == {MATRICES + VECTORS}


def test_bytes_of_mixed_precision() -> None:
    """Full parameters are kept in fp32, as on one device; ZeRO stage 1 divides Adam's moments."""
    for memory in (run("bf16-mixed").ranks[stage].memory for stage in INNER):
        full = SINGLE * (MATRICES + VECTORS)
        assert memory.parameters == memory.gradients == pytest.approx(full, rel=1e-4)
        assert memory.optimizer_state == pytest.approx(memory.gradients * 2 / D, rel=1e-4)


@pytest.mark.parametrize(
    "precision",
    ["bf16-true", "bf16-mixed"],  # norms give fp32, but their gradients are those of casts
)
def test_traffic_of_tensor_parallel(precision: str) -> None:
    """arXiv:1909.08053: of every layer and microbatch two all-reduces forward, two backward."""
    all_reduce = 2 * (T - 1) / T * S * H * HALF
    expected = 4 * all_reduce * BLOCKS * M
    assert {run(precision).ranks[stage].sent["tp"] for stage in INNER} == {expected}


def test_traffic_of_data_parallel() -> None:
    """Gradients are averaged in fp32, parameters come in bf16; and what ranks agree on."""
    for stage in INNER:
        expected = (SINGLE + HALF) * (MATRICES + VECTORS) * SHARE
        assert run("bf16-true").ranks[stage].sent["dp"] == pytest.approx(expected, rel=1e-6)


def test_traffic_of_pipeline_parallel() -> None:
    """One activation up and one gradient down a microbatch; the ends sum the tied embedding."""
    first, *inner, last = (one.sent["pp"] for one in run("bf16-true").ranks)
    activations = M * S * H * HALF
    assert set(inner) == {2 * activations}
    assert first == last == activations + SINGLE * V // T * H


def test_activations() -> None:
    """arXiv:2205.05198, equation 2: sbh (10 + 24 / t) a layer, without 2 for masks of dropout.

    Attention keeps no probabilities. Stage i of 1F1B has p - i microbatches in flight, and keeps
    what it has sent.
    """
    for stage in INNER:
        layer = S * H * (8 + 24 / T)
        expected = (P - stage) * (BLOCKS * layer + HALF * S * H)
        held = run("bf16-true").ranks[stage].memory.activations
        assert held == pytest.approx(expected, rel=1e-3)


def test_idle_share() -> None:
    """arXiv:2104.04473: (p - 1) / m of the computing, so (p - 1) / (m + p - 1) of the step."""
    assert run("bf16-mixed").idle_share == pytest.approx((P - 1) / (M + P - 1))


def test_tensor_parallel_stays_inside_a_node() -> None:
    placement = run("bf16-mixed").placement
    assert (placement.num_nodes, placement.nodes_per_group["tp"]) == (64, 1)
    assert placement.warnings == ()
