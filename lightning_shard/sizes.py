"""Sizes in words, for messages, tables and pages."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: int) -> str:
    """Write a size in the largest binary unit of which it has at least one, to two decimals."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.2f} {_UNITS[unit]}" if unit else f"{num_bytes} B"
