"""What Lightning's precision strings mean for parameters, gradients, traffic and the optimizer.

Under the mixed formats parameters stay in fp32, and autocast rounds a copy of each matrix for its
regions. Matrices are parameters of two or more dimensions; vectors (norms, biases) stay in fp32
there, too. Stage 3 brings the matrices of blocks together in 16 bits.

    string        full parameters   gradient traffic         gradients the     optimizer state
                                                             optimizer sees    and shards
    32-true       fp32              fp32                     fp32              fp32
    64-true       fp64              fp64                     fp64              fp64
    bf16-true     bf16              bf16, summed in fp32     bf16              bf16
    16-true       fp16              fp16, summed in fp32     fp16              fp16
    bf16-mixed    fp32, autocast    bf16 of matrices,        fp32              fp32
                                    summed in fp32
    16-mixed      fp32, autocast    fp32, loss scaled        fp32, unscaled    fp32

`reduce_dtype` sends gradients in another format. Micro-batches add up in the format that the
optimizer sees. Over Gloo, 16-bit gradients travel in 16 bits and are summed in fp32; where the
backend itself sums (NCCL, in process) an average of them travels in fp32.

`policy` keeps layers in the format that user code has asked for before the run.
"""
