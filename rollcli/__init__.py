"""Reinforcement learning post-training of language models: the `roll` command line and the system behind it."""

import sys
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Compiled against one build of torch; transformers and vLLM import them wherever they are installed."""


def hide_companions_of_another_torch() -> None:
    """Makes torch's companions that cannot import beside a CPU build of torch look as if they were not installed.

    vLLM's CPU build requires them, and the registry's are CUDA builds: beside torch+cpu their import fails, and with it
    that of every library which uses them where it sees them. Nothing here needs them without a GPU.
    """
    try:
        if not version("torch").endswith("+cpu"):
            return
    except PackageNotFoundError:
        return
    for name in COMPANIONS:
        try:
            fits = version(name).endswith("+cpu")
        except PackageNotFoundError:
            continue
        if not fits and name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]  # how Python marks what must not be imported
    # Where transformers was imported before, it remembers what it saw.
    for remembered in vars(sys.modules.get("transformers.utils.import_utils", sys)).copy().values():
        if callable(clear := getattr(remembered, "cache_clear", None)):
            clear()


hide_companions_of_another_torch()
