"""Checks of the attributes of a selection, in particular of a user's own."""

from typing import Any

from kvjax.arguments import check_hashable, count_argument
from kvjax.errors import KvjaxError, SelectionError
from kvjax.numerics.statistics import Statistic
from kvjax.policies.budget import Budget
from kvjax.selection.base import Selection

NAMES = ("per_slot", "per_head")  # sets of names of arrays


def check_selection(selection: Selection) -> None:
    """Checks what a selection is, without calling those of its methods that compute.

    Raises:
      SelectionError: an attribute is not what `Selection` says, or it cannot be hashed.
    """
    about = "selection"
    name = _read(about, selection, "name")
    if not isinstance(name, str) or not name:
        raise SelectionError(f"selection {selection!r}: name={name!r} must be a non-empty string.")
    about = f"selection {name}"
    check_hashable(about, selection, error=SelectionError)
    count_argument(f"{about}: unit", _read(about, selection, "unit"), minimum=1, error=SelectionError)
    count_argument(f"{about}: first_layer", _read(about, selection, "first_layer"), error=SelectionError)
    most = _read(about, selection, "most")
    if most is not None:
        count_argument(f"{about}: most", most, minimum=1, error=SelectionError)
    needs = _read(about, selection, "needs")
    if not isinstance(needs, frozenset) or not all(isinstance(each, Statistic) for each in needs):
        raise SelectionError(
            f"{about}: needs={needs!r} is not a frozenset of statistics; give one such as "
            "frozenset({kvjax.numerics.statistics.MASS})."
        )
    budget = _read(about, selection, "budget")
    if not (budget is None or isinstance(budget, Budget)):
        raise SelectionError(f"{about}: budget={budget!r} must be a kvjax.policies.Budget, such as Slots(64), or None.")
    for field in NAMES:
        given = _read(about, selection, field)
        if not isinstance(given, frozenset) or not all(isinstance(each, str) for each in given):
            raise SelectionError(f"{about}: {field}={given!r} is not a frozenset of names of arrays.")


def _read(about: str, selection: Selection, name: str) -> Any:
    """Returns an attribute, which may be a property of a user's own.

    Raises:
      SelectionError: there is none, or reading it raises an error.
    """
    try:
        return getattr(selection, name)
    except KvjaxError:
        raise
    except Exception as error:
        raise SelectionError(f"{about}: reading its {name} raised {type(error).__name__}: {error}.") from error
