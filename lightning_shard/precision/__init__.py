"""What Lightning's precision strings mean for parameters, gradients, traffic and the optimizer.

Matrices are parameters of two or more dimensions; vectors (norms, biases) stay in fp32 under the
mixed formats, as under autocast. N is the number of ranks.

    string        full parameters   gradients in backward,   gradients the        optimizer state
                  (compute)         gradient traffic         optimizer sees       and master copy
    32-true       fp32              fp32                     fp32                 fp32, no master
    64-true       fp64              fp64                     fp64                 fp64, no master
    bf16-true     bf16              bf16, summed in fp32     bf16                 bf16, no master
    16-true       fp16              fp16, summed in fp32     fp16                 fp16, no master
    bf16-mixed    bf16 matrices,    bf16, summed in fp32     fp32                 fp32 with master
                  autocast
    16-mixed      fp16 matrices,    fp16, summed in fp32,    fp32, unscaled       fp32 with master
                  autocast          loss scaled

Parameter traffic has the compute format; `reduce_dtype` sends gradients in another one. Master
copies, optimizer state and the gradients that the optimizer sees are 1/N from stage 1 on (stage 1
accumulates in a full buffer). Micro-batches add up in the format that the optimizer sees, so in
fp32 under the mixed formats. Over Gloo, 16-bit gradients travel in 16 bits and are summed in fp32;
where the backend itself sums (NCCL, in process) an average of them travels in fp32.

Bytes per parameter with Adam, in fp32 and in the mixed formats (matrices):

    stage       fp32          mixed
    0           16            2 + 16
    1           8 + 8/N       6 + 12/N
    2           4 + 12/N      2 + 16/N
    3           16/N          16/N, and 2 for the units in use
"""
