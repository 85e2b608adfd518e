"""kvjax: Hugging Face decoders in JAX under a fixed KV-cache budget."""

from kvjax import policies, selection, storage
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
from kvjax.sampling import Greedy, Sample
from kvjax.sharding import make_mesh
from kvjax.storage.calibration import Calibration, load_calibration
from kvjax.text import TextGeneration, generate_text

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
