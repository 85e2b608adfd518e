"""The config of `experiments.paper`.

No postponed annotations here: `config_flags` reads the types themselves.
"""

import dataclasses

from experiments.config import ModelConfig

OUTPUT = "results/papers"  # the folder of results, where no other is named


@dataclasses.dataclass
class PaperConfig:
    """Attributes:
    model: what the entries are measured on.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
