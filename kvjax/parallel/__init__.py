"""Several devices: meshes, where arrays lie on one, reductions over slots of all devices, processes, host memory."""

import jax  # noqa: F401 (says whether there is a TPU)

from kvjax.environment import silence_missing_tpu

# Everything of kvjax that makes arrays imports this package.
silence_missing_tpu()
