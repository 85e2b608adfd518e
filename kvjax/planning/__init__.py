"""Plans a run without running it: its memory, by ahead-of-time compilation from shapes, and its maximum speed.

The program is the decode loop of `kvjax.generate`. It is compiled for this machine or for a TPU topology, which need
not be present. No parameters and no cache are allocated. `plan_speculation` says from which length on drafts pay.
"""

from kvjax.planning.make_plan import plan
from kvjax.planning.plan_report import Plan
from kvjax.planning.speculation import DraftCosts, SpeculationPlan, plan_speculation

__all__ = ["DraftCosts", "Plan", "SpeculationPlan", "plan", "plan_speculation"]
