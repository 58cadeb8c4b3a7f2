"""The GPUs of this machine, in words, and how many a test needs."""

from collections.abc import Iterator

import torch

UNITS = 2**30


def num_gpus() -> int:
    """Return the number of CUDA devices that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_none() -> str:
    """Say why torch sees no CUDA device."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} with CUDA {torch.version.cuda} sees no device"


def describe() -> Iterator[str]:
    """Yield a line for torch and its libraries, and one for each GPU."""
    if num_gpus() == 0:
        yield why_none()
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    for index in range(num_gpus()):
        found = torch.cuda.get_device_properties(index)
        others = range(num_gpus())
        peers = [i for i in others if i != index and torch.cuda.can_device_access_peer(index, i)]
        yield (
            f"GPU {index}: {found.name}, {found.total_memory / UNITS:.0f} GiB, "
            f"reads GPUs {peers} directly"
        )


def too_few(needed: int) -> str | None:
    """Say that a test needs more GPUs than there are, or return None."""
    found = num_gpus()
    return f"needs {needed} GPUs, there are {found}" if found < needed else None
