"""Errors of `headgate ray` and of the process that watches the cluster.

HeadgateError
├── RayMissingError        ray is not installed
├── ClusterError           the cluster cannot be used
└── NotRunningError
    └── NoClusterError     no cluster answers, or `headgate ray up` was not run on it
"""

from __future__ import annotations

from headgate.shared.errors import Exit, HeadgateError, NotRunningError


class RayMissingError(HeadgateError):
    """The package ray is not installed."""

    exit_code = Exit.USAGE


class ClusterError(HeadgateError):
    """Ray refuses the connection, or an actor fails or does not answer in time."""


class NoClusterError(NotRunningError):
    """No Ray cluster answers at the address, or no services of Headgate are on it."""


_MAX_REASON_CHARS = 200


def reason(error: BaseException) -> str:
    """An error of Ray in one line: its first line and its last one, which has the cause if there is a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return ": ".join(dict.fromkeys(line[:_MAX_REASON_CHARS] for line in (lines[0], lines[-1])))
