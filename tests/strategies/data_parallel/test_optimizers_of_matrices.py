"""Optimizers that need full matrices, under ZeRO: one rank owns each parameter and updates it."""

from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_shard import HybridParallelStrategy
from tests.checkpoint.sharded import runs
from tests.checkpoint.sharded.runs import SAVED_AFTER
from tests.examples.commands import ignoring_advice
from tests.strategies import parity
from tests.strategies.data_parallel.test_held_bytes_and_traffic import Census, count
from tests.strategies.matrix_optimizers import Matrices, MatricesGPT, build

pytestmark = [
    *ignoring_advice("Be aware that when using `ckpt_path`"),
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in parity.UPSTREAM_WARNINGS),
]
NUM_STEPS = parity.LONG_STEPS
NUM_RUNS = 12  # of one device under noise: 66 pairs
MOVED = ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")
LAYOUTS = {
    **runs.LAYOUTS,
    "pipeline-zero2-4": lambda **o: HybridParallelStrategy(
        backend="in_process", num_ranks=4, pipeline_parallel_size=2, tensor_parallel_size=1,
        zero_stage=2, num_microbatches=2, announce=False, **o,
    ),
}  # fmt: skip
NAMES = ("adafactor", "transformers", "muon", "shampoo", "two")


def fit(name: str, layout: str | None = None, **options: Any) -> Matrices:
    # In float32 the iteration of Muon amplifies what differs in the last digit of small gradients.
    defaults = {"max_steps": NUM_STEPS * (2 if name == "two" else 1), "precision": "64-true"}
    options = defaults | options
    strategy = "auto" if layout is None else LAYOUTS[layout]()
    model = build(name)
    runs.fit(strategy, model, **options)
    return model


@cache
def alone(name: str, num_steps: int = NUM_STEPS) -> Matrices:
    return fit(name, max_steps=num_steps * (2 if name == "two" else 1))


