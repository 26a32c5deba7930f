"""Children that do what the test needs, tied to it or to a script that dies."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from process_tools import UserScript, alive, nothing_left_behind, wait_until
from stepahead.worker import child_process
from stepahead.worker.child_process import ChildProcess, for_large_tensors, stop_all
from stepahead.worker.sockets import SocketDirectory

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SocketDirectory]:
    with nothing_left_behind(monkeypatch):
        directory = SocketDirectory()
        yield directory
        directory.remove()


def start(directory: SocketDirectory, code: str) -> ChildProcess:
    return ChildProcess("children:run", "a-child", code.encode(), directory)


def wait_for_file(path: str) -> None:
    wait_until(lambda: os.path.exists(path), "the child wrote its file")


def test_a_child_has_the_parents_import_path_and_nothing_of_the_current_directory(
    directory: SocketDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = Path(directory.path) / "signal.py"
    trap.write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(directory.path)
    child = start(directory, f"import sys; assert sys.path == {sys.path!r}, sys.path")
    assert child.wait(15)
    assert child.exit_reason() == "exited with code 0"
    stop_all([child], 0)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL (out of memory?)"),
        ("import os; os.abort()", "was killed by SIGABRT"),
    ],
)
def test_the_reason_of_an_exit_is_in_words(directory: SocketDirectory, code: str, reason: str) -> None:
    child = start(directory, code)
    assert child.wait(15)
    assert child.exit_reason() == reason
    stop_all([child], 0)


def test_wait_gives_up_after_its_timeout(directory: SocketDirectory) -> None:
    child = start(directory, "import time; time.sleep(60)")
    begin = time.monotonic()
    assert not child.wait(0.2)
    assert 0.19 < time.monotonic() - begin < 2
    stop_all([child], 0)
    assert child.wait(0)


def test_a_child_that_ignores_sigterm_is_killed(directory: SocketDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = f"{directory.path}/ready"
    code = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({ready!r}, 'w'); time.sleep(60)"
    child = start(directory, code)
    wait_for_file(ready)
    begin = time.monotonic()
    stop_all([child], 0.1)
    assert 4 < time.monotonic() - begin < 7
    assert "SIGKILL" in child.exit_reason()


def test_without_pidfds_a_thread_waits_for_the_child(
    directory: SocketDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(child_process.os, "pidfd_open", raising=False)
    child = start(directory, "import time; time.sleep(0.2)")
    assert not child.wait(0)
    assert child.wait(15)
    assert child.exit_reason() == "exited with code 0"
    stop_all([child], 0)


def test_children_inherit_nothing_but_standard_streams(directory: SocketDirectory) -> None:
    listing = f"{directory.path}/fds"
    kept = os.open(directory.path, os.O_RDONLY)
    code = f"""
import os
links = [os.readlink(entry) for n in os.listdir("/proc/self/fd") if os.path.lexists(entry := f"/proc/self/fd/{{n}}")]
open({listing + ".part"!r}, "w").write("\\n".join(links)); os.rename({listing + ".part"!r}, {listing!r})
"""
    child = start(directory, code)
    assert child.wait(15)
    os.close(kept)
    assert directory.path not in Path(listing).read_text().split("\n")
    stop_all([child], 0)


def test_standard_input_of_a_child_is_empty(directory: SocketDirectory) -> None:
    child = start(directory, "import os; assert os.read(0, 10) == b''")
    assert child.wait(15)
    assert child.exit_reason() == "exited with code 0"
    stop_all([child], 0)


def test_a_whole_family_dies_with_its_ancestor(directory: SocketDirectory) -> None:
    """Even a grandchild that cannot look after itself: it is stopped, and so its watch is."""
    script = UserScript(
        f"""
from stepahead.worker.child_process import ChildProcess
from stepahead.worker.sockets import SocketDirectory
code = '''
import os, time
from stepahead.worker.child_process import ChildProcess
from stepahead.worker.sockets import SocketDirectory
grandchild = ChildProcess("children:run", "grandchild", b"import time; time.sleep(60)", SocketDirectory())
os.mkdir({directory.path!r} + "/grandchild-known")
time.sleep(60)
'''
child = ChildProcess("children:run", "child", code.encode(), SocketDirectory({directory.path!r}))
import psutil
while not os.path.exists({directory.path!r} + "/grandchild-known"):
    time.sleep(0.01)
say(child=child.pid, grandchild=psutil.Process(child.pid).children()[0].pid)
time.sleep(60)
"""
    )
    facts = script.facts()
    psutil.Process(facts["grandchild"]).suspend()
    script.process.kill()
    script.end()
    wait_until(lambda: not alive(list(facts.values())), "child and grandchild gone")
    assert not os.path.exists(directory.path)


def test_a_child_of_a_parent_without_standard_streams_runs(directory: SocketDirectory) -> None:
    script = UserScript(
        f"""
os.close(1), os.close(2)
from stepahead.worker.child_process import ChildProcess
from stepahead.worker.sockets import SocketDirectory
code = b'import os, sys; print(1); print(2, file=sys.stderr); assert os.fstat(1) and os.fstat(2)'
child = ChildProcess("children:run", "child", code, SocketDirectory({directory.path!r}))
child.wait()
sys.exit(child.exit_reason() != "exited with code 0")
"""
    )
    assert script.end()[0] == 0


def test_a_directory_made_by_a_child_lies_in_the_one_it_was_given(directory: SocketDirectory) -> None:
    """So whoever gave it removes both, also when the child was killed before anybody knew."""
    code = "from stepahead.worker.sockets import SocketDirectory; import os; SocketDirectory(); os.kill(os.getpid(), 9)"
    child = start(directory, code)
    assert child.wait(10)
    (made,) = os.listdir(directory.path)
    assert made.startswith("stepahead-")
    child.close()


def test_a_child_of_a_dead_parent_never_runs_its_main_for_long(directory: SocketDirectory) -> None:
    """The parent is gone before the child has looked for it."""
    script = UserScript(
        f"""
from stepahead.worker.child_process import ChildProcess
from stepahead.worker.sockets import SocketDirectory
child = ChildProcess("children:run", "child", b"import time; time.sleep(60)", SocketDirectory({directory.path!r}))
os.kill(child.pid, {int(signal.SIGSTOP)})
say(child=child.pid)
os.kill(os.getpid(), 9)
"""
    )
    child = script.facts()["child"]
    script.process.wait(15)
    os.kill(child, signal.SIGCONT)
    script.end()
    wait_until(lambda: not alive([child]), "the child gone")
    wait_until(lambda: not os.path.exists(directory.path), "the directory gone")


KEEPS = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.arena_max=1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, f"glibc.malloc.hugetlb=1:{KEEPS}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, f"glibc.malloc.check=1:glibc.malloc.hugetlb=1:{KEEPS}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, f"glibc.malloc.hugetlb=0:{KEEPS}"),
        ({"GLIBC_TUNABLES": f"glibc.malloc.hugetlb=0:{KEEPS}"}, f"glibc.malloc.hugetlb=0:{KEEPS}"),
    ],
)
def test_a_child_asks_for_huge_pages_and_keeps_memory_unless_the_user_decided(before, after):
    assert for_large_tensors({"HOME": "/", **before}) == {"HOME": "/", "GLIBC_TUNABLES": after}
