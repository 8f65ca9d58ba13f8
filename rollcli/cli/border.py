"""Where errors become messages and exit codes.

0    done, also when there was nothing to do
1    something the user can act on
2    the command line is wrong
3    a bug in rollcli: the traceback goes to the run's log or to a file that the message names
130  stopped by Ctrl-C      143  stopped by SIGTERM
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer import Abort
from typer.core import _click

from rollcli.cli.output import Output, cut, hint_line, is_terminal, paint
from rollcli.errors import ConfigError, Interrupted, Problem, RollError
from rollcli.suggest import did_you_mean

_WORDS = {
    "Input should be a valid integer, unable to parse string as an integer": "must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "must be a number",
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
    "Input should be greater than": "must be more than",
    "Input should be less than": "must be less than",
}
"""How Typer's checks of a value are told; what is not here is left out."""
_PYDANTIC = re.compile(rf"{'|'.join(_WORDS)}|Value error, ")


def output_before_parsing(words: list[str]) -> Output:
    """Returns what the bare words say about the output, for help and for errors of the parsing itself."""
    color = "auto"
    for word, following in zip(words, [*words[1:], ""]):
        if word.startswith("--color"):
            color = word.partition("=")[2] or following
    return Output(as_json="--json" in words, verbose=sum(word in ("-v", "-vv") for word in words), color=color)


def run(call: Callable[[], Any], output: Output, early: Output) -> int:
    """Calls the command line and returns its exit code; whatever it raises has been shown."""
    try:
        code = call()
        return code if isinstance(code, int) else 0
    except _click.exceptions.NoArgsIsHelpError as error:
        output.error(error.format_message())
        return 2
    except _click.exceptions.ClickException as error:
        show_usage_error(error, early)
        return error.exit_code
    except (KeyboardInterrupt, Abort):
        output.error("stopped by Ctrl-C")
        return 130
    except RollError as error:
        show_error(error, output)
        return error.exit_code if isinstance(error, Interrupted) else 1
    except SystemExit as error:
        # Typer ends so when the reader of a pipe (`| head`) has gone, which is no fault of the command's.
        if isinstance(error.__context__, BrokenPipeError):
            return 0
        raise
    except Exception as error:  # the last line of defence: a bug must not end in a bare traceback
        show_bug(error, output)
        return 3


def show_error(error: RollError, output: Output) -> None:
    """Writes an error the user can act on: JSON, located snippets on a terminal, or one line per problem in a pipe."""
    if output.as_json:
        output.error(_json_error(type(error).__name__, str(error), error.hint, error))
        return
    colored = output.colored_stderr
    if isinstance(error, ConfigError) and any(problem.source for problem in error.problems):
        terminal = is_terminal(sys.stderr)
        for number, problem in enumerate(error.problems):
            if terminal and number:
                output.error("")
            output.error(located(problem, colored) if terminal else str(problem))
        if len(error.problems) > 1:
            output.error(f"\n{paint('error:', 'error', colored)} {len(error.problems)} problems")
    else:
        output.error(f"{paint('error:', 'error', colored)} {error.message}")
    if output.verbose or os.environ.get("ROLL_DEBUG"):
        output.error("\n" + "".join(traceback.format_exception(error)).rstrip())
    _show_end(error.hint, output.log, output)


def located(problem: Problem, colored: bool) -> str:
    """Returns a problem with the line it stands on and a mark under the words that are wrong."""
    if not problem.source:
        return f"{paint('error:', 'error', colored)} {problem}"
    number = "" if problem.source == "command line" or not problem.line else str(problem.line)
    gutter = " " * len(number)
    meant = f" did you mean `{problem.suggestion}`?" if problem.suggestion else ""
    lines = [
        f"{paint('error:', 'error', colored)} {problem.message}",
        f" {gutter}{paint('-->', 'dim', colored)} {paint(problem.location, 'path', colored)}",
    ]
    if problem.snippet:
        bar = paint("|", "dim", colored)
        indent = len(problem.snippet) - len(problem.snippet.lstrip())
        column = max(problem.column, 1)
        length = max(min(problem.length, len(problem.snippet) - column + 1), 1)
        before = problem.snippet[: column - 1].expandtabs(4) if indent else problem.snippet[: column - 1]
        lines += [
            f" {gutter} {bar}",
            f" {paint(number, 'dim', colored)} {bar} {cut(problem.snippet.expandtabs(4), 110)}",
            f" {gutter} {bar} {' ' * len(before)}{paint('^' * min(length, 60), 'error', colored)}{meant}",
        ]
    elif meant:
        lines[0] += meant
    return "\n".join(lines)


def show_usage_error(error: Any, output: Output) -> None:
    """Writes an error of the command line itself, with the word that was meant when one is close."""
    message = error.format_message().rstrip(".").replace("'", "`")
    message = _PYDANTIC.sub(lambda match: _WORDS.get(match[0], ""), message)
    message = message[:1].lower() + message[1:]
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "roll"
    hint = f"run `{path} --help` to see how it is used"
    if isinstance(error, _click.exceptions.NoSuchOption):
        message = f"no such option `{error.option_name}`"
        meant = did_you_mean(error.option_name, error.possibilities or ())
        hint = f"did you mean `{meant}`? {hint}" if meant else hint
    if output.as_json:
        output.error(_json_error("UsageError", message, hint))
        return
    output.error(f"{paint('error:', 'error', output.colored_stderr)} {message}")
    _show_end(hint, None, output)


def show_bug(error: BaseException, output: Output) -> None:
    """Writes the message of an error nobody expected; its traceback goes to a file."""
    path = write_traceback(error, output.log) or write_traceback(error, _temporary_file())
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    hint = f"this is a bug in rollcli; please report it with the traceback in `{path}`"
    if output.as_json:
        output.error(_json_error("InternalError", message, hint))
        return
    if output.verbose or os.environ.get("ROLL_DEBUG"):
        output.error("".join(traceback.format_exception(error)).rstrip() + "\n")
    output.error(f"{paint('error:', 'error', output.colored_stderr)} {message}")
    _show_end(hint, None, output)


def write_traceback(error: BaseException, path: Path | None) -> Path | None:
    """Appends the traceback to a file and returns the file, or None when there is none to write to.

    Local variables are not shown: they may hold keys and tokens.
    """
    try:
        if path is None or not path.parent.is_dir():
            return None
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError:
        return None
    return path


def _temporary_file() -> Path:
    handle, name = tempfile.mkstemp(prefix="roll-traceback-", suffix=".log")
    os.close(handle)
    return Path(name)


def _show_end(hint: str | None, log: Path | None, output: Output) -> None:
    colored = output.colored_stderr
    if hint or log:
        output.error("")
    if hint:
        output.error(hint_line(hint, colored))
    if log:
        output.error(f"{paint('log:', 'hint', colored)} {log}")


def _json_error(kind: str, message: str, hint: str | None, error: RollError | None = None) -> str:
    import json

    body: dict[str, Any] = {"type": kind, "message": message, "hint": hint, "location": None}
    if isinstance(error, ConfigError) and error.problems:
        body["location"] = error.problems[0].location or None
        body["problems"] = [
            {"message": p.message, "location": p.location or None, "suggestion": p.suggestion} for p in error.problems
        ]
    return json.dumps({"error": body}, indent=2, ensure_ascii=False)
