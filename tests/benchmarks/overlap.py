"""How much of the GPUs' communication is hidden behind what they compute."""

from collections.abc import Iterable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.entries import CONTENDERS
from tests.benchmarks.model import build_model, make_batch
from tests.benchmarks.ranks import finish, own_device
from tests.benchmarks.timing import NUM_WARMUP_STEPS

Span = tuple[float, float]
"""Begin and end, in microseconds."""
NUM_STEPS = 3


def hidden_share(communication: Iterable[Span], computing: Iterable[Span]) -> float:
    """Return the share of communication's time in which something is computed; 0 where none is."""
    busy, total, hidden = _joined(computing), 0.0, 0.0
    for begin, end in communication:
        total += end - begin
        hidden += sum(max(0.0, min(end, other[1]) - max(begin, other[0])) for other in busy)
    return hidden / total if total else 0.0


def _joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def hidden_shares(rank: int, model_name: str, names: Sequence[str]) -> dict[str, float]:
    """Profile steps of each contender on GPUs; return what each hides on this rank."""
    return {name: _hidden_share(rank, model_name, name) for name in names}


def _hidden_share(rank: int, model_name: str, name: str) -> float:
    device = own_device()
    contender = CONTENDERS[name].make(build_model(model_name).to(device))
    batches = [make_batch(step, rank, device) for step in range(NUM_WARMUP_STEPS + NUM_STEPS)]
    for batch in batches[:NUM_WARMUP_STEPS]:
        contender.step(batch)
    finish()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for batch in batches[NUM_WARMUP_STEPS:]:
            contender.step(batch)
        torch.cuda.synchronize()
    kernels = [one for one in profiler.events() or () if one.device_type == DeviceType.CUDA]
    spans = {
        talks: [
            (one.time_range.start, one.time_range.end)
            for one in kernels
            if ("nccl" in one.name.lower()) == talks
        ]
        for talks in (True, False)
    }
    return hidden_share(spans[True], spans[False])
