"""An imitation of Megatron-Bridge as NeMo-RL 0.4.0 pins it, which is not on PyPI: the parts that tests need."""
