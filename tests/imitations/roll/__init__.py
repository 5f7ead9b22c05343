"""An imitation of what megapatch patches of ROLL, with its defects, around the real Megatron."""
