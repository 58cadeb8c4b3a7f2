"""A CPU rank keeps what it frees, so that the next step faults nothing in again."""

import os
import resource
from unittest.mock import patch

import pytest
import torch

from lightning_shard.backends import freed_memory
from lightning_shard.backends.freed_memory import keep_freed_memory
from tests.processes import run_processes

CPU = torch.device("cpu")


def fill_and_free() -> None:
    """Fill 96 MB in blocks like a small layer's gradients: glibc by itself keeps at most 64 MB."""
    _ = [torch.ones(16384) for _ in range(1536)]


def faults_of_a_step() -> int:
    """Return the pages that are faulted in once the same memory was used and freed before."""
    keep_freed_memory(CPU)
    for _ in range(3):
        fill_and_free()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fill_and_free()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_step_faulted_in_what_the_last_one_had_freed() -> None:
    (found,) = run_processes(faults_of_a_step, 1, fresh=True)
    assert found <= 100  # of 24,000 pages


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=65536")],
)
def test_who_sets_glibcs_variables_keeps_their_values(name: str, value: str) -> None:
    with patch.dict(os.environ, {name: value}):
        assert not freed_memory._keep.__wrapped__()


def test_a_gpu_changes_nothing_on_the_host() -> None:
    with patch.object(freed_memory, "_keep") as keep:
        keep_freed_memory(torch.device("cuda", 0))
    keep.assert_not_called()
