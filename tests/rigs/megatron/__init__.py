"""Real Megatron and Megatron-Bridge: options, reference runs, probes, exporters, edited functions."""
