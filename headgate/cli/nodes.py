"""The inference services of `inference.nodes` for the command line: requests to all of them at once, or to one.

If `inference.nodes` is empty, there is one service, without a name. With one service or node, its errors are raised.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headgate.cli import addresses
from headgate.cli.client import ANSWER_SECONDS, CONNECT_SECONDS, Api, ApiError, segment
from headgate.cli.command import Session, UsageError
from headgate.cli.terminal import Terminal
from headgate.shared.errors import HeadgateError, NotRunningError
from headgate.shared.log import on_one_line
from inference.protocol import ModelStatus

ONLY = ""
"""The name of the service if `inference.nodes` is empty."""
STATE_SECONDS = 3.0
"""Longest wait for the state of a node. Then the other nodes are shown without it."""
MAX_AT_ONCE = 32
"""Nodes that are called at the same time."""

Row = tuple[str, list[str]]
"""A row of a table: the name of its node, and the cells."""


@dataclass(frozen=True)
class Answers:
    """The answers of nodes and the errors of the other nodes, by name. There is at least one answer."""

    values: Mapping[str, Any]
    errors: Mapping[str, HeadgateError]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.values.items())

    @property
    def is_unnamed(self) -> bool:
        """Whether this is the answer of the service without a name (ONLY)."""
        return ONLY in self.values

    def as_json(self) -> Any:
        """The answer of the service without a name, or `nodes` with the answer or error of each node."""
        if self.is_unnamed:
            return self.values[ONLY]
        return {"nodes": [*({"node": name, **value} for name, value in self), *self.failures()]}

    def failures(self) -> list[dict[str, str]]:
        """The nodes without an answer, for JSON."""
        return [{"node": name, "error": str(error)} for name, error in self.errors.items()]

    def prints_json(self, session: Session, value: Any = None) -> bool:
        """Prints `value`, by default `as_json`, if `--json` is given. Returns whether it is."""
        if session.json:
            session.terminal.json(self.as_json() if value is None else value)
            self.warn(session.terminal)
        return session.json

    def table(
        self, terminal: Terminal, headers: Sequence[str], rows: Sequence[Row], right: Sequence[str] = (), none: str = ""
    ) -> None:
        """Writes a table with a column NODE, and a line for each node without an answer.

        The table of the service without a name has no such column.
        """
        if self.is_unnamed:
            terminal.table(headers, [cells for _, cells in rows], right, none)
            return
        width = max(map(len, ("NODE", *self.values, *self.errors)))
        terminal.table(["NODE".ljust(width), *headers], [[name, *cells] for name, cells in rows], right, none)
        for name, error in self.errors.items():
            terminal.data(f"{name.ljust(width)}  {on_one_line(str(error))}")
        self.warn(terminal)

    def warn(self, terminal: Terminal) -> None:
        """Writes the names of the nodes without an answer to stderr."""
        if self.errors:
            total = len(self.errors) + len(self.values)
            terminal.say(f"warning: {len(self.errors)} of {total} nodes gave no answer: {', '.join(self.errors)}")


def label(node: str) -> str:
    """The beginning of a line about an object of `node`; empty for the service without a name."""
    return f"{node}: " if node else ""


@dataclass(frozen=True)
class Nodes:
    """The services that a verb works with: that of `--node`, or all. `apis` is by name, ONLY for a single service."""

    apis: Mapping[str, Api]

    @classmethod
    def of(cls, session: Session) -> Nodes:
        """The nodes of the configuration, or that of `--node`. Raises UsageError for an unknown `--node`."""
        urls, chosen = addresses.node_urls(session), getattr(session.args, "node", None)
        if not urls:
            if chosen is not None:
                raise UsageError("--node needs `inference.nodes` in gateway.yaml; there is one inference service")
            return cls({ONLY: addresses.inference(session)})
        if chosen is not None:
            if chosen not in urls:
                raise UsageError(f"unknown node {chosen!r}; nodes: {', '.join(urls)}")
            urls = {chosen: urls[chosen]}
        return cls({name: addresses.inference(session, url, name) for name, url in urls.items()})

    def get(self, path: str) -> Answers:
        """The answers to GET `path`."""
        return self.each(lambda api: api.get(path), STATE_SECONDS)

    def each(self, call: Callable[[Api], Any], seconds: float = ANSWER_SECONDS) -> Answers:
        """The results of `call` for all nodes at once, within about `seconds`.

        With one node its error is raised. If none of several answers, raises NotRunningError, or HeadgateError if one
        of them answered with an error code.
        """
        if len(self.apis) == 1:
            ((name, api),) = self.apis.items()
            return Answers({name: call(api)}, {})
        found = _at_once(self.apis, call, seconds + CONNECT_SECONDS)
        values = {name: found[name] for name in self.apis if not isinstance(found[name], HeadgateError)}
        errors = {name: found[name] for name in self.apis if name not in values}
        if not values:
            reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
            is_refusal = any(isinstance(error, ApiError) and error.code for error in errors.values())
            raise (HeadgateError if is_refusal else NotRunningError)(
                f"none of {len(errors)} nodes could do it: {reasons}"
            )
        return Answers(values, errors)

    def one(self) -> Api:
        """The only service. Raises UsageError if there are several."""
        if len(self.apis) > 1:
            raise UsageError(f"which node? choose one with --node: {', '.join(self.apis)}")
        return next(iter(self.apis.values()))

    def with_model(self, model: str) -> Api:
        """The service with `model`. If there is only one, it is not checked whether it has the model.

        Raises UsageError if several nodes have the model, the errors of `each` if none has it.
        """
        if len(self.apis) == 1:
            return self.one()
        answers = self.get(f"/v1/models/{segment(model)}")
        if len(answers.values) > 1:
            places = ", ".join(f"{name} ({_place(ModelStatus.from_json(value))})" for name, value in answers)
            raise UsageError(f"{model} is on several nodes; choose one with --node: {places}")
        return self.apis[next(iter(answers.values))]


def _place(status: ModelStatus) -> str:
    return f"{status.state.value} on {', '.join(status.devices)}" if status.devices else status.state.value


def _at_once(apis: Mapping[str, Api], call: Callable[[Api], Any], seconds: float) -> dict[str, Any]:
    """The result or HeadgateError of `call` for each of `apis`, ApiError after `seconds`. Raises other exceptions."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    for name in apis:
        waiting.put(name)

    def work() -> None:
        while not waiting.empty():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results.put((name, call(apis[name])))
            except Exception as error:
                results.put((name, error))

    for _ in range(min(MAX_AT_ONCE, len(apis))):
        threading.Thread(target=work, daemon=True).start()
    late = ApiError(f"no complete answer within {seconds:g} s", status=504, retry_after=1.0)
    found: dict[str, Any] = {}
    ends = time.monotonic() + seconds
    while len(found) < len(apis):
        try:
            name, result = results.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(result, Exception) and not isinstance(result, HeadgateError):
            raise result
        found[name] = result
    return {name: found.get(name, late) for name in apis}
