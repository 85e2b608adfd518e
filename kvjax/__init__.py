"""kvjax: Hugging Face decoders in JAX under a fixed KV-cache budget."""

import os

from kvjax import devices, policies, selection, storage
from kvjax.cache import CacheSpec, KVState, LayerKV, Limits
from kvjax.checkpoint.huggingface import load
from kvjax.checkpoint.writer import save
from kvjax.choices import ChoiceScore, score_choices
from kvjax.errors import KvjaxError
from kvjax.generate import Generation, generate
from kvjax.likelihood import LogLikelihood, log_likelihood
from kvjax.models.calibrate import calibrate, calibrated
from kvjax.models.compress import compress_kv_heads
from kvjax.models.model import Model
from kvjax.models.quantize import WeightCodes, quantize_weights
from kvjax.rules import Rules
from kvjax.sampling import Greedy, Sample
from kvjax.sharding import make_mesh
from kvjax.storage.calibration import Calibration, load_calibration
from kvjax.text import TextGeneration, generate_text

# jax says so when it is imported where there is no TPU. With the TPU compiler installed it looks for one all the same,
# and libtpu would print errors.
if os.environ.get("TPU_SKIP_MDS_QUERY"):
    devices.prepare_libtpu()

__all__ = [
    "CacheSpec",
    "Calibration",
    "ChoiceScore",
    "Generation",
    "Greedy",
    "KVState",
    "KvjaxError",
    "LayerKV",
    "Limits",
    "LogLikelihood",
    "Model",
    "Rules",
    "Sample",
    "TextGeneration",
    "WeightCodes",
    "calibrate",
    "calibrated",
    "compress_kv_heads",
    "generate",
    "generate_text",
    "load",
    "load_calibration",
    "log_likelihood",
    "make_mesh",
    "policies",
    "quantize_weights",
    "save",
    "score_choices",
    "selection",
    "storage",
]
