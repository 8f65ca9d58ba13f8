"""Python as a tool: a call's code runs in the sandbox, and the model is shown what it printed."""

from __future__ import annotations

import math
import signal

from rollcli.environments.tools import CallFailed
from rollcli.errors import EngineError
from rollcli.sandbox.base import Limits, Outcome, Program
from rollcli.sandbox.session import run

# Runs in the sandbox. A last expression is shown as at Python's prompt; tracebacks begin in the model's own code.
_RUNNER = """
import ast, contextlib, io, linecache, random, sys, traceback

def execute(text, space, name):
    tree = ast.parse(text, name)
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    exec(compile(tree, name, "exec"), space)
    if last:
        exec(compile(ast.Interactive(last), name, "single"), space)

def main(earlier, code):
    space = {"__name__": "__main__"}
    random.seed(0)
    linecache.cache["<code>"] = len(code), None, code.splitlines(keepends=True), "<code>"
    try:
        for text in earlier:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                try:
                    execute(text, space, "<earlier>")
                except SystemExit:
                    pass
        execute(code, space, "<code>")
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename not in ("<code>", "<earlier>"):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        sys.exit(1)
"""


class Interpreter:
    """The tool `python` of one episode.

    With `stateful`, code that succeeded runs again, silently, before the code of the next call, so that its names and
    its state are there: the sandbox keeps no process between calls. Code that failed leaves nothing. `random` is seeded
    alike for each call; what reads a clock is not the same twice, and a call's limits count the code before it too.

    Args:
        stateful: names of earlier calls can be used.
        timeout_s: seconds, by the clock and of CPU, that a call may take.
        memory_mib: address space of the program.
    """

    name = "python"

    def __init__(self, stateful: bool = True, timeout_s: float = 4.0, memory_mib: int = 1024) -> None:
        self.stateful = stateful
        # `total_s` only bounds the start of a program that does not come, for there is one.
        self.limits = Limits(
            wall_s=timeout_s, total_s=2 * timeout_s, cpu_s=math.ceil(timeout_s), memory_mib=memory_mib
        )  # fmt: skip
        self._earlier: list[str] = []

    def __call__(self, code: str) -> str:
        """Runs Python code and returns what it prints, and the value of a last expression.

        Raises:
            CallFailed: it raised, ran into a limit, or ended with an exit code.
            EngineError: the sandbox cannot start or broke; SandboxUnavailable where nothing can confine a program.
        """
        # `ascii` because JSON may hold half a surrogate pair, which no source can.
        source = f"{_RUNNER}\nmain({self._earlier!a}, {code!a})\n"
        try:
            [outcome] = run([Program(source)], self.limits)
        except OSError as error:
            raise EngineError(f"the sandbox could not start: {error}") from error
        shown = _shown(outcome, self.limits)
        if outcome.ended != "exit" or outcome.exit_code:
            raise CallFailed(shown)
        if self.stateful:
            self._earlier.append(code)
        return shown or "[no output; print what you want to see]"


def _shown(outcome: Outcome, limits: Limits) -> str:
    said = [part.rstrip("\n") for part in (outcome.stdout, outcome.stderr) if part.strip()]
    if outcome.ended == "timeout":
        said.append(f"[stopped: it ran longer than {limits.wall_s:g} s]")
    elif outcome.ended == "output":
        said.append(f"[stopped: it wrote more than {limits.output_bytes} bytes]")
    elif outcome.exit_code < 0:
        name = signal.Signals(-outcome.exit_code).name
        said.append(f"[stopped by {name}{': out of CPU time' if name in ('SIGXCPU', 'SIGKILL') else ''}]")
    elif outcome.exit_code and not outcome.stderr.strip():
        said.append(f"[ended with exit code {outcome.exit_code}]")
    return "\n".join(said)
