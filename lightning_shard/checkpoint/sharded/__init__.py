"""The sharded format: a folder of torch.distributed.checkpoint, with the boxes of each rank.

    NAME/.metadata          DCP's index, written last: a folder without it is no checkpoint
    NAME/__R_0.distcp       boxes that rank R has written
    NAME/meta.pt            Lightning's checkpoint without "state_dict" and "optimizer_states"

Keys are those of Lightning's `ModelParallelStrategy`: `state_dict.<name>`, and
`optimizer_<i>.state.<name>.<key>` and `optimizer_<i>.param_groups...` as torch's
`get_optimizer_state_dict` gives them, so that it, FSDP2 and `dcp.load` read the folder.
"""
