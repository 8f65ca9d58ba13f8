"""Calls between the tests and the answer, which never share an interpreter.

Values cross as plain data in JSON, rebuilt as exact builtin types: what an answer returns has no `__eq__` of its own.
What is no plain data crosses as a handle. On the tests' side a handle (`Remote`) asks the answer for attributes, items
and calls, but compares equal to nothing but handles, and no arithmetic with plain data is left to the answer. On the
answer's side a handle, of a function that a test passed, can only be called.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import functools
import json
import operator
import socket
import types
from typing import Any

MAX_FRAME = 64 << 20
_SCALARS = (type(None), bool, float, str)
_HARMLESS_TYPES = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and kind is not type
}  # fmt: skip
_TEXT = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}
_SEQUENCES = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque,
}  # fmt: skip
_MAPPINGS = {"dict": dict, "Counter": collections.Counter, "OrderedDict": collections.OrderedDict}
_BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor")
_UNARY = {"len": len, "iter": iter, "next": next, "bool": bool, "str": str, "repr": repr, "int": int, "float": float}


class Remote:
    """A handle of an object on the other side."""

    __slots__ = ("_key", "_peer")

    def __init__(self, peer: Peer, key: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_key", key)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._peer.call(self, positional, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_pytest", "pytest")):
            raise AttributeError(name)
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("set_item", self, key, value)

    def __len__(self) -> int:
        return self._peer.ask("unary", "len", self)

    def __iter__(self) -> Any:
        return self._peer.ask("unary", "iter", self)

    def __next__(self) -> Any:
        return self._peer.ask("unary", "next", self)

    def __bool__(self) -> bool:
        return self._peer.ask("unary", "bool", self) is True

    def __str__(self) -> str:
        return str(self._peer.ask("unary", "str", self))

    def __repr__(self) -> str:
        return str(self._peer.ask("unary", "repr", self))

    def __hash__(self) -> int:
        return self._key

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Remote) and self._peer.ask("binary", "eq", self, other) is True

    def __ne__(self, other: Any) -> bool:
        return not self == other


def _binary(name: str) -> Any:
    def operate(self: Remote, other: Any) -> Any:
        # With plain data on one side the answer would decide a comparison that the test makes.
        return self._peer.ask("binary", name, self, other) if isinstance(other, Remote) else NotImplemented

    return operate


for _name in _BINARY[2:]:
    setattr(Remote, f"__{_name.strip('_')}__", _binary(_name))


class AnswerError(RuntimeError):
    """The answer raised what has no name here, or is gone."""


class Peer:
    """One end of the conversation. Both ends ask and answer; while one waits it answers what the other asks."""

    def __init__(self, channel: socket.socket, serves_all: bool) -> None:
        """With `serves_all` the other side may do all that `Remote` can; else only call what it was given."""
        self._reader, self._writer = channel.makefile("rb"), channel.makefile("wb")
        self._serves_all = serves_all
        self._objects: dict[int, Any] = {}
        self._keys: dict[int, int] = {}
        self.exceptions: dict[str, type[Exception]] = {}

    def ask(self, verb: str, *operands: Any) -> Any:
        """Returns what the other side answers. Raises what it raised, as an exception of this side; AnswerError."""
        self._send([verb, *map(self.encode, operands)])
        return self.decode(self._answer())

    def call(self, target: Remote, positional: tuple, named: dict[str, Any]) -> Any:
        """Calls a function of the other side; arguments it changed in place are changed here as well."""
        sent = [*positional, *named.values()]
        encoded = [self.encode(value) for value in sent]
        self._send(["call", self.encode(target), encoded, list(named)])
        value, *changed = self._answer()
        for index, after in changed:
            before, now = sent[index], self.decode(after)
            if type(before) is list and type(now) is list:
                before[:] = now
            elif type(before) in (dict, set) and type(now) is type(before):
                before.clear()
                before.update(now)
        return self.decode(value)

    def serve(self, first: Any) -> None:
        """Answers until the other side is gone; `first` tells it that this side is ready."""
        self._send(["return", first])
        try:
            while True:
                self._respond(self._receive())
        except EOFError:
            return

    def ready(self) -> Any:
        """Waits for what the other side's `serve` says first."""
        return self._answer()

    def encode(self, value: Any) -> Any:
        """Returns a value as JSON has it. Raises TypeError on the tests' side for what cannot be passed."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is int:
            return value if -(2**63) < value < 2**63 else ["int", hex(value)]
        if kind is Remote:
            return ["yours", value._key]
        for base in (*_SEQUENCES.values(), *_MAPPINGS.values()):
            if kind is base:
                items = value.items() if isinstance(value, dict) else value
                return [base.__name__, [self.encode(i) for pair in items for i in pair] if isinstance(value, dict)
                        else [self.encode(item) for item in items]]  # fmt: skip
        if kind in (bytes, bytearray):
            return [kind.__name__, value.hex()]
        if kind in _TEXT.values():
            return [kind.__name__, value.isoformat()]
        encoded = self._encode_number(value, kind)
        if encoded is not None:
            return encoded
        if isinstance(value, type) and _HARMLESS_TYPES.get(value.__name__) is value:
            return ["type", value.__name__]
        for base in (bool, int, float, str, tuple, list, collections.Counter, dict, set, frozenset):
            if isinstance(value, base):  # a subclass is known by its value: named tuples, default dicts, enumerations
                return self.encode(base(value))
        return self._handle(value)

    def decode(self, data: Any) -> Any:
        """Returns the value of what `encode` gave. Raises ValueError or KeyError for anything else."""
        if not isinstance(data, list):
            return data
        tag, *content = data
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([self.decode(item) for item in content[0]])
        if tag in _MAPPINGS:
            items = [self.decode(item) for item in content[0]]
            return _MAPPINGS[tag](dict(zip(items[::2], items[1::2])))
        if tag in ("bytes", "bytearray"):
            return _HARMLESS_TYPES[tag].fromhex(content[0])
        if tag in _TEXT:
            return _TEXT[tag].fromisoformat(content[0])
        if tag == "mine":
            return Remote(self, int(content[0]))
        if tag == "yours":
            return self._objects[content[0]]
        if tag == "type":
            return _HARMLESS_TYPES[content[0]]
        makers = {
            "int": lambda text: int(text, 16), "complex": complex, "range": range, "Decimal": decimal.Decimal,
            "Fraction": fractions.Fraction, "timedelta": datetime.timedelta, "Ellipsis": lambda: ...,
        }  # fmt: skip
        return makers[tag](*content)

    def _encode_number(self, value: Any, kind: type) -> Any:
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is range:
            return ["range", value.start, value.stop, value.step]
        if kind is decimal.Decimal:
            return ["Decimal", str(value)]
        if kind is fractions.Fraction:
            return ["Fraction", f"{value.numerator}/{value.denominator}"]
        if kind is datetime.timedelta:
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if value is ...:
            return ["Ellipsis"]
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a NumPy number
            return self.encode(value.item())
        return None

    def _handle(self, value: Any) -> Any:
        functions = (types.FunctionType, types.BuiltinFunctionType, functools.partial)
        if not self._serves_all and not isinstance(value, functions):
            raise TypeError(f"a {type(value).__name__} of the tests cannot be passed to the answer")
        key = self._keys.setdefault(id(value), len(self._keys) + 1)
        self._objects[key] = value  # kept, so that its id stays its own
        return ["mine", key]

    def _send(self, message: Any) -> None:
        frame = json.dumps(message).encode()
        try:
            self._writer.write(len(frame).to_bytes(8, "big") + frame)
            self._writer.flush()
        except OSError as error:
            raise EOFError from error

    def _receive(self) -> Any:
        length = int.from_bytes(self._reader.read(8), "big")
        if length > MAX_FRAME:
            raise AnswerError(f"the answer returned {length} bytes")
        frame = self._reader.read(length)
        if not length or len(frame) < length:
            raise EOFError("the answer's process has ended")
        return json.loads(frame)

    def _answer(self) -> Any:
        while True:
            message = self._receive()
            if message[0] == "return":
                return message[1]
            if message[0] == "raise":
                raise self._exception(message[1], str(message[2]))
            self._respond(message)

    def _respond(self, message: list[Any]) -> None:
        try:
            answer = ["return", self._done(*message)]
        except Exception as error:
            # The border between answer and tests: what one side raises is raised on the other.
            kinds = [kind.__name__ for kind in type(error).__mro__]
            answer = ["raise", kinds, str(error)[:500]]
        self._send(answer)

    def _done(self, verb: str, *operands: Any) -> Any:
        if verb == "call":
            function, arguments, names = (
                self.decode(operands[0]),
                [self.decode(each) for each in operands[1]],
                operands[2],
            )
            split = len(arguments) - len(names)
            value = self.encode(function(*arguments[:split], **dict(zip(names, arguments[split:]))))
            after = [(i, self.encode(each)) for i, each in enumerate(arguments) if type(each) in (list, dict, set)]
            return [value, *([i, each] for i, each in after if each != operands[1][i])]
        if not self._serves_all:
            raise PermissionError("a test's function can only be called")
        verbs = {
            "get": getattr, "set": setattr, "item": operator.getitem, "set_item": operator.setitem,
            "unary": lambda name, operand: _UNARY[name](operand),
            "binary": lambda name, left, right: getattr(operator, name)(left, right),
        }  # fmt: skip
        return self.encode(verbs[verb](*map(self.decode, operands)))

    def _exception(self, kinds: list[str], text: str) -> Exception:
        """Returns an exception of this side, of the nearest kind that has a name here."""
        for name in kinds:
            kind = self.exceptions.get(name) or getattr(builtins, name, None)
            # What ends loops and generators here must not come from there, but as the end of an iteration.
            if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
                try:
                    return kind(text)
                except TypeError:  # one that is made from more than a text
                    continue
        return AnswerError(f"{kinds[0]}: {text}")
