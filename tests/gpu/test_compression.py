"""A GPU packs gradients as the CPU does: whole numbers are the same, others within 1e-6."""

import pytest
import torch

from lightning_shard.data_parallel.compression.built_in import BF16, FP16, Int4, Int8, OneBit, TopK
from lightning_shard.data_parallel.compression.codec import Codec
from lightning_shard.data_parallel.compression.compressor import Turn

pytestmark = pytest.mark.gpu
CODECS = {
    "fp16": FP16(),
    "bf16": BF16(),
    "int8": Int8(rounding="nearest"),
    "int4": Int4(rounding="nearest"),
    "topk": TopK(ratio=0.01),
    "onebit": OneBit(),
}
TURN = Turn(step=5, seed=1, num_summed=1)


@pytest.mark.parametrize("numel", [1, 1000, 300_001])
@pytest.mark.parametrize("name", CODECS)
def test_a_gpu_sends_what_the_cpu_sends(name: str, numel: int) -> None:
    codec: Codec = CODECS[name]
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    expected = codec.encode(values, TURN)
    found = codec.encode(values.cuda(), TURN)
    assert [one.device.type for one in found] == ["cuda"] * len(expected)
    torch.testing.assert_close([one.cpu() for one in found], list(expected), rtol=1e-6, atol=0)
    decoded = codec.decode(found, numel)
    torch.testing.assert_close(decoded.cpu(), codec.decode(expected, numel), rtol=1e-6, atol=0)
