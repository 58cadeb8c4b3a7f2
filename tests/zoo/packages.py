"""How packages are imported that do not fit beside the others.

torchvision's wheel on PyPI does not fit the CPU's torch. pytorch-tabular and litgpt ask for older
releases of pandas, torchmetrics, huggingface-hub and jsonargparse than the others need, and work
with those.
"""

import re
import sys
from pathlib import Path

# `make test-all` installs them here, without what they ask for, and not beside the other packages:
# torchmetrics, and so Lightning, imports torchvision wherever it finds it, and that fails where its
# own operators do not load.
FOLDER = Path(sys.prefix) / "zoo"


def add_folder() -> None:
    """Let what lies in the folder be imported."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def import_torchvision() -> None:
    """Import torchvision, whose wheel on PyPI needs CUDA's libraries for its own operators.

    timm and lightly import it, and nothing here calls an operator of its own. It describes some of
    them to torch when it is imported, which fails where they could not be loaded: they are declared
    first then, without an implementation. Where the operators load, nothing is declared.
    """
    import torch

    add_folder()
    while "torchvision" not in sys.modules:
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            missing = re.match(r"operator (torchvision::\w+) does not exist", str(error))
            if missing is None:
                raise
            torch.library.define(missing[1], "(Tensor x) -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]
