"""The experiments, a file each: network, optimizer, batches, loss, and measurements after an epoch."""

from pathlib import Path

from ..config import Config
from .fashion_mnist import FashionMnist
from .mnist import Mnist
from .pendulum import Pendulum
from .task import Task
from .text import Text

TASKS: dict[str, type[Task]] = {
    "pendulum": Pendulum,
    "mnist": Mnist,
    "fashion-mnist": FashionMnist,
    "text": Text,
}


def task_of(config: Config, folder: Path | None = None) -> Task:
    """What a configuration trains; data files are looked for in the folder first."""
    return TASKS[config.experiment](config, folder)
