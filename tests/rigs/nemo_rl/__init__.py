"""NeMo-RL's workers, policies and weight synchronizers."""
