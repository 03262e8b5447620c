"""A request to leave: who takes the signal, what it interrupts, and what is done until then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from support.waiting import WaitUntil, wait_until

__all__ = ["wait_until"]

from opendiloco.background import in_background
from opendiloco.leave import Leave, LeaveRequest, every, run


def test_request_to_leave_takes_no_signal_in_a_thread() -> None:
    """Python gives signals to the main thread only; training in another one must work."""

    def ask() -> bool:
        with LeaveRequest() as leaving:
            return leaving()

    assert in_background(ask, "trains").result(20) is False


STUCK = """
import hashlib
from opendiloco.leave import LeaveRequest
with LeaveRequest():
    print("in", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # one call of many minutes
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_process_whose_main_thread_is_in_one_long_call(
    number: signal.Signals, wait_until: WaitUntil
) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == b"in\n"
        status, process = Path(f"/proc/{stuck.pid}/status"), psutil.Process(stuck.pid)
        used_s = process.cpu_times().user
        wait_until(lambda: process.cpu_times().user > used_s + 0.2, "it is in the call")
        stuck.send_signal(number)
        wait_until(lambda: f"ShdPnd:\t{0:016x}" in status.read_text(), "the first one has come")
        assert stuck.poll() is None
        stuck.send_signal(number)
        assert stuck.wait(20) == 128 + number


def test_the_end_of_a_terminal_asks_to_leave_however_often_it_is_told() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with LeaveRequest() as leaving:
        for _ in range(2):  # the kernel tells it, and the shell again
            os.kill(os.getpid(), signal.SIGHUP)
        assert leaving()
    assert signal.getsignal(signal.SIGHUP) is before


def test_who_is_to_outlive_the_terminal_does_not_hear_of_its_end() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with LeaveRequest() as leaving:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not leaving()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_takes_long_is_left_to_itself_once_somebody_asks() -> None:
    goes_on = threading.Event()
    with LeaveRequest() as leaving:
        assert run(lambda: 7, leaving, name="short") == 7
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Leave):
            run(goes_on.wait, leaving, name="long")
        goes_on.set()


def test_reminder_comes_once_in_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], []
    monkeypatch.setattr("opendiloco.leave.time.monotonic", lambda: now[0])
    remind = every(15.0, lambda: said.append(now[0]))
    for _ in range(40):
        remind()
        now[0] += 1
    assert said == [116.0, 132.0]
