"""From a configuration to what is trained."""

from __future__ import annotations

from jobs.config.config import Config
from jobs.train.tasks.images import Load, build_images
from jobs.train.tasks.speech import build_speech
from jobs.train.tasks.task import Workload
from jobs.train.tasks.text import build_language


def build_workload(config: Config, *, rank: int, size: int, load: Load | None = None) -> Workload:
    """The workload that a configuration describes, as one rank sees it; the weights are equal on all ranks.

    Args:
        config: a run's.
        rank, size: this rank's place.
        load: gives the training and the held-out images, where images are trained on; default: load_images.

    Raises:
        DataError: data that is missing, broken, or too little for the ranks.
        WorkloadError: settings and data that do not go together.
    """
    if config.task == "speech":
        return build_speech(config, rank=rank, size=size)
    if config.task == "text":
        return build_language(config, rank=rank, size=size)
    return build_images(config, rank=rank, size=size, load=load)
