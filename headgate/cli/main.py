"""Entry point of `headgate`: the table of verbs, and the call of a verb. Its module is imported when the verb runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.cli.terminal import Terminal

PROGRAM = "headgate"
DESCRIPTION = "An OpenAI-compatible gateway in front of local llama.cpp models."
EPILOG = """\
Data goes to stdout, progress to stderr. Exit codes: 0 ok, 1 failure, 2 usage, 3 not running, 4 does not fit,
70 restart required, 75 try later, 130 Ctrl-C. `headgate VERB --help` explains a verb."""
WIDTH = 110


@dataclass(frozen=True)
class Verb:
    """A verb: its name, the module in `headgate.cli` with its Command, a summary, and an example for its help."""

    name: str
    module: str
    summary: str
    example: str = ""


GROUPS: Mapping[str, tuple[Verb, ...]] = {
    "start": (
        Verb("up", "up", "inference and gateway under one supervisor", "headgate up --port 8080"),
        Verb("gateway", "services", "the gateway alone, in the foreground", "headgate gateway --host 0.0.0.0"),
        Verb("inference", "services", "the inference service alone, in the foreground", "headgate inference"),
        Verb("ray", "fleet.ray_verb", "inference services on the nodes of a Ray cluster", "headgate ray up"),
    ),
    "first steps": (
        Verb(
            "add",
            "first_steps.add",
            "write a model into models.yaml and reload a running service",
            "headgate add ~/models/qwen2.5-7b-instruct-q4_k_m.gguf",
        ),
        Verb(
            "pull",
            "first_steps.pull",
            "download a model from a Hugging Face hub",
            "headgate pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
        ),
        Verb(
            "doctor",
            "doctor.doctor",
            "check build, devices, limits, configuration, ports and proxies, with advice",
            "headgate doctor --url https://llm.example.org/v1",
        ),
        Verb(
            "completion",
            "first_steps.completion",
            "print the script that completes words in bash, zsh or fish",
            'eval "$(headgate completion bash)"',
        ),
    ),
    "models": (
        Verb("ps", "models", "loaded and warm models with their devices, memory and requests", "headgate ps --watch"),
        Verb("list", "models", "all configured models", "headgate list --json"),
        Verb("show", "models", "details of one model", "headgate show demo"),
        Verb("load", "models", "load a model now", "headgate load demo"),
        Verb("preload", "memory", "load several models now", "headgate preload demo demo-mini"),
        Verb("unload", "models", "unload a model after its running requests", "headgate unload demo"),
        Verb(
            "offload", "models", "move a model from its device to host memory, keeping it warm", "headgate offload demo"
        ),
        Verb("move", "models", "load a model on another device", "headgate move demo gpu-1"),
        Verb("restart", "models", "unload a model, then load it in a new process", "headgate restart demo"),
        Verb("stop", "models", "cancel a model's requests and unload it", "headgate stop demo"),
        Verb(
            "plan",
            "models",
            "what memory a model needs and where it would be loaded, as a dry run",
            "headgate plan demo --ctx 8192",
        ),
    ),
    "memory": (
        Verb("evictions", "memory", "models that left their device, and why", "headgate evictions --limit 50"),
        Verb("history", "memory", "memory of each device at the last checks", "headgate history --last 10m"),
        Verb("gc", "memory", "unload idle models and return unused memory", "headgate gc"),
        Verb(
            "defragment", "memory", "move idle models so that a larger model fits on one device", "headgate defragment"
        ),
        Verb(
            "dump",
            "memory",
            "all memory records; `dump compare` shows what changed between two dumps",
            "headgate dump compare dump-1 dump-2",
        ),
    ),
    "talk": (
        Verb("run", "talk", "stream one answer", 'headgate run demo "What is a breaker?"'),
        Verb("chat", "talk", "a streaming conversation", "headgate chat demo"),
    ),
    "operate": (
        Verb("nodes", "operate", "inference services of all machines", "headgate nodes --json"),
        Verb(
            "devices",
            "operate",
            "devices with their health and memory; `devices recover DEVICE` tests one",
            "headgate devices",
        ),
        Verb(
            "breakers",
            "operate",
            "circuit breakers; `breakers reset NAME` closes one",
            "headgate breakers reset local/demo",
        ),
        Verb(
            "kv",
            "operate",
            "sequences of all KV tiers: list, remove or keep them",
            "headgate kv pin 3f9c2a71b04e88d5",
        ),
        Verb(
            "quarantine",
            "operate",
            "requests that may have ended a worker; `quarantine clear KEY` allows one again",
            "headgate quarantine clear all",
        ),
        Verb("chaos", "chaos", "inject a fault; on simulated devices only", "headgate chaos device-cut --seconds 10"),
        Verb("config", "config", "check, show or import the configuration, print its schema", "headgate config check"),
        Verb(
            "key",
            "accounts.key_verb",
            "show, create, list and revoke API keys",
            "headgate key create team-a --dollars 20",
        ),
        Verb("usage", "accounts.usage_verb", "requests, tokens and cost", "headgate usage --by key,model --since 7d"),
        Verb(
            "bench", "bench", "a small load on the running gateway, and its figures", "headgate bench demo --streams 8"
        ),
    ),
}
HIDDEN = (Verb("health", "services", "exit 0 when a URL answers 200 (for container health checks)"),)
PATHS = frozenset({"config_dir", "write", "file"})
"""Arguments that are paths, which need not be UTF-8."""

VERBS: Mapping[str, Verb] = {verb.name: verb for verb in (*(v for group in GROUPS.values() for v in group), *HIDDEN)}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with a fixed width, so that it is the same in a terminal and in the documentation."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=WIDTH, max_help_position=30)


def top_parser() -> argparse.ArgumentParser:
    """The parser of `headgate --help`, which lists the verbs."""
    lines = [DESCRIPTION, ""]
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  {verb.name:<10} {verb.summary}" for verb in group), ""]
    parser = argparse.ArgumentParser(
        PROGRAM, usage=f"{PROGRAM} VERB [options]", description="\n".join(lines[:-1]), epilog=EPILOG,
        formatter_class=_Help,
    )  # fmt: skip
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    return parser


def verb_parser(verb: Verb) -> argparse.ArgumentParser:
    """The parser of one verb. Imports its module."""
    parser = argparse.ArgumentParser(
        f"{PROGRAM} {verb.name}",
        description=verb.summary[0].upper() + verb.summary[1:] + ".",
        epilog=f"example:\n  {verb.example}" if verb.example else None,
        formatter_class=_Help,
    )
    command = _command(verb)
    command.arguments(parser)
    common(parser, has_nodes=command.has_nodes)
    return parser


def common(parser: argparse.ArgumentParser, *, has_nodes: bool = False) -> None:
    """Adds the options of every verb, with `has_nodes` also `--node`, to `parser` or its sub-parsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                inner.formatter_class = parser.formatter_class
                common(inner, has_nodes=has_nodes)
            return
    if has_nodes:
        parser.add_argument("--node", metavar="NODE", help="only this node, as `headgate nodes` lists it")
    parser.add_argument(
        "--config-dir",
        metavar="DIR",
        help="directory of models.yaml and gateway.yaml (HEADGATE_CONFIG_DIR; default: ./config or the packaged ones)",
    )
    parser.add_argument("--json", action="store_true", help="print data as JSON")


