"""Plans a run without running it: its memory, by ahead-of-time compilation from shapes, and its maximum speed.

The program is the decode loop of `kvjax.generate`. It is compiled for this machine or for a TPU topology, which need
not be present. No parameters and no cache are allocated.
"""

from kvjax.planning.make_plan import plan
from kvjax.planning.plan_report import Plan

__all__ = ["Plan", "plan"]
