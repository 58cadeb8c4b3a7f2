"""The private names of torchmetrics that this room uses.

Checked with torchmetrics 1.9; `tests/strategies/trainer/logs/test_step_logs.py` fails when one
changes.
"""

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric


def computes_full(metric: Metric) -> bool:
    """Whether `compute` would ask for the full state: nothing cached, not inside `forward`."""
    return metric._computed is None and metric._should_unsync


def forget_computed(metric: Metric) -> None:
    """Drop the cached result, so that the next `compute` computes."""
    metric._computed = None


def is_persistent(metric: Metric) -> bool:
    """Whether the metric's state is part of the module's state dict."""
    return any(metric._persistent.values())


def copied_state(metric: Metric) -> dict[str, Any]:
    """Return the metric's state, in tensors and lists that no update changes."""
    copied: dict[str, Any] = apply_to_collection(metric.metric_state, Tensor, Tensor.clone)
    return copied


def set_state(metric: Metric, states: dict[str, Any], update_count: int) -> None:
    """Give the metric a state as if it had been updated to it."""
    for name, state in states.items():
        is_kept_on_cpu = metric.compute_on_cpu and isinstance(state, list)
        device = "cpu" if is_kept_on_cpu else metric.device
        setattr(metric, name, apply_to_collection(state, Tensor, Tensor.to, device))
    metric._update_count = update_count


def step_value(metric: Metric) -> Any:
    """Return the last result of `forward`, which Lightning logs on a step."""
    return metric._forward_cache


def set_step_value(metric: Metric, value: Any) -> None:
    """Let Lightning log `value` on a step."""
    metric._forward_cache = value
