"""The hub that text is streamed from: requests that fail for a while are made again until it answers.

`datasets` reads the hub through huggingface_hub, whose HTTP client is replaced by one that waits. Files are read in
ranges of some megabytes, so a range that failed is the only thing that is read again: above the client nobody notices,
and no row is lost or doubled. What a retry cannot cure (no such data set, no right to read it) is passed on.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from opendiloco.errors import SettingsError
from opendiloco.leave import POLL_S

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Pauses between two tries double from the first to the longest."""
LONGEST_WISH_S = 600.0
"""A hub that names a pause (Retry-After) gets it, up to this one."""
LINE_EVERY_S = 60.0
"""At most one warning in this time."""
STALL_S = 30.0
"""A request for which huggingface_hub sets no timeout fails when nothing moves for so long; it sets 10 s for files."""
WHOLE_BYTES = 64 * 1024**2
"""An answer up to this size is read to its end at once, so that one that breaks off is asked for again."""

# Data sets and their files. What else the libraries ask for, of the hub and of other hosts, are hints and statistics.
_WAITED_FOR = re.compile(r"/api/datasets/|/datasets/.+/resolve/")

T = TypeVar("T")

logger = logging.getLogger(__name__)


@cache
def tell_of_hub(name: str) -> None:
    """Say once that the hub is asked for something: without internet it takes a while until nothing came of it."""
    logger.info("%s is no folder here: asking the Hugging Face hub for it", name)


class HubAway(Exception):
    """A try failed in a way that passes."""

    def __init__(self, reason: str, *, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s
        """The pause that the hub wished for."""


class HubStopped(BaseException):
    """Whoever waited for the hub was asked to end. No Exception, so that no library takes it for a failed request."""


class Patience:
    """Repeats requests until the hub answers, and says so: one for all threads of a process."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        self._away_since = 0.0
        self._said_at: float | None = None
        self._has_said = False

    def ask(self, request: Callable[[], T], *, what: str, leaving: Callable[[], bool]) -> T:
        """What `request` returns, once it does not raise `HubAway` any more.

        Args:
            what: the request in words.
            leaving: asked a few times a second, and before each try.
        Raises:
            HubStopped: `leaving` said so.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            if leaving():
                raise HubStopped
            try:
                answer = request()
            except HubAway as away:
                self._failed(what, str(away))
                self._pause(max(pause_s, min(away.pause_s, LONGEST_WISH_S)), leaving)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except BaseException:
                self._answered(what)
                raise
            else:
                self._answered(what)
                return answer

    def _pause(self, seconds_s: float, leaving: Callable[[], bool]) -> None:
        until = self._clock() + seconds_s
        while (left := until - self._clock()) > 0:
            if leaving():
                raise HubStopped
            self._sleep(min(POLL_S, left))

    def _failed(self, what: str, reason: str) -> None:
        with self._lock:
            now = self._clock()
            if not self._failing:
                self._away_since, self._has_said = now, False
            self._failing.add(what)
            if self._said_at is not None and now - self._said_at < LINE_EVERY_S:
                return
            self._said_at, self._has_said = now, True
            since = f", for {now - self._away_since:.0f} s now" if now > self._away_since else ""
        logger.warning("the hub cannot be read%s (%s: %s): trying again until it answers", since, what, reason)

    def _answered(self, what: str) -> None:
        if not self._failing:
            return
        with self._lock:
            if what not in self._failing:
                return
            self._failing.discard(what)
            if self._failing or not self._has_said:
                return
            away_s = self._clock() - self._away_since
        logger.info("the hub is back after %.0f s", away_s)


PATIENCE = Patience()

_leaving: list[Callable[[], bool]] = []


@contextmanager
def patient(leaving: Callable[[], bool]) -> Iterator[None]:
    """Within it, all requests of this process to the hub wait until it answers, or `leaving` says so.

    The libraries make some of them in threads of their own (huggingface_hub lists folders, pyarrow reads columns),
    which do not know whom they work for: a wait ends when all readers of this process are asked to leave.
    """
    _install()
    _leaving.append(leaving)
    try:
        yield
    finally:
        _leaving.remove(leaving)


def explanation(error: BaseException) -> str | None:
    """Why the hub refused, and the cure; None if `error` does not come from a refusal."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    token = "set HF_TOKEN to a token of yours that may read it"
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, GatedRepoError) or "is a gated dataset" in str(seen):  # as `datasets` puts it
            return f"it is gated: accept its terms on its page on the hub, and {token}"
        if isinstance(seen, HfHubHTTPError):
            status = getattr(seen.response, "status_code", None)
            if status in (401, 404):
                return (
                    f"the hub has no such data set or file (HTTP {status}): correct the name; if it is private, {token}"
                )
            if status == 403:
                return f"the hub refuses it (HTTP 403): {token}"
        seen = seen.__cause__ or seen.__context__
    return None


def _install() -> None:
    """Have huggingface_hub make its requests with the client that waits, in this process from now on."""
    import huggingface_hub

    if not hasattr(huggingface_hub, "set_client_factory"):
        raise SettingsError(
            f"huggingface_hub {huggingface_hub.__version__} is too old to stream text: install 1.0 or newer"
        )
    session = huggingface_hub.get_session()
    if not getattr(session, "waits_for_the_hub", False):
        make = _client_class(import_module(type(session).__module__.split(".")[0]))
        hooks = session.event_hooks
        huggingface_hub.set_client_factory(lambda: make(event_hooks=hooks, follow_redirects=True, timeout=None))


def _client_class(httpx: Any) -> Any:
    """The client for this huggingface_hub, which uses httpx or httpx2. Outside of `patient` it is an ordinary one."""

    class Client(httpx.Client):  # type: ignore[misc]
        waits_for_the_hub = True

        def send(
            self,
            request: Any,
            *,
            stream: bool = False,
            auth: Any = httpx.USE_CLIENT_DEFAULT,
            follow_redirects: Any = httpx.USE_CLIENT_DEFAULT,
        ) -> Any:
            """As httpx's. Redirects are part of it: a signed address of a file is asked for anew with every try."""
            once = super().send

            def attempt() -> Any:
                try:
                    response = once(request, stream=stream, auth=auth, follow_redirects=follow_redirects)
                    if int(response.headers.get("Content-Length", 0)) <= WHOLE_BYTES:
                        response.read()
                except httpx.RequestError as error:
                    raise HubAway(_reason(error)) from error
                if response.status_code in (408, 429) or response.status_code >= 500:
                    response.close()
                    raise HubAway(f"HTTP {response.status_code}", pause_s=_wish_s(response.headers))
                return response

            timeouts = {**dict.fromkeys(("connect", "read", "write", "pool")), **request.extensions.get("timeout", {})}
            request.extensions["timeout"] = {name: given or STALL_S for name, given in timeouts.items()}
            if not _leaving or not _WAITED_FOR.search(request.url.path):
                return once(request, stream=stream, auth=auth, follow_redirects=follow_redirects)
            what = f"{request.method} {request.url.copy_with(query=None)}"
            return PATIENCE.ask(attempt, what=what, leaving=lambda: all(asked() for asked in list(_leaving)))

    return Client


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"no answer in time ({type(error).__name__})" if "Timeout" in type(error).__name__ else text


def _wish_s(headers: Any) -> float:
    """Seconds that an answer asks to wait, in Retry-After or the t= of ratelimit; 0 if it does not."""
    wishes = [str(headers.get("Retry-After", ""))]
    wishes += [part.strip().removeprefix("t=") for part in str(headers.get("ratelimit", "")).split(";")]
    return max((float(wish) for wish in wishes if wish.isdecimal()), default=0.0)
