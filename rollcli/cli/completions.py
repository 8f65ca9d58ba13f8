"""Completion scripts for bash, zsh and fish, generated from the application.

python -m rollcli.cli.completions FOLDER        writes `roll.bash`, `_roll`, `roll.fish`
"""

from __future__ import annotations

import sys
from pathlib import Path

from typer._completion_shared import get_completion_script

FILES = {"bash": "roll.bash", "zsh": "_roll", "fish": "roll.fish"}
NO_SPACE = "    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace\n"
"""Keeps bash from ending the word after `key=`, `block.` and `folder/`."""

FIRST_TAB = """if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _roll_completion "$@"
else
  compdef _roll_completion roll
fi"""
"""Completes on the first Tab too, when zsh loads the script from its function path."""


def scripts() -> dict[str, str]:
    """Returns each script by its file's name."""
    found = {}
    for shell, name in FILES.items():
        text = get_completion_script(prog_name="roll", complete_var="_ROLL_COMPLETE", shell=shell)
        if shell == "bash":
            text = text.replace("    return 0\n", f"{NO_SPACE}    return 0\n")
        if shell == "zsh":
            text = text.replace("compdef _roll_completion roll", FIRST_TAB).replace(f"#{FIRST_TAB}", "#compdef roll")
        found[name] = text + "\n"
    return found


def write(folder: Path) -> None:
    """Writes the scripts into `folder`."""
    for name, text in scripts().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "completions"))
