"""Megatron's own objects, as patches and TrainStep need them. Imports nothing of Megatron itself."""
