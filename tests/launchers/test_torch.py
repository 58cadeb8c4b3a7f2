"""The private names of torch.compile that the launchers need; a failure says what has changed."""

import torch
from torch import Tensor, nn

from lightning_shard.launchers._copy import compile_again, uncompiled


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_a_compiled_function_says_what_it_was_made_of() -> None:
    assert uncompiled(torch.compile(doubled, backend="eager")) is doubled
    assert uncompiled(doubled) is None


def test_another_function_is_compiled_with_the_same_options() -> None:
    compiled: list[int] = []

    def backend(graph: nn.Module, inputs: object) -> object:
        compiled.append(1)
        return graph.forward

    torch._dynamo.reset()
    again = compile_again(torch.compile(doubled, backend=backend), lambda x: x + 1)
    assert again(torch.ones(1)) == 2
    assert compiled == [1]
