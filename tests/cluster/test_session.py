"""One Ray per run, or somebody's cluster: each case in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollcli.cluster.session import ray_session
from rollcli.errors import EngineError

LIMIT_S = 90
OWN = """
import sys
from rollcli.cluster.session import ray_session
with ray_session(None, "own"):
    import ray
    node = ray._private.worker.global_worker.node
    def work(x): return 2 * x
    work = ray.remote(work)
    assert ray.get(work.remote(1)) == 2
    print(node.get_session_dir_path(), len(ray.nodes()), flush=True)
    for line in sys.stdin:
        print(ray.get(work.remote(int(line))), flush=True)
assert not ray.is_initialized()
"""
GUEST = """
import sys
from rollcli.cluster.session import ray_session
with ray_session(sys.argv[1] or None, "guest"):
    import ray
    def work(x): return 2 * x
    print(ray.get(ray.remote(work).remote(21)), ray.cluster_resources().get("theirs"))
"""
LISTING = """
import sys
from rollcli.cluster.session import cluster_nodes
from rollcli.devices.inventory import from_ray_nodes
import ray
nodes = cluster_nodes(sys.argv[1])
assert not ray.is_initialized()
found = from_ray_nodes(nodes)
print(len(nodes), found.kind, found.cores, found.memory_gib > 0.01)
"""
THEIRS = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"theirs": 3}, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""  # noqa: E501


def python(code: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | variables
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], text=True, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def processes_of(session: str) -> list[str]:
    """Returns the command lines that name a Ray session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if session in text:
            found.append(text[:80])
    return found


def ask(process: subprocess.Popen[str], number: int) -> int:
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_two_at_once_do_not_disturb_each_other_and_stop_what_they_started():
    both = [python(OWN), python(OWN)]
    try:
        facts = [process.stdout.readline().split() for process in both]
        assert [fact[1] for fact in facts] == ["1", "1"] and facts[0][0] != facts[1][0]
        assert [ask(process, 4) for process in both] == [8, 8]
        assert both[0].communicate(timeout=LIMIT_S) and both[0].returncode == 0
        deadline = time.monotonic() + 30
        while processes_of(Path(facts[0][0]).name):
            assert time.monotonic() < deadline, processes_of(Path(facts[0][0]).name)
            time.sleep(0.1)
        assert processes_of(Path(facts[1][0]).name)
        assert [ask(both[1], n) for n in range(5)] == [0, 2, 4, 6, 8]
        assert both[1].communicate(timeout=LIMIT_S) and both[1].returncode == 0
    finally:
        for process in both:
            process.kill()


@pytest.fixture(scope="module")
def theirs() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = python(THEIRS)
    yield process.stdout.readline().strip(), process
    process.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize("how", ["address", "RAY_ADDRESS"])
def test_existing_cluster_is_used_and_left_up(theirs, how):
    address, cluster = theirs
    guest = python(GUEST, address) if how == "address" else python(GUEST, "", RAY_ADDRESS=address)
    output, errors = guest.communicate(timeout=LIMIT_S)
    assert guest.returncode == 0, errors
    assert output.split() == ["42", "3.0"]
    assert cluster.poll() is None


def test_address_wins_over_the_variable(theirs):
    guest = python(GUEST, theirs[0], RAY_ADDRESS="127.0.0.1:1")
    output, errors = guest.communicate(timeout=LIMIT_S)
    assert output.split() == ["42", "3.0"], errors


def test_the_nodes_of_a_cluster_can_be_planned_for(theirs):
    listing = python(LISTING, theirs[0])
    output, errors = listing.communicate(timeout=LIMIT_S)
    assert output.split() == ["1", "cpu", "1", "True"], errors


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere.invalid:6379", "nonsense", "h:99999"])
def test_bad_address_is_told_soon_and_clearly(address):
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"cannot use Ray at `{address}`") as caught, ray_session(address, "x"):
        pass
    assert time.monotonic() - began < 25 and "--address" in caught.value.hint


def test_bad_variable_is_told(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(EngineError, match=r"cannot use Ray at `127\.0\.0\.1:1`"), ray_session(None, "x"):
        pass
