"""Serves many requests through the rows of one batch: `Runner`; and states that many of them continue: `Prefix`."""

from kvjax.serve.prefix import Prefix
from kvjax.serve.request import Progress, Request, Result
from kvjax.serve.runner import Runner

__all__ = ["Prefix", "Progress", "Request", "Result", "Runner"]
