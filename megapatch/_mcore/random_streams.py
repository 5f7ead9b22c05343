"""Megatron's names of the random streams that its tracker holds."""

MODEL_PARALLEL = "model-parallel-rng"
EXPERTS = "expert-parallel-rng"
