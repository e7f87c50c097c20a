"""What Lightning, the Hugging Face Trainer and Accelerate need to train a `DistributedOptimizer`; each is imported by name."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def imported(module: str, package: str) -> ModuleType:
    """A module of a framework.

    Args:
        module: its name, the framework's first.
        package: what pip installs.

    Raises:
        ImportError: the framework is not installed; the message says what to install.
    """
    framework = module.partition(".")[0]
    if find_spec(framework) is None:
        raise ImportError(f"oktopk.frameworks.{framework} needs {framework}: pip install {package}")
    return import_module(module)
