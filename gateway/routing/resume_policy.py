"""Decides whether an interrupted answer is resumed, by which candidates, and with which request.

Only plain text is resumed: the second half of a JSON text is not valid JSON. The same local model continues token by
token: it gets the text as `answer_so_far`, its own output. Another local model continues the same text. A cloud
continues a prefilled assistant message where its model supports that, and gets an instruction otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import AnyRequest, ChatRequest, Generation, InferenceRequest, changed
from gateway.breaker.outcome import Failure, Ignore, Next, Verdict
from gateway.routing.chain import Candidate
from headgate.shared.bodies.openai_bodies import AnswerSoFar, CompletionRequest, Message

MAX_RESUMES = 2
"""Maximum number of resumes of one answer."""

MAX_NODES = 3
"""Maximum number of nodes on which one model is tried for one resume."""

MAX_PAUSE_SECONDS = 5.0
"""The same model is preferred if it is ready again within this time; otherwise another candidate is tried."""

CHARACTERS_PER_TOKEN = 4
"""Estimate for English text."""
BYTES_PER_FOREIGN_TOKEN = 3
"""Estimate for UTF-8 beyond ASCII: one Chinese or Japanese character, or one and a half Cyrillic or Greek ones."""

_COMPLETION_TOKENS = 16
"""OpenAI's default for `max_tokens` of a completion."""

CONTINUE_PROMPT = (
    "The connection broke while you were answering. Your answer above is cut off at its end. Go on with it from the "
    "very next character. Write only what follows: repeat nothing of it, and say nothing about the interruption."
)


def estimated_tokens(text: str) -> int:
    """An estimate of the tokens of `text`, for models whose vocabulary is not available."""
    ascii_characters = len(text.encode("ascii", "ignore"))
    foreign_bytes = len(text.encode()) - ascii_characters
    return -(-ascii_characters // CHARACTERS_PER_TOKEN) + -(-foreign_bytes // BYTES_PER_FOREIGN_TOKEN)


class Policy(StrEnum):
    """Which candidates may resume (`routes.*.resume`)."""

    ANY = "any"
    LOCAL = "local"
    OFF = "off"


class ResumeMethod(StrEnum):
    """How a candidate is made to continue an answer."""

    RESTART = "restart"
    """the client has no text yet: the original request is sent again"""
    CONTINUE = "continue"
    """the inference service continues the text, and counts it as one answer"""
    PREFILL = "prefill"
    """the text is sent as the last assistant message, or at the end of the prompt, and the model continues it (not the
    prefill of a worker)"""
    INSTRUCT = "instruct"
    """a user message asks for the rest"""


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """The text of an answer that the client has. `tokens` is an estimate."""

    content: str = ""
    reasoning: str = ""
    tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the client has no text yet."""
        return not (self.content or self.reasoning)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The request body for a candidate, and how its answer is joined."""

    body: AnyRequest
    method: ResumeMethod


def why_not_resumable(request: InferenceRequest, policy: str) -> str | None:
    """Why an answer to `request` cannot be resumed once the client has text of it; None when it can."""
    if policy == Policy.OFF:
        return "off"
    body = request.body
    if isinstance(body, ChatRequest):
        is_unsuitable = bool(body.continue_final_message or body.audio)
    elif isinstance(body, CompletionRequest):
        prompt = body.prompt
        several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
        is_unsuitable = bool(several or body.echo or body.suffix or (body.best_of or 1) > 1)
    else:
        is_unsuitable = True
    return "shape" if is_unsuitable or not request.is_plain else None


def is_resumable(verdict: Verdict) -> bool:
    """Whether an answer whose attempt ended with `verdict` can be resumed: the request itself was not rejected."""
    return isinstance(verdict, Failure) or (isinstance(verdict, Ignore) and verdict.next is Next.NEXT_TIER)


def resume_order(
    candidates: Sequence[Candidate],
    broken: Candidate,
    verdict: Verdict,
    policy: str,
    partial: PartialAnswer,
    stalled: Collection[Candidate] = (),
) -> tuple[Candidate, ...]:
    """The candidates that may resume, in order: the same local model, other local models, the same cloud, other clouds;
    those of one group in the order of the chain.

    A candidate that rejected the request is left out. So is a cloud in `stalled`, which sent only keep-alives until
    its deadline and would probably do so again. While `partial` is empty, `policy` excludes no cloud.
    """
    found = [other for other in candidates if why_excluded(other, broken, verdict, policy, partial, stalled) is None]
    return tuple(sorted(found, key=lambda other: (not other.is_local, other != broken, other.position)))


def why_excluded(
    candidate: Candidate,
    broken: Candidate,
    verdict: Verdict,
    policy: str,
    partial: PartialAnswer,
    stalled: Collection[Candidate] = (),
) -> str | None:
    """Why `candidate` may not resume; None when it may."""
    if candidate == broken and not isinstance(verdict, Failure):
        return "it rejected the request"
    if candidate.is_local:
        return None
    if candidate in stalled:
        return "it sent only keep-alives"
    return f"the route has resume: {policy}" if policy != Policy.ANY and not partial.is_empty else None


def continuation(
    request: InferenceRequest, partial: PartialAnswer, candidate: Candidate, *, prefills: bool
) -> Continuation | None:
    """The request for `candidate`; None when it cannot resume. `prefills`: its model continues an assistant message."""
    body = request.body
    assert isinstance(body, ChatRequest | CompletionRequest), "only streams are resumed"
    if partial.is_empty:
        return Continuation(body, ResumeMethod.RESTART)
    if candidate.is_local:
        so_far = AnswerSoFar(content=partial.content, reasoning_content=partial.reasoning or None)
        return Continuation(changed(body, answer_so_far=so_far), ResumeMethod.CONTINUE)
    # a cloud cannot continue another model's reasoning, nor white space, which its API strips
    if not partial.content or (request.endpoint is Endpoint.CHAT and not partial.content.strip()):
        return Continuation(_shortened(body, partial), ResumeMethod.RESTART)
    if isinstance(body, CompletionRequest):
        prompt = body.prompt
        text = prompt[0] if isinstance(prompt, list) else prompt
        if not isinstance(text, str) or body.max_tokens == -1:
            return None
        limit = body.max_tokens or _COMPLETION_TOKENS
        return Continuation(
            _shortened(changed(body, prompt=text + partial.content, max_tokens=limit), partial), ResumeMethod.PREFILL
        )
    messages = [*body.messages, Message(role="assistant", content=partial.content)]
    if prefills and not body.reasoning_effort:
        prefilled = changed(body, messages=messages, continue_final_message=True)
        return Continuation(_shortened(prefilled, partial), ResumeMethod.PREFILL)
    messages.append(Message(role="user", content=CONTINUE_PROMPT))
    return Continuation(_shortened(changed(body, messages=messages), partial), ResumeMethod.INSTRUCT)


def _shortened(body: Generation, partial: PartialAnswer) -> Generation:
    """`body` with token limits reduced by the tokens of `partial`, to 1 at least."""
    limits = {name: getattr(body, name, None) for name in ("max_tokens", "max_completion_tokens")}
    given = {name: limit for name, limit in limits.items() if limit not in (None, -1)}
    return changed(body, **{name: max(1, limit - partial.tokens) for name, limit in given.items()})
