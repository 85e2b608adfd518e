"""The tables of `experiments.after_prompt`, with 95 % intervals."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from experiments.papers.statistics import paired_bootstrap
from experiments.reports import tables
from experiments.reports.bootstrap import interval
from kvjax.analysis import OutputError

MOST_LAYERS = 12  # of a model whose layers have columns


def report(page: Mapping[str, Any]) -> str:
    """Returns the tables of results."""
    caches, data_of = page["caches"], page["setting"]["data"]
    rows = data_of["num_sequences"]
    lines = [
        f"{page['text']}; {rows} rows, {data_of['prompt_length']} tokens of prompt and {data_of['new_tokens']} after "
        "it. In parentheses: 95 % intervals over rows or questions.",
        f"`{page['command']}`",
    ]
    for measure, tables_of in MEASURES.items():
        own = {name: found[measure] for name, found in caches.items() if measure in found}
        lines += tables_of(own, page) if own else []
    return "\n\n".join(lines) + "\n"


def _references(own: Mapping[str, Any], page: Mapping[str, Any]) -> list[str]:
    """Returns the caches to compare with, of those that are measured."""
    # The name of a policy, and not of an argument: window, but not rkv(window=8).
    words = [rf"(?<!\w){re.escape(text)}(?![\w=])" for text in page["against"]]
    found = (next((each for each in own if re.search(word, each)), None) for word in words)
    return [each for each in found if each is not None]


def _of_nats(own: Mapping[str, Any], page: Mapping[str, Any]) -> list[str]:
    first = next(iter(own.values()))
    names = [name for name in first["mean"] if sum(first["tokens"][name])]

    def nats_of(found: Mapping[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
        counts = np.asarray(found["tokens"][name], np.float64)
        return np.asarray(found["mean"][name])[counts > 0], counts[counts > 0]

    def perplexity(found: Mapping[str, Any], name: str) -> str:
        mean, counts = nats_of(found, name)
        return f"{math.exp(float(np.average(mean, weights=counts))):,.2f}"

    lines = [
        "Perplexity by class of tokens:",
        tables.table([
            {"cache": each, "bytes per row": f"{found['kv_bytes']:,}"}
            | {name: perplexity(found, name) for name in names}
            for each, found in own.items()
        ]),
    ]  # fmt: skip
    for reference in _references(own, page):
        shown = [
            {"cache": each} | {
                name: above(f"{each} {name}", nats_of(found, name)[0], nats_of(own[reference], name)[0])
                for name in names
            }
            for each, found in own.items()
            if each != reference
        ]  # fmt: skip
        lines += [f"Nats per token above `{reference}`, row by row:", tables.table(shown)] if shown else []
    return lines


def _of_facts(own: Mapping[str, Any], page: Mapping[str, Any]) -> list[str]:
    counts = ", ".join(f"{task} {len(right)}" for task, right in next(iter(own.values())).items())
    shown = [
        {"cache": each} | {task: _share(f"{each} {task}", right) for task, right in found.items()}
        for each, found in own.items()
    ]
    return [f"Facts that are asked for after the prompt, answered exactly ({counts}):", tables.table(shown)]


def _of_recurrences(own: Mapping[str, Any], page: Mapping[str, Any]) -> list[str]:
    def lost(part: str, whole: str, each: str, found: Mapping[str, Any]) -> str:
        return _share(f"{each} {part}", np.divide(found[part], found[whole]))

    shown = [
        {
            "cache": each, "tokens that recur, per row": f"{np.mean(found['tokens']):,.0f}",
            "of these evicted": lost("lost", "tokens", each, found),
            "of their attention": lost("mass_lost", "mass", each, found),
        }
        for each, found in own.items()
    ]  # fmt: skip
    gap = page["setting"]["gap"]
    return [f"Tokens that receive attention again after more than {gap} positions:", tables.table(shown)]


def _of_errors(own: Mapping[str, Any], page: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in OutputError._fields:
        # [rows, L] each
        error = {each: np.asarray(found[name]) for each, found in own.items() if np.max(found[name]) > 0}
        if not error:
            continue
        lowest = np.min(list(error.values()), axis=0)
        shown = [
            {
                "cache": each, "mean": _number(f"{each} {name}", values.mean(axis=1)),
                "lowest": f"{100 * np.mean(values <= lowest):.0f} %",
            } | {
                f"layer {layer}": f"{values[:, layer].mean():.2f}"
                for layer in range(values.shape[1])
                if values.shape[1] <= MOST_LAYERS
            }
            for each, values in error.items()
        ]  # fmt: skip
        what = "of the prompt" if name == "prompt" else "after the prompt"
        lines += [
            f"Relative error of the outputs of attention, queries {what}; lowest: share of rows and layers in which a "
            "cache has the lowest error:",
            tables.table(shown),
        ]
    return lines


def above(what: str, one: ArrayLike, other: ArrayLike) -> str:
    """Returns the mean difference of two measurements of the same rows, with its interval by a paired bootstrap."""
    found = paired_bootstrap(what, one, other, seed=0)
    return f"{found.difference:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def _share(what: str, values: ArrayLike) -> str:
    low, high = interval(values, what)
    return f"{100 * np.mean(np.asarray(values)):.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def _number(what: str, values: ArrayLike) -> str:
    low, high = interval(values, what)
    return f"{np.mean(np.asarray(values)):.3f} ({low:.3f} to {high:.3f})"


MEASURES = {"nats": _of_nats, "facts": _of_facts, "recurrences": _of_recurrences, "errors": _of_errors}
