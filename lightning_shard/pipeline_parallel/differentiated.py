"""What a step of a pipeline cannot differentiate by itself, since other stages have the rest.

training_step    torch.autograd.grad(loss, weights)     of the last stage's own weights only
backward(loss)   autograd.grad, backward(inputs=...)    of nothing: the schedule has done it all
"""

from collections.abc import Sequence
from typing import Any

from lightning_shard.data_parallel.differentiation import Gradients, Run
from lightning_shard.errors import ConfigError
from lightning_shard.placeholders import is_placeholder


class OfLastStage:
    """Refuses gradients of weights that lie on another stage than the loss."""

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return the gradients of inputs; see `Differentiator`.

        Raises:
            ConfigError: An input is on another stage.
        """
        if any(map(is_placeholder, inputs)):
            raise _refusal("training_step", "weights that other stages of the pipeline have")
        return run(inputs)


class AfterSchedule:
    """Refuses gradients by inputs of a loss whose microbatches have been through their backward."""

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return nothing; see `Differentiator`.

        Raises:
            ConfigError: Always.
        """
        raise _refusal("backward", "some inputs, after each microbatch has been sent backward")


def _refusal(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"{where} asks for gradients of {what}, by torch.autograd.grad or backward(inputs=...); "
        f"expected a loss that is sent backward as a whole. Freeze what is not to be trained, "
        f"change gradients in on_after_backward, or use strategy='zero2'."
    )
