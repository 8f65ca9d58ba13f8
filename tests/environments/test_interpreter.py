"""Python as a tool, in the real sandbox: what is shown, what is kept, and what hostile code gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollcli.environments import interpreter
from rollcli.environments.interpreter import Interpreter
from rollcli.environments.tools import CallFailed
from rollcli.errors import EngineError
from rollcli.sandbox.base import SandboxUnavailable


def failure(code: str, **options) -> str:
    with pytest.raises(CallFailed) as caught:
        Interpreter(**options)(code)
    return str(caught.value)


def test_printed_text_and_a_last_expression_are_shown() -> None:
    assert Interpreter()("print('so')\n6 * 7") == "so\n42"
    assert Interpreter()("x = 3") == "[no output; print what you want to see]"
    assert Interpreter()("import sys\nprint('a', file=sys.stderr)\nprint('b')") == "b\na"
    assert Interpreter()("'\\ud800' == chr(0xd800), '\\x00', 'ü'") == "(True, '\\x00', 'ü')"
    assert "surrogates not allowed" in failure("'\ud800'")  # which JSON can hold, and no source


def test_names_are_kept_and_earlier_output_is_not_shown_again() -> None:
    python = Interpreter()
    assert python("import math, random\nprint('once')\ndef f(x): return math.sqrt(x)\na = random.random()\na") != ""
    first = python("a")
    assert python("f(16) + 0 * a") == "4.0" and python("a") == first
    with pytest.raises(CallFailed):
        python("b = 1\nraise ValueError")
    with pytest.raises(CallFailed, match="name 'b' is not defined"):
        python("b")
    python("raise SystemExit")  # which ended well
    assert python("f(9)") == "3.0"
    with pytest.raises(CallFailed, match="name 'f' is not defined"):
        Interpreter(stateful=False)("f(9)")
    alone = Interpreter(stateful=False)
    alone("c = 1")
    with pytest.raises(CallFailed, match="name 'c' is not defined"):
        alone("c")


def test_a_traceback_shows_the_models_code_alone() -> None:
    said = failure("def f(x):\n    return 1 / x\n\nf(0)")
    assert said.splitlines()[:3] == ["Traceback (most recent call last):", '  File "<code>", line 4, in <module>',
                                     "    f(0)"]  # fmt: skip
    assert said.endswith("ZeroDivisionError: division by zero") and "execute" not in said
    assert "SyntaxError" in (said := failure("x = = 1")) and 'File "<code>", line 1' in said
    assert failure("import sys\nsys.exit(3)") == "[ended with exit code 3]"
    assert "null bytes" in failure("\0")


def test_limits_are_told() -> None:
    assert failure("print('begun', flush=True)\nwhile True: pass", timeout_s=0.5).startswith("begun\n[stopped")
    assert failure("import time\ntime.sleep(60)", timeout_s=0.5) == "[stopped: it ran longer than 0.5 s]"
    assert failure("while True: print('x' * 10**6)").endswith("[stopped: it wrote more than 1048576 bytes]")
    assert "MemoryError" in failure("x = bytearray(1 << 33)")


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "import socket\nsocket.socket()",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "open('/tmp/roll-tool-attack', 'w').write('x')",
    ],
)
def test_hostile_code_gets_nowhere(code: str) -> None:
    said = failure(code)
    assert said and "root:" not in said and not os.path.exists("/tmp/roll-tool-attack")
    assert Path("/etc/passwd").read_text()


def test_no_sandbox_is_no_failure_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_):
        raise SandboxUnavailable("no sandbox on this machine", hint="install bubblewrap")

    monkeypatch.setattr(interpreter, "run", refuse)
    with pytest.raises(SandboxUnavailable):
        Interpreter()("1")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(interpreter, "run", full)
    with pytest.raises(EngineError, match="no space left"):
        Interpreter()("1")
