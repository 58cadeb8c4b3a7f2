"""Fewer bytes for gradients: codecs, and the exchange that averages a flat buffer through them.

from lightning_shard.data_parallel.compression import Codec, FlatBuffer, find_compressor

exchange = find_compressor("int8").exchange(FlatBuffer(layout=layout, ranks=collectives))
exchange.begin(values, out)      # each rank
exchange.wait()                  # `out` holds the average
"""

from lightning_shard.data_parallel.compression.codec import Codec
from lightning_shard.data_parallel.compression.compressor import (
    Compressor,
    Exchange,
    FlatBuffer,
    Tally,
    Turn,
)
from lightning_shard.data_parallel.compression.one_bit import OneBit
from lightning_shard.data_parallel.compression.power_sgd import PowerSGD
from lightning_shard.data_parallel.compression.rounding import BF16, FP16, Int8
from lightning_shard.data_parallel.compression.selection import (
    COMPRESSORS,
    Compression,
    find_compressor,
)
from lightning_shard.data_parallel.compression.top_k import TopK

__all__ = [
    "BF16",
    "COMPRESSORS",
    "FP16",
    "Codec",
    "Compression",
    "Compressor",
    "Exchange",
    "FlatBuffer",
    "Int8",
    "OneBit",
    "PowerSGD",
    "Tally",
    "TopK",
    "Turn",
    "find_compressor",
]
