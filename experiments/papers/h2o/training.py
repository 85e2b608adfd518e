"""H2O, Figure 10: heavy hitters while a model is trained."""

from collections.abc import Iterable

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import look, training
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table


def _parts(settings: Settings) -> Iterable[Part]:
    return [training.checkpoints(settings)]


def _judge(settings: Settings, found: Found) -> Judgement:
    part = training.checkpoints(settings)
    # [checkpoints, L]
    exponent, overlap = found[part]["exponent"], found[part]["overlap"]
    rows = [
        {"steps": f"{share:.0%}", "exponent": f"{exponent[i].mean():.2f}",
         "by layer": ", ".join(f"{each:.2f}" for each in exponent[i]),
         "heaviest 20 % shared with the end": f"{100 * overlap[i].mean():.0f} %"}
        for i, share in enumerate(part.shares)
    ]  # fmt: skip
    uniform = float(look.exponent_of(look.uniform_mass(part.length)))
    mean = dict(zip(part.shares, exponent.mean(axis=1), strict=True))
    early, half = float(mean[0.1] / mean[1.0]), float(mean[0.5] / mean[1.0])
    # Before a decoder learns where to attend, the exponents of all steps are alike without heavy hitters.
    heavy = float(mean[1.0] / uniform)
    lines = {
        f"layer {layer}": ([100 * share for share in part.shares], exponent[:, layer].tolist())
        for layer in range(exponent.shape[1])
    }
    return Judgement(
        tables=[Table(f"A decoder of {exponent.shape[1]} layers, {part.count} steps from random weights", rows)],
        confirm=[
            Claim("the last exponent is more than 1.2 times that of uniform attention", heavy > 1.2,
                  f"{heavy:.2f} times"),
            Claim("the exponent at 10 % of the steps is within 20 % of the last", abs(early - 1) <= 0.2,
                  f"{early:.2f} of it"),
        ],
        contradict=[Claim("at half of the steps it is under half of the last", half < 0.5, f"{half:.2f} of it")],
        notes=[
            f"Uniform attention has an exponent of {uniform:.2f}, since early tokens have more queries: an exponent "
            "near it says nothing about heavy hitters."
        ],
        draw=lambda: figures.curves(
            [figures.Panel("Exponent of accumulated attention", "% of the steps", "exponent", lines)]
        ),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="h2o_fig10",
        question="When in training do heavy hitters appear?",
        here="A decoder of the model's shape is trained on a book for a small number of steps, and its accumulated "
        "attention measured on another at 4, 10, 25, 50 and 100 % of them.",
        parts=_parts,
        judge=_judge,
    ),
)
