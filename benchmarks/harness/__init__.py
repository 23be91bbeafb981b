"""The benchmark's driver: inputs, environments, processes, agreement, report."""
