"""Prices of accelerators, from a table (prices.toml) in which each has a date and a source."""

import dataclasses
import datetime
import functools
import tomllib
from pathlib import Path

from kvjax.typing import JsonObject

TABLE = Path(__file__).with_suffix(".toml")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one chip, or one GPU, for an hour on demand.

    Attributes:
      device: JAX's ``device_kind``.
      amount: of the currency.
      currency: ISO 4217.
      provider: who sells it.
      region: where, as the provider calls it.
      date: the day on which the provider's list had this price.
      source: address of the page or file that it was read from.
    """

    device: str
    amount: float
    currency: str
    provider: str
    region: str
    date: datetime.date
    source: str

    def as_dict(self) -> JsonObject:
        """Returns all attributes as JSON values."""
        return dataclasses.asdict(self) | {"date": self.date.isoformat()}


@functools.cache
def table() -> dict[str, Price]:
    """Returns the prices by ``device_kind``."""
    return {price.device: price for price in (Price(**row) for row in tomllib.loads(TABLE.read_text())["price"])}
