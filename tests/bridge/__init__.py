"""Tests of megatron_bridge."""
