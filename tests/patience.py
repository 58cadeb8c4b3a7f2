"""How long tests wait for what may hang: longer where other processes keep the machine busy."""

import os


def patient(seconds: float) -> float:
    """Return the time-out of what takes so many seconds at most on a quiet machine.

    Processes take as many times longer as there are of them for each core. Where nobody else
    computes, a hang is noticed no later.
    """
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
