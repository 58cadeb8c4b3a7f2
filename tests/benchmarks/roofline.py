"""What the machine multiplies in a second, to say what share of it a step makes use of.

Each rank multiplies square matrices of fp32 at the same time as all others, as they do in a step:
ranks that share cores, memory or power are slower together. The best of several turns counts.
"""

import time

import torch

from tests.benchmarks.ranks import finish, own_device

WIDTHS = {"cpu": 1024, "cuda": 8192}
NUM_TURNS = 5


def flops_per_second() -> float:
    """Return this rank's rate; each rank calls."""
    device = own_device()
    width = WIDTHS[device.type]
    left, right = (torch.ones(width, width, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(NUM_TURNS):
        finish()
        begin = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * width**3 / best
