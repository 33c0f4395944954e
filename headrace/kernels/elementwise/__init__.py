"""Triton kernels of the operations between the products: each reads its operands once and writes its result once."""
