"""Resuming an interrupted answer: its candidates, their requests, and joining the parts into one stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from gateway.apis.messages.messages_request import parse as parse_messages
from gateway.apis.openai.frames import Comment, Data, DeltaKind, Done, Endpoint, Flavor, Frame
from gateway.apis.openai.generation_request import InferenceRequest, parse
from gateway.breaker.outcome import Failure, Ignore, Reason, Scope, Success
from gateway.routing.chain import Candidate
from gateway.routing.resume_policy import (
    CONTINUE_PROMPT,
    PartialAnswer,
    ResumeMethod,
    continuation,
    is_resumable,
    resume_order,
    why_excluded,
    why_not_resumable,
)
from gateway.routing.splice import (
    MAX_CHARACTERS,
    SentAnswer,
    Splice,
    overlap,
    resume_comment,
    stop_string_across,
    stripped_white_space,
)
from tests.rigs.typed_bodies import chat as chat_body
from tests.rigs.typed_bodies import json_of, to_openai

MESSAGES = [{"role": "user", "content": "Hello!"}]
DEMO, MINI = Candidate("local", "demo", 0), Candidate("local", "demo-mini", 1)
GPT, CLAUDE = Candidate("openai", "gpt", 2), Candidate("anthropic", "claude", 3)
CHAIN = (DEMO, MINI, GPT, CLAUDE)
BROKE = Failure(Scope.PAIR)
PARTIAL = PartialAnswer("one two ", tokens=2)


def chat(**more: Any) -> InferenceRequest:
    return parse(Endpoint.CHAT, orjson.dumps({"model": "m", "messages": MESSAGES, "stream": True, **more}))


def completion(**more: Any) -> InferenceRequest:
    return parse(Endpoint.COMPLETIONS, orjson.dumps({"model": "m", "prompt": "a", "stream": True, **more}))


def chunk(
    content: str | None = None, *, finish: str | None = None, kind: DeltaKind = DeltaKind.CONTENT, **delta: Any
) -> Data:
    fields = {**delta, **({} if content is None else {"content": content})}
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    payload = {"id": "b", "object": "chat.completion.chunk", "created": 2, "model": "m2", "choices": [choice]}
    return Data(orjson.dumps(payload), DeltaKind.FINISH if finish else kind)


def usage(prompt: int, completion: int) -> Data:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return Data(orjson.dumps({"id": "b", "created": 2, "choices": [], "usage": counts}), DeltaKind.USAGE)


def kept(*frames: Frame) -> SentAnswer:
    """The answer with the id `a` that a client has received in `frames`."""
    found = SentAnswer()
    for frame in frames:
        found.note([Data(frame.payload.replace(b'"b"', b'"a"'), frame.kind) if isinstance(frame, Data) else frame])
    return found


def splice(sent: str, how: ResumeMethod, *, stops: Sequence[str] = (), reasoning: str = "") -> Splice:
    before = kept(chunk("", role="assistant"), chunk(sent or None, **({"reasoning": reasoning} if reasoning else {})))
    return Splice(before, before.partial, how, stops)


def shown(frames: Sequence[Frame]) -> str:
    choices = [choice for frame in frames if isinstance(frame, Data) for choice in json.loads(frame.payload)["choices"]]
    return "".join(
        (choice["delta"].get("content") if "delta" in choice else choice["text"]) or "" for choice in choices
    )


# --- obstacles and candidates -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("request_", "policy", "reason"),
    [
        (chat(), "any", None),
        (chat(), "local", None),
        (chat(), "off", "off"),
        (chat(n=2), "any", "shape"),
        (chat(logprobs=True), "any", "shape"),
        (chat(response_format={"type": "json_object"}), "any", "shape"),
        (chat(continue_final_message=True), "any", "shape"),
        (completion(), "any", None),
        (completion(prompt=["a"]), "any", None),
        (completion(prompt=[1, 2]), "any", None),
        (completion(prompt=["a", "b"]), "any", "shape"),
        (completion(echo=True), "any", "shape"),
        (completion(suffix="x"), "any", "shape"),
        (completion(best_of=2), "any", "shape"),
    ],
)
def test_only_plain_text_is_resumable(request_: InferenceRequest, policy: str, reason: str | None) -> None:
    assert why_not_resumable(request_, policy) == reason


def test_rejected_request_is_not_resumed() -> None:
    assert is_resumable(BROKE)
    assert is_resumable(Ignore(Reason.QUEUE_FULL))
    assert not is_resumable(Ignore(Reason.CONTENT_POLICY))
    assert not is_resumable(Ignore(Reason.CLIENT_LEFT))
    assert not is_resumable(Success())


def test_resume_order_is_local_models_then_clouds_each_with_the_interrupted_candidate_first() -> None:
    assert resume_order(CHAIN, MINI, BROKE, "any", PARTIAL) == (MINI, DEMO, GPT, CLAUDE)
    assert resume_order(CHAIN, MINI, BROKE, "local", PARTIAL) == (MINI, DEMO)
    assert resume_order(CHAIN, CLAUDE, BROKE, "any", PARTIAL) == (DEMO, MINI, CLAUDE, GPT)
    assert resume_order(CHAIN, DEMO, Ignore(Reason.QUEUE_FULL), "any", PARTIAL) == (MINI, GPT, CLAUDE)
    assert resume_order(CHAIN, DEMO, BROKE, "local", PartialAnswer()) == CHAIN


def test_cloud_that_sent_only_keep_alives_is_not_tried_again() -> None:
    assert resume_order(CHAIN, CLAUDE, BROKE, "any", PARTIAL, {CLAUDE}) == (DEMO, MINI, GPT)
    assert resume_order(CHAIN, DEMO, BROKE, "any", PARTIAL, {DEMO, GPT}) == (DEMO, MINI, CLAUDE)


def test_excluded_candidates_have_a_reason() -> None:
    assert why_excluded(DEMO, DEMO, Ignore(Reason.QUEUE_FULL), "any", PARTIAL) == "it rejected the request"
    assert why_excluded(GPT, CLAUDE, BROKE, "any", PARTIAL, {GPT}) == "it sent only keep-alives"
    assert why_excluded(GPT, DEMO, BROKE, "local", PARTIAL) == "the route has resume: local"
    assert [why_excluded(candidate, DEMO, BROKE, "any", PARTIAL) for candidate in CHAIN] == [None] * 4


# --- requests for the rest of an answer -------------------------------------------------------------------------------
def test_answer_without_text_is_restarted() -> None:
    request = chat(tools=[{"type": "function", "function": {"name": "f"}}])
    plan = continuation(request, PartialAnswer(), GPT, prefills=False)
    assert plan is not None
    assert (plan.body, plan.method) == (request.body, ResumeMethod.RESTART)


def test_local_model_continues_the_answer_so_far() -> None:
    plan = continuation(chat(max_tokens=9), PartialAnswer("one", "hm", 3), MINI, prefills=False)
    assert plan is not None
    assert plan.method is ResumeMethod.CONTINUE
    assert json_of(plan.body)["answer_so_far"] == {"content": "one", "reasoning_content": "hm"}
    assert json_of(plan.body)["max_tokens"] == 9
    plan = continuation(completion(), PartialAnswer("one", "", 1), DEMO, prefills=False)
    assert plan is not None
    assert json_of(plan.body)["answer_so_far"] == {"content": "one"}


def test_cloud_continues_a_prefill_or_gets_an_instruction() -> None:
    instructed = continuation(chat(max_tokens=9, max_completion_tokens=2), PARTIAL, GPT, prefills=False)
    assert instructed is not None
    assert instructed.method is ResumeMethod.INSTRUCT
    body = json_of(instructed.body)
    assert body["messages"] == [
        *MESSAGES, {"role": "assistant", "content": "one two "}, {"role": "user", "content": CONTINUE_PROMPT},
    ]  # fmt: skip
    assert (body["max_tokens"], body["max_completion_tokens"]) == (7, 1)
    filled = continuation(chat(), PARTIAL, CLAUDE, prefills=True)
    assert filled is not None
    assert (filled.method, json_of(filled.body)["continue_final_message"]) == (ResumeMethod.PREFILL, True)
    assert json_of(filled.body)["messages"] == [*MESSAGES, {"role": "assistant", "content": "one two "}]
    thinking = continuation(chat(reasoning_effort="high"), PARTIAL, CLAUDE, prefills=True)
    assert thinking is not None
    assert thinking.method is ResumeMethod.INSTRUCT


@pytest.mark.parametrize("partial", [PARTIAL, PartialAnswer("", "hm", 2)])
def test_messages_request_is_resumed_by_another_cloud_without_its_origin(partial: PartialAnswer) -> None:
    """The origin does not contain the partial answer. `max_tokens` is limited to what the model accepts."""
    given = {"model": "m", "max_tokens": 32_000, "messages": MESSAGES, "stream": True}
    request = parse_messages(orjson.dumps(given))
    plan = continuation(request, partial, GPT, prefills=False)
    assert plan is not None
    assert to_openai(Endpoint.CHAT, plan.body, "gpt-4o", Flavor.OPENAI)["max_completion_tokens"] == 16_384
    assert json_of(chat_body(request.body).origin) == given
    assert chat_body(plan.body).origin is None


@pytest.mark.parametrize(
    "partial", [PartialAnswer("", "hm", 4), PartialAnswer("\n\n", "hm", 4), PartialAnswer(" \n", "", 4)]
)
@pytest.mark.parametrize("prefills", [False, True])
def test_cloud_restarts_after_reasoning_or_white_space(partial: PartialAnswer, prefills: bool) -> None:
    """An instruction would refer to an answer that the cloud does not get."""
    plan = continuation(chat(max_tokens=9), partial, GPT, prefills=prefills)
    assert plan is not None
    body = json_of(plan.body)
    assert (plan.method, body["messages"], body["max_tokens"]) == (ResumeMethod.RESTART, MESSAGES, 5)


@pytest.mark.parametrize(("prompt", "sent"), [("a ", "a one two "), (["a "], "a one two "), ([1, 2], None)])
def test_completion_is_continued_with_a_longer_prompt(prompt: Any, sent: str | None) -> None:
    """A prompt of token ids is not continued: they are valid for one model only."""
    plan = continuation(completion(prompt=prompt), PARTIAL, GPT, prefills=False)
    assert (plan and json_of(plan.body)["prompt"]) == sent
    assert plan is None or (plan.method, json_of(plan.body)["max_tokens"]) == (ResumeMethod.PREFILL, 14)


def test_completion_of_white_space_is_continued_instead_of_restarted() -> None:
    """White space stays in the prompt; after a restart the answer would contain it twice."""
    plan = continuation(completion(prompt="def f():"), PartialAnswer("\n    ", "", 2), GPT, prefills=False)
    assert plan is not None
    assert (plan.method, json_of(plan.body)["prompt"]) == (ResumeMethod.PREFILL, "def f():\n    ")


# --- the answer that a client has -------------------------------------------------------------------------------------
def test_text_is_extracted_from_payloads() -> None:
    found = kept(
        chunk("", role="assistant"), Comment(b": x\n\n"), chunk(reasoning_content="hm"), chunk("one "), chunk("two"),
    )  # fmt: skip
    assert (found.partial, found.has_begun) == (PartialAnswer("one two", "hm", 3), True)
    assert found.choices_with_role == {0}
    assert (found.head.id, found.head.created, found.is_finished) == ("a", 2, False)
    found.note([chunk(finish="stop"), usage(1, 2)])
    assert found.is_finished
    assert kept(chunk("word " * 8)).partial.tokens == 10
    assert kept(chunk("水は川から水車へ流れる。")).partial.tokens == 12, "a Japanese character counts as one token"
    assert kept(chunk("Вода идёт к мельнице")).partial.tokens == 13


def test_continuation_keeps_the_first_id() -> None:
    """The first chunk of Azure has an empty id."""
    nameless = Data(b'{"id":"","object":"","created":0,"model":"","choices":[]}', DeltaKind.OTHER)
    found = kept(nameless, chunk("one"), chunk("two"))
    assert (found.partial.content, found.head.id, found.head.created) == ("onetwo", "a", 2)


def test_text_of_answers_that_cannot_be_resumed_is_not_kept() -> None:
    found = SentAnswer("shape")
    found.note([Comment(b": x\n\n")])
    assert not found.has_begun
    found.note([chunk("x")])
    assert (found.has_begun, found.partial.is_empty) == (True, True)
    assert not SentAnswer().has_begun


def test_answer_begins_with_its_first_content() -> None:
    """A role is no content. Id and roles are kept for a restarted answer."""
    found = SentAnswer("shape", 2)
    role = {"index": 1, "delta": {"role": "assistant", "content": ""}}
    found.note([Data(b"{oops", DeltaKind.OTHER), Data(orjson.dumps({"id": "a", "choices": [role]}), DeltaKind.OTHER)])
    assert (found.has_begun, found.head.id, found.partial.is_empty) == (False, "a", True)
    assert found.choices_with_role == {1}
    found.note([chunk(tool_calls=[{"index": 0}])])
    assert (found.has_begun, found.head.id) == (True, "a")
    assert not SentAnswer().head.id and not SentAnswer().choices_with_role


def test_finish_reasons_are_counted_without_kept_text() -> None:
    found = SentAnswer("shape", 2)
    found.note([chunk("x", finish="stop")])
    assert not found.is_finished
    found.note([Data(b'{"choices":[{"index":1,"finish_reason":"tool_calls"}]}', DeltaKind.FINISH)])
    assert found.is_finished


def test_restart_changes_only_the_id_the_time_and_the_role_of_a_frame() -> None:
    """Calls, scores and choices are unchanged; the id is the first one, and no role is repeated."""
    before = SentAnswer("shape", 2)
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    before.note([Data(orjson.dumps({"id": "a", "created": 2, "choices": [role]}), DeltaKind.OTHER)])
    call = {"index": 0, "delta": {"role": "assistant", "tool_calls": [{"index": 0}]}, "logprobs": {"content": []}}
    other = {"index": 1, "delta": {"role": "assistant", "refusal": "no"}}
    frame = Data(orjson.dumps({"id": "b", "created": 3, "choices": [call, other]}), DeltaKind.CONTENT)
    (joined,) = Splice(before, before.partial, ResumeMethod.RESTART, ()).join([frame])
    assert isinstance(joined, Data)
    del call["delta"]["role"]  # type: ignore[attr-defined]
    assert json.loads(joined.payload) == {"id": "a", "created": 2, "choices": [call, other]}
    assert joined.kind is DeltaKind.CONTENT


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"content": [{"type": "text", "text": "x"}]}},
        {"delta": {"content": 1}},
        {"delta": "role"},
        {"text": []},
    ],
    ids=str,
)
def test_content_of_an_unusual_type_is_passed_on_and_prevents_a_resume(choice: dict[str, Any]) -> None:
    """Some clouds stream contents as lists of parts."""
    frame = Data(orjson.dumps({"id": "b", "created": 2, "choices": [choice]}), DeltaKind.CONTENT)
    for how in ResumeMethod:
        assert splice("One", how).join([frame]) == [frame]
    assert kept(chunk("One"), frame).obstacle == "malformed"


def test_text_after_signed_thinking_is_resumable() -> None:
    found = kept(chunk(reasoning_content="hm"), chunk(thinking_blocks=[{"type": "thinking", "signature": "s"}]))
    found.note([chunk("one "), chunk("two")])
    assert (found.partial, found.obstacle) == (PartialAnswer("one two", "hm", 3), None)


@pytest.mark.parametrize(
    "blocks", [[{"type": "redacted_thinking", "data": "aGlk"}], [{"type": "thinking", "signature": "c2ln"}]]
)
@pytest.mark.parametrize("behind", [[], [chunk("")], [chunk(reasoning_content="hm")]])
def test_signed_thinking_without_text_is_not_resumable(blocks: list[Any], behind: list[Data]) -> None:
    """The client has a block of this answer, and a message cannot contain blocks of two answers."""
    found = kept(chunk("", role="assistant"), chunk(thinking_blocks=blocks), *behind)
    assert not found.partial.content
    assert (found.obstacle, found.has_begun) == ("shape", True)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (chunk(tool_calls=[{"index": 0}]), "shape"),
        (chunk(refusal="no"), "shape"),
        (Data(b"{oops", DeltaKind.CONTENT), "malformed"),
        (Data(b"[]", DeltaKind.CONTENT), "malformed"),
        (Data(b'{"choices":null}', DeltaKind.CONTENT), "malformed"),
        (Data(b'{"choices":[{},{}]}', DeltaKind.CONTENT), "malformed"),
        (Data(b'{"choices":[1]}', DeltaKind.CONTENT), "malformed"),
        (chunk("x" * (MAX_CHARACTERS + 1)), "too_long"),
    ],
)
def test_frame_that_prevents_a_resume_gives_the_reason(frame: Data, reason: str) -> None:
    found = kept(chunk("x"), frame, chunk("y"))
    assert found.partial.is_empty
    assert (found.obstacle, found.has_begun) == (reason, True)


def test_text_of_a_long_answer_is_kept() -> None:
    found = SentAnswer()
    for _ in range(200):
        found.note([chunk("x")])
    assert found.partial.content == "x" * 200


def test_escapes_in_text_are_decoded() -> None:
    """Also surrogate pairs across frames. Half a pair is not text."""

    def plain(text: str) -> Data:
        payload = (
            '{"id":"a","created":2,"choices":[{"index":0,"delta":{"content":"' + text + '"},"finish_reason":null}]}'
        )
        return Data(payload.encode(), DeltaKind.CONTENT)

    found = kept(plain("one"), plain(' \\"two\\"'), plain("\\ud83d"), plain("\\ude00"), chunk("!"), plain(" é"))
    assert found.partial == PartialAnswer('one "two"\U0001f600! é', "", 6)
    half = kept(plain("one"), plain("\\ud83d"))
    assert (half.partial.content, half.obstacle) == ("", "malformed")
    assert kept(plain("\\u0041"), plain("\\u0042")).partial.content == "AB"
    long = kept(plain("one"), plain("x" * MAX_CHARACTERS), chunk("two"), chunk("three"))
    assert (long.partial.content, long.obstacle) == ("", "too_long")
    assert not kept(Comment(b": x\n\n")).has_begun


# --- joining ----------------------------------------------------------------------------------------------------------
def test_local_continuation_keeps_id_and_sends_its_role_once() -> None:
    joined = splice("one ", ResumeMethod.CONTINUE).join(
        [
            Comment(b": x\n\n"),
            chunk("", role="assistant", kind=DeltaKind.OTHER),
            chunk("two", role="assistant"),
            chunk(finish="stop"),
            usage(3, 4),
            Done(),
        ]
    )
    assert [frame.kind if isinstance(frame, Data) else type(frame) for frame in joined] == [
        Comment, DeltaKind.CONTENT, DeltaKind.FINISH, DeltaKind.USAGE, Done,
    ]  # fmt: skip
    chunks = [json.loads(frame.payload) for frame in joined if isinstance(frame, Data)]
    assert {(item["id"], item["created"]) for item in chunks} == {("a", 2)}
    assert chunks[0]["model"] == "m2"
    assert chunks[0]["choices"][0]["delta"] == {"content": "two"}
    assert chunks[2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_restarted_answer_keeps_role_and_reasoning() -> None:
    fresh = Splice(SentAnswer(), PartialAnswer(), ResumeMethod.RESTART, ())
    first, second = fresh.join([chunk("", role="assistant"), chunk(reasoning="hm")])
    assert isinstance(first, Data) and isinstance(second, Data)
    assert json.loads(first.payload)["id"] == "b"
    assert json.loads(first.payload)["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(second.payload)["choices"][0]["delta"] == {"reasoning": "hm"}
    (third,) = fresh.join([chunk("", role="assistant")])
    assert isinstance(third, Data) and "role" not in json.loads(third.payload)["choices"][0]["delta"]


def test_reasoning_about_the_continuation_is_removed() -> None:
    """If the answer has no text yet, its reasoning is continued."""
    assert splice("one ", ResumeMethod.CONTINUE).join([chunk(reasoning_content="Let me see.")]) == []
    assert len(splice("", ResumeMethod.CONTINUE, reasoning="hm").join([chunk(reasoning_content=" yes")])) == 1


def test_repeated_prompt_tokens_count_as_completion_tokens() -> None:
    def counted(how: ResumeMethod, sent: str, *counts: int) -> list[int]:
        (frame,) = splice(sent, how).join([usage(*counts)])
        assert isinstance(frame, Data)
        return list(json.loads(frame.payload)["usage"].values())

    assert counted(ResumeMethod.INSTRUCT, "12345678", 20, 5) == [18, 7, 25]
    assert counted(ResumeMethod.RESTART, "12345678", 20, 5) == [20, 7, 27]
    odd = Data(b'{"choices":[],"usage":{"prompt_tokens":null}}', DeltaKind.USAGE)
    (frame,) = splice("x", ResumeMethod.INSTRUCT).join([odd])
    assert isinstance(frame, Data)
    assert json.loads(frame.payload)["usage"] == {"prompt_tokens": None}


def test_malformed_chunks_are_passed_on() -> None:
    oops = Data(b"oops", DeltaKind.CONTENT)
    assert splice("x", ResumeMethod.INSTRUCT).join([oops]) == [oops]


def test_repetition_is_removed() -> None:
    joint = splice("The wheel turns the stone", ResumeMethod.INSTRUCT)
    assert joint.join([chunk("turns the"), chunk(" stone")]) == []
    assert shown(joint.join([chunk(" and grinds"), chunk(" corn.")])) == " and grinds corn."
    joint = splice("The wheel turns the stone", ResumeMethod.INSTRUCT)
    last = joint.join([chunk("the stone"), chunk(finish="length")])
    assert [shown(last), len(last)] == ["", 1]
    text = splice("one two ", ResumeMethod.PREFILL)
    choice = {"index": 0, "text": " three", "finish_reason": None}
    assert shown(text.join([Data(orjson.dumps({"choices": [choice]}), DeltaKind.CONTENT)])) == "three"


@pytest.mark.parametrize(
    ("sent", "text", "final", "size"),
    [
        ("The wheel turns", " and", False, 0),
        ("The wheel turns", "wheel turns and", False, 11),
        ("The wheel turns", "wheel tu", False, None),
        ("The wheel turns", "wheel tu", True, 0),
        ("bee", "e", True, 0),
        ("The wheel", "The wh", False, None),
        ("The wheel", "The wheel turns", False, 9),
        ("a", "ab", False, 1),
    ],
)
def test_overlap_of_a_continuation_is_computed(sent: str, text: str, final: bool, size: int | None) -> None:
    assert overlap(sent, text, final) == size


@pytest.mark.parametrize(
    ("sent", "text", "final", "size"),
    [("one ", " two", False, 1), ("one ", "two", False, 0), ("one\n\n", "\n", False, None), ("one\n\n", "\n", True, 0)],
)
def test_white_space_that_the_api_stripped_from_the_sent_answer_is_not_repeated(
    sent: str, text: str, final: bool, size: int | None
) -> None:
    assert stripped_white_space(sent, text, final) == size


@pytest.mark.parametrize(
    ("text", "met"), [("o three", True), ("", None), ("enty", False)], ids=["met", "not known yet", "missed"]
)
def test_stop_string_across_two_pieces_is_found(text: str, met: bool | None) -> None:
    assert stop_string_across("one tw", text, ("two", "x")) is met


def test_stop_string_that_began_in_the_first_piece_ends_the_answer() -> None:
    joint = splice("one t", ResumeMethod.INSTRUCT, stops=("two",))
    assert joint.join([chunk("w")]) == []
    frames = joint.join([chunk("o three"), chunk(" four"), Done()])
    assert [frame.kind if isinstance(frame, Data) else type(frame) for frame in frames] == [DeltaKind.FINISH, Done]
    assert shown(frames) == ""
    assert isinstance(frames[0], Data)
    assert json.loads(frames[0].payload)["choices"][0]["finish_reason"] == "stop"
    missed = splice("one t", ResumeMethod.INSTRUCT, stops=("two",))
    assert missed.join([chunk("w")]) == []
    assert shown(missed.join([chunk("enty")])) == "wenty"
    cut = splice("one t", ResumeMethod.INSTRUCT, stops=("two",))
    assert shown(cut.join([chunk("w", finish="length")])) == "w"


def test_resume_comment_names_candidate_and_position() -> None:
    comment = resume_comment("local/demo", 7, "read").frame
    assert comment == b": headgate resumed on local/demo after 7 characters (read)\n\n"


def test_completion_without_a_limit_is_resumed_by_local_models_only() -> None:
    request = completion(max_tokens=-1)
    local = continuation(request, PARTIAL, DEMO, prefills=False)
    assert local is not None
    assert (json_of(local.body)["max_tokens"], local.method) == (-1, ResumeMethod.CONTINUE)
    assert continuation(request, PARTIAL, GPT, prefills=False) is None
    thought = continuation(request, PartialAnswer("", reasoning="hm", tokens=2), GPT, prefills=False)
    assert thought is not None
    assert json_of(thought.body)["max_tokens"] == -1
