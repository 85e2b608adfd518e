"""Model arguments of lm_eval as what kvjax takes."""

import ast
from typing import Any

from kvjax import policies
from kvjax.cache.spec import CacheSpec
from kvjax.errors import ConfigError
from kvjax.policies import Policy
from kvjax.policies import budget as budgets
from kvjax.policies.budget import BudgetLike
from kvjax.selection import Selection
from kvjax.specs import parse
from kvjax.storage import Storage
from kvjax.typing import JsonObject

AUTO_ROWS = 16  # rows of a batch where lm_eval asks for ``auto``
MIN_SLOTS = budgets.MIN_SLOTS  # of the shortest contexts, where a budget is a fraction


def spec(
    policy: str | Policy,
    budget: BudgetLike = None,
    storage: str | Storage = "dense",
    selection: str | Selection = "everything",
    least_slots: int = MIN_SLOTS,
) -> CacheSpec:
    """Builds a spec from texts, see `kvjax.specs.parse`, or from what they describe.

    Args:
      policy: which slots stay.
      budget: of the policies in the text that take one and are not given theirs there: slots, or a fraction of each
        context.
      storage: how slots are held.
      selection: which slots a query reads.
      least_slots: slots of contexts of which the fraction is less.

    Raises:
      KvjaxError: a text that says nothing known, or a combination that cannot work.
    """
    if budget is not None and not isinstance(policy, str):
        raise ConfigError("budget= is for a policy given by name; this policy has its own.")
    given = {} if budget is None else {"budget": as_budget(budget, least_slots)}

    def made(axis: parse.Axis, value: object, **given: Any) -> Any:
        return parse.build(axis, value, **given) if isinstance(value, str) else value

    return CacheSpec(made("policy", policy, **given), made("storage", storage), made("selection", selection))


def as_budget(budget: BudgetLike, least_slots: int) -> policies.Budget | None:
    """Returns a budget; a fraction keeps `least_slots` of the shortest contexts."""
    if isinstance(budget, float):
        return policies.Fraction(budget, min_slots=least_slots)
    return budgets.as_budget(budget)


def rows(batch_size: int | str | None) -> int:
    """Returns the rows of a batch: a number, or ``auto``, ``auto:4`` and the like for `AUTO_ROWS`.

    Raises:
      ConfigError: anything else.
    """
    text = str(batch_size if batch_size is not None else 1)
    if text.split(":")[0] == "auto":
        return AUTO_ROWS
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"batch_size={batch_size!r} is not valid; give a whole number of at least 1, or auto.")
    return int(text)


def parsed(text: str) -> JsonObject:
    """Reads ``key=value,key=value``, where a comma in brackets or quotes belongs to a value.

    Raises:
      ConfigError: a part that is not of this form.
    """
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        depth += (char in "([{") - (char in ")]}") if not quote else 0
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    found = {}
    for part in filter(str.strip, parts):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"model_args: {part.strip()!r} is not of the form key=value.")
        found[key.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
