"""BiPACE in ms-swift: join() in a file of --external_plugins.  docs/swift.md"""

from typing import Any

from .._settings import Settings

__all__ = ["Settings", "join", "settings"]

settings = Settings()  # of the trainers that are made from now on


def join(**values: Any) -> None:
    """From now on `--rlhf_type grpo` trains with BiPACEGRPOTrainer, and these fields of integrations' `Settings`.

    TypeError and ValueError name the one that is wrong.
    """
    global settings
    from swift.trainers import TrainerFactory

    settings = Settings.of(values)
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.trainer.BiPACEGRPOTrainer"
