"""Policies: what a cache keeps. A new one is a factory in its family's file and one line of `POLICIES`.

`repr` of a policy evaluates to an equal policy in the namespace of this package.
"""

from collections.abc import Callable

from kvjax.arguments import Registry
from kvjax.errors import PolicyError
from kvjax.policies.allocation import Pyramid, Shared
from kvjax.policies.base import Evict, Policy, compress, evict
from kvjax.policies.budget import Budget, Fraction, FromLayer, Given, PerLayer, Slots, TextFraction
from kvjax.policies.caote import OutputChange, caote
from kvjax.policies.chunks import ChunkMean, chunkkv
from kvjax.policies.combinators import Best, TimesValueNorm, by_page, from_layer, value_norm, with_heavy_hitters
from kvjax.policies.compactor import LeverageAndMass, compactor
from kvjax.policies.components import Folded, Importance, Keep, Merge, Scope, Unprotected, View, keep, unprotected
from kvjax.policies.convolution import ConvolutionWeights, LoCoCo, lococo
from kvjax.policies.critical import OutputNorm, TwoStages, critical
from kvjax.policies.ems import GlobalOrLocal, ems
from kvjax.policies.expected_attention import ExpectedAttention, expected_attention
from kvjax.policies.gates import (
    GATES,
    AttentionGate,
    ChannelGate,
    Gate,
    GateScore,
    LinearGate,
    MlpGate,
    QkvGate,
    SinkGate,
)
from kvjax.policies.gkv import GlobalRedundancy, GlobalScore, gkv
from kvjax.policies.h2o import (
    DecayedMass,
    Mass,
    Newest,
    Ring,
    decayed_mass,
    h2o,
    h2o_decay,
    heavy_only,
    mass,
    protect_newest,
    ring,
)
from kvjax.policies.h2o_variants import WithSelection
from kvjax.policies.heads import Compensation, Split, compensation, duo_attention, razor_attention, split_heads
from kvjax.policies.keys import KeyDifference, LowNorm, key_difference, keydiff, knorm, low_norm
from kvjax.policies.kvgrad import ReplayedGradient, kvgrad
from kvjax.policies.kvzip import ReplayedAttention, kvzip
from kvjax.policies.ladder import Cursor, Ladder, ladder
from kvjax.policies.lagkv import LagRelative, lagkv
from kvjax.policies.layers import SplitLayers, longgen, split_layers
from kvjax.policies.lazy_eviction import Recurrence, lazy
from kvjax.policies.learned import AtMost, GateImportance, learned
from kvjax.policies.leverage import KeyValueShare, Leverage, cur, leverage
from kvjax.policies.matched import (
    LargestAttention,
    MatchedAttention,
    Weights,
    largest_attention,
    matched,
    matched_attention,
)
from kvjax.policies.merge import D2O, MERGES, Anchors, CaM, KVMerger, SimilarKey, anchors, cam, d2o, kvmerger
from kvjax.policies.padded import Padded, padded
from kvjax.policies.parameters import ModelSizes, Parameters, TextSamples
from kvjax.policies.patterns import LastColumns, OwnBlock, Strided, Uniform, fixed, random, strided
from kvjax.policies.phases import AfterPrompt, BeyondPrompt, KeptPrompt, Phases, after_prefill, phases, random_control
from kvjax.policies.pools import Ends, Fetched, LastFetched, counter, fifo, lru
from kvjax.policies.prompt_replay import Replay
from kvjax.policies.qfilters import Projection, QueryDirection, qfilters
from kvjax.policies.query_window import RecentAttention, Redundancy, morphkv, rkv
from kvjax.policies.roco import MeanMass, Varying, mean_attention, mean_mass, protect_varying, roco
from kvjax.policies.round_memory import RoundMemory
from kvjax.policies.row_memory import PromptQueries, QueryMoments, RecentQueries, ReplayQueries, RowMemory
from kvjax.policies.scissorhands import TimesAbove, scissorhands, times_above
from kvjax.policies.slot_order import FirstSlots
from kvjax.policies.snapkv import (
    ObservationWindow,
    PromptEnd,
    adakv,
    observation_window_score,
    protect_prompt_end,
    pyramidkv,
    snapkv,
)
from kvjax.policies.tova import Last, SharedLast, last, shared_last, tova
from kvjax.policies.triattention import FutureLogit, QuerySpread, triattention
from kvjax.policies.union import Union, protect_any
from kvjax.policies.value_aware import LargestValues, value_aware
from kvjax.policies.vase import ProjectedShare, SampledAttention, vase, vase_dkv
from kvjax.policies.window import First, Recency, full, local_only, protect_first, recency, streaming_llm, window
from kvjax.policies.written import Token, Written

