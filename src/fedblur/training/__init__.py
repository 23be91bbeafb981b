"""A run: the round, the loop around it, the server's step, checkpoints, the run folder."""
