"""Layouts of the systems that the bridge moves weights between; pure, they import none of them."""

from megatron_bridge.layouts.hf import HFLayout
from megatron_bridge.layouts.layout import Layout, Unit
from megatron_bridge.layouts.megatron import MegatronLayout
from megatron_bridge.layouts.vllm import VLLMLayout

__all__ = ["HFLayout", "Layout", "MegatronLayout", "Unit", "VLLMLayout"]
