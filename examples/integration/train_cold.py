"""Cold restart: torchrun starts all ranks again, which go on from the last checkpoint.

torchrun --nproc-per-node 4 --max-restarts 1 examples/integration/train_cold.py
"""

# integration: begin
import os
# integration: end

import common
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def train():
    # integration: begin
    # torchrun's store outlives a restart, with the addresses of the ranks that died in it.
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"restart{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    # integration: end
    shard, _ = dist.new_subgroups_by_enumeration(common.SHARDS)
    replicate, _ = dist.new_subgroups_by_enumeration(common.REPLICAS, timeout=common.TIMEOUT)
    mesh = DeviceMesh.from_group(
        [replicate, shard], "cpu", mesh=common.SHARDS, mesh_dim_names=("replicate", "shard")
    )
    model = common.build_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = common.restore(model, optimizer)

    while step < common.UPDATES:
        loss = common.loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % common.CHECKPOINT_EVERY == 0:
            common.save(model, optimizer, step)

        common.come_late(step)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=replicate)
        common.log_loss(step, mean)
    common.finish(model, optimizer)


if __name__ == "__main__":
    train()
