"""What the checks for GPUs run, and where."""
