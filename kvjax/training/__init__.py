"""Training of learned retention: the budget of all queries at once, and attention whose gradient reaches gates.

`Retention` says which slots stay, `visible` which of them each query of a text sees, and `gated_weights` returns
weights of attention whose gradient reaches the scores of tokens. `GatedAttention` puts them into a model.
"""

from kvjax.training.gated_attention import GatedAttention
from kvjax.training.retention import Retention, decayed_weights, gated_weights, soft_gates, visible

__all__ = ["GatedAttention", "Retention", "decayed_weights", "gated_weights", "soft_gates", "visible"]
