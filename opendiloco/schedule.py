"""Schedulers of the learning rate at the swarm's place in the run, not at this process's."""

from __future__ import annotations

import warnings

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

__all__ = ["LRScheduler", "align"]


def align(scheduler: object, step: int) -> None:
    """Have `scheduler` stand where it stands after `step` steps.

    A LambdaLR goes there at once, forwards or back. Others are stepped, so they wait where they are ahead. One that
    follows a metric is left alone, and so is what is none of torch's.
    """
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return
    if scheduler.last_epoch == step:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the optimizer has made no step yet: elsewhere it has
        if isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = step - 1
        while scheduler.last_epoch < step:
            scheduler.step()
