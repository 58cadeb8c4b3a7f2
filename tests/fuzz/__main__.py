"""Draw programs, run them, and say what was found: `python -m tests.fuzz --count 100`."""

import argparse
from pathlib import Path

from tests.fuzz.campaign import FOLDER, read, report, run_all, shrink_all, tasks, written
from tests.fuzz.workers import workers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run them")
    parser.add_argument(
        "--runs-per-program", type=int, default=4, help="schemes of each; 0 for all in process"
    )
    parser.add_argument("--scheme", action="append", default=[], help="run these alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the scripts of defects")
    parser.add_argument("--no-shrink", action="store_true", help="print programs as they are")
    parser.add_argument("--journal", type=Path, help="file to which each run is added")
    parser.add_argument("--sum", type=Path, nargs="+", help="say what these journals hold, no more")
    given = parser.parse_args()
    if given.sum:
        print(report(read(given.sum)))
        return 0
    seeds = range(given.seed, given.seed + given.count)
    with workers(given.jobs) as pool:
        campaign = run_all(pool, tasks(seeds, given.runs_per_program, given.scheme), given.journal)
        print(report(campaign), flush=True)
        if given.no_shrink:
            groups = {
                (outcome.kind, task.features): [(task, outcome)]
                for task, outcome in campaign.defects
            }
        else:
            groups = shrink_all(pool, campaign)
    ordered = sorted(groups.items(), key=lambda item: (not item[0][1], -len(item[1]), item[0]))
    for number, ((kind, features), found) in enumerate(ordered):
        task, outcome = found[0]
        path = written(given.folder, number, task, outcome)
        schemes = ", ".join(sorted({one.scheme for one, _ in found}))
        print(f"\n{number}: {kind}, {len(found)}x, under {schemes}")
        print(f"   {', '.join(features) or 'not shrunk: ' + ', '.join(task.features)}")
        print(f"   {path}: {outcome.text.splitlines()[-1][:300] if outcome.text else ''}")
    return 1 if campaign.defects else 0


if __name__ == "__main__":
    raise SystemExit(main())
