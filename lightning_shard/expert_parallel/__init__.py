"""Expert parallel: each rank has some of a mixture's experts, and tokens go to those of theirs.

finding           which modules are mixtures
exchange          rows to the experts' ranks and results back, and what gradients are there
batched, listed   what a call of a mixture does: experts in tensors, experts in lists
split             which rank has which experts
shared_experts    the mixtures of a model, until they are restored, and their trial
load              counters
"""
