"""Deaths for want of host memory are told from kills from outside by the counters that the kernel keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.workers.kernel_oom_kills import LATELY_SECONDS, KernelOomKills

WHERE = {
    "v2": ("0::/service", "sys/fs/cgroup/service/memory.events", "low 0\nhigh 0\nmax 7\noom 1\noom_kill {}\n"),
    "v2 seen from within": ("0::/service", "sys/fs/cgroup/memory.events", "oom_kill {}\noom_group_kill 0\n"),
    "v1": (
        "4:memory:/service",
        "sys/fs/cgroup/memory/service/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
    ),
    "no groups": ("", "proc/vmstat", "pgfault 5\noom_kill {}\n"),
}


@pytest.mark.parametrize("kind", WHERE)
def test_a_rise_is_seen_wherever_it_is_counted(tmp_path: Path, kind: str) -> None:
    """And counts for a moment only; what was counted before the service began is nothing of ours."""
    groups, name, text = WHERE[kind]
    for path, content in (("proc/self/cgroup", groups + "\n" if groups else ""), (name, text.format(3))):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    kills = KernelOomKills(tmp_path)
    assert not kills.is_recent(10.0)
    (tmp_path / name).write_text(text.format(4))
    kills.update(11.0)
    assert kills.is_recent(11.0 + LATELY_SECONDS)
    assert not kills.is_recent(11.1 + LATELY_SECONDS)


def test_where_nothing_is_counted_nothing_is_claimed(tmp_path: Path) -> None:
    """Neither on a machine without such files nor where one cannot be read any more."""
    assert not KernelOomKills(tmp_path).is_recent(0.0)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("oom_kill 1\n")
    kills = KernelOomKills(tmp_path)
    (tmp_path / "proc/vmstat").write_text("oom_kill what\n")
    assert not kills.is_recent(0.0)
    (tmp_path / "proc/vmstat").write_text("oom_kill 9\n")
    assert not kills.is_recent(1.0)
