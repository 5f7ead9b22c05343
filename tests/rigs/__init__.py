"""What tests share: real Megatron, the frameworks' own code, and stand-ins for what cannot exist here."""
