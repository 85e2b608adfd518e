"""InfiniGen, Figures 3, 6, 8, 9 and 10: pictures of the method, with what can be checked of them."""

from collections.abc import Callable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.infinigen.link import NEEDS, NEW, PROMPT, SHAPE
from experiments.papers.recipes import guess, moved, plan
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table
from kvjax.devices import PCIE_3

BATCH = 8


def _fig3(settings: Settings, found: Found) -> Judgement:
    result = found[moved.moved(SHAPE, BATCH, PROMPT, NEW)]
    bandwidth = plan.PLATFORMS["A6000"].bandwidth
    assert bandwidth is not None
    compute = 1e3 * float(result["weights"]) / bandwidth
    link = {"all": 1e3 * float(result["moved"][0]) / PCIE_3, "critical": 1e3 * float(result["moved"][3]) / PCIE_3}
    styles = (
        ("(a) all on the GPU", 0.0, compute),
        ("(b) cache on the CPU", link["all"], compute + link["all"]),
        ("(c) prefetch of all", link["all"], max(compute, link["all"])),
        ("(d) prefetch of the critical part", link["critical"], max(compute, link["critical"])),
    )
    rows = [
        {
            "style": name,
            "ms of the link": f"{transfer:.0f}",
            "ms of weights": f"{compute:.0f}",
            "ms a step, at the least": f"{step:.0f}",
        }
        for name, transfer, step in styles
    ]
    return Judgement(
        tables=[
            Table(
                f"OPT-13B, {PROMPT} + {NEW}, batch {BATCH}, PCIe 3 and an A6000's memory; at most 20 % critical", rows
            )
        ],
        notes=["From bytes and bandwidths: the sides of an offload benchmark, which needs a GPU."],
    )


#: What the overview shows -> where it is in kvjax.
OVERVIEW = (
    ("KV cache in host memory", "storage.dense(memory='host')"),
    ("skewing controller, offline", "kvjax.models.skew.find_skew, experiments.skew"),
    ("partial weights and partial keys", "kvjax.selection.InfiniGen.watch, build, entries"),
    ("KV selection controller", "kvjax.selection.InfiniGen.chosen"),
    ("prefetch during the layer before", "Selection.ahead: the choice needs nothing newer"),
    ("pool manager", "presets.infinigen(pool_limit=...), policies fifo, lru, counter"),
)
#: The flow of Figure 8: stage, what happens, shapes.
FLOW = (
    ("offline", "singular vectors of sample queries", "A [L, K, D, D]"),
    ("prefill", "sums of |q| and |k| over the prompt", "[B, K, D]"),
    ("prefill", "the largest columns, and keys in them", "[B, K, r], [B, K, S, r]"),
    ("decoding, layer i - 1", "the attention input, through layer i's query projection", "[B, H, D]"),
    ("decoding, layer i - 1", "guessed scores, threshold, count, the n best", "[B, K, S] -> [B, K, W]"),
    ("decoding, layer i - 1", "gather of W slots from the pool", "[B, K, W, D] twice"),
    ("decoding, layer i", "attention over these and the new token", "[B, H, D]"),
    (
        "decoding, layer i",
        "the new token: its pair to the pool, its key's columns to the index",
        "[B, K, 1, D], [B, K, 1, r]",
    ),
)


def _fig6(settings: Settings, found: Found) -> Judgement:
    return Judgement(
        tables=[Table("The parts of the overview in kvjax", [{"part": a, "kvjax": b} for a, b in OVERVIEW])]
    )


def _fig8(settings: Settings, found: Found) -> Judgement:
    rows = [{"when": when, "what": what, "arrays": shape} for when, what, shape in FLOW]
    return Judgement(
        tables=[
            Table(
                "The flow in kvjax; B rows, L layers, H query heads, K KV heads, D and r columns, S slots, W read", rows
            )
        ]
    )


