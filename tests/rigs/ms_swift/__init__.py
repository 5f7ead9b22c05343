"""ms-swift's Megatron trainer, and what is run with it."""
