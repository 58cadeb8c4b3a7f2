"""Optimizers of bitsandbytes and torchao, whose states lie in blocks: those of one device, exactly.

Each rank takes the same samples, so that averages round nothing. Matrices of 8,192 and 4,096
elements are quantised, also where the shards of ranks are smaller than that; one of 4,160 ends
within a block, which torchao leaves as it is.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import PipelineParallelStrategy, ZeRO2Strategy, ZeRO3Strategy
from tests.optim.test_blockwise import Saves, StateBytes, parts_of
from tests.strategies.stacks import Stack, fit, trainer_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.zoo,
    pytest.mark.timeout(600),  # the first import of these packages takes long
    pytest.mark.filterwarnings("ignore"),  # those of the packages
]

OF_BITSANDBYTES = [
    *("AdamW8bit", "Adam8bit", "Lion8bit", "RMSprop8bit", "Adagrad8bit", "SGD8bit"),
    *("LAMB8bit", "AdEMAMix8bit", "PagedAdamW8bit"),
]
OF_TORCHAO = ["AdamW8bit", "Adam8bit", "AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8"]
NAMES = [f"bitsandbytes.{one}" for one in OF_BITSANDBYTES] + [f"torchao.{x}" for x in OF_TORCHAO]


def maker(name: str) -> Callable[..., torch.optim.Optimizer]:
    package, _, kind = name.partition(".")
    if package == "torchao":
        import torchao.optim as optimizers
    else:
        import bitsandbytes.optim as optimizers
    found: Callable[..., torch.optim.Optimizer] = getattr(optimizers, kind)
    return found


class Matrices(Stack):
    def __init__(self) -> None:
        super().__init__()
        sizes = (8, 64, 128, 64, 65, 8)
        layers = [nn.Linear(one, other) for one, other in pairwise(sizes)]
        self.blocks = nn.ModuleList(layers)


def style(name: str, **settings: Any) -> type[Stack]:
    class WithOptimizer(Matrices):
        def configure_optimizers(self) -> Any:
            more = {"momentum": 0.9} if "SGD" in name else {}
            return maker(name)(self.parameters(), lr=1e-2, **more, **settings)

    return WithOptimizer


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchao's steps run as they are written; compiling each shape takes minutes."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def staged(**options: Any) -> PipelineParallelStrategy:
    """Return a pipeline of one microbatch, whose gradients are those of the batch."""
    return PipelineParallelStrategy(num_microbatches=1, **options)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("make", [ZeRO2Strategy, ZeRO3Strategy, staged])
@pytest.mark.parametrize("name", NAMES)
def test_states_in_blocks_are_those_of_one_device(name: str, make: Any, num_ranks: int) -> None:
    """Those of torchao were refused, and each of bitsandbytes' lay full on one rank."""
    strategy = make(backend="in_process", num_ranks=num_ranks)
    expected, got = fit(style(name)).weights, fit(style(name), strategy).weights
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_blocks_are_as_large_as_an_optimizer_is_told() -> None:
    """States began in the blocks of the constructor's default, and weights went apart by 5e-3."""
    strategy, larger = ZeRO2Strategy(backend="in_process", num_ranks=4), {"block_size": 512}
    expected = fit(style("torchao.AdamW8bit", **larger)).weights
    got = fit(style("torchao.AdamW8bit", **larger), strategy).weights
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["full", "sharded"])
@pytest.mark.parametrize("name", NAMES)
def test_they_go_on_on_other_ranks(name: str, layout: str, tmp_path: Path) -> None:
    saves = Saves(tmp_path / "saved")
    strategy = ZeRO2Strategy(backend="in_process", num_ranks=4, checkpoint_format=layout)
    fit(style(name), strategy, [saves], max_epochs=1)
    model = style(name)()
    resumed = trainer_of(ZeRO3Strategy(backend="in_process", num_ranks=2))
    resumed.fit(model, ckpt_path=saves.path, weights_only=False)
    torch.testing.assert_close(dict(model.state_dict()), fit(style(name)).weights, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_one_file_has_the_bits_of_one_device(name: str, tmp_path: Path) -> None:
    states: list[list[Tensor]] = []
    for strategy in ("auto", ZeRO2Strategy(backend="in_process", num_ranks=4)):
        saves = Saves(tmp_path / f"{len(states)}.ckpt")
        fit(style(name), strategy, [saves], max_epochs=1)
        (state,) = torch.load(saves.path, weights_only=False)["optimizer_states"]
        states.append(parts_of(state["state"]))
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


def test_eight_bits_take_less_than_a_third_of_the_state() -> None:
    """Beside AdamW's of 32 bits, on each rank."""
    held = []
    for name in ("bitsandbytes.AdamW8bit", "bitsandbytes.AdamW"):
        counted = StateBytes()

        class Wide(style(name)):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Sequential(nn.Linear(8, 65536, bias=False), nn.Linear(65536, 3))

        fit(Wide, ZeRO2Strategy(backend="in_process", num_ranks=4), [counted], max_steps=1)
        held.append(max(counted.of_ranks))
    assert held[0] < 0.3 * held[1]