def _fig9(settings: Settings, found: Found) -> Judgement:
    part = guess.guess(2)
    result = found[part]
    same = int(np.sum(np.all(result["columns"] == result["expected"], axis=-1)))
    heads = result["columns"].shape[0] * result["columns"].shape[1]
    count, dim = int(result["columns"][0, 0].sum()), result["columns"].shape[-1]
    rows = [{"head": "all", "columns": f"{count} of {dim}", "as NumPy's": f"{same} of {heads} heads"}]
    order = np.argsort(-result["sums"])
    chosen = result["columns"][0, 0][order]
    return Judgement(
        tables=[Table(f"The largest Σ|q| + Σ|k|: {part.ratio:g} of the columns, drawn queries and keys", rows)],
        confirm=[
            Claim("kvjax takes the columns of a top-k over Σ|q| + Σ|k| in float64", same == heads,
                  f"{same} of {heads}"),
            Claim("they are 0.3 of the columns, rounded up", count == int(np.ceil(part.ratio * dim - 1e-9)),
                  str(count)),
        ],
        contradict=[Claim("another column is taken", same < heads)],
        draw=lambda: figures.curves([
            figures.Panel("Columns of one head", "column, the largest first", "Σ|q| + Σ|k|", {
                "taken": (np.flatnonzero(chosen).tolist(), result["sums"][order][chosen].tolist()),
                "left out": (np.flatnonzero(~chosen).tolist(), result["sums"][order][~chosen].tolist()),
            }, log_y=True)
        ]),
    )  # fmt: skip


def _fig10(settings: Settings, found: Found) -> Judgement:
    rows, worst = [], {}
    for heads in (1, 2):
        part = guess.guess(heads)
        result = found[part]
        # [B, K, S]
        left = ~result["chosen"] & ~result["near"]
        over = left & (result["weight"] >= np.exp(-part.alpha))
        worst[heads] = float(np.max(result["weight"], initial=0.0, where=left))
        rows.append(
            {"KV heads": str(heads),
             "chosen, mean": f"{result['chosen'].sum(axis=-1).mean():.1f} of {result['chosen'].shape[-1]}",
             "left out": str(int(left.sum())), "of these above e^-alpha": str(int(over.sum())),
             "largest weight left out": f"{100 * worst[heads]:.2f} %"}
        )  # fmt: skip
    alpha = guess.guess(1).alpha
    limit = float(np.exp(-alpha))
    return Judgement(
        tables=[Table(f"Guessed weights by the largest of their head; e^-{alpha:g} is {100 * limit:.2f} %", rows)],
        confirm=[
            Claim("with one KV head, every token left out weighs less than e^-alpha of the largest", worst[1] < limit,
                  f"at most {100 * worst[1]:.2f} %"),
        ],
        contradict=[Claim("a heavier token is left out", worst[1] >= limit)],
        notes=[
            "With several KV heads all fetch the mean number of their counts, by the paper: a head with a larger count "
            "leaves tokens out that are above the threshold, which the second row counts.",
        ],
    )  # fmt: skip


def _none(settings: Settings) -> list[moved.Moved]:
    return []


def _guesses(*heads: int) -> Callable[[Settings], list[guess.Guess]]:
    return lambda settings: [guess.guess(each) for each in heads]


ENTRIES = (
    Entry(
        name="infinigen_fig3",
        question="Which styles of execution are there when the cache does not fit?",
        here="The least time of a step in each style, from bytes and bandwidths.",
        parts=lambda settings: [moved.moved(SHAPE, BATCH, PROMPT, NEW)],
        judge=_fig3,
        needs=NEEDS,
    ),
    Entry(
        name="infinigen_fig6",
        question="What is InfiniGen made of?",
        here="Where its parts are in kvjax.",
        parts=_none,
        judge=_fig6,
    ),
    Entry(
        name="infinigen_fig8",
        question="What happens offline, in prefill and in decoding?",
        here="The same flow in kvjax, with the shapes of its arrays.",
        parts=_none,
        judge=_fig8,
    ),
    Entry(
        name="infinigen_fig9",
        question="Which columns become partial weights?",
        here="kvjax's columns of drawn queries and keys beside NumPy's.",
        parts=_guesses(2),
        judge=_fig9,
        exact=True,
    ),
    Entry(
        name="infinigen_fig10",
        question="Which tokens does the guess leave out?",
        here="kvjax's choice by drawn queries and keys, without a cap, beside guessed weights of NumPy.",
        parts=_guesses(1, 2),
        judge=_fig10,
        exact=True,
    ),
)
