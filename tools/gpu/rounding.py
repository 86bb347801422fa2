"""How far two computations of one model in bfloat16 may lie apart when they add in different orders.

Derived for the random models of `tools.gpu.shapes`. Each layer adds two branches to the residual stream; of each the
output and the sum are rounded, by at most 2⁻⁸ of themselves and evenly below that: 4·L roundings of variance 2⁻¹⁶/3,
independent of each other and in both computations. Hidden states then lie ρ = 2⁻⁸·√(8·L/3) apart, relative and root
mean square. All bounds are four times what is expected.
"""

from __future__ import annotations

import math

from tools.gpu.shapes import EMBEDDING_SPREAD, MATRIX_SPREAD, Shape

ROUNDING = 2.0**-8  # of a number in bfloat16, at most, relative
TIMES = 4.0


def distance_of_hidden(shape: Shape) -> float:
    """ρ, relative: .034 with 28 layers."""
    return ROUNDING * math.sqrt(8 * shape.num_hidden_layers / 3)


def bound_of_loss(shape: Shape, tokens: int) -> float:
    """In nats, for the mean of so many tokens' log-probs.

    A logit is a sum over normed hidden states: it spreads by the weights' deviation times √hidden, and its error by ρ
    times that. Errors of tokens are independent, so that the mean's is 1/√tokens of one token's.
    """
    weights = EMBEDDING_SPREAD if shape.tie_word_embeddings else MATRIX_SPREAD
    logits = weights * math.sqrt(shape.hidden_size)
    return TIMES * logits * distance_of_hidden(shape) / math.sqrt(tokens)


def bound_of_gradients(shape: Shape) -> float:
    """Relative, for the gradients' norm and for the loss that steps along them take away.

    Forward and backward together round twice as often, so that the square of an element's error is 2·ρ² of its own.
    Errors that are independent of what they fall on lengthen a norm by half of that, and of AdamW's steps, whose length
    is given, they turn so much away.
    """
    return TIMES * distance_of_hidden(shape) ** 2
