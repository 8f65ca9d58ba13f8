"""Help of every command: examples that parse, few options, plain text of a fixed width."""

from __future__ import annotations

import shlex

from rollcli.cli.help import examples

CP = """\
Usage: roll recipes cp RECIPE [FILE] [OPTIONS]

Copy a recipe, to own and change it.

Arguments
  RECIPE         A recipe's name, or the path of one
  [FILE]         Where to; RECIPE.yaml here if left out

Options
  --force        Write over an existing file

Output
  -q, --quiet    Only the essential value; -qq nothing
  -v, --verbose  Explain; -vv library logs too
  --json         One JSON document on stdout
  -h, --help     Show this message and exit

Examples
  roll recipes cp grpo-gsm8k my.yaml
  roll recipes cp grpo-gsm8k  # keeps the name, in this folder
"""


def leaves(commands):
    return {words: command for words, command in commands.items() if not hasattr(command, "commands")}


def test_exact_help_of_a_command(roll):
    assert roll("recipes", "cp", "--help").out == CP


def test_every_help_shows(roll, commands):
    for words in commands:
        result = roll(*words[1:], "--help")
        assert result.code == 0 and result.err == ""
        assert max(map(len, result.out.splitlines())) <= 80, words
        assert "\x1b" not in result.out and "Raises" not in result.out


def test_every_command_has_a_few_examples(commands):
    for words, command in leaves(commands).items():
        shown = examples(command)
        assert 2 <= len(shown) <= 4, words
        assert all(line.startswith(" ".join(words)) for line in shown), words


def test_examples_parse(commands, workplace):
    for command in leaves(commands).values():
        for line in examples(command):
            words = shlex.split(line.partition(" > ")[0])[1:]
            root = commands[("roll",)]
            context = root.make_context("roll", list(words))
            name, sub, rest = root.resolve_command(context, [*context._protected_args, *context.args])
            while hasattr(sub, "commands"):
                context = sub.make_context(name, rest, parent=context)
                name, sub, rest = sub.resolve_command(context, [*context._protected_args, *context.args])
            sub.make_context(name, rest, parent=context)


def test_no_command_has_more_than_twelve_options(commands):
    for words, command in commands.items():
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
        assert len(options) <= 12, words


def test_every_parameter_has_help_and_no_full_stop(commands):
    for words, command in leaves(commands).items():
        for param in command.params:
            if not getattr(param, "hidden", False):
                assert param.help and not param.help.endswith("."), (words, param.name)


def test_locals_never_show():
    from rollcli.cli.app import app

    assert app.pretty_exceptions_show_locals is False and app.pretty_exceptions_enable is False
