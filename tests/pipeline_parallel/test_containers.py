"""The checksum by which stages compare what each has computed of a batch."""

import pytest
import torch

from lightning_shard.pipeline_parallel.containers import digest

COLUMNS = torch.arange(21).reshape(3, 7)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_a_column_of_one_sample_had_no_checksum(rows: int, dtype: torch.dtype) -> None:
    """One element keeps its stride, which ended the step of a microbatch of one sample."""
    column = COLUMNS.to(dtype)[:rows, 3]
    assert digest([column]) == digest([column.clone(memory_format=torch.contiguous_format)])
    assert digest([column]) != digest([column + 1])
