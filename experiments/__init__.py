"""Thin programs over the library: run, sweep, bench."""

import os

from kvjax import devices

# jax says so when it is imported where there is no TPU. With the TPU compiler installed it would still look for one,
# and libtpu would fill the terminal before a program's first line.
if os.environ.get("TPU_SKIP_MDS_QUERY"):
    devices.prepare_libtpu()
