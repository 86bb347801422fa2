"""Reinforcement learning of large language models: megatron-core trains, vLLM samples, the bridge moves weights."""

__version__ = "0.1.0"
