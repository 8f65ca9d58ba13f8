"""Models that come as one GGUF file: converted once into the hub's layout, kept, and loaded from there.

Run as a program it converts; the caller stays free of torch:

    python -m rollcli.engines.gguf FILE FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from rollcli.errors import EngineError
from rollcli.runs.locations import gguf_folder


def ensure_converted(path: str) -> bool:
    """Converts the GGUF file that `path` stands for unless that is done already; returns whether it took place.

    Raises:
        EngineError: a package is missing, or the file cannot be read as a model.
    """
    found = gguf_folder(path)
    if found is None or (found[1] / "config.json").is_file():
        return False
    file, folder = found
    command = [sys.executable, "-m", "rollcli.engines.gguf", str(file), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        raise EngineError(
            f"`{file}` cannot be converted: {lines[-1] if lines else 'no reason given'}",
            hint="GGUF files need `pip install 'rollcli[gguf]'`",
        )
    return True


def convert(file: Path, folder: Path) -> None:
    """Writes a GGUF model, its weights widened to float32, as configuration, safetensors and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model loaded from GGUF refuses to be saved; one built anew from its configuration does not.
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A folder of its own: another run may convert the same file at this moment.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.tmp") as beside:
        whole = Path(beside) / "model"
        model.save_pretrained(whole)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(whole)
        if not (folder / "config.json").is_file():
            whole.rename(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