def _command(verb: Verb):  # type: ignore[no-untyped-def]  # Command is not imported: `--help` does not need it
    return importlib.import_module(f"headgate.cli.{verb.module}").COMMANDS[verb.name]


WINDOWS = f"{PROGRAM}: Windows is not supported (docs/decisions.md explains why); use WSL 2 or a Linux container"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (default: that of this process) and returns its exit code.

    Shows the traceback of an unexpected error only with HEADGATE_DEBUG.
    """
    if sys.platform == "win32":
        print(WINDOWS, file=sys.stderr)
        return 2
    from headgate.cli.terminal import StdoutClosedError, Terminal, open_missing_streams, writing
    from headgate.shared.errors import HeadgateError

    if argv is None:
        open_missing_streams()
    terminal = Terminal.of_process(os.environ)
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv), terminal)
        with writing(sys.stdout):
            sys.stdout.flush()
    except HeadgateError as error:
        terminal.say(f"{terminal.paint_err(PROGRAM + ':', 'red')} {error}")
        return int(error.exit_code)
    except KeyboardInterrupt:
        terminal.say("")
        return 130
    except StdoutClosedError:
        return 0
    except Exception as error:
        if os.environ.get("HEADGATE_DEBUG"):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            terminal.say(f"{PROGRAM}: cannot use {os.fsdecode(error.filename)}: {error.strerror}")
        else:
            terminal.say(f"{PROGRAM}: unexpected {type(error).__name__}: {error}; HEADGATE_DEBUG=1 shows the traceback")
        return 1
    return status


def _dispatch(words: list[str], terminal: Terminal) -> int:
    if len(words) > 1 and words[0] == "help":
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        terminal.data(top_parser().format_help(), end="")
        return 0 if words else 2
    if words[0] == "--version":
        from headgate import __version__

        terminal.data(f"{PROGRAM} {__version__}")
        return 0
    if words[0] not in VERBS:
        from headgate.shared.errors import did_you_mean

        otherwise = f"`{PROGRAM} --help` lists the verbs"
        advice = did_you_mean(words[0], VERBS, otherwise, shown=lambda near: f"`{PROGRAM} {near}`")
        kind = "option" if words[0].startswith("-") else "verb"
        terminal.say(f"{PROGRAM}: unknown {kind} {words[0]!r}{advice}")
        return 2
    return _run(VERBS[words[0]], words[1:], terminal)


def _run(verb: Verb, words: list[str], terminal: Terminal) -> int:
    try:
        args = verb_parser(verb).parse_args(words)
    except SystemExit as end:  # argparse has printed: 0 after --help, 2 after a usage error
        return int(end.code or 0)

    from headgate.cli.command import Session, is_text
    from headgate.shared.state_directory import load_environ

    for name, value in vars(args).items():
        values = value if isinstance(value, list) else [value]
        if name not in PATHS and not all(is_text(item) for item in values if isinstance(item, str)):
            terminal.say(f"{PROGRAM} {verb.name}: {name.upper()} is not UTF-8 text")
            return 2
    return int(_command(verb).run(Session(args, load_environ(), terminal)))


if __name__ == "__main__":
    sys.exit(main())
