"""Measures of attention, and of the attention that a policy misses, as in the papers and in linear memory.

`sparsity`, `accumulated_attention`, `keys_for_mass` and `attention_std` measure the full cache; `attention_cosine`,
`jaccard`, `miss_rate`, `recurrences`, `retained` and `output_error` compare a policy with it, or a `CacheSpec` of
policy, storage and selection; `retrieval_scores` and `retrieval_heads` measure heads, `head_gates` trains gates of
heads on `passkeys`, and `budgets` divides slots among the layers. `selected` compares what a selection reads with the
best choice of the same size, `skew_effect` does so with and without a skew, and `input_cosine` compares the inputs of
consecutive layers. `plots` draws each of them, and `submodular` compares greedy selection with the optimum.
`acceptance` compares probabilities of the next token, and predicts the drafts of `kvjax.speculation` that are accepted.
`train_directions` and `search_ranks` fit a storage of low rank. `show` makes a page of a text that marks the tokens
that each cache holds.

In shapes: L layers, B rows, H query heads, K KV heads, T tokens of the longest row. Results are NumPy arrays.
"""

from kvjax.analysis import plots, submodular
from kvjax.analysis.acceptance import Acceptance, acceptance
from kvjax.analysis.budgets import budgets, density_weights, divided, entropy_weights, replay_scores
from kvjax.analysis.compare import MissRate, Retained, attention_cosine, jaccard, miss_rate, retained
from kvjax.analysis.directions import Ranks, TrainedDirections, search_ranks, shortened, train_directions
from kvjax.analysis.full_cache import (
    AccumulatedAttention,
    AttentionStd,
    accumulated_attention,
    attention_std,
    keys_for_mass,
    sparsity,
)
from kvjax.analysis.gates import HeadGates, Passkeys, head_gates, passkeys
from kvjax.analysis.heads import RetrievalScores, retrieval_heads, retrieval_scores
from kvjax.analysis.layer_inputs import InputCosine, input_cosine
from kvjax.analysis.outputs import OutputError, output_error
from kvjax.analysis.recurrence import Recurrences, recurrences
from kvjax.analysis.selection_quality import Selected, SkewEffect, selected, skew_effect
from kvjax.analysis.viewer import Viewer, show

__all__ = [
    "Acceptance",
    "AccumulatedAttention",
    "AttentionStd",
    "HeadGates",
    "InputCosine",
    "MissRate",
    "OutputError",
    "Passkeys",
    "Ranks",
    "Recurrences",
    "Retained",
    "RetrievalScores",
    "Selected",
    "SkewEffect",
    "TrainedDirections",
    "Viewer",
    "acceptance",
    "accumulated_attention",
    "attention_cosine",
    "attention_std",
    "budgets",
    "density_weights",
    "divided",
    "entropy_weights",
    "head_gates",
    "input_cosine",
    "jaccard",
    "keys_for_mass",
    "miss_rate",
    "output_error",
    "passkeys",
    "plots",
    "recurrences",
    "replay_scores",
    "retained",
    "retrieval_heads",
    "retrieval_scores",
    "search_ranks",
    "selected",
    "shortened",
    "show",
    "skew_effect",
    "sparsity",
    "submodular",
    "train_directions",
]
