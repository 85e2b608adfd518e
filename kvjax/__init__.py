"""kvjax: Hugging Face decoders in JAX under a fixed KV-cache budget.

Models
  `load` and `save` a Hugging Face folder as a `Model`; `quantize_weights` (`WeightCodes`) and `compress_kv_heads` make
  smaller ones, and `make_mesh` and `Rules` divide one over devices.

Text and tokens
  `generate_text` takes texts and conversations, and returns a `TextGeneration`. `generate` takes token ids, and returns
  a `Generation`; `Greedy` and `Sample` choose the tokens. `log_likelihood` scores texts (`LogLikelihood`), and
  `score_choices` the continuations of a context (`ChoiceScore`). `speculate` generates with drafts that the full cache
  verifies; `kvjax.speculation` has the ways to draft. Within `reuse_prompts`, calls on equal prompts under
  several caches compute them once. `cartridge` trains the slots of a compacted context (`Cartridge`).

Contexts
  A `Context` is the cache after some tokens, as a value. `contexts` has the functions that begin one, continue it turn
  by turn, generate from it, copy or join its rows, and keep it in a folder. `chat` answers a message (`Reply`) in a
  conversation that is one context. A `PrefixStore` stores contexts keyed by their tokens, for texts that begin alike.

Caches
  `CacheSpec` is a policy, a storage and a selection. `policies`: which slots stay, such as ``policies.h2o(0.2)``.
  `storage`: how slots are held, such as ``storage.int8()``; those that need it have a `Calibration` (`calibrate`,
  `calibrated`, `load_calibration`). `selection`: which slots a query reads, such as ``selection.quest(budget=512)``.
  `presets`: published systems made of the three. Each of the four has ``names()`` and ``by_name(name, ...)``.
  `CacheOptions` are all options of a run's cache; its `Limits` say what arrays are allocated for. `KVState` is the
  cache of a result and `LayerKV` one of its layers; ``result.kept(layer)`` lists the positions that a layer holds.

Elsewhere
  `kvjax.serve`: many requests, and an HTTP server. `kvjax.analysis`: what attention does, and a policy makes of it.
  `kvjax.planning` and `kvjax.planning.capacity`: models that do not fit on this machine. `kvjax.lm_eval`:
  lm-evaluation-harness.

Names are imported when they are first used. A module that this page does not name is imported as such:
``import kvjax.generation.prefill``.

This machine
  Compiled programs are kept for later processes in the user's cache folder; `keep_programs` takes another one, or none.
  For CPUs, XLA compiles them without unrolling loops, unless ``XLA_FLAGS`` names ``--xla_backend_extra_options``.

Errors that a caller can cause are `KvjaxError`. `__version__` is the version.
"""

from typing import TYPE_CHECKING, Any

from kvjax import lazy
from kvjax.environment import compile_quickly, silence_missing_tpu
from kvjax.errors import KvjaxError
from kvjax.version import __version__

if TYPE_CHECKING:
    from kvjax import contexts, policies, presets, selection, storage
    from kvjax.cache import CacheSpec, KVState, LayerKV, Limits
    from kvjax.checkpoint.huggingface import load
    from kvjax.checkpoint.writer import save
    from kvjax.contexts.chats import Reply, chat
    from kvjax.contexts.choices import ChoiceScore, score_choices
    from kvjax.contexts.prefix_store import PrefixStore
    from kvjax.generation.cartridge import Cartridge, cartridge
    from kvjax.generation.context import Context
    from kvjax.generation.generate import Generation, generate
    from kvjax.generation.likelihood import LogLikelihood, log_likelihood
    from kvjax.generation.options import CacheOptions
    from kvjax.generation.prompt_store import reuse_prompts
    from kvjax.generation.sampling import Greedy, Sample
    from kvjax.generation.text import TextGeneration, generate_text
    from kvjax.host import keep_programs
    from kvjax.models.calibrate import calibrate, calibrated
    from kvjax.models.compress import compress_kv_heads
    from kvjax.models.model import Model
    from kvjax.models.quantize import WeightCodes, quantize_weights
    from kvjax.parallel.rules import Rules
    from kvjax.parallel.sharding import make_mesh
    from kvjax.speculation.speculating import speculate
    from kvjax.storage.calibration import Calibration, load_calibration

silence_missing_tpu()
compile_quickly()

__all__ = [
    "CacheOptions",
    "CacheSpec",
    "Calibration",
    "Cartridge",
    "ChoiceScore",
    "Context",
    "Generation",
    "Greedy",
    "KVState",
    "KvjaxError",
    "LayerKV",
    "Limits",
    "LogLikelihood",
    "Model",
    "PrefixStore",
    "Reply",
    "Rules",
    "Sample",
    "TextGeneration",
    "WeightCodes",
    "__version__",
    "calibrate",
    "calibrated",
    "cartridge",
    "chat",
    "compress_kv_heads",
    "contexts",
    "generate",
    "generate_text",
    "keep_programs",
    "load",
    "load_calibration",
    "log_likelihood",
    "make_mesh",
    "policies",
    "presets",
    "quantize_weights",
    "reuse_prompts",
    "save",
    "score_choices",
    "selection",
    "speculate",
    "storage",
]

# jax, flax and the decoders take a second to import, which ``--help`` and error messages can do without.
_load, __dir__ = lazy.attach(
    __name__,
    {
        "kvjax.cache": ("CacheSpec", "KVState", "LayerKV", "Limits"),
        "kvjax.checkpoint.huggingface": ("load",),
        "kvjax.checkpoint.writer": ("save",),
        "kvjax.contexts.chats": ("Reply", "chat"),
        "kvjax.contexts.prefix_store": ("PrefixStore",),
        "kvjax.generation.cartridge": ("Cartridge", "cartridge"),
        "kvjax.generation.context": ("Context",),
        "kvjax.generation.generate": ("Generation", "generate"),
        "kvjax.generation.likelihood": ("LogLikelihood", "log_likelihood"),
        "kvjax.contexts.choices": ("ChoiceScore", "score_choices"),
        "kvjax.generation.options": ("CacheOptions",),
        "kvjax.generation.prompt_store": ("reuse_prompts",),
        "kvjax.generation.sampling": ("Greedy", "Sample"),
        "kvjax.generation.text": ("TextGeneration", "generate_text"),
        "kvjax.host": ("keep_programs",),
        "kvjax.models.calibrate": ("calibrate", "calibrated"),
        "kvjax.models.compress": ("compress_kv_heads",),
        "kvjax.models.model": ("Model",),
        "kvjax.models.quantize": ("WeightCodes", "quantize_weights"),
        "kvjax.parallel.rules": ("Rules",),
        "kvjax.parallel.sharding": ("make_mesh",),
        "kvjax.speculation.speculating": ("speculate",),
        "kvjax.storage.calibration": ("Calibration", "load_calibration"),
    },
)

if not TYPE_CHECKING:  # a type checker would take any name to be here

    def __getattr__(name: str) -> Any:
        value = _load(name)
        silence_missing_tpu()  # jax may have been imported with it
        return value
