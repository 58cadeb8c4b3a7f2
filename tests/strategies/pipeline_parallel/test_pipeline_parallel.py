"""Every schedule trains as a single device does, whatever the stages and microbatches."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from lightning_shard import ConfigError, PipelineParallelStrategy
from lightning_shard.pipeline_parallel.schedules import SCHEDULES
from tests.pipeline_parallel.peaks import theoretical_peak_activations
from tests.strategies.models import PIPELINE_MODELS
from tests.strategies.parity import (
    GLOBAL_BATCH,
    GlobalBatches,
    Run,
    assert_bitwise_equal,
    assert_parity,
    build,
    ignoring,
    quiet_trainer,
    train,
)

pytestmark = ignoring(".* microbatches are fewer than the")


@dataclass(frozen=True)
class Pipelined:
    """A run whose ranks are one pipeline."""

    model: str
    num_ranks: int
    schedule: str
    num_microbatches: int | None = None
    split: str | tuple[int, ...] = "parameters"

    def __str__(self) -> str:
        parts = f"{self.num_microbatches or 'default'}"
        split = "" if isinstance(self.split, str) else f"-at{','.join(map(str, self.split))}"
        return f"{self.model}-{self.schedule}-{self.num_ranks}ranks-{parts}parts{split}"

    def strategy(self, backend: str = "in_process") -> PipelineParallelStrategy:
        """Return the strategy."""
        return PipelineParallelStrategy(
            backend=backend,
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            split=self.split if isinstance(self.split, str) else list(self.split),
        )

    def run(self, backend: str = "in_process") -> Run:
        """Train the model."""
        strategy = self.strategy(backend)
        return train(build(self.model), strategy=strategy, devices=self.num_ranks)


@cache
def single_device(model: str) -> Run:
    return train(build(model))


QUICK = [
    Pipelined("layers", 2, "1f1b"),
    Pipelined("layers", 2, "zbv"),
    Pipelined("layers", 4, "interleaved_1f1b"),
    Pipelined("gpt2", 2, "gpipe"),
]
EVERYWHERE = [
    case
    for model in PIPELINE_MODELS
    for num_ranks in (2, 4)
    for schedule in SCHEDULES
    if (case := Pipelined(model, num_ranks, schedule)) not in QUICK
]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_equals_a_single_device(case: Pipelined) -> None:
    assert_parity(case.run(), single_device(case.model))


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYWHERE, ids=str)
def test_equals_a_single_device_everywhere(case: Pipelined) -> None:
    assert_parity(case.run(), single_device(case.model))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "case",
    [
        Pipelined("layers", 2, "1f1b", 5),  # 3, 3, 2, 2 and 2 samples
        Pipelined("layers", 2, "zbv", 1, (1, 2, 9)),
        *(
            pytest.param(Pipelined("layers", *options), marks=pytest.mark.slow)
            for options in (
                (2, "zbv", 5),
                (2, "interleaved_zero_bubble", 6, (1, 2, 9)),
                (2, "gpipe", 1),
                (2, "interleaved_1f1b", 1),
                (2, "1f1b", 4 * GLOBAL_BATCH),  # one for each sample
            )
        ),
        *(
            pytest.param(Pipelined(model, *options), marks=pytest.mark.slow)
            for model in ("gpt_8", "gpt2_8", "mixtral_8")
            for options in (
                (2, "1f1b", 5, (1,)),
                (2, "looped_bfs", 5, (1, 2, 6)),
                (2, "zbv", 7, (3, 4, 7)),
                (4, "gpipe", 5, (1, 2, 7)),
                (4, "1f1b", 2, (4, 6, 7)),
                (4, "interleaved_1f1b", 5),
                (4, "interleaved_zero_bubble", 12),
                (4, "dual_pipe_v", 9),
                (4, "zbv", 1),
                (2, "looped_bfs", 3, (1, 2, 3, 4, 5, 6, 7)),
                (2, "interleaved_1f1b", 4, (1, 2, 3, 4, 7)),
            )
        ),
    ],
    ids=str,
)
def test_uneven_stages_and_microbatches(case: Pipelined) -> None:
    assert_parity(case.run(), single_device(case.model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Pipelined("layers", 2, "1f1b"),
        pytest.param(Pipelined("layers", 4, "zbv"), marks=pytest.mark.slow),
        pytest.param(Pipelined("gpt2", 2, "1f1b"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_same_seed_gives_the_same_bits(case: Pipelined) -> None:
    assert_bitwise_equal(case.run(), case.run())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_live_activations_are_those_of_the_theory(schedule: str, num_ranks: int) -> None:
    """For example gpipe: all microbatches; 1f1b: as many as stages follow, itself among them."""
    peaks: Any = {}

    class Counting(PipelineParallelStrategy):
        def teardown(self) -> None:
            with suppress(ConfigError):  # the second time
                peaks[self.mesh_rank] = self.pipeline.peak_activations
            super().teardown()

    model = build("layers")
    strategy = Counting(backend="in_process", schedule=schedule, num_microbatches=GLOBAL_BATCH)
    quiet_trainer(strategy=strategy, devices=num_ranks, max_steps=1).fit(
        model, datamodule=GlobalBatches(model, 1)
    )
    assert tuple(peaks[rank] for rank in range(num_ranks)) == theoretical_peak_activations(
        schedule, num_ranks=num_ranks, num_microbatches=GLOBAL_BATCH
    )
