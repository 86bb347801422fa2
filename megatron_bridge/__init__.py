"""Moves model weights between HF checkpoints, Megatron-core and vLLM."""
