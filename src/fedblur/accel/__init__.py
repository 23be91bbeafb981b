"""Speed only: kernels, threads, recorded and compiled steps. Without this room, results are the same but slower."""
