"""The command line: parse, run the command, and say in one line what went wrong."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence

import typer

from opendiloco.commands import State, app
from opendiloco.errors import OpendilocoError, SettingsError
from opendiloco.launcher import tell_keeper
from opendiloco.options import spread_peers


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (0, 64, 75 or 1); an error is one line on stderr."""
    code = _run(argv)
    tell_keeper(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    state = State()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = typer.main.get_command(app)
    try:
        result = command.main(spread_peers(arguments), prog_name="opendiloco", standalone_mode=False, obj=state)
        return result if isinstance(result, int) else 0
    except OpendilocoError as error:
        _complain(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if isinstance(error, typer.BadParameter.__mro__[2]):  # every error of the command line itself
            return _complain_about_usage(error)
        return _complain_about_a_bug(error, state)


def _complain(message: str) -> None:
    print(f"opendiloco: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _complain_about_usage(error: Exception) -> int:
    message = str(getattr(error, "message", "") or error)
    if callable(full_message := getattr(error, "format_message", None)):
        message = str(full_message())
    command = getattr(getattr(error, "ctx", None), "command_path", "opendiloco")
    _complain(f"{message.rstrip('.')}: see `{command} --help`")
    return SettingsError.exit_code


def _complain_about_a_bug(error: Exception, state: State) -> int:
    where = "run again with --debug for the traceback"
    if state.debug:
        traceback.print_exception(error)
        where = "the traceback is above"
    elif state.log_file is not None:
        with contextlib.suppress(OSError), state.log_file.open("a", encoding="utf-8") as log:
            traceback.print_exception(error, file=log)
            where = f"the traceback is in {state.log_file}"
    _complain(f"unexpected {type(error).__name__}: {error}: {where}")
    return 1
