"""Print the waits and races within steps, for every strategy and precision, or for some of them.

    python -m tests.gpu_like                         all
    python -m tests.gpu_like zero3/bf16-mixed/0      one: strategy, precision, rank
    python -m tests.gpu_like --json zero3/32-true/0  as JSON, one line each

Each fit is a line: operations on the device within a step, and how many places have the host wait;
then these, with how often in a step, and why; and the races of the whole fit. The exit status is
the number of fits that failed, had a wait without a reason or a race.
"""

import json
import sys

from tests.gpu_like.apart import fit_apart
from tests.gpu_like.fits import CASES, PRECISIONS, Seen, prepare
from tests.gpu_like.reasons import reason_for, unexplained


def every_fit() -> list[str]:
    """Return the names of all fits."""
    return [
        f"{name}/{precision}/{rank}"
        for name, case in CASES.items()
        for precision in PRECISIONS
        for rank in case.ranks
        if precision != case.refuses
    ]


def show(name: str, seen: Seen) -> bool:
    """Print what was seen of a fit; return whether it is as it should be."""
    bad, num_steps = unexplained(seen.waits, seen.num_steps), max(seen.num_steps, 1)
    waits = f"{len(seen.waits)} places wait" if seen.waits else "no wait"
    races = f"{len(seen.races)} RACES" if seen.races else "no race"
    operations = f"{seen.num_operations // num_steps:6} operations"
    print(f"{name:36} {operations}  {seen.error or f'{waits}, {races}'}")
    for first, second, count in seen.races:
        print(f"    {count} x {first}\n        without an order with {second}")
    for wait in seen.waits:
        what, place, upstream, count = wait
        reason = reason_for(wait)
        why = reason.why if reason else "NOBODY KNOWS WHY"
        often = f", BUT MORE THAN {reason.most} IN A STEP" if reason and wait in bad else ""
        print(f"    {count / num_steps:g} x {what}: {place.split(' < ')[0]} {upstream}")
        print(f"        {why}{often}")
    return not (seen.error or bad or seen.races)


def main(arguments: list[str]) -> int:
    """Run the fits; return the number of those that are not as they should be."""
    as_json = "--json" in arguments
    names = [one for one in arguments if one != "--json"] or every_fit()
    prepare()
    num_bad = 0
    for one in names:
        name, precision, rank = one.split("/")
        seen = fit_apart(name, precision, int(rank))
        if as_json:
            print(json.dumps([one, seen.as_dict()]), flush=True)
        else:
            num_bad += not show(one, seen)
            sys.stdout.flush()
    return num_bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
