"""Serves many requests in the rows of one batch (`Runner`), from contexts that requests can share."""

from typing import TYPE_CHECKING

from kvjax import lazy

if TYPE_CHECKING:
    from kvjax.serve.documents import Documents
    from kvjax.serve.request import Progress, Request, Result
    from kvjax.serve.runner import Runner
else:
    # The server's ``--help`` does without them.
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "kvjax.serve.documents": ("Documents",),
            "kvjax.serve.request": ("Progress", "Request", "Result"),
            "kvjax.serve.runner": ("Runner",),
        },
    )

__all__ = ["Documents", "Progress", "Request", "Result", "Runner"]
