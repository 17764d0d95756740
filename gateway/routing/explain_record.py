"""Remembers how each of the last requests was decided, for `/admin/requests/{id}`; holds no prompts and no answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from gateway.apis.openai.generation_request import MOST_MODEL_CHARS, refused_body
from gateway.errors import GatewayError
from gateway.providers.local.candidate_facts import Facts
from gateway.routing.chain import Candidate
from gateway.routing.quote_redaction import WITHHELD, without_quotes
from gateway.routing.ttft_prediction import Prediction

KEPT = 1000
"""Records kept of requests that got as far as a route; the oldest leave first."""

KEPT_REFUSED = 200
"""And of requests that were refused before. They have a bound of their own, so that they push out no other record."""

MOST_PARAM_CHARS = 256


@dataclass(slots=True)
class Considered:
    """What was known of a candidate when the chain was folded, and what was found when its turn came.

    `prompt_tokens` were counted with its vocabulary, `expected` is when it would have begun to answer.
    """

    facts: Facts
    prompt_tokens: int | None = None
    expected: Prediction | None = None

    def to_json(self) -> dict[str, Any]:
        """What is known of it; what is not is left out."""
        said = {name: _plain(value) for name, value in self.facts._asdict().items()}
        said |= self.facts.speed._asdict()
        del said["speed"]
        said["prompt_tokens"] = self.prompt_tokens
        if self.expected is not None:
            said["expected_seconds"] = round(self.expected.seconds, 3)
        return {name: value for name, value in said.items() if value is not None}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return sorted(value) if isinstance(value, frozenset) else value


@dataclass(slots=True)
class Tried:
    """One attempt: what was asked, how it ended, how long it took (seconds)."""

    name: str
    outcome: str
    said: str
    seconds: float


@dataclass(slots=True)
class Broke:
    """One break of an answer that had begun: whose it was, why it broke, and what came of it.

    `outcome` is `gone_on`, `left` when the caller left or the gateway stopped before anybody could, or a result of
    `gateway_resume_total`; `dropped` says of each who was not asked to go on why.
    """

    name: str
    said: str
    outcome: str = "running"
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """How one request went. Times are seconds; `started` is wall-clock."""

    id: str
    started: float
    endpoint: str
    asked: str = ""
    stream: bool = False
    route: str = ""
    key: str = ""
    priority: str = ""
    retries: int = 0
    chain: Sequence[Candidate] = ()
    needs: Collection[str] = ()
    size_bytes: int = 0
    max_tokens: int | None = None
    cloud_allowed: bool = True
    considered: Sequence[Considered] = ()
    """Of each of the chain, once it was folded."""
    dropped: dict[str, str] = field(default_factory=dict)
    attempts: list[Tried] = field(default_factory=list)
    answered_by: str | None = None
    tier: str = "none"
    hops: list[str] = field(default_factory=list)
    """Who went on with the answer when it broke off, where in it, and why."""
    breaks: list[Broke] = field(default_factory=list)
    reason: str = "none"
    outcome: str = "running"
    status: int | None = None
    first_token_seconds: float | None = None
    overhead_seconds: float | None = None
    total_seconds: float | None = None
    error: str | None = None
    param: str | None = None
    """The field of the request or the header that the error names."""

    def note_error(self, error: GatewayError) -> None:
        """Fills in how the request failed. An error text that is there already stays."""
        self.outcome, self.status = str(error.code), error.status
        self.error = self.error or error.message
        self.param = None if error.param is None else error.param[:MOST_PARAM_CHARS]

    def note_refused_body(self, raw: bytes, error: GatewayError) -> None:
        """Fills in what a refused body asked for, and the error without the words that it quotes of the body."""
        body = refused_body(raw)
        if body is None:
            self.error = WITHHELD
            return
        model, stream = body.get("model"), body.get("stream")
        self.asked = model[:MOST_MODEL_CHARS] if isinstance(model, str) else ""
        self.stream = stream is True
        self.error = without_quotes(error.message, body)

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        said = {name: getattr(self, name) for name in self.__dataclass_fields__}
        said["chain"] = [candidate.name for candidate in self.chain]
        said["needs"] = sorted(self.needs)
        considered = zip(said["chain"], self.considered, strict=False)
        said["considered"] = {name: found.to_json() for name, found in considered}
        said["attempts"] = [asdict(tried) for tried in self.attempts]
        said["breaks"] = [asdict(broke) for broke in self.breaks]
        return said


class Ring:
    """The records of the last requests by request id: KEPT that got a route, KEPT_REFUSED that were refused before."""

    def __init__(self, kept: int = KEPT, kept_refused: int = KEPT_REFUSED) -> None:
        self._kept, self._kept_refused = kept, kept_refused
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._refused: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        """Keeps the record of a request with a route; the same id again replaces the older one."""
        self._put(record, self._records, self._kept)

    def add_refused(self, record: Record) -> None:
        """Keeps the record of a request that was refused before it had a route."""
        self._put(record, self._refused, self._kept_refused)

    def get(self, request_id: str) -> Record | None:
        """The record of a request, or None when it is unknown or forgotten."""
        return self._records.get(request_id) or self._refused.get(request_id)

    def _put(self, record: Record, records: OrderedDict[str, Record], most: int) -> None:
        self._records.pop(record.id, None)
        self._refused.pop(record.id, None)
        records[record.id] = record
        while len(records) > most:
            records.popitem(last=False)
