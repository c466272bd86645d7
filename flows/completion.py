"""`novelty completion SHELL`: a script that completes commands, options and their choices.

Enters: the parsers. Leaves: a script that needs nothing of ours at the Tab key. It knows the words
of the version that printed it, so a shell should ask for it when it starts.
"""

import shlex
from collections.abc import Mapping, Sequence

from flows.parser import Parser

Words = dict[tuple[str, ...], list[str]]
"""What may follow: after the words of a command, or after them and an option with choices."""


def words_of(parser: Parser, place: tuple[str, ...] = ()) -> Words:
    """The words after every command of the parser, itself at `place`."""
    below = parser.commands()
    options: list[str] = []
    choices: list[str] = []
    words: Words = {}
    for action in parser._actions:
        options += [option for option in action.option_strings if option.startswith("--")]
        values = [str(choice) for choice in action.choices or ()]
        if action.option_strings and values:
            words |= {(*place, option): values for option in action.option_strings}
        elif not below:
            choices += values
    words[place] = [*below, *choices, *options]
    for name, command in below.items():
        words |= words_of(command, (*place, name))
    return words


def completion_script(shell: str, words: Mapping[tuple[str, ...], Sequence[str]]) -> str:
    """The script for `bash`, `zsh` or `fish`."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](
        {" ".join(place): " ".join(following) for place, following in words.items()}
    )


def _cases(words: Mapping[str, str], indent: str = "    ") -> str:
    return "\n".join(
        f"{indent}{shlex.quote(place)}) words={shlex.quote(following)} ;;"
        for place, following in words.items()
    )


def _steps(words: Mapping[str, str], indent: str) -> str:
    """Places that one more word leads to: commands, not options with choices."""
    places = [shlex.quote(place) for place in words if place and "--" not in place]
    return f"{indent}{'|'.join(places)}) place=$next ;;"


def _bash(words: Mapping[str, str]) -> str:
    return f"""\
# In ~/.bashrc:  eval "$(novelty completion bash)"
_novelty_words() {{
  local words=""
  case "$1" in
{_cases(words)}
  esac
  printf '%s' "$words"
}}
_novelty() {{
  local place="" next word words
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    next="${{place:+$place }}$word"
    case "$next" in
{_steps(words, "      ")}
    esac
  done
  words=$(_novelty_words "${{place:+$place }}${{COMP_WORDS[COMP_CWORD-1]}}")
  if [[ "$place" == *"${{COMP_WORDS[COMP_CWORD-1]}}" || -z "$words" ]]; then
    words=$(_novelty_words "$place")
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _novelty novelty
"""


def _zsh(words: Mapping[str, str]) -> str:
    return f"""\
# In ~/.zshrc, after compinit:  eval "$(novelty completion zsh)"
_novelty_words() {{
  local words=""
  case "$1" in
{_cases(words)}
  esac
  print -rn -- "$words"
}}
_novelty() {{
  local place="" next word following
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    next="${{place:+$place }}$word"
    case "$next" in
{_steps(words, "      ")}
    esac
  done
  following=$(_novelty_words "${{place:+$place }}${{words[CURRENT-1]}}")
  if [[ "$place" == *"${{words[CURRENT-1]}}" || -z "$following" ]]; then
    following=$(_novelty_words "$place")
  fi
  compadd -- ${{=following}}
  _files
}}
compdef _novelty novelty
"""


def _fish(words: Mapping[str, str]) -> str:
    cases = "\n".join(
        f"    case {_fish_quoted(place)}\n      string split ' ' -- {_fish_quoted(following)}"
        for place, following in words.items()
    )
    places = " ".join(_fish_quoted(place) for place in words if place and "--" not in place)
    return f"""\
# In ~/.config/fish/config.fish:  novelty completion fish | source
function __novelty_after
  switch "$argv[1]"
{cases}
  end
end
function __novelty_words
  set -l place ""
  set -l tokens (commandline -opc)[2..-1]
  for word in $tokens
    set -l next (string trim "$place $word")
    if contains -- "$next" {places}
      set place $next
    end
  end
  set -l following
  if test (count $tokens) -gt 0; and not string match -q -- "*$tokens[-1]" "$place"
    set following (__novelty_after (string trim "$place $tokens[-1]"))
  end
  if test -z "$following"
    set following (__novelty_after "$place")
  end
  printf '%s\\n' $following
end
complete -c novelty -a '(__novelty_words)'
"""


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
