"""What Lightning's precision strings mean for parameters, gradients, traffic and the optimizer.

    string        full parameters   gradient traffic         gradients the     optimizer state
                                                             optimizer sees    and shards
    32-true       fp32              fp32                     fp32              fp32
    64-true       fp64              fp64                     fp64              fp64
    bf16-true     bf16              bf16, summed in fp32     bf16              bf16
    16-true       fp16              fp16, summed in fp32     fp16              fp16
    bf16-mixed    fp32, autocast    bf16 of matrices,        fp32              fp32
                                    summed in fp32
    16-mixed      fp32, autocast    fp32, loss scaled        fp32, unscaled    fp32

Matrices are parameters of two or more dimensions. Over Gloo, 16-bit gradients travel in 16 bits and
are summed in fp32; where the backend itself sums (NCCL, in process) they travel in fp32.
"""
