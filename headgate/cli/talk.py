"""`run` and `chat`: answers through the gateway, as any client gets them; prints text as it comes, invents nothing."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from headgate.cli import addresses, sse_lines
from headgate.cli.client import Answer, ApiError, from_envelope
from headgate.cli.command import Command, Session, at_least_one, is_text, zero_or_more
from headgate.shared.errors import Exit, HeadgateError
from inference.protocol import H_MODEL, H_POLICY, H_REASON, H_TIER, Progress, Tier

SILENCE_SECONDS = 330.0
"""Longer than the gateway's own longest deadline by default (300 s): its sentence is better than ours."""

INTERRUPTED = 130


class NotTextError(HeadgateError):
    """What is to be said is not text."""

    exit_code = Exit.USAGE


def _talk_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model or route of the gateway")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--max-tokens", metavar="N", type=at_least_one, help="longest answer, in tokens")
    parser.add_argument("--temperature", metavar="T", type=zero_or_more, help="0 is greedy")
    parser.add_argument("--seed", metavar="N", type=int, help="makes sampling repeatable")
    parser.add_argument("--local-only", action="store_true", help="never let a cloud provider answer")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _talk_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="*", help="what to say; read from stdin when there is none")


def _body(session: Session, messages: list[dict[str, str]], *, stream: bool) -> dict[str, Any]:
    args = session.args
    body: dict[str, Any] = {"model": args.model, "messages": messages, "stream": stream}
    for name in ("max_tokens", "temperature", "seed"):
        if (value := getattr(args, name)) is not None:
            body[name] = value
    return body


@contextlib.contextmanager
def _ask(session: Session, messages: list[dict[str, str]], *, stream: bool) -> Iterator[Answer]:
    api = addresses.gateway(session)
    if api.token is None:
        raise HeadgateError(
            "there is no key to talk to the gateway with; start it once with `headgate up`, or set GATEWAY_API_KEY"
        )
    headers = {H_POLICY: "local-only"} if session.args.local_only else {}
    body = _body(session, messages, stream=stream)
    with api.open("POST", "/v1/chat/completions", body, SILENCE_SECONDS, headers) as answer:
        yield answer


def _stream(session: Session, messages: list[dict[str, str]]) -> str:
    """Prints one answer as it comes and returns its text; raises ApiError for an error frame or a cut stream."""
    terminal, done = session.terminal, False
    said: list[str] = []
    with _ask(session, messages, stream=True) as answer:
        for event in sse_lines.events(answer.lines):
            if event.comment is not None:
                if progress := Progress.parse(event.comment):
                    terminal.status(_progress(progress))
                continue
            if event.data == "[DONE]":
                done = True
                break
            chunk = json.loads(event.data or "null")
            if error := chunk.get("error"):
                if said:
                    terminal.data("")
                raise from_envelope(error, None, None)
            for choice in chunk.get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    said.append(text)
                    terminal.data(text, end="")
        if said:
            terminal.data("")
        if not done:
            raise ApiError("the answer was cut off: the stream ended before its end")
        _tell_tier(session, answer)
    return "".join(said)


def _progress(progress: Progress) -> str:
    amount = f"{progress.done}" if progress.total is None else f"{progress.done} of {progress.total}"
    what = {
        "queued": "waiting, requests ahead:",
        "loading": "loading the model, percent:",
        "prefill": "reading the prompt, tokens:",
    }
    return f"{what[progress.stage]} {amount}"


def _tell_tier(session: Session, answer: Answer) -> None:
    """Says on stderr when somebody else than the model asked for has answered."""
    tier = answer.headers.get(H_TIER, Tier.LOCAL)
    if tier != Tier.LOCAL:
        reason = answer.headers.get(H_REASON)
        text = f"answered by {answer.headers.get(H_MODEL, 'another model')} ({tier}){': ' + reason if reason else ''}"
        session.terminal.say(session.terminal.paint_err(text, "dim"))


def _opening(session: Session) -> list[dict[str, str]]:
    system = session.args.system
    return [{"role": "system", "content": system}] if system else []


def run(session: Session) -> int:
    """One answer; the prompt comes from the arguments, else from stdin; on a terminal without a prompt, a chat."""
    prompt = " ".join(session.args.prompt)
    if not prompt:
        if sys.stdin.isatty():
            return chat(session)
        prompt = _listen(sys.stdin.read).strip()
    if not prompt:
        session.terminal.say("headgate: say something: headgate run MODEL PROMPT, or pipe the prompt in")
        return Exit.USAGE
    messages = [*_opening(session), {"role": "user", "content": prompt}]
    try:
        if session.json:
            with _ask(session, messages, stream=False) as answer:
                session.terminal.json(json.loads(answer.response.read()))
                _tell_tier(session, answer)
        else:
            _stream(session, messages)
    except KeyboardInterrupt:
        session.terminal.say("")
        return INTERRUPTED
    return Exit.OK


def _listen(read: Callable[[], str]) -> str:
    """What `read` takes from stdin; raises NotTextError when that is not UTF-8."""
    try:
        text = read()
    except UnicodeDecodeError:
        text = None
    if text is None or not is_text(text):
        raise NotTextError("what was piped in is not text in UTF-8")
    return text


def chat(session: Session) -> int:
    """A conversation until end of input, `/bye` or Ctrl-C at the prompt; Ctrl-C in an answer stops that answer."""
    terminal = session.terminal
    messages = _opening(session)
    person = sys.stdin.isatty()
    if person:
        with contextlib.suppress(ImportError):  # line editing is a comfort that some builds of Python lack
            import readline  # noqa: F401
        terminal.say(f"Talking to {session.args.model}. /clear forgets, /bye or Ctrl-D ends, Ctrl-C stops an answer.")
    failed = False
    while (text := _next_line(session, person)) is not None:
        if text in ("/bye", "/exit", "/quit"):
            break
        if text == "/clear":
            messages = _opening(session)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            if session.json:
                with _ask(session, messages, stream=False) as answer:
                    reply = json.loads(answer.response.read())
                    said = reply["choices"][0]["message"]["content"]
                    terminal.data(json.dumps(reply, ensure_ascii=False))
            else:
                said = _stream(session, messages)
            messages.append({"role": "assistant", "content": said})
        except KeyboardInterrupt:
            terminal.say("")
            messages.pop()
            if not person:
                return INTERRUPTED
        except ApiError as error:
            messages.pop()
            terminal.say(f"{terminal.paint_err('headgate:', 'red')} {error}")
            failed = True
            if not person:
                return error.exit_code
    return Exit.FAILURE if failed and not person else Exit.OK


def _next_line(session: Session, person: bool) -> str | None:
    """What is said next, or None at the end."""
    try:
        if person:
            session.terminal.clear_status()
            return input(">>> ").strip()
        line = _listen(sys.stdin.readline)
    except (EOFError, KeyboardInterrupt):
        session.terminal.say("")
        return None
    return line.strip() if line else None


COMMANDS = {"run": Command(_run_arguments, run), "chat": Command(_talk_arguments, chat)}
