"""`run` and `chat`: one answer or a conversation through the gateway, printed as it streams."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from headgate.cli import addresses
from headgate.cli.client import Answer, ApiError, from_envelope
from headgate.cli.command import Command, Session, UsageError, at_least_one, is_text, zero_or_more
from headgate.shared.errors import Exit
from inference.protocol import H_MODEL, H_POLICY, H_REASON, H_TIER, Progress, Tier

SILENCE_SECONDS = 330.0
"""Longer than the gateway's longest default deadline (300 s), because its error message says more than a timeout."""

INTERRUPTED = 130


def _talk_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model or route of the gateway")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--max-tokens", metavar="N", type=at_least_one, help="longest answer, in tokens")
    parser.add_argument("--temperature", metavar="T", type=zero_or_more, help="0 is greedy")
    parser.add_argument("--seed", metavar="N", type=int, help="makes sampling repeatable")
    parser.add_argument("--local-only", action="store_true", help="use local models only, no cloud provider")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _talk_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="*", help="the prompt; read from stdin when absent")


def _body(session: Session, messages: list[dict[str, str]], *, stream: bool) -> dict[str, Any]:
    args = session.args
    body: dict[str, Any] = {"model": args.model, "messages": messages, "stream": stream}
    for name in ("max_tokens", "temperature", "seed"):
        if (value := getattr(args, name)) is not None:
            body[name] = value
    return body


@contextlib.contextmanager
def _post_chat(session: Session, messages: list[dict[str, str]], *, stream: bool) -> Iterator[Answer]:
    api = addresses.gateway(session, needs_key=True)
    headers = {H_POLICY: "local-only"} if session.args.local_only else {}
    body = _body(session, messages, stream=stream)
    with api.open("POST", "/v1/chat/completions", body, SILENCE_SECONDS, headers) as answer:
        yield answer


def _stream(session: Session, messages: list[dict[str, str]]) -> str:
    """Prints one answer as it arrives and returns its text. Raises ApiError for an error or an incomplete stream."""
    terminal, done = session.terminal, False
    pieces: list[str] = []
    with _post_chat(session, messages, stream=True) as answer:
        for frame in answer.frames():
            if frame.comment is not None:
                if progress := Progress.parse(frame.comment.rstrip(b"\r\n")):
                    terminal.status(_progress(progress))
                continue
            if frame.data == b"[DONE]":
                done = True
                break
            chunk = json.loads(frame.data or b"{}")
            if error := chunk.get("error"):
                if pieces:
                    terminal.data("")
                raise from_envelope(error, None, None)
            for choice in chunk.get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    pieces.append(text)
                    terminal.data(text, end="")
        if pieces:
            terminal.data("")
        if not done:
            raise ApiError("the answer is incomplete: the stream ended without [DONE]")
        _note_other_tier(session, answer)
    return "".join(pieces)


def _progress(progress: Progress) -> str:
    amount = f"{progress.done}" if progress.total is None else f"{progress.done} of {progress.total}"
    stages = {
        "queued": "waiting, requests ahead:",
        "loading": "loading the model, percent:",
        "prefill": "reading the prompt, tokens:",
    }
    return f"{stages[progress.stage]} {amount}"


def _note_other_tier(session: Session, answer: Answer) -> None:
    """Writes a line to stderr when the answer does not come from the tier `local`."""
    tier = answer.headers.get(H_TIER, Tier.LOCAL)
    if tier != Tier.LOCAL:
        reason = answer.headers.get(H_REASON)
        text = f"answered by {answer.headers.get(H_MODEL, 'another model')} ({tier}){': ' + reason if reason else ''}"
        session.terminal.say(session.terminal.paint_err(text, "dim"))


def _opening(session: Session) -> list[dict[str, str]]:
    system = session.args.system
    return [{"role": "system", "content": system}] if system else []


def run(session: Session) -> int:
    """Prints one answer to the prompt in the arguments or on stdin. Without a prompt on a terminal it starts a chat."""
    prompt = " ".join(session.args.prompt)
    if not prompt:
        if sys.stdin.isatty():
            return chat(session)
        prompt = _read_text(sys.stdin.read).strip()
    if not prompt:
        raise UsageError("the prompt is empty; use: headgate run MODEL PROMPT, or pipe the prompt in")
    messages = [*_opening(session), {"role": "user", "content": prompt}]
    try:
        if session.json:
            with _post_chat(session, messages, stream=False) as answer:
                session.terminal.json(json.loads(answer.response.read()))
                _note_other_tier(session, answer)
        else:
            _stream(session, messages)
    except KeyboardInterrupt:
        session.terminal.say("")
        return INTERRUPTED
    return Exit.OK


def _read_text(read: Callable[[], str]) -> str:
    """The result of `read` from stdin. Raises UsageError when it is not UTF-8."""
    try:
        text = read()
    except UnicodeDecodeError:
        text = None
    if text is None or not is_text(text):
        raise UsageError("stdin is not UTF-8 text")
    return text


def chat(session: Session) -> int:
    """Holds a conversation until end of input, `/bye` or Ctrl-C at the prompt. Ctrl-C stops an answer.

    With input that is not from a terminal, an error or Ctrl-C during an answer ends it.
    """
    terminal = session.terminal
    messages = _opening(session)
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # some builds of Python have no line editing
            import readline  # noqa: F401
        terminal.say(
            f"Chat with {session.args.model}. /clear starts over, /bye or Ctrl-D ends, Ctrl-C stops an answer."
        )
    while (text := _next_line(session, interactive)) is not None:
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
                with _post_chat(session, messages, stream=False) as answer:
                    reply = json.loads(answer.response.read())
                    content = reply["choices"][0]["message"]["content"]
                    terminal.data(json.dumps(reply, ensure_ascii=False))
            else:
                content = _stream(session, messages)
            messages.append({"role": "assistant", "content": content})
        except KeyboardInterrupt:
            terminal.say("")
            messages.pop()
            if not interactive:
                return INTERRUPTED
        except ApiError as error:
            messages.pop()
            terminal.say(f"{terminal.paint_err('headgate:', 'red')} {error}")
            if not interactive:
                return error.exit_code
    return Exit.OK


def _next_line(session: Session, interactive: bool) -> str | None:
    """The next line of the input; None at its end and after Ctrl-C."""
    try:
        if interactive:
            session.terminal.clear_status()
            return input(">>> ").strip()
        line = _read_text(sys.stdin.readline)
    except (EOFError, KeyboardInterrupt):
        session.terminal.say("")
        return None
    return line.strip() if line else None


COMMANDS = {"run": Command(_run_arguments, run), "chat": Command(_talk_arguments, chat)}
