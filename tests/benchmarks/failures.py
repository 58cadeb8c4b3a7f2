"""How often a killed, a terminated and a stopped rank of three is named in time by the others.

python -m tests.benchmarks.failures                           20 times each, over Gloo
python -m tests.benchmarks.failures --backend mpi --repeat 5  under mpirun
"""

import argparse
import signal

from tests.strategies.rank_failures import SIGNALS, WORLD_SIZE, Training, ends, is_right


def main() -> None:
    """Repeat each signal; print how many times every survivor raised the right error."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.failures")
    parser.add_argument("--backend", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--repeat", type=int, default=20, help="times for each signal")
    parser.add_argument("--timeout", type=float, default=10, help="of the strategy, in seconds")
    names = [sent.name for sent in SIGNALS]
    parser.add_argument("--signals", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    for sent in map(signal.Signals.__getitem__, arguments.signals):
        times = [
            time_of_survivors(
                Training(
                    backend=arguments.backend, timeout=arguments.timeout, victim=turn % WORLD_SIZE
                ),
                sent,
            )
            for turn in range(arguments.repeat)
        ]
        right = [seconds for seconds in times if seconds is not None]
        slowest = f", the slowest after {max(right):.2f} s" if right else ""
        print(
            f"{arguments.backend} {sent.name}: the survivors named the rank {len(right)} of "
            f"{arguments.repeat} times within {arguments.timeout:g} s{slowest}",
            flush=True,
        )


def time_of_survivors(training: Training, sent: signal.Signals) -> float | None:
    """Return when the last survivor raised the right error; None, and print, if one did not."""
    survivors = [end for end in ends(training, sent) if end.rank != training.victim]
    if all(is_right(end, training, sent) for end in survivors):
        return max(end.seconds for end in survivors)
    print(f"  {sent.name} of rank {training.victim}: {survivors}", flush=True)
    return None


if __name__ == "__main__":
    main()
