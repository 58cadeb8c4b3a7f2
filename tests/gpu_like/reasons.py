"""The waits that steps have, each with its reason and how often; all others are failures."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Found = tuple[str, str, str, int]
"""A wait as `fits.Seen` has it: what for, where, from where, how often."""


class Reason(NamedTuple):
    """Why a wait is there.

    Attributes:
        place: What its line begins with: file and function.
        upstream: What the other package's line begins with, for a wait that it asks for.
        most: How often at most within a step of the model.
    """

    place: str
    upstream: str
    what: str
    most: int
    why: str


REASONS = (
    Reason(
        "lightning_shard/strategies/run_steps.py update",
        "amp/grad_scaler.py",
        "item",
        1,
        "torch's GradScaler asks whether a gradient overflowed before it calls the optimizer.",
    ),
    Reason(
        "lightning_shard/data_parallel/gradients/usage.py finish",
        "",
        "tolist",
        1,
        "A parameter had no gradient on this rank, which asks whether it has one on another.",
    ),
    Reason(
        "lightning_shard/data_parallel/offload/copier.py finish",
        "",
        "stream or event",
        2,
        "The optimizer on the host reads gradients that have come down: that is what it is for.",
    ),
    Reason(
        "lightning_shard/data_parallel/offload/copier.py take_in",
        "",
        "item",
        18,
        "The host compares whether user code has changed parameters, once for each buffer; it has "
        "waited for their gradients by then, or comes from an update of its own.",
    ),
    Reason(
        "lightning_shard/optim/clipping.py _norm_over",
        "",
        "copy from the host (pinned, but blocking)",
        1,
        "The norm of gradients on the host is combined over the group of the device, which the "
        "host has waited for by then.",
    ),
    Reason(
        "lightning_shard/data_parallel/async_sgd/async_sgd.py gradient",
        "",
        "copy to the host",
        10,
        "Asynchronous ranks send messages from host memory: each buffer's gradients go down.",
    ),
    Reason(
        "lightning_shard/data_parallel/async_sgd/async_sgd.py shard",
        "",
        "copy to the host",
        5,
        "Asynchronous ranks send messages from host memory: the shard of each buffer goes down.",
    ),
    Reason(
        "lightning_shard/pipeline_parallel/step_edits.py equal",
        "",
        "equal",
        1,
        "A stage of a pipeline runs the user's step for each microbatch, and looks once a batch "
        "whether it has edited parameters.",
    ),
    Reason(
        "lightning_shard/data_parallel/gradients/gradient_shards.py agree",
        "",
        "tolist",
        1,
        "Stages agree which parameters have gradients: where `.grad` is None, it is on all.",
    ),
    Reason(
        "lightning_shard/strategies/trainer/shared_values.py _receive",
        "",
        "tolist",
        1,
        "What a pipeline's step returns and logs on the last stage, other ranks get as numbers.",
    ),
)


def reason_for(wait: Found, reasons: Iterable[Reason] = REASONS) -> Reason | None:
    """Return why a wait is there; None where nobody knows.

    Args:
        wait: With "" for what it is for where that is not seen.
        reasons: Those that there are.
    """
    what, place, upstream, _ = wait
    innermost = place.split(" < ")[0]
    file, _, rest = innermost.partition(":")
    function = rest.partition(" ")[2]
    for reason in reasons:
        is_it = reason.place == f"{file} {function}" and what in ("", reason.what)
        if is_it and upstream.startswith(reason.upstream):
            return reason
    return None


def unexplained(
    waits: Iterable[Found], num_steps: int, reasons: Sequence[Reason] = REASONS
) -> list[Found]:
    """Return the waits that nobody knows the reason of, or that come more often than it says."""
    waits, times = list(waits), Counter[Reason | None]()
    for wait in waits:
        times[reason_for(wait, reasons)] += wait[-1]
    return [
        wait
        for wait in waits
        if (reason := reason_for(wait, reasons)) is None or times[reason] > reason.most * num_steps
    ]
