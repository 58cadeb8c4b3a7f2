"""What only GPUs can show: `make test-gpu` on a machine with 1 to 8 of them.

schemes.py          every strategy, as it is trained on GPUs and on CPU ranks
test_parity.py      each on 1 to 8 GPUs over NCCL against ranks of one process on the CPU
test_compression.py what a GPU sends under compression against what the CPU sends
test_steps.py       order of communication, memory, graphs and waits of engine steps; see waits.py
test_rehearsal.py   the same functions on CPU ranks over Gloo, so that they run when GPUs come
__main__.py         the machine in words, all tests marked `gpu`, and what could not run
"""
