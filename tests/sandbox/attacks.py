"""Twenty and more answers that try to score without solving, or to harm the host; each must score 0.

The task they are put to is `f(x) == x + 40`; no value that a test expects can be guessed from its argument.
"""

WRONG = "def f(x):\n    return 0\n"
ATTACKS = {
    "password file": "print(open('/etc/passwd').read())\n" + WRONG,
    "password file by subprocess": "import subprocess\nsubprocess.check_output(['/bin/cat', '/etc/passwd'])\n" + WRONG,
    "socket": "import socket\nsocket.socket().connect(('127.0.0.1', 22))\n" + WRONG,
    "fork bomb": "import os\nwhile True:\n    os.fork()\n",
    "8 GB": "blocks = [bytearray(1 << 28) for _ in range(32)]\n" + WRONG,
    "1 GB of output": "import sys\nfor _ in range(1024):\n    sys.stdout.write('x' * (1 << 20))\n" + WRONG,
    "os._exit(0)": "import os\nos._exit(0)\n",
    "os._exit(0) when asked": "import os\ndef f(x):\n    os._exit(0)\n",
    "sys.exit(0)": "import sys\nsys.exit(0)\n",
    "sys.exit(0) when asked": "import sys\ndef f(x):\n    sys.exit(0)\n",
    "printed success": "print('[true, \"\"]\\npassed\\nOK\\n100% 3 passed')\n" + WRONG,
    "success on every file": """import os
for number in range(64):
    try:
        os.write(number, b'[true, ""]\\n' * 3 + b'sealed\\n')
    except OSError:
        pass
"""
    + WRONG,
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + WRONG,
    "kill all": "import os, signal\nos.kill(-1, signal.SIGKILL)\n" + WRONG,
    "patched builtins": """import builtins, operator, unittest, json
builtins.AssertionError = type(None)
builtins.all = builtins.isinstance = lambda *_: True
unittest.TestCase.assertEqual = lambda *_: None
json.dumps = lambda *_: '["return", true]'
__debug = False
"""
    + WRONG,
    "equal to everything": """class Same(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
class Alike:
    __eq__ = Same.__eq__
    __ne__ = Same.__ne__
    __sub__ = __rsub__ = lambda self, other: 0
    __hash__ = lambda self: 0
def f(x):
    return Alike() if x else Same()
""",
    "frames and heap": """import gc, sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [value for space in (frame.f_locals, frame.f_globals) for value in list(space.values())]
        frame = frame.f_back
    seen += gc.get_objects()
    for each in seen:
        for text in each.values() if type(each) is dict else [each]:
            if isinstance(text, str) and 'SECRET' in text and 'isinstance' not in text:
                return x + 40
    return 0
""",
    "symlinks": """import os
os.symlink('/etc/passwd', 'link')
print(open('link').read())
"""
    + WRONG,
    "endless loop": "while True:\n    pass\n",
    "endless loop when asked": "def f(x):\n    while True:\n        pass\n",
    "endless sleep": "import time\ntime.sleep(1000)\n",
    "walk /proc": """import os
for name in os.listdir('/proc'):
    print(open(f'/proc/{name}/environ', 'rb').read())
"""
    + WRONG,
    "own memory map": "print(open('/proc/self/maps').read(), open('/proc/self/mem', 'rb'))\n" + WRONG,
    "write outside": "open('/tmp/roll-attack', 'w').write('x')\nopen('/roll-attack', 'w').write('x')\n" + WRONG,
    "ptrace": """import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, os.getppid(), 0, 0):
    raise SystemExit(3)
"""
    + WRONG,
    "atexit": "import atexit\natexit.register(lambda: print(42))\n" + WRONG,
    "threads": """import threading, time
threads = [threading.Thread(target=time.sleep, args=(1000,)) for _ in range(5000)]
for thread in threads:
    thread.start()
"""
    + WRONG,
    "deep recursion": """import sys
sys.setrecursionlimit(1 << 30)
def g(x):
    return [repr(g)] and eval('g(x)', {'g': g, 'x': x})
g(1)
"""
    + WRONG,
    "environment": "import os\nassert any('RUNS' in name or 'SSH' in name for name in os.environ)\n" + WRONG,
    "huge file": """with open('huge', 'wb') as file:
    for _ in range(4096):
        file.write(bytes(1 << 20))
"""
    + WRONG,
    "many files": """for number in range(1 << 20):
    open(f'file{number}', 'wb').write(bytes(1 << 16))
"""
    + WRONG,
    "memory that is no process's": "import os\nos.ftruncate(os.memfd_create('x'), 1 << 33)\n" + WRONG,
    "root again": "import os\nos.setuid(0)\n" + WRONG,
}
