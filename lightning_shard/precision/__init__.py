"""What Lightning's precision strings mean for parameters, gradients, traffic and the optimizer.

Bytes per parameter are for Adam, `N` ranks; "matrices" are parameters of two or more dimensions,
vectors (norms, biases) stay in fp32 under the mixed formats, as under autocast.

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

Parameter traffic has the compute format. `reduce_dtype` sends gradients in another format. Master
copies, optimizer state and the gradients the optimizer sees are 1/N under stages 1 to 3. Where the
backend sums by itself (NCCL), sums of 16-bit gradients go over the wire in fp32 when averaged into
fp32. 16-bit floats with 5 exponent bits ("16-...") are meant for GPUs.
"""
