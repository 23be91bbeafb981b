"""Kernels of our own, where the libraries leave most of a GPU idle."""
