"""What a step of a pipeline cannot differentiate by itself, since other stages have the rest.

training_step    torch.autograd.grad(loss, weights)     of what the last stage alone computes with
backward(loss)   autograd.grad, backward(inputs=...)    of nothing: the schedule has done it all
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.data_parallel.differentiation import Gradients, Run
from lightning_shard.errors import ConfigError
from lightning_shard.placeholders import is_placeholder


class OfLastStage:
    """Refuses gradients of which another stage than the loss's has a part, or all.

    Args:
        given: The tensors that other stages compute with, as far as the step has come.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self._given = given

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return the gradients of inputs; see `Differentiator`.

        Raises:
            ConfigError: An input is on another stage, or computed with there.
        """
        if any(map(is_placeholder, inputs)):
            raise _refusal("training_step", "weights that other stages of the pipeline have")
        elsewhere = _ancestors(self._given)
        if any(_node(one) in elsewhere for one in inputs):
            raise _refusal("training_step", "what earlier stages of the pipeline compute with")
        return run(inputs)


class AfterSchedule:
    """Refuses gradients by inputs of a loss whose microbatches have been through their backward."""

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return nothing; see `Differentiator`.

        Raises:
            ConfigError: Always.
        """
        raise _refusal("backward", "some inputs, after each microbatch has been sent backward")


def _ancestors(tensors: Sequence[Tensor]) -> set[Any]:
    """Return the nodes of autograd's graph that tensors are computed from, and their own."""
    found, nodes = set(), [_node(one) for one in tensors]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            nodes += [before for before, _ in node.next_functions]
    return found


def _node(value: Any) -> Any:
    """Return the node of the graph where a tensor's gradient arrives; None without one."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return None
    return torch.autograd.graph.get_gradient_edge(value).node


def _refusal(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"{where} asks for gradients of {what}, by torch.autograd.grad or backward(inputs=...); "
        f"expected a loss that is sent backward as a whole. Freeze what is not to be trained, "
        f"change gradients in on_after_backward, or use strategy='zero2'."
    )
