"""Scores for responses: built-in functions, the way from a name to a callable, and the scorer that mixes them."""

from rlflow.rewards.exact import character_share, exact_match, integer_answer
from rlflow.rewards.mathematics import math

__all__ = ["character_share", "exact_match", "integer_answer", "math"]
