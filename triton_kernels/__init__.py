"""Triton kernels, one op per file: reference, kernels, wrapper.

The folder is installed as `lightning_dynmo.triton_kernels`. It needs torch and triton only, and only the files of the
ops import triton, so that importing this package works where triton is missing.

[Note: sparse weights]
A weight [M, K] is `values` [nnz] and CSR indices. Activations are feature-major, [K, tokens] and [M, tokens]: a kept
entry (i, j) reads a stretch of row j and adds it to one of row i, in whole lines of memory. `spmm` is the product with
activations, `sddmm` the gradient of the values, `csr` makes both differentiable. The products multiply in the precision
of the values and add in float32, without TF32 and without atomics, so that results are the same in every run.
"""
