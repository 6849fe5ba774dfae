"""Every error a user can meet, sorted by who has to act.

    ForetellError
      InputError        something given is wrong: fix the file or the option
      GraphError        a graph breaks a rule: fix what made it
      UnmodelledError   no price knows this task: measure it or add a model
      InfeasibleError   no plan fits the cluster: relax a limit

A message says what is wrong with the values and where; `hint` says what to do about it.
The command line prints both without a traceback and exits 2; any other exception is a bug.
"""

from collections.abc import Iterable


class ForetellError(Exception):
    """An error message for the user, with a hint what to do."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class InputError(ForetellError):
    """Something the user gave is wrong."""


class GraphError(ForetellError):
    """A graph breaks one of its rules."""


class UnmodelledError(ForetellError):
    """No price model knows this task."""


class InfeasibleError(ForetellError):
    """No plan fits within the limits."""


_LONGEST = 200  # letters of a name that is quoted


def unknown(what: str, name: str, known: Iterable[str]) -> InputError:
    """An error for an unknown name that offers the nearest known one."""
    from difflib import get_close_matches

    names, name = sorted(known), name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    if near:
        hint = f"did you mean `{near[0]}`?"
    elif len(names) <= 40:
        hint = f"known: {', '.join(names)}" if names else "none is known here"
    else:
        hint = f"{len(names)} are known, among them {', '.join(names[:12])}"
    return InputError(f"unknown {what}: `{name}`", hint=hint)
