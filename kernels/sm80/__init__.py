"""Kernels for GPUs without WGMMA (sm_80, sm_86, sm_89; they run on Hopper, too): cp.async, ldmatrix, mma.sync."""
