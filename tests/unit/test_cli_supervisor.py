"""The supervisor with real child processes: restarts, order of ending, force, what a child prints."""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headgate.cli.supervisor import Child, Supervisor, describe
from headgate.shared.restart import Phase, Policy
from tests.rigs.processes import is_alive
from tests.rigs.stack import until

QUICK = Policy(first_seconds=0.01, cap_seconds=0.04, healthy_seconds=60.0)


@dataclass
class Heard:
    """Everything a supervisor said."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def texts(self, name: str) -> list[str]:
        """The lines of one child."""
        return [text for who, text in self.lines if who == name]


def _child(name: str, script: str, drain: float = 10.0) -> Child:
    import os

    return Child(name, [sys.executable, "-c", textwrap.dedent(script)], dict(os.environ), drain)


STAYS = """
    import signal, sys, threading
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: (print("draining", flush=True), done.set()))
    signal.signal(signal.SIGHUP, lambda *_: print("reloading", flush=True))
    print("up", flush=True)
    done.wait(60)
"""
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    time.sleep(60)
"""


def _supervisor(heard: Heard, *children: Child, policy: Policy = QUICK) -> Supervisor:
    return Supervisor(children, lambda name, text: heard.lines.append((name, text)), heard.notes.append, policy)


async def _is_up(heard: Heard, name: str, times: int = 1) -> None:
    await until(f"{name} is up", lambda: heard.texts(name).count("up") >= times)


@pytest.fixture
def heard() -> Heard:
    return Heard()


async def test_children_end_last_to_first_after_their_drain(heard: Heard) -> None:
    """SIGTERM reaches the second child first, and the first only when the second is gone."""
    back, front = _child("back", STAYS), _child("front", STAYS)
    supervisor = _supervisor(heard, back, front)
    supervisor.begin()
    await _is_up(heard, "back")
    await _is_up(heard, "front")
    await supervisor.stop()
    assert [name for name, text in heard.lines if text == "draining"] == ["front", "back"]
    assert heard.notes == ["stopping front", "stopping back"]


async def test_a_killed_child_is_started_again_and_others_stay(heard: Heard) -> None:
    back, front = _child("back", STAYS), _child("front", STAYS)
    supervisor = _supervisor(heard, back, front)
    supervisor.begin()
    await _is_up(heard, "back")
    await _is_up(heard, "front")
    assert back.process is not None
    back.process.kill()
    await _is_up(heard, "back", times=2)
    assert heard.texts("front") == ["up"]
    assert "back was ended by SIGKILL" in heard.notes
    await supervisor.stop()


async def test_status_70_is_restarted(heard: Heard, tmp_path: Path) -> None:
    """A service that cannot heal itself asks for a restart from outside; here that is us."""
    mark = tmp_path / "mark"
    child = _child(
        "odd",
        f"""
        import pathlib, sys, time
        mark = pathlib.Path({str(mark)!r})
        if not mark.exists():
            mark.touch()
            sys.exit(70)
        print("up", flush=True)
        time.sleep(60)
        """,
    )
    supervisor = _supervisor(heard, child)
    supervisor.begin()
    await _is_up(heard, "odd")
    assert "odd asked to be restarted (status 70)" in heard.notes
    await supervisor.stop()


@pytest.mark.parametrize("status", [1, 2])
async def test_a_start_that_fails_with_a_reason_ends_everything(heard: Heard, status: int) -> None:
    """Before anything has worked, an error is for the person in front of the terminal, not for a loop."""
    child = _child("odd", f"import sys; sys.exit({status})")
    supervisor = _supervisor(heard, child)
    supervisor.begin()
    assert await asyncio.wait_for(supervisor.over, 10) == status
    await supervisor.stop()


async def test_a_usage_error_after_a_good_start_is_given_up_until_sighup(heard: Heard, tmp_path: Path) -> None:
    """A configuration broken meanwhile stops that service alone; SIGHUP reloads the others and starts it again."""
    broken = tmp_path / "broken"
    script = f"""
        import pathlib, sys
        if pathlib.Path({str(broken)!r}).exists():
            sys.exit(2)
        {textwrap.indent(textwrap.dedent(STAYS), " " * 8).strip()}
    """
    odd, other = _child("odd", script), _child("other", STAYS)
    supervisor = _supervisor(heard, odd, other)
    supervisor.begin()
    await _is_up(heard, "odd")
    await _is_up(heard, "other")
    odd.was_ready = other.was_ready = True
    broken.touch()
    assert odd.process is not None
    odd.process.kill()
    await until("given up", lambda: odd.state.phase is Phase.GIVEN_UP)
    assert not supervisor.over.done()
    broken.unlink()
    supervisor.hang_up()
    await _is_up(heard, "odd", times=2)
    await until("the other reloads", lambda: "reloading" in heard.texts("other"))
    await supervisor.stop()


async def test_force_ends_a_child_that_ignores_sigterm(heard: Heard) -> None:
    child = _child("stubborn", STUBBORN, drain=60.0)
    supervisor = _supervisor(heard, child)
    supervisor.begin()
    await _is_up(heard, "stubborn")
    assert child.process is not None
    pid = child.process.pid
    stopping = asyncio.ensure_future(supervisor.stop())
    await until("it was asked", lambda: "stopping stubborn" in heard.notes)
    supervisor.force()
    await asyncio.wait_for(stopping, 5)
    assert not is_alive(pid)


async def test_a_child_that_outlives_its_drain_is_killed(heard: Heard) -> None:
    child = _child("stubborn", STUBBORN, drain=0.05)
    supervisor = _supervisor(heard, child)
    supervisor.begin()
    await _is_up(heard, "stubborn")
    await asyncio.wait_for(supervisor.stop(), 5)
    assert heard.notes[-1] == "stubborn did not end within 0.05 s and is killed"


async def test_stop_in_the_middle_of_a_start_leaves_nobody(heard: Heard) -> None:
    child = _child("back", STAYS)
    supervisor = _supervisor(heard, child)
    supervisor.begin()
    await asyncio.wait_for(supervisor.stop(), 10)
    assert child.process is None


async def test_a_program_that_is_not_there_is_tried_again_and_told(heard: Heard) -> None:
    child = Child("ghost", ["/nonexistent/program"], {}, 1.0)
    supervisor = _supervisor(heard, child)
    supervisor.begin()
    await until("two tries", lambda: sum("cannot be started" in note for note in heard.notes) >= 2)
    await supervisor.stop()


async def test_long_and_unfinished_lines_arrive(heard: Heard) -> None:
    """A line beyond the limit arrives in parts, one without its newline at the end arrives whole."""
    child = _child("loud", "import sys; sys.stdout.write('x' * 200_000 + '\\nend'); sys.stdout.flush()")
    supervisor = _supervisor(heard, child, policy=Policy(first_seconds=60.0))
    supervisor.begin()
    await until("the end", lambda: heard.texts("loud")[-1:] == ["end"])
    assert sum(map(len, heard.texts("loud")[:-1])) == 200_000
    await supervisor.stop()


def test_exit_statuses_are_told_in_words() -> None:
    told: Callable[[int], str] = describe
    assert told(-signal.SIGABRT) == "was ended by SIGABRT"
    assert told(-99) == "was ended by signal 99"
    assert told(70) == "asked to be restarted (status 70)"
    assert told(3) == "ended with status 3"
