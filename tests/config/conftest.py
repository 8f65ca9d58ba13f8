import pytest

GOOD = """\
model:
  path: some/model
steps: 3
tasks:
  - name: a
    source: {name: sums}
    rewards: [{name: math}]
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe into an empty working directory: the given text, or a small right one with `more` added."""
    monkeypatch.chdir(tmp_path)

    def write(text=None, more="", name="r.yaml"):
        content = GOOD + more if text is None else text
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return f"./{name}"

    return write
