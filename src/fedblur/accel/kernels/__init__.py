"""Our own kernels, for work on which the libraries leave most of a GPU idle."""
