"""Triton kernels, one op per file: reference, kernels, wrapper.

The folder is installed as `lightning_dynmo.triton_kernels`. It needs torch and triton only, and only the files of the
ops import triton, so that importing this package works where triton is missing.
"""
