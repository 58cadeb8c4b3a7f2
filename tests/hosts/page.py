"""The page of the documentation that says what ran under which launcher, from what was measured.

build/launchers/torchrun.json     what `test_launchers` has measured, a file for each launcher
docs/launchers.md                 `python -m tests.hosts`, the last thing `make test-cluster` does
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.hosts.launching import LAUNCHERS
from tests.hosts.schemes import SCHEMES
from tests.processes import REPOSITORY

PAGE = REPOSITORY / "docs" / "launchers.md"
MEASURED = REPOSITORY / "build" / "launchers"
TOLERANCE = 1e-5
WITHOUT = {("elastic", "mpirun"), ("elastic", "mpirun, MPI")}
_HEAD = """# Launchers over two hosts

Each cell is a run of four ranks, two on each of two hosts: 20 steps of a small GPT, started by the
launcher above it. It says by how much a step's loss differs at the most, relatively, from a run of
four in-process ranks: "0" is the same bits, and 1e-07 the last bit of a float. More than 1e-05
fails.

The hosts are network and UTS namespaces of one machine, each with its own name, address and
loopback interface. SLURM is a real one, of two nodes. Ranks talk over Gloo, but over MPI in the
column "mpirun, MPI".
"""
_FOOT = """
`tensor_parallel` has two ranks to a layer and two copies, `hybrid_parallel` two stages of layers
split over two ranks, hybrid sharding two copies of the state; `local_sgd` averages after five
steps, and `async_sgd` has a bound of 0. `elastic` has the scheme `zero2`; mpirun ends all ranks
with one, so [it is not for it](elastic.md#when-to-use-it).

## How each was started

Each with `Trainer(devices=2, num_nodes=2)`, and with `LIGHTNING_SHARD_JOB_TOKEN` set to one value
on both hosts, which mpirun does not need: see [the token](security.md#the-token).

```text
# our launcher, on each host, with MASTER_ADDR and MASTER_PORT set
NODE_RANK=0 python train.py

# torchrun, on each host
torchrun --nnodes=2 --node-rank=0 --master-addr=10.77.0.1 --master-port=29500 \\
    --nproc-per-node=2 train.py

# torchrun, c10d: on each host; the agents number the hosts
torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=host-a:29500 --rdzv-id=test \\
    --nproc-per-node=2 train.py

# mpirun, on the first host, which reaches the other by ssh
mpirun --hostfile hosts -n 4 --map-by slot python train.py

# srun, on any host
srun --nodes=2 --ntasks-per-node=2 python train.py
```

`make test-cluster` measures this and writes this page. It needs root, iproute2, and an installed
SLURM or else a Debian or Ubuntu, whose packages it unpacks into `build/slurm`; it installs nothing.
"""


def cell(difference: float | None) -> str:
    """Return what the table says of the largest relative difference; None: it was not tried."""
    if difference is None:
        return "-"
    return f"{difference:.0e}" if difference else "0"


def page(cells: Mapping[tuple[str, str], str]) -> str:
    """Return the Markdown page; `cells` are by scheme and launcher."""
    lines = [f"| scheme | {' | '.join(LAUNCHERS)} |", "|---" * (len(LAUNCHERS) + 1) + "|"]
    lines += [
        f"| {scheme} | {' | '.join(cells[scheme, launcher] for launcher in LAUNCHERS)} |"
        for scheme in SCHEMES
    ]
    return "\n".join([_HEAD, *lines, _FOOT])


def measured() -> dict[tuple[str, str], str]:
    """Return the cells of what was measured last."""
    found = {}
    for launcher in LAUNCHERS:
        told = json.loads(measurement(launcher).read_text())
        found |= {(scheme, launcher): cell(told.get(scheme)) for scheme in SCHEMES}
    return found


def cells_of(text: str) -> dict[tuple[str, str], str]:
    """Return the cells that a page has."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head = next(row for row in rows if row[0] == "scheme")
    return {
        (row[0], launcher): one
        for row in rows
        if row[0] in SCHEMES
        for launcher, one in zip(head[1:], row[1:], strict=True)
    }


def measurement(launcher: str) -> Path:
    """Return the file of what was measured under a launcher."""
    return MEASURED / f"{launcher.replace(', ', '_').replace(' ', '_')}.json"
