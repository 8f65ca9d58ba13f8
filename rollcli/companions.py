"""What has to be settled before torch's companions or DeepSpeed are imported beside a CPU build of torch."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Compiled against one build of torch; transformers and vLLM import them wherever they are installed."""


def is_cpu_build() -> bool:
    """Returns whether the torch installed is a build for CPUs alone; does not import it."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def settle() -> None:
    """Hides what does not import, and tells DeepSpeed that there is no device; nothing beside another torch."""
    if is_cpu_build():
        hide_companions_of_another_torch()
        # DeepSpeed, which accelerate imports wherever it is installed, would look for a device and print a warning.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def hide_companions_of_another_torch() -> None:
    """Makes torch's companions that cannot import beside a CPU build of torch look as if they were not installed.

    vLLM's CPU build requires them, and the registry's are CUDA builds: beside torch+cpu their import fails, and with it
    that of every library which uses them where it sees them. Nothing here needs them without a GPU.
    """
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
