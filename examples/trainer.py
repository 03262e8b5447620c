"""A transformers.Trainer in a swarm. Start it in two terminals; 2 is how many workers the first round waits for:

.venv/bin/python examples/trainer.py runs/one 2
.venv/bin/python examples/trainer.py runs/two 2 $(cat runs/one/addresses)
"""

import logging
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from opendiloco import Contract, DiLoCoCallback, InnerConfig, RoundsConfig, RunConfig, Swarm, SwarmConfig

if len(sys.argv) < 3 or not sys.argv[2].isdecimal() or int(sys.argv[2]) < 1:
    sys.exit(print("usage: trainer.py FOLDER WORKERS [ADDRESS ...]", file=sys.stderr) or 2)
folder, workers, peers = Path(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:])  # no peers: a new swarm
logging.basicConfig(level=logging.INFO, format="%(message)s")  # a line when the swarm is joined
run, rounds = RunConfig(id="trainer", rounds=4), RoundsConfig(start_peers=workers)
contract = Contract(run=run, inner=InnerConfig(steps=5), rounds=rounds)  # equal on all workers; H is 5
torch.manual_seed(0)  # all workers start from the same parameters, which is checked: yours are from_pretrained(...)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
text = torch.tensor(list(Path(logging.__file__).read_bytes()))  # your own data set goes here
sequences = [{"input_ids": part, "labels": part} for part in text.split(64)[:-1]]
arguments = TrainingArguments(
    output_dir=str(folder / "trainer"),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    logging_steps=5,
    report_to="none",
)
trainer = Trainer(model=model, args=arguments, train_dataset=sequences)
with Swarm.join(SwarmConfig(peers=peers), folder) as swarm:
    trainer.add_callback(DiLoCoCallback(trainer, swarm, contract))
    trainer.train()
trainer.save_model(str(folder / "model"))  # the outer parameters: the same bits at all workers
