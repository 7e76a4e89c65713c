"""torch's own reconfiguration (2.14 and later, experimental): the same group, connected anew.

torchrun --nproc-per-node 4 examples/integration/train_c10d_reconfigure.py
"""

# integration: begin
import itertools
from datetime import timedelta
# integration: end

import common
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


# integration: begin
DEADLINE = timedelta(seconds=30)


# Connect `group` anew when all its members have come; a generation used twice would split it.
def reconfigure(group, generation):
    ranks = dist.get_process_group_ranks(group)
    prefix = f"reconfigure/{group.group_name}/{generation}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), dist._get_reconfigure_handle(group))
    store.wait([str(rank) for rank in ranks], DEADLINE)
    handles = [store.get(str(rank)).decode() for rank in ranks]
    dist._reconfigure(uuid=generation, handles=handles, group=group, timeout=DEADLINE).wait()


# integration: end
def train():
    dist.init_process_group("gloo")
    shard, _ = dist.new_subgroups_by_enumeration(common.SHARDS)
    replicate, _ = dist.new_subgroups_by_enumeration(common.REPLICAS, timeout=common.TIMEOUT)
    mesh = DeviceMesh.from_group(
        [replicate, shard], "cpu", mesh=common.SHARDS, mesh_dim_names=("replicate", "shard")
    )
    model = common.build_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = common.restore(model, optimizer)
    # integration: begin
    generations = itertools.count(1)
    # integration: end

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
        # integration: begin
        try:
            dist.all_reduce(mean, group=replicate)
        except RuntimeError:
            reconfigure(replicate, next(generations))
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=replicate)
        # integration: end
        common.log_loss(step, mean)
    common.finish(model, optimizer)


if __name__ == "__main__":
    train()
