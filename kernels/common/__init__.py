"""Pieces that kernels of every architecture share."""
