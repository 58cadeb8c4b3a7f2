"""Checkpoints in one canonical form: the module's own parameter names and shapes.

Any scheme goes on from what another has written: state is full, or boxes of full tensors. What is
of use on the same mesh alone, such as each rank's random streams, stands by rank beside it.
"""
