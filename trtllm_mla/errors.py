"""The one exception type for mistakes a user can make and mend."""


class UserError(Exception):
    """A mistake in what the user passed: a path, a file, a value, a combination.

    The message says what was found, what was expected, and how to fix it, in one or two sentences. The command
    line prints it without a traceback and exits with status 2. Broken invariants of this package are never raised
    as ``UserError``: those are assertions.
    """


class MissingDependencyError(UserError, ImportError):
    """An optional package is not installed.

    Args:
        package: Name of the package as it is imported.
        purpose: What it is needed for, to complete the sentence "... is needed to".
        extra: Extra of this distribution that installs it.
    """

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(
            f"The package '{package}' is needed to {purpose}, and it cannot be imported. "
            f"Install it with: pip install 'trtllm-mla[{extra}]'"
        )


def one_line(message: str) -> str:
    """A message with line breaks and other control characters, which may come from outside, as escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
