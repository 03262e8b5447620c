"""Errors a user can act on. Each is one line that names the setting, the values and the cure.

Exit codes follow sysexits.h: 64 means the settings are wrong, so restarting with the same ones is useless;
75 means the swarm could not be reached or held, so restarting is the cure.
"""


class OpendilocoError(Exception):
    """Base of every error that ends a command with one line instead of a traceback."""

    exit_code = 1


class SettingsError(OpendilocoError):
    """The settings (or the files they name) are wrong: do not restart with the same ones."""

    exit_code = 64


class SwarmError(OpendilocoError):
    """The swarm could not be reached or stayed away: restart the peer."""

    exit_code = 75
