"""Kernels for GPUs without WGMMA, from sm_80 on: mma.sync, ldmatrix, cp.async."""
