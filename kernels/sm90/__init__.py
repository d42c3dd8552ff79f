"""Kernels for Hopper (sm_90a): TMA, WGMMA, warp specialisation."""