#: Every named policy: the command line, sweeps and conformance tests take the list from here.
POLICIES: Registry[Policy] = Registry(
    "policy",
    "policies",
    PolicyError,
    {
        "full": full,
        "random": random,
        "window": window,
        "local_only": local_only,
        "streaming_llm": streaming_llm,
        "strided": strided,
        "fixed": fixed,
        "h2o": h2o,
        "heavy_only": heavy_only,
        "h2o_decay": h2o_decay,
        "scissorhands": scissorhands,
        "tova": tova,
        "mean_attention": mean_attention,
        "roco": roco,
        "lazy": lazy,
        "ems": ems,
        "snapkv": snapkv,
        "pyramidkv": pyramidkv,
        "knorm": knorm,
        "keydiff": keydiff,
        "rkv": rkv,
        "morphkv": morphkv,
        "gkv": gkv,
        "ladder": ladder,
        "vase": vase,
        "vase_dkv": vase_dkv,
        "expected_attention": expected_attention,
        "lagkv": lagkv,
        "leverage": leverage,
        "cur": cur,
        "kvzip": kvzip,
        "kvgrad": kvgrad,
        "compactor": compactor,
        "matched": matched,
        "triattention": triattention,
        "qfilters": qfilters,
        "learned": learned,
        "fifo": fifo,
        "lru": lru,
        "counter": counter,
    },
)
by_name, accepts, names = POLICIES.by_name, POLICIES.accepts, POLICIES.names

#: Policies that differ by head, for a table that belongs to one model (`kvjax.analysis` makes one), by layer or phase.
HEAD_PLANS: dict[str, Callable[..., Policy]] = {
    "split_heads": split_heads,
    "duo_attention": duo_attention,
    "razor_attention": razor_attention,
    "split_layers": split_layers,
    "longgen": longgen,
    "random_control": random_control,
}

#: Functions from policies to a policy.
COMBINATORS: dict[str, Callable[..., Policy]] = {
    "with_heavy_hitters": with_heavy_hitters,
    "value_norm": value_norm,
    "adakv": adakv,
    "after_prefill": after_prefill,
    "from_layer": from_layer,
    "by_page": by_page,
    "caote": caote,
    "critical": critical,
    "value_aware": value_aware,
    "chunkkv": chunkkv,
    "phases": phases,
}

__all__ = [
    "COMBINATORS", "D2O", "GATES", "HEAD_PLANS", "MERGES", "POLICIES", "AfterPrompt", "Anchors", "AtMost",
    "AttentionGate", "Best", "BeyondPrompt", "Budget", "CaM", "ChannelGate", "ChunkMean", "Compensation",
    "ConvolutionWeights", "Cursor", "DecayedMass", "Ends", "Evict", "ExpectedAttention", "Fetched", "First",
    "FirstSlots", "Folded", "Fraction", "FromLayer", "FutureLogit", "Gate", "GateImportance", "GateScore", "Given",
    "GlobalOrLocal", "GlobalRedundancy", "GlobalScore", "Importance", "KVMerger", "Keep", "KeptPrompt", "KeyDifference",
    "KeyValueShare", "Ladder", "LagRelative", "LargestAttention", "LargestValues", "Last", "LastColumns", "LastFetched",
    "Leverage", "LeverageAndMass", "LinearGate", "LoCoCo", "LowNorm", "Mass", "MatchedAttention", "MeanMass", "Merge",
    "MlpGate", "ModelSizes", "Newest", "ObservationWindow", "OutputChange", "OutputNorm", "OwnBlock", "Padded",
    "Parameters", "PerLayer", "Phases", "Policy", "ProjectedShare", "Projection", "PromptEnd", "PromptQueries",
    "Pyramid", "QkvGate", "QueryDirection", "QueryMoments", "QuerySpread", "Recency", "RecentAttention",
    "RecentQueries", "Recurrence", "Redundancy", "Replay", "ReplayQueries", "ReplayedAttention", "ReplayedGradient",
    "Ring", "RoundMemory", "RowMemory", "SampledAttention", "Scope", "Shared", "SharedLast", "SimilarKey", "SinkGate",
    "Slots", "Split", "SplitLayers", "Strided", "TextFraction", "TextSamples", "TimesAbove", "TimesValueNorm", "Token",
    "TwoStages", "Uniform", "Union", "Unprotected", "Varying", "View", "Weights", "WithSelection", "Written", "accepts",
    "adakv", "after_prefill", "anchors", "by_name", "by_page", "cam", "caote", "chunkkv", "compactor", "compensation",
    "compress", "counter", "critical", "cur", "d2o", "decayed_mass", "duo_attention", "ems", "evict",
    "expected_attention", "fifo", "fixed", "from_layer", "full", "gkv", "h2o", "h2o_decay", "heavy_only", "keep",
    "key_difference", "keydiff", "knorm", "kvgrad", "kvmerger", "kvzip", "ladder", "lagkv", "largest_attention", "last",
    "lazy", "learned", "leverage", "local_only", "lococo", "longgen", "low_norm", "lru", "mass", "matched",
    "matched_attention", "mean_attention", "mean_mass", "morphkv", "names", "observation_window_score", "padded",
    "phases", "protect_any", "protect_first", "protect_newest", "protect_prompt_end", "protect_varying", "pyramidkv",
    "qfilters", "random", "random_control", "razor_attention", "recency", "ring", "rkv", "roco", "scissorhands",
    "shared_last", "snapkv", "split_heads", "split_layers", "streaming_llm", "strided", "times_above", "tova",
    "triattention", "unprotected", "value_aware", "value_norm", "vase", "vase_dkv", "window", "with_heavy_hitters",
]  # fmt: skip
