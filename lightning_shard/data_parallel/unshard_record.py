"""The units that this rank has unsharded since the last agreement, in order; see `usage`."""

import zlib

_DIGEST_BYTES = 4


class UnshardRecord:
    """A digest that is the same on two ranks only when they unsharded the same units."""

    def __init__(self) -> None:
        self._checksum = 0
        self._names: dict[str, None] = {}

    def note(self, index: int, name: str) -> None:
        """Note that the unshard of unit `index` begins."""
        self._checksum = zlib.crc32(index.to_bytes(4), self._checksum)
        self._names[name] = None

    def digest(self) -> bytes:
        """Return the checksum of the unsharded units and its complement.

        The maximum over all ranks is one's own digest only where all ranks have the same.
        """
        checksum = self._checksum.to_bytes(_DIGEST_BYTES)
        return checksum + bytes(255 - byte for byte in checksum)

    def take(self) -> list[str]:
        """Return the names of the units, each once, and begin anew."""
        names = list(self._names)
        self._checksum, self._names = 0, {}
        return names
