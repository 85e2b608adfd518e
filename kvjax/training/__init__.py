"""Training of learned retention: the budget of all queries at once, and weights of attention that gates are trained by.

`Retention` says which slots stay, `visible` which of them each query of a text sees, and `gated_weights` returns
weights of attention whose gradient reaches the scores of tokens.
"""

from kvjax.training.retention import Retention, decayed_weights, gated_weights, soft_gates, visible

__all__ = ["Retention", "decayed_weights", "gated_weights", "soft_gates", "visible"]
