"""An object store in memory that fails from some operation on, as if its client had been killed."""

from typing import Any, ClassVar

from fsspec.implementations.memory import MemoryFileSystem

NOBODY = 2**22 + 7  # above the largest number of a process


class Mortal(MemoryFileSystem):
    """Objects in this process, `mortal://...`, with its life counted in operations."""

    protocol = "mortal"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    left: int | None = None  # operations that still succeed; None for any number
    done = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("mortal://")))

    @classmethod
    def count(cls) -> None:
        """Count one operation, which may be one too many."""
        cls.done += 1
        if cls.left is not None:
            cls.left -= 1
            if cls.left < 0:
                raise KeyboardInterrupt("killed")


def _counted(name: str) -> Any:
    def operation(self: Mortal, *args: Any, **kwargs: Any) -> Any:
        self.count()
        return getattr(super(Mortal, self), name)(*args, **kwargs)

    return operation


for _name in ("_open", "ls", "info", "rm_file", "_rm", "rm", "cp_file", "makedirs", "rmdir"):
    setattr(Mortal, _name, _counted(_name))
