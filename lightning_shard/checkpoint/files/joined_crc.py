"""The CRC-32 of two byte strings one after the other, from those of each.

A checksum is the remainder of a polynomial over two elements, whose first coefficient is the lowest
bit; a byte that follows multiplies it by x^8.

Source:
    `crc32_combine` of zlib, which Python does not wrap.
"""

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of zip and zlib, without x^32
_ONE, _X = 1 << 31, 1 << 30


def joined_crc(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of a string that is followed by another.

    Args:
        first: CRC-32 of the first string.
        second: CRC-32 of the second one.
        second_bytes: Length of the second one.
    """
    return _product(_factor(second_bytes), first) ^ second


@lru_cache(maxsize=1024)
def _factor(num_bytes: int) -> int:
    """Return x^(8 * num_bytes)."""
    factor, power, left = _ONE, _X, 8 * num_bytes
    while left:
        if left & 1:
            factor = _product(factor, power)
        power = _product(power, power)
        left >>= 1
    return factor


def _product(one: int, other: int) -> int:
    total = 0
    while one:
        if one & _ONE:
            total ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return total
