"""`headgate completion`: scripts that complete words in bash, zsh and fish, generated from the parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headgate.cli.command import Command, Session, UsageError
from headgate.shared.errors import ConfigError, Exit, HeadgateError

SHELLS = ("bash", "zsh", "fish")
_KINDS = {"FILE": "file", "DIR": "directory", "MODEL": "model"}
"""How the value of an argument is completed, by its placeholder in the help."""
_INSTALL = {
    "bash": 'eval "$(headgate completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(headgate completion zsh)" in ~/.zshrc, after compinit',
    "fish": "headgate completion fish > ~/.config/fish/completions/headgate.fish",
}
_LONGEST_HELP = 70


@dataclass(frozen=True)
class Option:
    """An option: its names, its help, and its value: one of `words`, or of a `kind` (None: the option has no value)."""

    flags: tuple[str, ...]
    help: str
    words: tuple[str, ...] = ()
    kind: str | None = None


@dataclass(frozen=True)
class Level:
    """What can follow `headgate VERB` or `headgate VERB ACTION` (`path`): words with help, a kind of value, options."""

    path: str
    words: tuple[tuple[str, str], ...]
    kind: str
    options: tuple[Option, ...]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", choices=SHELLS, help="bash, zsh or fish")
    parser.add_argument("--models", action="store_true", help="print the names of models, for the scripts")


def completion(session: Session) -> int:
    """Prints the script of a shell, or the names of models."""
    if session.args.models:
        session.terminal.data("\n".join(_models(session)))
        return Exit.OK
    if session.args.shell is None:
        raise UsageError(f"name the shell: {', '.join(SHELLS)}")
    text = {"bash": bash, "zsh": zsh, "fish": fish}[session.args.shell](verbs(), levels())
    session.terminal.data(text, end="")
    if session.terminal.out_tty:
        session.terminal.say(f"to use it: {_INSTALL[session.args.shell]}")
    return Exit.OK


def _models(session: Session) -> list[str]:
    """Names and aliases of models in the configuration of the running services, else of this command.

    Empty if the configuration is invalid.
    """
    from headgate.cli.first_steps.running_service import Target
    from inference import settings

    try:
        target = Target.of(session)
        return sorted(settings.load(target.config_dir, target.environ, {}).names)
    except (ConfigError, HeadgateError):
        return []


# --- the parsers ------------------------------------------------------------------------------------------------------
def verbs() -> list[tuple[str, str]]:
    """The verbs that `headgate --help` lists, with their verb_list."""
    from headgate.cli.main import GROUPS

    return [(verb.name, verb.summary) for group in GROUPS.values() for verb in group]


def levels() -> list[Level]:
    """A level for each verb and for each of its actions."""
    from headgate.cli.main import VERBS, verb_parser

    return [level for name, _ in verbs() for level in _levels(name, verb_parser(VERBS[name]))]


def _levels(path: str, parser: argparse.ArgumentParser) -> Iterator[Level]:
    words: list[tuple[str, str]] = []
    inner: list[Level] = []
    kind, options = "", []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, each in action.choices.items():
                words.append((name, _short(helps.get(name))))
                inner += _levels(f"{path} {name}", each)
        elif action.option_strings:
            takes = None if action.nargs == 0 else _KINDS.get(str(action.metavar), "value")
            options.append(Option(tuple(action.option_strings), _short(action.help), _choices(action), takes))
        else:
            found = _choices(action)
            words += [(word, "") for word in found]
            kind = kind or ("" if found else _KINDS.get(str(action.metavar), ""))
    yield Level(path, tuple(words), kind, tuple(options))
    yield from inner


def _choices(action: argparse.Action) -> tuple[str, ...]:
    return tuple(map(str, action.choices or ()))


def _short(text: str | None) -> str:
    """A help text on one line, without quotes, and shortened to _LONGEST_HELP characters."""
    words = " ".join((text or "").replace("'", "").replace('"', "").replace("`", "").split())
    return words if len(words) <= _LONGEST_HELP else words[: _LONGEST_HELP - 3] + "..."


# --- the scripts ------------------------------------------------------------------------------------------------------
def bash(verb_list: Sequence[tuple[str, str]], all_levels: Sequence[Level]) -> str:
    """The script for bash 3.2 and newer."""
    actions = [level.path for level in all_levels if " " in level.path]
    lines = [
        "# Completes `headgate` in bash. " + _INSTALL["bash"],
        "_headgate() {",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" level="${COMP_WORDS[1]}"',
        '    local words="" kind="" IFS=$\' \\t\\n\'',
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        words="{" ".join(name for name, _ in verb_list)}"',
        "    else",
        '        [ "$COMP_CWORD" -gt 2 ] && case "$level ${COMP_WORDS[2]}" in',
        f'            {_or(actions)}) level="$level ${{COMP_WORDS[2]}}" ;;',
        "        esac",
        '        case "$level $prev" in',
        *(f"            {pattern}) {_set(option)} ;;" for pattern, option in _with_values(all_levels)),
        "            *)",
        '                case "$level" in',
    ]
    for level in all_levels:
        flags = " ".join(flag for option in level.options for flag in option.flags)
        words = " ".join(word for word, _ in level.words)
        lines.append(
            f'                    "{level.path}") if [[ "$cur" == -* ]]; then words="{flags}"; else words="{words}" '
            f'kind="{level.kind}"; fi ;;'
        )
    lines += [
        "                esac ;;",
        "        esac",
        "    fi",
        '    case "$kind" in',
        '        file) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$cur")) ;;',
        '        directory) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$cur")) ;;',
        '        model) words="$words $(headgate completion --models 2>/dev/null)" ;;',
        "    esac",
        '    [ -n "$words" ] && COMPREPLY+=($(compgen -W "$words" -- "$cur"))',
        "    return 0",
        "}",
        "complete -F _headgate headgate",
    ]
    return "\n".join(lines) + "\n"


def zsh(verb_list: Sequence[tuple[str, str]], all_levels: Sequence[Level]) -> str:
    """The script for zsh."""
    actions = [level.path for level in all_levels if " " in level.path]
    lines = [
        "#compdef headgate",
        "# Completes `headgate` in zsh. " + _INSTALL["zsh"],
        "_headgate() {",
        '    local level="$words[2]" prev="$words[CURRENT-1]" kind=""',
        "    local -a found",
        "    if (( CURRENT == 2 )); then",
        f"        found=({_described(verb_list)})",
        "        _describe verb found",
        "        return",
        "    fi",
        f'    (( CURRENT > 3 )) && case "$level $words[3]" in ({_or(actions)}) level="$level $words[3]" ;; esac',
        '    case "$level $prev" in',
    ]
    for pattern, option in _with_values(all_levels):
        found = " ".join(map(shlex.quote, option.words))
        lines.append(f"        ({pattern}) found=({found}) kind={option.kind} ;;")
    lines += ["        (*)", '            case "$level" in']
    for level in all_levels:
        flags = [(flag, option.help) for option in level.options for flag in option.flags]
        lines.append(
            f'                ("{level.path}") if [[ "$PREFIX" == -* ]]; then found=({_described(flags)}); else '
            f'found=({_described(level.words)}) kind="{level.kind}"; fi ;;'
        )
    lines += [
        "            esac ;;",
        "    esac",
        '    case "$kind" in',
        "        (file) _files ;;",
        "        (directory) _files -/ ;;",
        '        (model) compadd -- ${(f)"$(headgate completion --models 2>/dev/null)"} ;;',
        "    esac",
        "    (( $#found )) && _describe value found",
        "}",
        'if [ "$funcstack[1]" = "_headgate" ]; then _headgate "$@"; else compdef _headgate headgate; fi',
    ]
    return "\n".join(lines) + "\n"


def fish(verb_list: Sequence[tuple[str, str]], all_levels: Sequence[Level]) -> str:
    """The script for fish."""
    lines = [f"# Completes `headgate` in fish. {_INSTALL['fish']}", "complete -c headgate -f"]
    lines += [
        f"complete -c headgate -n __fish_use_subcommand -a {name} -d '{_short(text)}'" for name, text in verb_list
    ]
    for level in all_levels:
        seen = "; and ".join(f"__fish_seen_subcommand_from {part}" for part in level.path.split())
        if inner := [word for word, _ in level.words]:
            seen += f"; and not __fish_seen_subcommand_from {' '.join(inner)}" if not level.kind else ""
        start = f"complete -c headgate -n '{seen}'"
        lines += [f"{start} -a {word} -d '{text}'" for word, text in level.words]
        if level.kind:
            lines.append(f"{start} {_fish_kind(level.kind)}")
        for option in level.options:
            flags = " ".join(f"-l {each[2:]}" if each.startswith("--") else f"-s {each[1:]}" for each in option.flags)
            values = f" -x -a '{' '.join(option.words)}'" if option.words else ""
            values = values or {None: "", "value": " -x"}.get(option.kind, f" -r {_fish_kind(option.kind or '')}")
            lines.append(f"{start} {flags}{values} -d '{option.help}'")
    return "\n".join(lines) + "\n"


def _fish_kind(kind: str) -> str:
    return {"file": "-F", "directory": "-a '(__fish_complete_directories)'"}.get(
        kind, "-a '(headgate completion --models 2>/dev/null)'"
    )


def _with_values(all_levels: Sequence[Level]) -> Iterator[tuple[str, Option]]:
    """A pattern for `LEVEL OPTION` of each option that takes a value."""
    for level in all_levels:
        for option in level.options:
            if option.kind is not None:
                yield _or([f"{level.path} {flag}" for flag in option.flags]), option


def _or(patterns: Sequence[str]) -> str:
    return "|".join(f'"{pattern}"' for pattern in patterns)


def _set(option: Option) -> str:
    return f'words="{" ".join(option.words)}" kind="{option.kind}"'


def _described(words: Sequence[tuple[str, str]]) -> str:
    """Words with help as zsh's `_describe` takes them."""
    return " ".join(shlex.quote(f"{word.replace(':', chr(92) + ':')}:{_short(text)}") for word, text in words)


COMMANDS = {"completion": Command(_arguments, completion)}
