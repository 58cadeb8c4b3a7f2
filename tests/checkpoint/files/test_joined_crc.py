"""The checksum of two strings is that of both one after the other."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.checkpoint.files.joined_crc import joined_crc


@given(st.binary(), st.binary())
def test_it_is_that_of_both_together(one: bytes, other: bytes) -> None:
    assert joined_crc(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)


def test_a_long_string() -> None:
    one, other = b"begin", bytes(range(256)) * 5000
    assert joined_crc(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)
