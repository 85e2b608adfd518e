"""The checkpoints of a run that can be continued."""

from pathlib import Path

import orbax.checkpoint as ocp

from experiments.training.run_folder import CHECKPOINTS


def manager(folder: Path, every: int) -> ocp.CheckpointManager:
    """Opens the checkpoints of a run: the newest two are kept.

    Args:
      folder: the run's output folder.
      every: steps between two checkpoints.

    Returns:
      Orbax's manager, to be used as a context.
    """
    directory = (folder / CHECKPOINTS).resolve()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        save_interval_steps=every,
        # Orbax looks for unfinished checkpoints in a thread, which prints an error if the folder of a run that fails
        # at once is removed meanwhile. A new folder has none.
        cleanup_tmp_directories=directory.exists(),
    )
    return ocp.CheckpointManager(directory, options=options)
