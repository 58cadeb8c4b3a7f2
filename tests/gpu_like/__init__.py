"""A device that is like a GPU but has no elements: what engines do on it, without a GPU.

    device.py    torch learns of the device, by its Python registration of a backend
    contents.py  the few elements that are known: of what the host has sent up
    watch.py     sees every operation: the host's waits for the device, and mixed devices
    ranks.py     a Trainer's accelerator, a group that talks to nobody, who is which rank
    fits.py      a fit of one strategy and precision, and what was seen in its steps

`python -m tests.gpu_like` prints what was seen, for every strategy and precision. All of it runs in
a process of its own: a backend that torch has been told of stays until the process ends.
"""
