"""DiLoCo in a plain training loop. Start it in two terminals; 2 is how many workers the first round waits for:

.venv/bin/python examples/own_loop.py runs/one 2
.venv/bin/python examples/own_loop.py runs/two 2 $(cat runs/one/addresses)
"""

import logging
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from opendiloco import Contract, DiLoCo, InnerConfig, RoundsConfig, RunConfig, Swarm, SwarmConfig

if len(sys.argv) < 3 or not sys.argv[2].isdecimal() or int(sys.argv[2]) < 1:
    sys.exit(print("usage: own_loop.py FOLDER WORKERS [ADDRESS ...]", file=sys.stderr) or 2)
folder, workers, peers = Path(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:])  # no peers: a new swarm
logging.basicConfig(level=logging.INFO, format="%(message)s")  # a line for every round
contract = Contract(  # equal on all workers; `model`, `data` and most of `inner` say nothing here
    run=RunConfig(id="own-loop", rounds=4), inner=InnerConfig(steps=5), rounds=RoundsConfig(start_peers=workers)
)
torch.manual_seed(0)  # all workers start from the same parameters, which is checked: yours are from_pretrained(...)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
text = torch.tensor(list(Path(logging.__file__).read_bytes()))  # your own data set goes here
sequences = text[: len(text) // 64 * 64].view(-1, 64)

with Swarm.join(SwarmConfig(peers=peers), folder) as swarm:
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with DiLoCo(adamw, model, swarm, contract) as optimizer:
        order = torch.Generator().manual_seed(optimizer.seed)  # an order of this worker's own, another after a restart
        optimizer.drive(get_cosine_schedule_with_warmup(optimizer, 5, optimizer.total_steps))
        while not optimizer.is_done:
            batch = sequences[torch.randint(len(sequences), (8,), generator=order)]
            model(input_ids=batch, labels=batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # every 5th step ends an outer round
            optimizer.zero_grad()
    model.save_pretrained(folder / "model")  # the outer parameters: the same bits at all workers
