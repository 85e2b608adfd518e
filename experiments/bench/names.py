"""Names that the flags of benchmarks show; this module imports nothing that takes time."""

ACCELERATOR = "accelerator"  # runs other benchmarks, in processes of their own
MINUTES = 8.0  # that the shares of time of the accelerator's parts add up to, and more
LLAMA = "llama-12x768"  # as large as OPT-125M, of a family that every peer has
STEP = "h2o, a whole step"
KINDS = {"none": "none", "mass": "mass", "step": STEP}  # --kinds, and what the rows of `kernels` call them
#: The flags of benchmarks in groups, for ``--help``.
GROUPS = {
    "Sides": ["against", "python", "policies", "caches", "weights", "implementation", "compile", "servers"],
    "Sizes": ["shape", "dtype", "budget", "slots", "batch", "context", "tokens", "rounds", "fill", "tiny"],
    "One benchmark's own": [
        "model", "text", "data", "questions", "shots", "examples", "documents", "requests", "drafts",
        "gammas", "acceptance", "memory", "temperature", "top_p", "grid", "kinds", "interpret", "minutes",
    ],
    "Results": ["output", "plot"],
}  # fmt: skip
