"""The one error type that users cause and can mend."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from the user: a file, an argument or a pair of models that cannot work.

    The message is one line that names the argument, its value and the fix. The command line
    prints that line alone and exits with status 2.
    """
