"""Bytes are counted by storage: views and ties once, freed storages not at all."""

import torch

from tests.benchmarks.memory import unique_storage_bytes


def test_views_and_ties_count_once() -> None:
    flat = torch.zeros(10)
    assert unique_storage_bytes([flat, flat[2:4], flat.view(2, 5)], set()) == 40


def test_what_another_category_has_counted_does_not_count_again() -> None:
    flat = torch.zeros(10)
    seen: set[int] = set()
    assert unique_storage_bytes([flat], seen) == 40
    assert unique_storage_bytes([flat[5:], torch.zeros(1)], seen) == 4


def test_a_freed_storage_counts_nothing() -> None:
    flat = torch.zeros(10)
    flat.untyped_storage().resize_(0)
    assert unique_storage_bytes([flat], set()) == 0
