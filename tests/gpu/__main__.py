"""`python -m tests.gpu`: every test that needs GPUs, on 1 to 8 of them.

It prints the machine first. Tests for more GPUs than there are are named at the end, as NOT RUN.
On a machine without a GPU all are named, and the exit status is 1. Further arguments are pytest's.
"""

import sys
from collections.abc import Sequence

import pytest

from tests.gpu.machine import describe, num_gpus

PLACES = (
    "tests/gpu",
    "tests/backends/test_conformance.py",
    "tests/backends/in_process/test_streams.py",
    "tests/data_parallel/offload/test_places.py",
    "tests/strategies/async_sgd/test_processes.py",
)
"""Where tests are marked `gpu`."""


def main(arguments: Sequence[str]) -> int:
    """Run the tests; return pytest's exit status, or 1 without a GPU."""
    print("\n".join(describe()), flush=True)
    if num_gpus() == 0:
        pytest.main(["-m", "gpu", "--collect-only", "-q", *PLACES])
        print("NONE of these tests was run: there is no GPU.")
        return 1
    return int(pytest.main(["-m", "gpu", "-q", *PLACES, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
