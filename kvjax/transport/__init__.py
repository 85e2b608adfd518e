"""Contexts as bytes, to be sent or stored: CacheGen's codes of keys and values."""

from typing import TYPE_CHECKING

from kvjax import lazy

if TYPE_CHECKING:
    from kvjax.transport.controller import Transfer, plan_transfer
    from kvjax.transport.messages import Report, decode, encode, report
    from kvjax.transport.tables import Tables, make_tables
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "kvjax.transport.controller": ("Transfer", "plan_transfer"),
            "kvjax.transport.messages": ("Report", "decode", "encode", "report"),
            "kvjax.transport.tables": ("Tables", "make_tables"),
        },
    )

__all__ = ["Report", "Tables", "Transfer", "decode", "encode", "make_tables", "plan_transfer", "report"]
