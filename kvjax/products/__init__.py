"""Products of activations with weights: several forms that compute the same, of which the fastest here is used.

A decode step is limited by these products, and which form reads weights at the speed of memory depends on the
processor, on the number of rows and on XLA's version. Accelerators, meshes and small or many-row products use a fixed
form. Otherwise the forms are timed once on this machine; see `kvjax.products.choice`.

The forms differ in rounding. Where digits must not depend on the machine, fix the form: ``KVJAX_PRODUCTS=fixed`` in the
environment, or `use`.
"""

import jax

from kvjax.products.choice import FIXED, MAX_ROWS, Entry, chosen, explain, form_for, setting, use
from kvjax.products.forms import FORMS

Array = jax.Array

__all__ = ["FIXED", "FORMS", "MAX_ROWS", "Entry", "chosen", "explain", "product", "setting", "use"]


def product(x: Array, kernel: Array, *, transposed: bool = False) -> Array:
    """Multiplies rows by a matrix.

    Args:
      x: [..., in].
      kernel: [in, out], or [out, in] if `transposed`.
      transposed: whether each row of the kernel is an output, as in an embedding table.

    Returns:
      [..., out].
    """
    form = form_for(x, kernel, transposed)
    if form == "dot":
        # [..., out]
        return FORMS["dot"].run(x, kernel, transposed)
    run = FORMS[form].run
    # [..., out]
    return jax.lax.platform_dependent(
        x, kernel, cpu=lambda x, k: run(x, k, transposed), default=lambda x, k: FORMS["dot"].run(x, k, transposed)
    )
