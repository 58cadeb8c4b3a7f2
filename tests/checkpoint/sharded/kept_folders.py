"""Folders of the sharded format that are kept: each later version has to read them.

    python -m tests.checkpoint.sharded.kept_folders FOLDER     writes FOLDER/<layout>.ckpt

Written once for a format, and never again.
"""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.checkpoint.sharded.runs import LAYOUTS, SAVED_AFTER, fit, saving

KEPT_LAYOUTS = ("zero3-3", "tensor-4", "pipeline-2")


def write(folder: Path) -> None:
    """Write a folder of each layout, and the losses of a single device after it."""
    folder.mkdir(parents=True, exist_ok=True)
    for layout in KEPT_LAYOUTS:
        with TemporaryDirectory() as scratch:
            path = saving(LAYOUTS[layout](checkpoint_format="sharded"), Path(scratch))
            shutil.copytree(path, folder / f"{layout}.ckpt")
    losses = fit("auto").losses[SAVED_AFTER:]
    (folder / "losses.json").write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
