"""What this machine has and lacks for training: `lightning-shard doctor` and `strategies`.

finding.py    one answer: what was found, whether that will do, what to do about it
host.py       memory, clock, file systems                                 )  without torch
present.py    versions, what backends need, who has started this process  )
network.py    names, interfaces, ports, adapters
backends.py   backends, devices, MPI
measuring.py  a machine profile for `lightning-shard plan --machine`
"""
