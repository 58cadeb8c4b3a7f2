"""Numbers in words, and words in HTML."""

from html import escape

from lightning_shard.sizes import format_bytes

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

__all__ = ["bytes_of", "escape", "percent", "rate", "seconds_of"]


def bytes_of(size: float) -> str:
    """Write bytes in their largest unit."""
    return format_bytes(round(size))


def seconds_of(seconds: float) -> str:
    """Write seconds with three digits, in the largest unit of which there is one."""
    if seconds == 0:
        return "0 s"
    size, unit = next((one for one in _UNITS if abs(seconds) >= one[0]), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}" if seconds < 999 else f"{seconds:,.0f} s"


def rate(number: float, unit: str = "") -> str:
    """Write a number with three digits and a prefix, such as 12.3 k."""
    size, prefix = next((one for one in _PREFIXES if abs(number) >= one[0]), (1.0, ""))
    return f"{number / size:.3g} {prefix}{unit}".rstrip()


def percent(share: float) -> str:
    """Write a share as a percentage."""
    return f"{share:.1%}"
