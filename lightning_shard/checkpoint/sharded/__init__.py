"""The sharded format: a folder of torch.distributed.checkpoint, with the boxes of each rank.

    what a rank has of a tensor     boxed_tensor
    of a run's module and optimizers, and where what is read goes
                                    run_state
    the folder, written             writing, box_writer
    the folder, read                folder, reading
    which entry of Lightning's checkpoint is where in it, and what each rank keeps for itself
                                    entries
    what it may hold, what fits     index, named_optimizers

    NAME/.metadata          DCP's index, written last: a folder without it is no checkpoint
    NAME/__R_0.distcp       boxes that rank R has written
    NAME/meta.pt            Lightning's checkpoint without "state_dict" and "optimizer_states"

Keys are those of Lightning's `ModelParallelStrategy`: `state_dict.<name>`, and
`optimizer_<i>.state.<name>.<key>` and `optimizer_<i>.param_groups...` as torch's
`get_optimizer_state_dict` gives them, so that it, FSDP2 and `dcp.load` read the folder.
"""
