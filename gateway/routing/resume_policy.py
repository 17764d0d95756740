"""Decides whether an answer that broke off may go on, with whom, and what they are asked; opens no stream.

Only what is one text can be gone on with: the second half of a JSON text is no JSON text. The same local model goes on
to the token (`answer_so_far`, which counts as its own); another local one goes on with the same text; a cloud goes on
behind a prefilled message where its model takes one, and is asked in words otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.apis.openai.frames import ANSWER_SO_FAR, Endpoint
from gateway.apis.openai.generation_request import InferenceRequest
from gateway.apis.openai.origin import changed
from gateway.breaker.outcome import Failure, Ignore, Next, Verdict
from gateway.routing.chain import Candidate

MAX_HOPS = 2
"""An answer is of three pieces at most."""

MOST_PAUSE_SECONDS = 5.0
"""A model that says it is back so soon is waited for, before another one goes on."""

CHARACTERS_PER_TOKEN = 4
"""Of English text, about."""
BYTES_PER_FOREIGN_TOKEN = 3
"""Of UTF-8 beyond ASCII: a Chinese or Japanese character, or one and a half of Cyrillic or Greek."""

_COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` of a completion that names none."""

GO_ON = (
    "The connection broke while you were answering. Your answer above is cut off at its end. Go on with it from the "
    "very next character. Write only what follows: repeat nothing of it, and say nothing about the interruption."
)


def estimated_tokens(text: str) -> int:
    """How many tokens `text` is, about: for who counts in a vocabulary that nobody here has."""
    ascii_characters = len(text.encode("ascii", "ignore"))
    foreign_bytes = len(text.encode()) - ascii_characters
    return -(-ascii_characters // CHARACTERS_PER_TOKEN) + -(-foreign_bytes // BYTES_PER_FOREIGN_TOKEN)


class Policy(StrEnum):
    """What a route lets resume (`routes.*.resume`)."""

    ANY = "any"
    LOCAL = "local"
    OFF = "off"


class How(StrEnum):
    """How a candidate is made to go on."""

    AGAIN = "again"
    """nothing was said, so it is asked as the first one was"""
    SO_FAR = "so_far"
    """our own service: behind the text, counted as one answer"""
    PREFILL = "prefill"
    """behind a last assistant message, or a longer prompt"""
    ASKED = "asked"
    """by a user's message, in words"""


@dataclass(frozen=True, slots=True)
class Said:
    """What the caller has of an answer. `tokens` is how many those are, about: exact for nobody."""

    content: str = ""
    reasoning: str = ""
    tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no text yet."""
        return not (self.content or self.reasoning)


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a candidate is sent, and how its answer joins on."""

    body: Mapping[str, Any]
    how: How


_JOINED = frozenset(("echo", "suffix", "continue_final_message", "audio"))
"""What ties an answer to its own beginning."""


def why_not(request: InferenceRequest, policy: str) -> str | None:
    """Why an answer to `request` cannot go on once some of it was said; None when it can."""
    if policy == Policy.OFF:
        return "off"
    body = request.body
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    joined = not _JOINED.isdisjoint(body) and any(body.get(name) for name in _JOINED)
    best = (body.get("best_of") or 1) > 1
    return None if request.is_plain and not (several or joined or best) else "shape"


def may_go_on(verdict: Verdict) -> bool:
    """Whether how an attempt ended is a reason to ask somebody else: not a refusal of the request itself."""
    return isinstance(verdict, Failure) or (isinstance(verdict, Ignore) and verdict.next is Next.NEXT_TIER)


def ladder(
    candidates: Sequence[Candidate],
    broken: Candidate,
    verdict: Verdict,
    policy: str,
    said: Said,
    stalled: Collection[Candidate] = (),
) -> tuple[Candidate, ...]:
    """Who is asked to go on, in order: the same local model, other local ones, then clouds, each as in the chain.

    Whoever only refused is not asked again, nor is a cloud of `stalled`, which sent keep-alives and nothing else until
    its time was over: it would most likely keep the caller waiting as long again. With no content said there is
    nothing that a cloud could not begin anew.
    """
    found = [other for other in candidates if barred(other, broken, verdict, policy, said, stalled) is None]
    return tuple(sorted(found, key=lambda other: (not other.is_local, other != broken, other.position)))


def barred(
    candidate: Candidate,
    broken: Candidate,
    verdict: Verdict,
    policy: str,
    said: Said,
    stalled: Collection[Candidate] = (),
) -> str | None:
    """Why `candidate` has no place on the ladder; None where it has one."""
    if candidate == broken and not isinstance(verdict, Failure):
        return "it refused"
    if candidate.is_local:
        return None
    if candidate in stalled:
        return "it sent keep-alives and nothing else"
    return f"the route has resume: {policy}" if policy != Policy.ANY and not said.is_empty else None


def continuation(request: InferenceRequest, said: Said, candidate: Candidate, *, prefills: bool) -> Continuation | None:
    """What `candidate` is asked; None where it cannot go on. `prefills`: its model goes on with a last message."""
    body = request.body
    if said.is_empty:
        return Continuation(body, How.AGAIN)
    if candidate.is_local:
        so_far = {"content": said.content} | ({"reasoning_content": said.reasoning} if said.reasoning else {})
        return Continuation(changed(body, **{ANSWER_SO_FAR: so_far}), How.SO_FAR)
    # no cloud goes on with another's thought: it thinks for itself; nor, told of it, behind white space it is not shown
    if not said.content or (request.endpoint is Endpoint.CHAT and not said.content.strip()):
        return Continuation(_shortened(body, said), How.AGAIN)
    if request.endpoint is Endpoint.COMPLETIONS:
        prompt = body["prompt"]
        text = prompt[0] if isinstance(prompt, list) and prompt else prompt
        if not isinstance(text, str) or body.get("max_tokens") == -1:
            return None
        limit = body.get("max_tokens") or _COMPLETION_TOKENS
        return Continuation(_shortened(changed(body, prompt=text + said.content, max_tokens=limit), said), How.PREFILL)
    messages = [*body["messages"], {"role": "assistant", "content": said.content}]
    if prefills and not body.get("reasoning_effort"):
        prefilled = changed(body, messages=messages, continue_final_message=True)
        return Continuation(_shortened(prefilled, said), How.PREFILL)
    messages.append({"role": "user", "content": GO_ON})
    return Continuation(_shortened(changed(body, messages=messages), said), How.ASKED)


def _shortened(body: Mapping[str, Any], said: Said) -> Mapping[str, Any]:
    """`body` with as many tokens fewer as were said already, and at least one."""
    names = ("max_tokens", "max_completion_tokens")
    limits = {name: body[name] for name in names if body.get(name) not in (None, -1)}
    return changed(body, **{name: max(1, limit - said.tokens) for name, limit in limits.items()})