def assert_same(model: Matrices, expected: Matrices, last: int = NUM_STEPS) -> None:
    assert len(model.losses) == last
    torch.testing.assert_close(model.losses, expected.losses[-last:], rtol=1e-5, atol=0)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-9)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("layout", ["zero1-3", "zero2-2", "zero3-4"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_equal_a_single_devices(name: str, layout: str) -> None:
    assert_same(fit(name, layout), alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["copies-4", "pipeline-zero2-4"])
def test_owners_within_a_copy_of_the_state_and_within_a_stage(layout: str) -> None:
    assert_same(fit("muon", layout), alone("muon"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["64-true", "32-true"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", ["adafactor", "transformers", "muon"])
def test_a_gpt_equals_a_single_devices(name: str, strategy: str, precision: str) -> None:
    def run(**options: Any) -> parity.Run:
        torch.manual_seed(7)
        model = MatricesGPT(name)
        return parity.train(model, num_steps=NUM_STEPS, precision=precision, **options)

    made = parity.STRATEGIES[strategy](backend="in_process", bucket_mb=parity.SMALL_BUCKET_MB)
    atol = 1e-9 if precision == "64-true" else 2e-6
    got, expected = run(strategy=made, devices=3), run()
    apart = max(map(relative, zip(got.losses, expected.losses, strict=True)))
    weights = farthest(got, expected)
    print(f"{name}, {strategy}, {precision}: losses {apart:.1e}, weights {weights:.1e}")
    parity.assert_parity(got, expected, num_steps=NUM_STEPS, atol=atol)


def relative(pair: tuple[float, float]) -> float:
    return abs(pair[0] - pair[1]) / abs(pair[1])


def farthest(run: parity.Run, expected: parity.Run) -> float:
    """Return how far a weight is from another run's."""
    return max(float((run.weights[k] - v).abs().max()) for k, v in expected.weights.items())


RESUMED = [
    ("zero1-3", "sharded", "zero3-4"),
    ("zero3-4", "sharded", "zero2-2"),
    ("zero3-4", "full", "zero1-3"),
    ("shard_ddp-2", "sharded", "zero3-3"),
    ("zero2-2", "sharded", "shard_ddp-2"),
    ("copies-4", "full", "pipeline-zero2-4"),
    ("pipeline-zero2-4", "sharded", "copies-4"),
]


def assert_goes_on(name: str, before: str, kept_as: str, after: str, folder: Path) -> None:
    """Save under one layout, go on under another, and compare with one device's run."""
    path = runs.saving(
        LAYOUTS[before](checkpoint_format=kept_as), folder, build(name), precision="64-true"
    )
    assert path.is_dir() == (kept_as == "sharded")
    model = fit(name, after, ckpt_path=path, max_steps=4)
    assert_same(model, alone(name, 4), 4 - SAVED_AFTER)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "kept_as", "after"), RESUMED)
@pytest.mark.parametrize("name", ["muon", "adafactor", "shampoo"])
def test_a_run_goes_on_on_another_layout(
    name: str, before: str, kept_as: str, after: str, tmp_path: Path
) -> None:
    assert_goes_on(name, before, kept_as, after, tmp_path)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["adafactor", "shampoo"])
def test_a_checkpoint_is_that_of_a_single_device(name: str, tmp_path: Path) -> None:
    paths = [
        runs.saving(strategy, tmp_path / str(number), build(name), precision="64-true")
        for number, strategy in enumerate(("auto", LAYOUTS["zero3-4"]()))
    ]
    expected, got = (torch.load(path, weights_only=True)["optimizer_states"] for path in paths)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-9)
    model = fit(name, ckpt_path=paths[1], max_steps=4)
    assert_same(model, alone(name, 4), 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_state_and_traffic(strategy: str, num_ranks: int) -> None:
    """State is 1/N and at most the largest matrix's more; a step sends what AdamW's does."""
    plain = count(parity.build("gpt"), strategy, num_ranks)
    for name, bytes_of_each in (("muon", 8), ("adafactor", 4)):
        model = MatricesGPT(name)
        census = count(model, strategy, num_ranks)
        held = [one.optimizer_state for one in census.held]
        largest = bytes_of_each * max(param.numel() for param in model.parameters())
        assert max(held) <= sum(held) / num_ranks + largest
        assert min(held) > 0
        for sent, allowed in zip(_sent(census), _sent(plain), strict=True):
            assert allowed / 2 < sent <= allowed


def _sent(census: Census) -> list[int]:
    """Return the elements of parameters and gradients that all ranks have sent, by step."""
    return [
        sum(one.elements for step in steps for key, one in step.items() if key in MOVED)
        for steps in zip(*census.sent, strict=True)
    ]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("layout", ["zero1-3", "zero2-2", "zero3-3"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_other_formats_train(precision: str, layout: str) -> None:
    assert_trains(precision, layout)


def assert_trains(precision: str, layout: str) -> None:
    """Compare a run in a lower precision with one device's in float32."""
    expected = fit("adafactor", precision="32-true")
    given: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # the Trainer itself has no fp16 on the CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # skips no first step
        given = {"precision": None, "plugins": [MixedPrecision(precision, "cpu", scaler)]}
    model = fit("adafactor", layout, **given)
    assert len(model.losses) == NUM_STEPS
    assert model.losses == pytest.approx(expected.losses, rel=0.1)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("layout", ["zero2-2", "zero3-3"])
def test_clipping_and_accumulation(layout: str) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    expected = fit("adafactor", **options)
    assert_same(fit("adafactor", layout, **options), expected, 2 * NUM_STEPS)


def noisy(seed: int, **options: Any) -> "Noisy":
    torch.manual_seed(7)
    model = Noisy(seed)
    parity.train(model, num_steps=NUM_STEPS, **options)
    return model


@cache
def own_spread() -> tuple["Noisy", float]:
    """Return one device's model, and how far any two of its runs under noise lie apart."""
    models = [noisy(seed) for seed in range(NUM_RUNS)]
    return models[0], max(distance(*pair) for pair in combinations(models, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)  # of the first case, which measures one device's own spread
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_torchs_muon_stays_within_its_own_spread(strategy: str) -> None:
    """Its iteration in bfloat16 turns a last digit of a gradient into a digit of the update."""
    expected, allowed = own_spread()
    made = parity.STRATEGIES[strategy](backend="in_process", bucket_mb=parity.SMALL_BUCKET_MB)
    found = distance(noisy(0, strategy=made, devices=3), expected)
    print(f"{strategy}: {found:.2e}, and one device's own spread {allowed:.2e}")
    assert 0 < found <= allowed


class Noisy(MatricesGPT):
    """Trained by torch's Muon, on gradients with noise of 1e-7 of their size; none for seed 0."""

    def __init__(self, seed: int) -> None:
        super().__init__("torch muon")
        self.noise = torch.Generator().manual_seed(seed) if seed else None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters() if self.noise is not None else ():
            if param.grad is not None:
                noise = torch.randn(param.grad.shape, generator=self.noise, dtype=torch.float64)
                noisy = param.grad.double() * (1 + 1e-7 * noise)
                param.grad.copy_(noisy)


def distance(model: MatricesGPT, other: MatricesGPT) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((one - its).detach().abs().max()) for one, its in pairs)
