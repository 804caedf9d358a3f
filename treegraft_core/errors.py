"""The error that users cause and can mend, and the one for work that failed without their fault."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from the user: a file, an argument or a pair of models that cannot work.

    The message is one line that names the argument, its value and the fix. The command line
    prints that line alone and exits with status 2.
    """

    def __init__(self, message: str = ""):
        # Parts of the message come from files, and from other libraries' errors of many lines.
        super().__init__(" ".join(str(message).split()))


class StageError(RuntimeError):
    """A stage's work failed for a reason that is not the user's input.

    The message is one line. The command line prints that line alone and exits with status 1.
    """

    def __init__(self, message: str = ""):
        super().__init__(" ".join(str(message).split()))


class NonFiniteError(InputError):
    """A model's logits hold NaN or an infinity: nothing computed from them may be used."""
