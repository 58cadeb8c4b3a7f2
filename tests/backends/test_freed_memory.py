"""A CPU rank keeps what it frees, so that the next step faults nothing in again."""

import os
import resource
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch

from lightning_shard.backends import free_memory
from lightning_shard.backends.free_memory import keep_freed_memory
from tests.processes import run_processes

CPU = torch.device("cpu")


def fill_and_free() -> None:
    """Fill 200 MB, freed in the order of their making: glibc by itself keeps at most 64 MB."""
    blocks = deque(torch.ones(1 << 19) for _ in range(100))
    while blocks:
        blocks.popleft()


def faults_of_a_step() -> int:
    """Return the pages that two steps fault in once six have used and freed the same memory."""
    keep_freed_memory(CPU)
    for _ in range(6):
        fill_and_free()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fill_and_free()
    fill_and_free()  # a thread's last heap went in every other step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def faults_of_a_step_of_a_thread() -> int:
    """Return the same of a step on a thread, whose heaps are not the main one's."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(faults_of_a_step).result()


@pytest.mark.slow
@pytest.mark.parametrize("faults", [faults_of_a_step, faults_of_a_step_of_a_thread])
def test_a_step_uses_again_what_the_last_one_has_freed(faults: Callable[[], int]) -> None:
    """A step faulted in what the last one had freed."""
    (found,) = run_processes(faults, 1, fresh=True)
    assert found <= 100  # of 102,400 pages


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=65536")],
)
def test_who_sets_glibcs_variables_keeps_their_values(name: str, value: str) -> None:
    with patch.dict(os.environ, {name: value}):
        assert not free_memory._keep.__wrapped__()


def test_a_gpu_changes_nothing_on_the_host() -> None:
    with patch.object(free_memory, "_keep") as keep:
        keep_freed_memory(torch.device("cuda", 0))
    keep.assert_not_called()
