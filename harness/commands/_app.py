"""The application that commands are added to, and how they end."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import typer

from harness.spec import SpecError

F = TypeVar("F", bound=Callable[..., Any])

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Compare how sharded training survives a communication failure.",
)

EXIT_UNEXPECTED, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 1, 2, 3, 130


class CannotRunHere(RuntimeError):
    """This machine cannot do what was asked; says what to do."""


def guarded(command: F) -> F:
    """Turn a user's mistake, a machine's limit and Ctrl-C into one line and an exit status."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except SpecError as error:
            fail(str(error), EXIT_USAGE)
        except CannotRunHere as error:
            fail(str(error), EXIT_ENVIRONMENT)
        except OSError as error:
            fail(f"the machine refused: {error}", EXIT_ENVIRONMENT)
        except KeyboardInterrupt:
            fail("interrupted; every process is ended, records so far are kept", EXIT_INTERRUPTED)

    return wrapped  # type: ignore[return-value]


def fail(message: str, status: int) -> NoReturn:
    typer.echo(f"accelpact: {message}", err=True)
    raise typer.Exit(status)


def names_in(text: str) -> list[str]:
    """The names in a comma-separated option."""
    return [name for name in text.split(",") if name]


def in_a_path(text: str) -> str:
    """`mine.py:build` as part of a folder's name."""
    return re.sub(r"[^\w.-]+", "-", text)
