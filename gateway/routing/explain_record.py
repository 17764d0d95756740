"""Explain records for `/admin/requests/{id}`: why each candidate of a request was used, skipped or left.

They contain no prompts and no answers.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from gateway.access.rate_limits import BYTES_PER_TOKEN
from gateway.apis.body_parser import refused_body
from gateway.errors import GatewayError
from gateway.providers.local.candidate_facts import Facts
from gateway.routing.candidate_checks import Prediction
from gateway.routing.chain import Candidate
from gateway.telemetry.quote_redaction import WITHHELD, without_quotes
from headgate.shared.bodies.openai_bodies import MAX_MODEL_CHARS
from headgate.shared.traces.trace_context import SpanContext
from inference.protocol import Code, Progress, Restored

KEPT = 1000
"""How many records of requests with a route are kept; the oldest are dropped first."""

KEPT_REFUSED = 200
"""How many records of requests that were refused before they had a route are kept."""

MAX_PARAM_CHARS = 256

_COUNT = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)"\s*:\s*(\d{1,15})')
"""One number of a usage. Quotes inside a string are escaped, so the pattern cannot match inside a string."""


@dataclass(slots=True)
class Considered:
    """The facts about a candidate when candidates were selected, and what was found when its turn came.

    `prompt_tokens` were counted with its vocabulary; `expected` is its predicted time to first token.
    """

    facts: Facts
    prompt_tokens: int | None = None
    expected: Prediction | None = None

    def to_json(self) -> dict[str, Any]:
        """The known facts as JSON."""
        facts = self.facts._asdict()
        known: dict[str, Any] = facts.pop("speed")._asdict()
        known |= {name: _plain(value) for name, value in facts.items()}
        known["prompt_tokens"] = self.prompt_tokens
        if self.expected is not None:
            known["expected_seconds"] = round(self.expected.seconds, 3)
        return {name: value for name, value in known.items() if value is not None}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return sorted(value) if isinstance(value, tuple) else value


@dataclass(slots=True)
class AttemptRecord:
    """One attempt: its candidate, how it ended, how long it took, and which prompt tokens it did not compute.

    It began `began_seconds` after the request. `span` is None without a trace. `node` is empty for clouds and where
    only one inference service is configured.
    """

    name: str
    outcome: str
    message: str
    seconds: float
    restored: Sequence[Restored] = ()
    began_seconds: float = 0.0
    span: SpanContext | None = None
    node: str = ""

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["restored"] = [asdict(one) for one in self.restored]
        fields["span"] = None if self.span is None else f"{self.span.span_id:016x}"
        return fields


@dataclass(slots=True)
class BreakRecord:
    """One interruption of an answer: its candidate, the cause, and the result.

    `outcome` is `running` until the result is known. Then it is `resumed`, `cancelled` (the client disconnected or the
    gateway stopped first), or another result of `gateway_resume_total`. `dropped` has the reason for each candidate
    that was not tried.
    """

    name: str
    message: str
    outcome: str = "running"
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """The explain record of one request. Times are seconds; `started` is Unix time."""

    id: str
    started: float
    endpoint: str
    model: str = ""
    """The model in the request."""
    stream: bool = False
    route: str = ""
    key: str = ""
    priority: str = ""
    retries: int = 0
    """How often the client has sent the request before."""
    changed_parameters: dict[str, Any] = field(default_factory=dict)
    """The parameters that the route changed, with its values; None for a removed one."""
    chain: Sequence[Candidate] = ()
    chosen: dict[str, str] = field(default_factory=dict)
    """The candidate that `local/smaller` stood for."""
    needs: Collection[str] = ()
    size_bytes: int = 0
    max_tokens: int | None = None
    cloud_allowed: bool = True
    considered: Sequence[Considered] = ()
    """One for each candidate of the chain, once candidates were selected."""
    dropped: dict[str, str] = field(default_factory=dict)
    attempts: list[AttemptRecord] = field(default_factory=list)
    answered_by: str | None = None
    node: str = ""
    """The node that answered, where there are several."""
    tier: str = "none"
    hops: list[str] = field(default_factory=list)
    """A text for each resume: the candidate that continues, after how many characters, and why the attempt before it
    ended."""
    breaks: list[BreakRecord] = field(default_factory=list)
    reason: str = "none"
    """Why the first candidate of the chain did not answer; `none` if it did, or if the request was refused or cancelled
    before another candidate answered."""
    outcome: str = "running"
    status: int | None = None
    first_token_seconds: float | None = None
    overhead_seconds: float | None = None
    total_seconds: float | None = None
    error: str | None = None
    param: str | None = None
    """The field of the request or the header that the error names."""
    phase: str = "admission"
    """`admission`, `queued`, `loading`, `prefill`, `decoding`, `done`."""
    progress: tuple[int, int | None] | None = None
    """Of the phase, as `Progress` has it: done and total."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Those prompt tokens that the provider had computed before."""
    pieces: int = 0
    """Content chunks of attempts that ended without reporting usage; each counts as one token."""
    trace: SpanContext | None = None
    """The span of the request, if traces are on."""

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens to account for, prompt and answer: those that providers reported, plus the pieces of attempts without
        a report; an unreported prompt is estimated from its size if there are pieces.
        """
        prompt = self.prompt_tokens
        if prompt is None:
            prompt = self.size_bytes // BYTES_PER_TOKEN if self.pieces else 0
        return prompt, (self.completion_tokens or 0) + self.pieces

    def note_prefill(self) -> None:
        """The phase `prefill` begins: after admission, and again with each attempt."""
        self.phase, self.progress = "prefill", None

    def note_progress(self, progress: Progress) -> None:
        """The inference service reported progress of the current attempt."""
        if self.phase != "decoding":
            self.phase, self.progress = progress.stage, (progress.done, progress.total)

    def note_decoding(self) -> None:
        """The current attempt has content."""
        self.phase, self.progress = "decoding", None

    def note_usage(self, usage: bytes) -> None:
        """Fills in the tokens of an answer; `usage` is the end of its JSON, or its chunk with the usage."""
        last = {name: int(count) for name, count in _COUNT.findall(usage)}
        self.prompt_tokens = last.get(b"prompt_tokens")
        self.completion_tokens = last.get(b"completion_tokens")
        self.cached_tokens = last.get(b"cached_tokens")

    def note_end(self, seconds: float) -> None:
        """The request has ended after `seconds`."""
        self.phase, self.progress, self.total_seconds = "done", None, seconds
        if self.outcome == "running":
            self.outcome = str(Code.INTERNAL_ERROR)

    def note_error(self, error: GatewayError) -> None:
        """Fills in how the request failed. An existing error text is kept."""
        self.outcome, self.status = str(error.code), error.status
        self.error = self.error or error.message
        self.param = None if error.param is None else error.param[:MAX_PARAM_CHARS]

    def note_refused_body(self, raw: bytes, error: GatewayError) -> None:
        """Fills in the model of a refused body, and the error without its quotes of the body."""
        body = refused_body(raw)
        if body is None:
            self.error = WITHHELD
            return
        self.model, self.stream = body.model[:MAX_MODEL_CHARS], body.is_stream
        self.error = without_quotes(error.message, body.fields)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["chain"] = [candidate.name for candidate in self.chain]
        fields["needs"] = sorted(self.needs)
        considered = zip(fields["chain"], self.considered, strict=False)
        fields["considered"] = {name: found.to_json() for name, found in considered}
        fields["attempts"] = [attempt.to_json() for attempt in self.attempts]
        fields["breaks"] = [asdict(one) for one in self.breaks]
        fields["trace"] = None if self.trace is None else f"{self.trace.trace_id:032x}"
        return fields


class RecordStore:
    """The records of the last requests by request id: KEPT with a route, and KEPT_REFUSED without."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._refused: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        """Keeps the record of a request with a route; a record with the same id is replaced."""
        self._put(record, self._records, KEPT)

    def add_refused(self, record: Record) -> None:
        """Keeps the record of a request without a route."""
        self._put(record, self._refused, KEPT_REFUSED)

    def get(self, request_id: str) -> Record | None:
        """The record of a request; None when it is unknown or dropped."""
        return self._records.get(request_id) or self._refused.get(request_id)

    def __iter__(self) -> Iterator[Record]:
        """All records, those of refused requests first."""
        yield from self._refused.values()
        yield from self._records.values()

    def _put(self, record: Record, records: OrderedDict[str, Record], limit: int) -> None:
        self._records.pop(record.id, None)
        self._refused.pop(record.id, None)
        records[record.id] = record
        while len(records) > limit:
            records.popitem(last=False)
