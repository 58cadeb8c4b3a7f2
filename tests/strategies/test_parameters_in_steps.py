"""What `training_step` does with `self.parameters()` is done with full parameters, or refused."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from lightning_shard import HybridParallelStrategy, TensorParallelStrategy
from lightning_shard.errors import ConfigError
from tests.strategies.parity import Run, build, ignoring, train

pytestmark = ignoring(
    "A step uses .* parameters outside of their stage", ".*microbatches are fewer than the"
)

RANKS: dict[str, Any] = {"backend": "in_process", "announce": False}


def tensor(**options: Any) -> TensorParallelStrategy:
    return TensorParallelStrategy(tensor_parallel_size=2, **RANKS, **options)


def stages(**options: Any) -> HybridParallelStrategy:
    return HybridParallelStrategy(pipeline_parallel_size=2, **RANKS, **options)


STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "tensor": (2, tensor),
    "tensor by sequence": (2, lambda: tensor(sequence_parallel=True)),
    "tensor, zero1": (4, lambda: tensor(zero_stage=1)),
    "tensor, zero3": (4, lambda: tensor(zero_stage=3)),
    "stages": (2, stages),
    "stages, zero3": (4, lambda: stages(zero_stage=3)),
    "2x2x2, zero3": (8, lambda: stages(tensor_parallel_size=2, zero_stage=3)),
}


def matrices(module: nn.Module) -> list[Tensor]:
    return [param for param in module.parameters() if param.ndim == 2]


def products(module: nn.Module) -> Tensor:
    each = [matrix @ matrix.T - torch.eye(matrix.shape[0]) for matrix in matrices(module)]
    return torch.stack([one.pow(2).sum() for one in each]).sum()


PENALTIES: dict[str, Callable[[nn.Module], Tensor]] = {
    # Each rank's loss was the others' to six digits: a mean over its part is nearly that over all.
    "means": lambda module: sum((p * p).mean() for p in module.parameters()),  # type: ignore
    "norms": lambda module: sum(p.norm() for p in matrices(module)),  # type: ignore
    # Shards have one dimension: no parameter of a block was a matrix.
    "products": products,
    "one vector": lambda module: parameters_to_vector(module.parameters()).norm(),
    # On a stage of a pipeline the parameters of others looked frozen.
    "trained": lambda module: sum(p.pow(2).sum() for p in module.parameters() if p.requires_grad),  # type: ignore
    # Of what a module keeps itself each rank had its part, or nothing.
    "kept in a list": lambda module: sum(p.norm() for p in module.kept),  # type: ignore
    "by layers": lambda module: sum(
        (one.weight**2).mean() for one in module.modules() if isinstance(one, nn.Linear)
    ),  # type: ignore
}


def penalized(name: str) -> Any:
    """A GPT whose loss has a penalty over parameters."""
    model: Any = build("gpt")
    own = type(model)

    class Penalized(own):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = super().training_step(batch, batch_idx)
            return loss + 0.01 * PENALTIES[name](self)

    model.__class__, model.kept = Penalized, matrices(model)
    return model


@cache
def penalized_on_one_device(name: str) -> Run:
    return train(penalized(name), num_steps=3)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_is_of_full_parameters(penalty: str, strategy: str) -> None:
    """A penalty was of this rank's parts."""
    num_ranks, make = STRATEGIES[strategy]
    run = train(penalized(penalty), num_steps=3, strategy=make(), devices=num_ranks)
    expected = penalized_on_one_device(penalty)
    torch.testing.assert_close(run.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(run.norms, expected.norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(run.weights, expected.weights, rtol=1e-5, atol=5e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch mutes it, but not by thread
def test_kept_parameters_beside_compiled_blocks_are_full() -> None:
    """A number of them was this rank's, without a word, and a loss of them was refused."""
    model = penalized("kept in a list")
    for block in model.blocks:
        block.compile(backend="eager")
    run = train(model, num_steps=3, strategy=tensor(), devices=2)
    expected = penalized_on_one_device("kept in a list")
    torch.testing.assert_close(run.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(run.weights, expected.weights, rtol=1e-5, atol=5e-7)


def look(module: nn.Module) -> float:
    return float(sum(p.norm() ** 2 for p in matrices(module)))


def look_at_kept(module: nn.Module) -> float:
    return float(sum(p.norm() ** 2 for p in module.kept))  # type: ignore[union-attr]


def count(module: nn.Module) -> float:
    return float(sum(p.numel() for p in module.parameters()))


class Looking:
    """Does something with a module's parameters in each step, and keeps what comes of it."""

    def __init__(self, use: Callable[[nn.Module], float]) -> None:
        self.use, self.seen = use, list[float]()

    def model(self) -> Any:
        model: Any = build("gpt")
        own, looking = type(model), self

        class Used(own):  # type: ignore[misc,valid-type]
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                with torch.no_grad():
                    looking.seen.append(looking.use(self))
                loss: Tensor = super().training_step(batch, batch_idx)
                return loss

        model.__class__, model.kept = Used, matrices(model)
        return model


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use", [look, look_at_kept, count])
def test_numbers_are_the_full_models_or_refused(
    use: Callable[[nn.Module], float], strategy: str
) -> None:
    """Numbers of this rank's parts were taken for the model's."""
    num_ranks, make = STRATEGIES[strategy]
    alone, many = Looking(use), Looking(use)
    train(alone.model(), num_steps=2)
    if (
        use is not count and strategy == "stages, zero3"
    ):  # all matrices of the other are split layers
        with pytest.raises(ConfigError, match="A step or hook reads elements of 'blocks"):
            train(many.model(), num_steps=2, strategy=make(), devices=num_ranks)
        return
    train(many.model(), num_steps=2, strategy=make(), devices=num_ranks)
    assert len(many.seen) >= num_ranks
    assert all(
        any(seen == pytest.approx(one, rel=1e-5) for one in alone.seen) for seen in many.seen
    )


def clamp(module: nn.Module) -> float:
    for param in module.parameters():
        param.data.clamp_(-0.03, 0.03)
    return 0.0


def freeze_biases(module: nn.Module) -> float:
    for name, param in module.named_parameters():
        param.requires_grad_("bias" not in name)
    return 0.0


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name.startswith("tensor")])
@pytest.mark.parametrize("use", [clamp, freeze_biases])
def test_what_a_step_does_to_parameters_reaches_them(
    use: Callable[[nn.Module], float], strategy: str
) -> None:
    num_ranks, make = STRATEGIES[strategy]
    expected = train(Looking(use).model(), num_steps=3)
    run = train(Looking(use).model(), num_steps=3, strategy=make(), devices=num_ranks)
    torch.testing.assert_close(run.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(run.weights, expected.weights, rtol=1e-5, atol=5e-7)
