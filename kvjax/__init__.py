"""kvjax: Hugging Face decoders in JAX under a fixed KV-cache budget."""

from kvjax import policies
from kvjax.cache import KVState, LayerKV
from kvjax.generate import Generation, LogLikelihood, generate, log_likelihood
from kvjax.models.model import Model

__all__ = ["Generation", "KVState", "LayerKV", "LogLikelihood", "Model", "generate", "log_likelihood", "policies"]
