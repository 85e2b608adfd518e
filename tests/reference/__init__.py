"""An independent float64 NumPy reference of kvjax: the decoder, the cache step and the policies.

It is written from the definitions alone and shares no code with the library (no import of kvjax
or jax), so that agreement between the two means something. One row and one KV head are computed
at a time; only slots and a block's queries are vectorised.
"""

from tests.reference import policies
from tests.reference.checkpoint import load_llama
from tests.reference.decoder import ReferenceConfig, ReferenceRun, reference_run
from tests.reference.random_model import random_model

__all__ = [
    "ReferenceConfig",
    "ReferenceRun",
    "load_llama",
    "policies",
    "random_model",
    "reference_run",
]
