"""Train a small language model with DistributedDataParallel. Knows nothing of AccelPact.

torchrun --nproc-per-node 4 -m accelpact examples/train_ddp.py --epochs 2
"""

import argparse
import datetime
import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CharModel(nn.Module):
    """Predicts the next character from those before it."""

    def __init__(self, dim=64, layers=2):
        super().__init__()
        self.embed = nn.Embedding(128, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(dim, 128)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.embed(tokens), mask=mask, is_causal=True))


def dataset(length=32):
    """Windows over the source code of argparse."""
    text = inspect.getsource(argparse).encode("ascii", "replace")
    tokens = torch.tensor(list(text[: 512 * length + 1]))
    return TensorDataset(tokens[:-1].view(-1, length), tokens[1:].view(-1, length))


def evaluate(model, data):
    """Mean loss over a few batches, the same on all ranks."""
    model.eval()
    with torch.no_grad():
        inputs, targets = data[dist.get_rank() :: dist.get_world_size()]
        loss = nn.functional.cross_entropy(model(inputs[:16]).flatten(0, 1), targets[:16].flatten())
    model.train()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=60, help="of collectives, in seconds")
    args = parser.parse_args()

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    torch.manual_seed(0)
    data = dataset()
    model = DDP(CharModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(data, seed=1)
    torch.manual_seed(100 + dist.get_rank())

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(
            DataLoader(data, args.batch_size, sampler=sampler)
        ):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()

            logged = loss.detach()
            dist.all_reduce(logged, op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {logged.item():.6f}", flush=True)
        held_out = evaluate(model, data)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} held out {held_out:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
