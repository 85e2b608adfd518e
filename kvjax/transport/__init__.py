"""Contexts as bytes, to be sent or stored: codes of keys and values by CacheGen or KVTC."""

from typing import TYPE_CHECKING

from kvjax import lazy

if TYPE_CHECKING:
    from kvjax.transport.codecs import KVTC, CacheGen, load_codec
    from kvjax.transport.controller import Transfer, plan_transfer
    from kvjax.transport.messages import Report, decode, encode, report
    from kvjax.transport.tables import Tables, make_tables
    from kvjax.transport.transform import Transform, fit_transform
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "kvjax.transport.codecs": ("KVTC", "CacheGen", "load_codec"),
            "kvjax.transport.controller": ("Transfer", "plan_transfer"),
            "kvjax.transport.messages": ("Report", "decode", "encode", "report"),
            "kvjax.transport.tables": ("Tables", "make_tables"),
            "kvjax.transport.transform": ("Transform", "fit_transform"),
        },
    )

__all__ = [
    "KVTC", "CacheGen", "Report", "Tables", "Transfer", "Transform", "decode", "encode", "fit_transform",
    "load_codec", "make_tables", "plan_transfer", "report",
]  # fmt: skip
