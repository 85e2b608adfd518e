"""How tokens that continue a prompt are fed: in one block where that makes no difference, otherwise one at a time."""

import dataclasses

from kvjax.cache.planning.layout import Phase

FEW_FED = 8  # tokens that fewer are padded to where the tokens of a continuation are fed in one block
MANY_FED = 64  # the same where they are fed one at a time; steps that no row needs are not taken


def takes_blocks(phase: Phase) -> bool:
    """Returns whether tokens that are fed in one block have the same scores as tokens that are fed one at a time."""
    return not any(
        group.evicts
        or group.storage.new_tokens_separate
        or not group.selection.reads_all
        or group.policy.positions != "original"
        for layer in phase
        for group in layer
    )  # fmt: skip


def without_step_kernels(phase: Phase) -> Phase:
    """Returns the phase without kernels that take one token of each row."""
    return tuple(
        tuple(dataclasses.replace(group, step_implementation=None, attn_implementation="xla") for group in layer)
        for layer in phase
    )
