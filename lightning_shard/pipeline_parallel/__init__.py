"""Pipeline parallelism: consecutive layers on each rank, under an unmodified training step.

find_blocks ──► Partition ──► PipelineSplit    which parameters are here
                    │
                    └──► StagedModel ──► StageRun    the user's step, cut to one stage
                                             ▲
make_schedule ──► Schedule ──► Pipeline ─────┘       whose turn it is, and the messages
                      │
                      └──► replay, Timeline          how long ranks are idle
"""
