"""Parts of a shared evaluation travel in the workers' records, also in the last one of a worker that has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.waiting import LIMIT_S

from opendiloco.evaluation import EvaluationPart

if TYPE_CHECKING:
    from support.peers import Network


def test_every_worker_gets_the_parts_of_all_also_of_one_that_left_at_once(network: Network) -> None:
    workers = network.workers(3)
    lineage, names = "e" * 64, tuple(worker.peer_id for worker in workers)
    parts = {name: EvaluationPart(lineage, float(number), 10 + number) for number, name in enumerate(names)}
    first, *others = workers
    telling = [network.start(worker.process.share_evaluation(parts[worker.peer_id], names)) for worker in others]
    assert network.run(first.process.share_evaluation(parts[first.peer_id], names)) == parts
    first.leave()
    assert [future.result(LIMIT_S) for future in telling] == [parts, parts]
