import io

import pyte
import pytest
from rich.cells import cell_len
from rich.console import Console

from rollcli.monitor.dashboard import Frame, render
from rollcli.monitor.view import RunView
from tests.monitor.events import event, run, sample, started, step

NOW = 1020.0 + 142 * 55 + 14

WIDE = """\
run        grpo-math-7f3a · grpo · 8 GPUs (4 train + 4 rollout) · seed=1 algorithm.clip=0.3
step       142/500 · 2h 10m elapsed · 5h 27m left · checkpoint step 140 (2 ago)
────────────────────────────────────────────────────────────────────────────────────────────────────
reward     ▁▂▂▂▂▂▂▂▃▃▃▃▃▃▄▄▄▄▄▄  0–1      0.551  ▲ +0.43 since step 1  eval 0.612 @140  math500
accuracy   ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄  0–1      0.500  = 0.00
tasks      gsm8k 0.610   sokoban 0.320
length     ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆  0–500    384 tokens  = 0              truncated 3.1 %  max 3,912
kl         ▁▁▁▁▁▁▂▂▂▂▂▃▃▃▃▃▃▄▄▄  0–0.01   0.0051 to reference          entropy 0.830
staleness  0: 61 %   1: 32 %   2: 7 %   max 2   dropped 0   failed 0
────────────────────────────────────────────────────────────────────────────────────────────────────
stage      sync 3 %  rollout 41 %  logprobs 9 %  advantages 1 %  update 39 %  idle 7 %  last step
           1.6 s     22.5 s        4.9 s         0.5 s           21.4 s       3.9 s     54.8 s
now        rollout 14s · 371/512 samples, longest 3,912 tokens · generating 120  acting 3  scoring 2
speed      rollout 11.4k tok/s · train 8.9k tok/s
memory     policy 71.2 · rollout 62.0 · total 133.2 GiB
────────────────────────────────────────────────────────────────────────────────────────────────────
sample     gsm8k step 142 · 1/3 · reward 0.500 · advantage +0.62 · 212 tokens · stop
  prompt   Natalia sold clips to 48 friends.⏎How many altogether?
  response so 48 + 24 = 72.⏎The answer is \\boxed{72}.
log        no warnings


n/p next, previous sample   b/w best, worst   ctrl-c stop after this step
"""

MEDIUM = """\
run        grpo-math-7f3a · grpo · 8 GPUs (4 train + 4 rollout) · seed=1 algori…
step       142/500 · 2h 10m elapsed · 5h 27m left · checkpoint step 140 (2 ago)
────────────────────────────────────────────────────────────────────────────────
reward     ▁▂▂▂▂▃▃▃▃▄▄▄  0–1      0.551  ▲ +0.43 since step 1  eval 0.612 @140
accuracy   ▄▄▄▄▄▄▄▄▄▄▄▄  0–1      0.500  = 0.00
tasks      gsm8k 0.610   sokoban 0.320
length     ▆▆▆▆▆▆▆▆▆▆▆▆  0–500    384 tokens  = 0              truncated 3.1 %
kl         ▁▁▁▂▂▂▂▃▃▃▄▄  0–0.01   0.0051 to reference          entropy 0.830
staleness  0: 61 %   1: 32 %   2: 7 %   max 2   dropped 0   failed 0
────────────────────────────────────────────────────────────────────────────────
stage      rollout 41 %  logprobs 9 %  update 39 %  other 11 %  last step
           22.5 s        4.9 s         21.4 s       6.0 s       54.8 s
now        rollout 14s · 371/512 samples, longest 3,912 tokens · generating 120…
speed      rollout 11.4k tok/s · train 8.9k tok/s
memory     policy 71.2 · rollout 62.0 · total 133.2 GiB
────────────────────────────────────────────────────────────────────────────────
sample     gsm8k step 142 · 1/3 · reward 0.500 · advantage +0.62 · 212 tokens ·…
  prompt   Natalia sold clips to 48 friends.⏎How many altogether?
  response so 48 + 24 = 72.⏎The answer is \\boxed{72}.
log        no warnings


n/p next, previous sample   b/w best, worst   ctrl-c stop after this step
"""

EMPTY = """\
run        waiting for the first event
step       no data · no checkpoint yet
reward     no data
length     no data
kl         no data
staleness  no data
stage      no data
now        no data
speed      no data
sample     no data

ctrl-c stop after this step
"""


def view_of(*events):
    view = RunView()
    for one in events:
        view.apply(one)
    return view


def text(view, **frame):
    frame = Frame(**{"now": NOW, **frame})
    output = io.StringIO()
    Console(file=output, width=frame.width, color_system=None, highlight=False).print(render(view, frame))
    return output.getvalue()


def trimmed(drawn):
    return "".join(line.rstrip() + "\n" for line in drawn.splitlines())


def test_frame_at_100_columns():
    assert trimmed(text(view_of(*run()), width=100, height=23)) == WIDE


def test_frame_at_80_columns():
    assert trimmed(text(view_of(*run()), width=80, height=23)) == MEDIUM


def test_frame_before_anything_happened():
    assert trimmed(text(RunView(), width=80, height=12, keys=False)) == EMPTY


def test_narrow_frame_drops_columns_and_does_not_wrap():
    drawn = text(view_of(*run()), width=59, height=23)
    assert "reward     0.551  ▲ +0.43 since step 1\n" in trimmed(drawn)
    assert "▁" not in drawn and "truncated" not in drawn


