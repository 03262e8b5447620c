"""DiLoCo in a plain training loop. Start it in two terminals:

.venv/bin/python examples/own_loop.py runs/one
.venv/bin/python examples/own_loop.py runs/two $(cat runs/one/addresses)
"""

import sys
from pathlib import Path

import torch

from opendiloco import Contract, DiLoCo, InnerConfig, RoundsConfig, RunConfig, Swarm, SwarmConfig

folder, peers = Path(sys.argv[1]), tuple(sys.argv[2:])  # no peers: this worker starts a new swarm
folder.mkdir(parents=True, exist_ok=True)
contract = Contract(  # equal on all peers
    run=RunConfig(id="own-loop", rounds=4), inner=InnerConfig(steps=25), rounds=RoundsConfig(start_peers=2)
)
torch.manual_seed(0)  # all peers start from the same parameters; that is checked by hash
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

with Swarm(SwarmConfig(peers=peers), folder) as swarm:
    swarm.open()
    (folder / "addresses").write_text("\n".join(swarm.addresses))
    generator = torch.Generator().manual_seed(sum(swarm.peer_id.encode()))  # data of this worker's own
    optimizer = DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-2), model, swarm, contract)
    while optimizer.round < contract.run.rounds:
        inputs = torch.randn(32, 16, generator=generator)
        loss = (model(inputs).squeeze(1) - inputs[:, :2].prod(1)).square().mean()
        loss.backward()
        before = optimizer.round
        optimizer.step()  # every 25th step ends an outer round
        optimizer.zero_grad()
        if optimizer.round > before:
            print(f"round {optimizer.round} | loss {loss:.3f} | replica {optimizer.params_hash[:12]}", flush=True)
    optimizer.finish()
