"""A process that saves again and again until it is killed: run as a program, with a folder.

Each checkpoint holds one number in every element; the number before it was saved whole.
"""

import os
import sys
from pathlib import Path

import torch

from lightning_shard.checkpoint.files.new import new_file, new_folder
from lightning_shard.checkpoint.files.torch_archive import records_of, write_archive

NUMEL = 200_000


def save(folder: Path, number: int) -> None:
    weights = {str(index): torch.full((NUMEL,), float(number)) for index in range(4)}
    with new_file(folder / "last.ckpt") as file:
        write_archive(file, records_of(weights))
    with new_folder(folder / "sharded.ckpt") as new:
        for index, weight in weights.items():
            torch.save(weight, Path(new, f"__{index}_0.distcp"))
        Path(new, ".metadata").write_text(str(number))


def main(folder: Path) -> None:
    number = 0
    while True:
        save(folder, number)
        os.write(1, f"{number}\n".encode())  # whatever has taken the place of sys.stdout
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
