"""One training of `test_same_bits` on processes, which its launcher starts as this script.

python -m tests.strategies.same_bits_job BACKEND STRATEGY NUM_RANKS FOLDER
"""

import sys
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_only

from tests.strategies.pipeline_parallel.test_same_bits import fit as through_stages
from tests.strategies.test_same_bits import fit


@rank_zero_only
def tell(folder: Path, told: str) -> None:
    """Write what one rank knows of all."""
    (folder / "digest").write_text(told)


if __name__ == "__main__":
    backend, strategy, num_ranks, place = sys.argv[1:]
    folder = Path(place)
    if strategy == "pipeline_parallel":
        given = {"model": "tied_staged", "num_stages": int(num_ranks), "backend": backend}
        saved, logged = through_stages(folder, **given)
    else:
        saved, logged, _ = fit(folder, strategy=strategy, num_ranks=int(num_ranks), backend=backend)
    tell(folder, saved + logged)
