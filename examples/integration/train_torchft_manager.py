"""torchft's Manager: replicas vote on every update, which is done again if one failed.

All in one torchrun. With a launcher for each replica, as torchft is meant to be run, lighthouse and
stores come from outside, and `serve` is not needed.

RUST_LOG=error torchrun --nproc-per-node 4 examples/integration/train_torchft_manager.py
"""

import common
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# integration: begin
from torchft import Manager
from torchft.coordination import LighthouseServer
from torchft.process_group import ManagedProcessGroup, ProcessGroupGloo
# integration: end


# integration: begin
HOST = "127.0.0.1"


# Run one lighthouse for the job and a store for each replica.
def serve(rank):
    lighthouse = rank == 0 and LighthouseServer(bind=f"{HOST}:0", min_replicas=2)
    store = rank % 2 == 0 and dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    mine = (lighthouse and lighthouse.address().rsplit(":", 1)[1], store and store.port)
    ports = [None] * dist.get_world_size()
    dist.all_gather_object(ports, mine)
    return (lighthouse, store), f"http://{HOST}:{ports[0][0]}", ports[rank - rank % 2][1]


# Connect this rank's manager. A replica that died could be healed by `state_dict` and
# `load_state_dict`; what is survived here is a collective that fails.
def make_manager(rank):
    kept, lighthouse, store_port = serve(rank)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=common.TIMEOUT),
        state_dict=None,
        load_state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        rank=rank % 2,
        world_size=2,
        store_addr=HOST,
        store_port=store_port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{rank // 2}",
        hostname=HOST,
        init_sync=False,
    )
    return manager, kept


# integration: end
def train():
    dist.init_process_group("gloo")
    shard, _ = dist.new_subgroups_by_enumeration(common.SHARDS)
    # integration: begin
    manager, _servers = make_manager(dist.get_rank())
    replicate = ManagedProcessGroup(manager)
    replicate.register("replicate")
    # integration: end
    mesh = DeviceMesh.from_group(
        [replicate, shard], "cpu", mesh=common.SHARDS, mesh_dim_names=("replicate", "shard")
    )
    model = common.build_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = common.restore(model, optimizer)
    # integration: begin
    manager.load_state_dict({"step": step, "batches_committed": 0})
    failure = None
    # integration: end

    while step < common.UPDATES:
        # integration: begin
        manager.start_quorum()  # which forgets a failure since the last update
        if failure is not None:
            manager.report_error(failure.original_exception)
        # integration: end
        loss = common.loss_of(model, step)
        loss.backward()
        # integration: begin
        failure = None
        if not manager.should_commit():
            optimizer.zero_grad()
            continue
        # integration: end
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % common.CHECKPOINT_EVERY == 0:
            common.save(model, optimizer, step)

        common.come_late(step)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=replicate)
        # integration: begin
        failure = manager.errored()  # a collective that fails returns normally
        # integration: end
        common.log_loss(step, mean)
    # integration: begin
    manager.shutdown(wait=False)
    # integration: end
    common.finish(model, optimizer)


if __name__ == "__main__":
    train()
