"""The runs of the checks for GPUs, and their devices."""