HOSTILE = "\x1b[2J\x1b[1;1H[bold]gotcha[/bold]\r\n\n\x07答え" * 60


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 100, 200])
@pytest.mark.parametrize("height", [1, 5, 12, 23, 24, 40])
def test_frame_is_exactly_as_high_and_at_most_as_wide_as_asked(width, height):
    views = [
        RunView(),
        view_of(started()),
        view_of(*run(3)),
        view_of(*run(3), sample(4, None, task=HOSTILE, prompt=HOSTILE, response=HOSTILE, stop_reason=HOSTILE)),
        view_of(
            started(run=HOSTILE, algorithm=HOSTILE, overrides=[HOSTILE], devices={"policy": HOSTILE}),
            step(1, 1055, **{f"time/{HOSTILE}_s": 3.0, f"accuracy/{HOSTILE}": 0.5, f"memory/{HOSTILE}_gib": 1.0}),
            event("evaluation", step=1, tasks={HOSTILE: {}}, accuracy=0.5),
            *(event("warning", message=f"{number}{HOSTILE}") for number in range(5)),
            event("stage_started", step=2, stage=HOSTILE),
            event("progress", step=2, stage=HOSTILE, done=1, total=2, states={HOSTILE: 1}),
        ),
        view_of(started(), event("run_finished", status="failed", reason=HOSTILE, hint=HOSTILE)),
        view_of(started(pipeline="sft"), event("step", step=1, metrics={"loss": 2.5, "length": 90.0})),
    ]
    for view in views:
        lines = text(view, width=width, height=height).splitlines()
        assert len(lines) == height
        assert max(map(cell_len, lines)) <= width
        assert all(line.isprintable() for line in lines)


def test_a_talk_is_shown_with_its_player():
    talk = "assistant: 1\nuser: 1XO\nassistant: 3"
    shown = text(view_of(started(), sample(1, 1.0, agent="first", response=talk, prompt="123")), width=100, height=23)
    assert " · first · 1/1 · " in shown and "response assistant: 1⏎user: 1XO⏎assistant: 3" in shown


def test_hostile_sample_is_shown_as_written():
    view = view_of(started(), sample(1, 1.0, response="[red]\x1b[31mred[/red]\nend :smile:", prompt="p"))
    assert "  response [red]␛[31mred[/red]⏎end :smile:" in text(view, width=100, height=23)


def test_long_response_shows_its_end():
    view = view_of(started(), sample(1, 1.0, response="first " + "x" * 5000 + " the answer is 72"))
    lines = text(view, width=80, height=26).splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("  response …x"))
    shown = "".join(line[11:].rstrip("\n") for line in lines[at : at + 8])
    assert "the answer is 72" in shown and "first" not in shown


def test_only_color_changes_with_color():
    view = view_of(*run())
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=True, color_system="truecolor", highlight=False)
    console.print(render(view, Frame(width=100, height=23, now=NOW)))
    screen = pyte.Screen(100, 24)
    pyte.Stream(screen).feed(output.getvalue().replace("\n", "\r\n"))
    assert trimmed("\n".join(screen.display[:23])) == WIDE
    assert "\x1b[" in output.getvalue() and "█" not in WIDE


def test_stage_shares_fit_every_width():
    view = view_of(*run(2))
    for width in range(46, 140):
        row = next(line for line in text(view, width=width, height=23).splitlines() if line.startswith("stage"))
        assert row.rstrip().endswith("last step")
        shares = [int(word) for word, unit in zip(row.split(), row.split()[1:]) if unit == "%"]
        assert 98 <= sum(shares) <= 102


def test_synchronous_run_without_staleness_says_no_data():
    view = view_of(started(), event("step", step=1, metrics={"reward": 1.0}))
    drawn = trimmed(text(view, width=80, height=23))
    assert "staleness  no data\n" in drawn and "speed      no data\n" in drawn
    assert "reward     ▇             0–1      1.000\n" in drawn


def test_sft_shows_the_loss():
    view = view_of(started(pipeline="sft"), *(event("step", step=n, metrics={"loss": 3.0 - n}) for n in (1, 2)))
    drawn = trimmed(text(view, width=80, height=23))
    assert "loss       ▇▄            0–2      1.000  ▼ -1.00 since step 1\n" in drawn
    assert "reward" not in drawn


def test_asynchronous_rollout_is_shown_beside_the_update():
    view = view_of(*run(2), event("stage_started", NOW, step=3, stage="update"))
    assert "now        update 0s · rollout 371/512 samples" in text(view, width=100, height=23)


def test_footer_tells_what_ctrl_c_does():
    view = view_of(*run(2))

    def footer(**frame):
        return text(view, width=100, height=23, **frame).splitlines()[-1].rstrip()

    assert footer(keys=False) == "ctrl-c stop after this step"
    assert footer(keys=False, watching=True) == "ctrl-c detach, the run goes on"
    view.apply(event("stopping", 9000, signal="SIGINT", step=3))
    assert footer() == "stopping after this step — press ctrl-c again to kill"
    assert footer(watching=True, keys=False) == "the run is stopping after this step   ctrl-c detach"
    view.apply(event("run_finished", 9001, status="stopped", reason="SIGINT", hint="roll resume grpo-math-7f3a"))
    assert footer(watching=True) == "stopped: roll resume grpo-math-7f3a"
    assert footer() == "stopped", "the run's own process says what to do next itself"
    assert "now        stopped: SIGINT" in text(view, width=100, height=23)
    assert "step       2/500 · stopped · " in text(view, width=100, height=23)


def test_warnings_are_counted_newest_last():
    messages = ["disk slow", "3 episodes timed out", "disk slow"]
    view = view_of(*run(2), *(event("warning", message=message) for message in messages))
    lines = trimmed(text(view, width=80, height=23)).splitlines()
    assert lines[-4:-1] == [
        "log        warning: 3 episodes timed out",
        "           warning: disk slow (2 times)",
        "",
    ]
