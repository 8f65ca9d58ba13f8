"""What a person sees of a run: the live dashboard and the plain lines, both made from `events.jsonl` alone.

    events.jsonl ──follow.py──▶ view.py (RunView) ──▶ dashboard.py (terminal) or lines.py (pipe, CI)

The training process and a viewer in another terminal read the same file, so what they show is the same, and a viewer
that crashes cannot hurt a run.
"""
