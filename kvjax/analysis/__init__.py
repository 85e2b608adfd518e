"""What attention looks like, and what a policy misses of it: the measures of the papers, in linear memory.

`sparsity`, `accumulated_attention`, `keys_for_mass` and `attention_std` measure the full cache; `attention_cosine`,
`jaccard`, `miss_rate` and `retained` compare a policy with it, or a `CacheSpec` of policy, storage and selection;
`retrieval_scores` and `retrieval_heads` measure heads. `plots` draws each of them, and `submodular` compares greedy
selection with the optimum.

In shapes: L layers, B rows, H query heads, K KV heads, T tokens of the longest row. Results are NumPy arrays.
"""

from kvjax.analysis import plots, submodular
from kvjax.analysis.compare import MissRate, Retained, attention_cosine, jaccard, miss_rate, retained
from kvjax.analysis.full_cache import (
    AccumulatedAttention,
    AttentionStd,
    accumulated_attention,
    attention_std,
    keys_for_mass,
    sparsity,
)
from kvjax.analysis.heads import RetrievalScores, retrieval_heads, retrieval_scores

__all__ = [
    "AccumulatedAttention",
    "AttentionStd",
    "MissRate",
    "Retained",
    "RetrievalScores",
    "accumulated_attention",
    "attention_cosine",
    "attention_std",
    "jaccard",
    "keys_for_mass",
    "miss_rate",
    "plots",
    "retained",
    "retrieval_heads",
    "retrieval_scores",
    "sparsity",
    "submodular",
]
