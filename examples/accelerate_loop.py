"""An accelerate loop in a swarm. Start it in two terminals; 2 is how many workers the first round waits for:
.venv/bin/python examples/accelerate_loop.py runs/one 2
.venv/bin/python examples/accelerate_loop.py runs/two 2 $(cat runs/one/addresses)
"""

import itertools
import logging
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from opendiloco import Contract, DiLoCo, InnerConfig, OuterConfig, RoundsConfig, RunConfig, Swarm, SwarmConfig

if len(sys.argv) < 3 or not sys.argv[2].isdecimal() or int(sys.argv[2]) < 1:
    sys.exit(print("usage: accelerate_loop.py FOLDER WORKERS [ADDRESS ...]", file=sys.stderr) or 2)
folder, workers, peers = Path(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:])  # no peers: a new swarm
logging.basicConfig(level=logging.INFO, format="%(message)s")  # a line for every round
run, rounds = RunConfig(id="accelerate", rounds=4), RoundsConfig(start_peers=workers)
contract = Contract(run=run, inner=InnerConfig(steps=5), outer=OuterConfig(weighting="tokens"), rounds=rounds)
accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)  # all workers start from the same parameters, which is checked: yours are from_pretrained(...)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
ids = torch.tensor(list(Path(logging.__file__).read_bytes())).split(64)[:-1]  # your own data set goes here
with Swarm.join(SwarmConfig(peers=peers), folder) as swarm:
    with DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-3), model, swarm, contract) as diloco:
        loader = torch.utils.data.DataLoader(ids, 4, shuffle=True, generator=torch.Generator().manual_seed(diloco.seed))
        model, optimizer, loader = accelerator.prepare(model, diloco, loader)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
        while not diloco.is_done:
            batch = next(batches)
            with accelerator.accumulate(model):
                diloco.count_tokens(batch.numel())  # the weight of this worker in the average
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                optimizer.step()  # every 10th batch, which is the 5th step, ends an outer round
                optimizer.zero_grad()
    accelerator.unwrap_model(model).save_pretrained(folder / "model")  # the outer parameters
