"""log.txt and the console: who may write what where."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from opendiloco.errors import SettingsError

_LOGGER = logging.getLogger("opendiloco")
_LIBRARIES = ("hivemind", "transformers", "datasets", "huggingface_hub")


def setup_logging(log_file: Path | None, *, console: bool) -> ExitStack:
    """Send logger `opendiloco` to log_file and the console, everybody else to the file only.

    For the commands, whose processes are this program's own: in somebody's script logging is theirs to set up. Works
    whether libraries that bring handlers of their own were imported already or come later. What is returned undoes it:
    use it as a context manager or call close(). Tracebacks go to the file only.
    """
    root, stack = logging.getLogger(), ExitStack()
    if log_file is None:
        _attach(stack, root, logging.NullHandler())  # without any handler logging would print to stderr
    else:
        _attach(stack, root, _open_log(log_file))
    if console:
        handler = _ConsoleHandler()
        handler.setFormatter(_ConsoleFormatter())
        _attach(stack, _LOGGER, handler)
    stack.callback(_LOGGER.setLevel, _LOGGER.level)
    _LOGGER.setLevel(logging.INFO)
    for name in _LIBRARIES:
        _claim(stack, logging.getLogger(name))
    logging.captureWarnings(True)
    stack.callback(logging.captureWarnings, False)
    return stack


class NamedLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger of one worker among several in a process, which says whose lines they are; without a name as it is."""

    def __init__(self, logger: logging.Logger, name: str) -> None:
        super().__init__(logger)
        self._prefix = f"{name}: " if name else ""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return self._prefix + msg, kwargs


def file_formatter() -> logging.Formatter:
    """Format of log.txt: UTC time, level, logger, message and traceback."""
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    formatter.converter = time.gmtime
    formatter.default_time_format, formatter.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
    return formatter


def _open_log(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}: choose another --out") from None
    handler.setFormatter(file_formatter())
    return handler


def _attach(stack: ExitStack, logger: logging.Logger, handler: logging.Handler) -> None:
    logger.addHandler(handler)
    stack.callback(handler.close)
    stack.callback(logger.removeHandler, handler)


def _claim(stack: ExitStack, logger: logging.Logger) -> None:
    """Take away the handlers a library gave its logger, or will give it when it is imported."""
    before = logger.__class__, logger.handlers, logger.propagate
    logger.__class__ = _LibraryLogger
    logger.handlers, logger.propagate = [], True

    def give_back() -> None:
        logger.__class__, logger.handlers, logger.propagate = before

    stack.callback(give_back)


class _LibraryLogger(logging.Logger):
    """A logger that hands every line to the root logger, whatever its library asks for."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        pass

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, True if name == "propagate" else value)


class _ConsoleFormatter(logging.Formatter):
    """One plain line: the message, with the level before it from warnings on."""

    def format(self, record: logging.LogRecord) -> str:
        levels = {logging.WARNING: "warning: ", logging.ERROR: "error: ", logging.CRITICAL: "error: "}
        return levels.get(record.levelno, "") + record.getMessage()


class _ConsoleHandler(logging.Handler):
    """Prints to whatever stderr is at the moment: a live display puts lines above itself through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """A console that is gone does not matter."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _FileHandler(logging.FileHandler):
    """A full disk does not matter to training, and MetricsLog warns about it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()
