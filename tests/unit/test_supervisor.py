"""The supervisor with real child processes: restarts, stop order, forced stop, output of children."""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from headgate.supervisor import Child, RestartDelays, Supervisor, describe
from tests.rigs.processes import is_alive
from tests.rigs.stack import until

QUICK = RestartDelays(first_seconds=0.01, max_seconds=0.04, healthy_seconds=60.0)


@dataclass
class Output:
    """The lines and notes of a supervisor."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def texts(self, name: str) -> list[str]:
        """The lines of one child."""
        return [text for child, text in self.lines if child == name]


def _child(name: str, script: str, kill_seconds: float = 10.0) -> Child:
    import os

    return Child(name, [sys.executable, "-c", textwrap.dedent(script)], dict(os.environ), kill_seconds)


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


def _supervisor(output: Output, *children: Child, delays: RestartDelays = QUICK) -> Supervisor:
    return Supervisor(children, lambda name, text: output.lines.append((name, text)), output.notes.append, delays)


async def _is_up(output: Output, name: str, times: int = 1) -> None:
    await until(f"{name} is up", lambda: output.texts(name).count("up") >= times)


@pytest.fixture
def output() -> Output:
    return Output()


async def _back_and_front(output: Output) -> tuple[Supervisor, Child]:
    """Two children that are up, and the first of them."""
    back, front = _child("back", STAYS), _child("front", STAYS)
    supervisor = _supervisor(output, back, front)
    supervisor.begin()
    await _is_up(output, "back")
    await _is_up(output, "front")
    return supervisor, back


async def test_children_stop_in_reverse_order(output: Output) -> None:
    """The first child receives SIGTERM when the second one has ended."""
    supervisor, _back = await _back_and_front(output)
    await supervisor.stop()
    assert [name for name, text in output.lines if text == "draining"] == ["front", "back"]
    assert output.notes == ["stopping front", "stopping back"]


async def test_killed_child_is_restarted_and_others_keep_running(output: Output) -> None:
    supervisor, back = await _back_and_front(output)
    assert back.process is not None
    back.process.kill()
    await _is_up(output, "back", times=2)
    assert output.texts("front") == ["up"]
    assert "back was ended by signal SIGKILL" in output.notes
    await supervisor.stop()


async def test_exit_with_status_70_is_restarted(output: Output, tmp_path: Path) -> None:
    """Services that were ready once exit with status 70 when only a new process can recover."""
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
    child.was_ready = True
    supervisor = _supervisor(output, child)
    supervisor.begin()
    await _is_up(output, "odd")
    assert "odd requests a restart (status 70)" in output.notes
    await supervisor.stop()


@pytest.mark.parametrize("status", [1, 2, 70])
async def test_failed_first_start_ends_the_supervisor(output: Output, status: int) -> None:
    """The error is shown once instead of in a restart loop."""
    child = _child("odd", f"import sys; sys.exit({status})")
    supervisor = _supervisor(output, child)
    supervisor.begin()
    assert await asyncio.wait_for(supervisor.over, 10) == status
    await supervisor.stop()


async def test_usage_error_after_a_good_start_waits_for_sighup(output: Output, tmp_path: Path) -> None:
    """A broken configuration stops one service. SIGHUP starts it again and reloads the others."""
    broken = tmp_path / "broken"
    script = f"""
        import pathlib, sys
        if pathlib.Path({str(broken)!r}).exists():
            sys.exit(2)
        {textwrap.indent(textwrap.dedent(STAYS), " " * 8).strip()}
    """
    odd, other = _child("odd", script), _child("other", STAYS)
    supervisor = _supervisor(output, odd, other)
    supervisor.begin()
    await _is_up(output, "odd")
    await _is_up(output, "other")
    odd.was_ready = other.was_ready = True
    broken.touch()
    assert odd.process is not None
    odd.process.kill()
    await until("given up", lambda: odd.has_usage_error)
    assert not supervisor.over.done()
    broken.unlink()
    supervisor.hang_up()
    await _is_up(output, "odd", times=2)
    await until("the other reloads", lambda: "reloading" in output.texts("other"))
    await supervisor.stop()


async def test_force_kills_a_child_that_ignores_sigterm(output: Output) -> None:
    child = _child("stubborn", STUBBORN, kill_seconds=60.0)
    supervisor = _supervisor(output, child)
    supervisor.begin()
    await _is_up(output, "stubborn")
    assert child.process is not None
    pid = child.process.pid
    stopping = asyncio.ensure_future(supervisor.stop())
    await until("SIGTERM is sent", lambda: "stopping stubborn" in output.notes)
    supervisor.force()
    await asyncio.wait_for(stopping, 5)
    assert not is_alive(pid)


async def test_child_that_does_not_end_is_killed_after_its_kill_seconds(output: Output) -> None:
    child = _child("stubborn", STUBBORN, kill_seconds=0.05)
    supervisor = _supervisor(output, child)
    supervisor.begin()
    await _is_up(output, "stubborn")
    await asyncio.wait_for(supervisor.stop(), 5)
    assert output.notes[-1] == "killing stubborn: it did not end within 0.05 s"


async def test_stop_during_a_start_leaves_no_process(output: Output) -> None:
    child = _child("back", STAYS)
    supervisor = _supervisor(output, child)
    supervisor.begin()
    await asyncio.wait_for(supervisor.stop(), 10)
    assert child.process is None


async def test_no_process_starts_after_a_stop_during_the_wait_for_a_restart(output: Output) -> None:
    child = _child("a", "print('up', flush=True)")
    child.was_ready = True
    supervisor = _supervisor(output, child, delays=RestartDelays(first_seconds=0.2))
    supervisor.begin()
    await until("it waits", lambda: any("restarting" in note for note in output.notes))
    supervisor.hang_up()  # starts no second process beside the one that is due
    await supervisor.stop()
    await asyncio.sleep(0.4)
    assert output.texts("a") == ["up"]
    assert child.process is None


async def test_missing_program_is_retried_with_a_note(output: Output) -> None:
    child = Child("ghost", ["/nonexistent/program"], {}, 1.0)
    supervisor = _supervisor(output, child)
    supervisor.begin()
    await until("two attempts", lambda: sum("cannot start ghost" in note for note in output.notes) >= 2)
    await supervisor.stop()


async def test_long_and_unfinished_lines_are_complete(output: Output) -> None:
    """A line beyond the limit arrives in parts, a last line without a line feed in one."""
    child = _child("loud", "import sys; sys.stdout.write('x' * 200_000 + '\\nend'); sys.stdout.flush()")
    supervisor = _supervisor(output, child, delays=RestartDelays(first_seconds=60.0))
    supervisor.begin()
    await until("the end", lambda: output.texts("loud")[-1:] == ["end"])
    assert sum(map(len, output.texts("loud")[:-1])) == 200_000
    await supervisor.stop()


async def test_delay_doubles_after_each_exit_and_starts_again_after_a_healthy_run(output: Output) -> None:
    """Each run counts as healthy when `healthy_seconds` is 0."""
    quick = RestartDelays(first_seconds=0.001, max_seconds=0.004, healthy_seconds=60.0)
    for delays, expected in (
        (quick, ["0.001", "0.002", "0.004", "0.004"]),
        (replace(quick, healthy_seconds=0.0), ["0.001"] * 4),
    ):
        output.notes.clear()
        child = _child("odd", "import sys; sys.exit(3)")
        child.was_ready = True
        supervisor = _supervisor(output, child, delays=delays)
        supervisor.begin()
        await until("four restarts", lambda: sum("restarting" in note for note in output.notes) >= 4)
        await supervisor.stop()
        waits = [note for note in output.notes if "restarting" in note][:4]
        assert waits == [f"restarting odd in {seconds} s" for seconds in expected]


def test_delays_double_up_to_the_longest() -> None:
    delays = RestartDelays()
    assert [delays.after(exits) for exits in (1, 2, 3, 10, 11, 10_000)] == [0.1, 0.2, 0.4, 51.2, 60.0, 60.0]


async def test_usage_errors_of_all_children_end_the_supervisor(output: Output) -> None:
    children = [_child(name, "import sys; sys.exit(2)") for name in ("back", "front")]
    for child in children:
        child.was_ready = True
    supervisor = _supervisor(output, *children)
    supervisor.begin()
    assert await asyncio.wait_for(supervisor.over, 10) == 2
    await supervisor.stop()


def test_exit_statuses_are_described() -> None:
    assert describe(-signal.SIGABRT) == "was ended by signal SIGABRT"
    assert describe(-99) == "was ended by signal 99"
    assert describe(70) == "requests a restart (status 70)"
    assert describe(3) == "ended with status 3"
