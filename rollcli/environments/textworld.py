"""Games of Microsoft's TextWorld (arXiv 1806.11532): rooms, things and a quest, played by typing commands."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcli.config.schema import Problems, finite, positive
from rollcli.data.carriers import Message, Task
from rollcli.data.games.moves import marked
from rollcli.environments.base import StepResult
from rollcli.errors import DatasetNotFound, EpisodeError, PluginError

_MAKING = threading.Lock()
_STATUS = re.compile(r"\n>(?: [^\n]*)?\s*\Z")
"""The interpreter's prompt, with its status line behind it."""


@dataclass
class TextWorld:
    """One game: a file of `games` that the task's seed picks, or one that is made from the task's seed.

    A made game is compiled once, in some seconds, and kept in the user's cache, so the episodes of a group share it.
    Reward of a turn is what the score rose by, as a share of the most there is to score. Each turn's metrics and fields
    hold `success` (won), `score`, `turns`, and why the episode ended (`ended_won`, `ended_lost`, `ended_max_turns`).
    """

    blocking = True

    games: list[str] = field(default_factory=list)
    """Game files (`.z8`, its `.json` beside it) or patterns of them; none: games are made."""
    test_games: list[str] = field(default_factory=list)
    """Those of the test split; none: the same as in training."""
    rooms: int = 3
    """Rooms of a made game."""
    objects: int = 6
    """Things in a made game."""
    quest_length: int = 3
    """Commands that solve a made game."""
    show_commands: bool = True
    """The commands that are possible are listed in each observation."""
    max_turns: int = 30
    """Turns after which the episode ends."""
    invalid_reward: float = 0.0
    """Reward of a turn without a command."""

    def __post_init__(self) -> None:
        self._turns, self._score = 0, 0.0
        self._game: Any = None

    def problems(self) -> Problems:
        yield from positive(self, "rooms", "objects", "quest_length", "max_turns")
        yield from finite(self, "invalid_reward")
        if self.test_games and not self.games:
            yield "test_games", "needs `games`: made games of the two splits differ anyway"

    def reset(self, task: Task) -> list[Message]:
        """Starts the game and shows where the player is.

        Raises:
            PluginError: `textworld` is not installed.
            DatasetNotFound: there is no game file, or it is none.
            EpisodeError: a game with these options cannot be made.
        """
        textworld = _package()
        path = self._file(task, textworld)
        wanted = textworld.EnvInfos(
            admissible_commands=self.show_commands, won=True, lost=True, score=True, max_score=True, objective=True
        )
        try:
            self._game = textworld.start(str(path), wanted)
            state = self._game.reset()
        except (OSError, ValueError, KeyError) as error:
            raise DatasetNotFound(
                f"`{path}` is no game of TextWorld: {error}", hint="give the `.z8` that `tw-make` wrote"
            ) from error
        self._most = float(state.max_score or 1)
        text = state.feedback
        if state.objective and (start := text.find(state.objective)) >= 0:
            text = text[start:]  # a banner is before it
        return [*task.messages, {"role": "user", "content": self._shown(text, state)}]

    def step(self, response: str) -> StepResult:
        """Plays the command of a response: its marked part, or its last line."""
        self._turns += 1
        command, reward, reason = _command(response), self.invalid_reward, ""
        shown = "Write one command."
        if command:
            state, _, is_over = self._game.step(command)
            score = float(state.score or 0)
            reward, self._score = (score - self._score) / self._most, score
            reason = "won" if state.won else "lost" if is_over or state.lost else ""
            shown = self._shown(state.feedback, state)
        if not reason and self._turns >= self.max_turns:
            reason = "max_turns"
        numbers = {"success": float(reason == "won"), "score": self._score / self._most, "turns": float(self._turns)}
        numbers |= {f"ended_{each}": float(reason == each) for each in ("won", "lost", "max_turns")}
        messages = [] if reason else [{"role": "user", "content": shown}]
        return StepResult(messages, bool(reason), reward, {**numbers, "done_reason": reason}, numbers)

    def close(self) -> None:
        """Ends the interpreter."""
        if self._game is not None:
            self._game.close()

    def _shown(self, text: str, state: Any) -> str:
        text = re.sub(r"\n{3,}", "\n\n", _STATUS.sub("", text)).strip()
        return f"{text}\n\nPossible commands: {', '.join(state.admissible_commands)}" if self.show_commands else text

    def _file(self, task: Task, textworld: Any) -> Path:
        patterns = (self.test_games if task.split == "test" else []) or self.games
        if not patterns:
            return made(textworld, task.seed % 2**31, self.rooms, self.objects, self.quest_length)
        files = sorted({name for pattern in patterns for name in glob.glob(os.path.expanduser(pattern))})
        files = [name for name in files if not name.endswith(".json")]
        if not files:
            raise DatasetNotFound(f"no game file at {', '.join(map(repr, patterns))}", hint="`tw-make` writes some")
        return Path(files[task.seed % len(files)])


def made(textworld: Any, seed: int, rooms: int, objects: int, quest_length: int) -> Path:
    """Returns the file of the game that these numbers make; makes it where it is not in the user's cache.

    Raises:
        EpisodeError: there is no such game, or it does not compile.
    """
    key = json.dumps([textworld.__version__, seed, rooms, objects, quest_length])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rollcli" / "textworld"
    file = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.z8"
    # The package's generators are the process's; another process may make the same game at this moment.
    with _MAKING:
        if file.is_file():
            return file
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as beside:
            options = textworld.GameOptions()
            options.seeds, options.path = seed, str(Path(beside) / file.name)
            options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, quest_length
            try:
                textworld.make(options)
            except (OSError, RuntimeError, ValueError, AssertionError) as error:
                raise EpisodeError(f"no game of {rooms} rooms and a quest of {quest_length}: {error}") from error
            for suffix in (".json", ".z8"):  # the game last: where it is, all of it is
                os.replace(Path(beside) / file.with_suffix(suffix).name, file.with_suffix(suffix))
    return file


def _command(response: str) -> str:
    lines = [line.strip().lstrip(">").strip() for line in marked(response)[0].splitlines()]
    return next((line[:200] for line in reversed(lines) if line), "")


def _package() -> Any:
    try:
        import textworld
    except ImportError as error:
        raise PluginError(
            f"this environment is played by `textworld`, which does not import: {error}",
            hint="pip install 'rollcli[textworld]'",
        ) from error
    return textworld
