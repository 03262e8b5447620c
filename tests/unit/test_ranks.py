"""What a process learns from torchrun, and the settings that several processes cannot have."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import distributed

from opendiloco.config import ComputeConfig, Contract, InnerConfig
from opendiloco.errors import SettingsError, SwarmError
from opendiloco.ranks import End, Ranks, TakeOptimizer, check_batch
from opendiloco.replica import assist, build_replica


@pytest.mark.parametrize(
    ("environment", "index", "size"),
    [
        ({}, 0, 1),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 0, 1),
        ({"WORLD_SIZE": "4"}, 0, 1),  # of something that is not torchrun
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}, 3, 4),
    ],
)
def test_torchruns_environment_says_which_process_this_is(environment: dict[str, str], index: int, size: int) -> None:
    ranks = Ranks.from_environment(environment)
    assert (ranks.index, ranks.size, ranks.is_first) == (index, size, index == 0)


def test_a_batch_that_processes_cannot_share_equally_is_refused() -> None:
    contract = Contract(inner=InnerConfig(batch_size=8))
    check_batch(contract, Ranks(0, 4))
    with pytest.raises(SettingsError, match=r"inner.batch_size is 8 and this worker has 3 processes: start"):
        check_batch(contract, Ranks(0, 3))


def test_every_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Ranks(5, 8, 1).own_device(ComputeConfig()).device == "cuda:1"
    assert Ranks(5, 8, 1).own_device(ComputeConfig(device="cpu")).device == "cpu"
    assert Ranks().own_device(ComputeConfig(device="cuda:3")).device == "cuda:3"
    with pytest.raises(SettingsError, match=r"compute.device is cuda:0 and this worker has 8 processes: set it to"):
        Ranks(5, 8, 1).own_device(ComputeConfig(device="cuda:0"))


def test_a_lost_process_is_named_without_the_librarys_own_lines() -> None:
    lost = (
        "[/a/b/gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:1. This is typically caused by\nmore"
    )
    with pytest.raises(SwarmError) as caught, Ranks(0, 2) as ranks:
        ranks.together(partial(_fail, RuntimeError(lost)))
    assert re.fullmatch(
        r"another of this worker's 2 processes has ended \(Connection closed by peer \[127.0.0.1\]:1\): see .*",
        str(caught.value),
    )


@pytest.mark.parametrize(
    "lost",
    [
        distributed.DistBackendError("NCCL error in: /a/NCCLUtils.hpp:1, remote process exited\nncclRemoteError"),
        distributed.DistStoreError("wait timeout after 300000ms"),
    ],
)
def test_torchs_errors_of_connections_say_that_another_process_has_ended(lost: Exception) -> None:
    with pytest.raises(SwarmError, match="another of this worker's 2 processes has ended"), Ranks(1, 2) as ranks:
        ranks.together(partial(_fail, lost))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: device-side assert triggered"),
        distributed.DistBackendError(
            "NCCL error in: /a/b.cpp:1, ncclUnhandledCudaError\nCuda failure 2 'out of memory'"
        ),
        distributed.DistBackendError("NCCL error in: /a/b.cpp:1, ncclInvalidUsage\nDuplicate GPU detected"),
        SettingsError("no"),
        KeyError("no"),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_a_processs_own_errors_stay_what_they_are(error: Exception, index: int) -> None:
    with pytest.raises(type(error)) as caught, Ranks(index, 2) as ranks:
        ranks.together(partial(_fail, error))
    assert caught.value is error


class Ended(Ranks):
    """A process in which something goes wrong at once."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1, 2)
        self._error = error

    def open(self, leaving: object = None) -> None:
        raise self._error


@pytest.fixture
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
def test_another_process_says_why_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    assert assist(Ended(SwarmError("another has ended"))) == SwarmError.exit_code
    assert caplog.messages == ["process 1 of this worker ends: another has ended"]
    with pytest.raises(RuntimeError, match="device-side assert"):
        assist(Ended(RuntimeError("device-side assert")))


def test_an_optimizers_state_travels_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr("opendiloco.ranks.copy_to_host", lambda state: {"copy of": state})
    monkeypatch.setattr(distributed, "broadcast_object_list", lambda orders, src, group: sent.extend(orders))
    with Ranks(0, 2) as ranks:
        ranks._control = object()
        ranks.give(TakeOptimizer({"state": {}}))
        ranks.give(End())
        ranks._control = None
    assert sent == [TakeOptimizer({"copy of": {"state": {}}}), End()]


def test_a_gpu_is_the_current_one_wherever_a_process_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((threading.get_ident(), device)))
    with Ranks(1, 2) as ranks:
        ranks.use(torch.device("cpu"))
        assert not used
        ranks.use(torch.device("cuda:1"))
        assert ranks._thread.submit(threading.get_ident).result() == used[1][0] != used[0][0]
    assert [device for _, device in used] == [torch.device("cuda:1")] * 2


def test_a_replica_uses_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(Ranks, "use", lambda ranks, device: used.append(device))
    build_replica(Contract(), ComputeConfig(device="cpu"), vocab_size=300, end_id=None, ranks=Ranks())
    assert used == [torch.device("cpu")]


def _fail(error: Exception) -> None:
    raise error
