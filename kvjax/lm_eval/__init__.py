"""kvjax in lm-evaluation-harness: ``python -m kvjax.lm_eval --model kvjax ...``; see docs/lm_eval.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.lm_eval.model import KVJaxLM

__all__ = ["KVJaxLM"]


def __getattr__(name: str) -> Any:
    """Imports lm_eval only when its class is asked for: scores and texts do not need it."""
    if name != "KVJaxLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvjax.lm_eval.model import KVJaxLM

    return KVJaxLM
