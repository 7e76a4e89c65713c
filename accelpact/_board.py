"""Everything that the control plane writes to the store and reads there, key by key.

Keys, below a prefix of the job's attempt, g being the generation:

======================  =====================================================
`groups/<rank>`         groups of the model on `rank`
`beat/<rank>`, `ends`   heartbeats, and who has ended (`accelpact._heartbeat`)
`claim/<g>`             the group that generation g repairs
`wake/<g>/<rank>`       the failure notice for `rank` (or a farewell, at close)
`standing/<g>/<rank>`   where `rank` is: a member's training thread has come, or another's pledge
`done/<g>`              counts members whose replacement works
`verdict/<g>`           `release`, or `abort` with the reason
`over/<g>/<rank>`       `rank` has read the verdict
`rendezvous/<g>/...`    where the members of the replacement meet
======================  =====================================================

The last rank to read the verdict on generation g, of those that have not ended, deletes the keys
of g.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from accelpact._messages import Notice, Standing

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.distributed import Store

_FOREVER = timedelta(days=30)
_FAREWELL = "farewell"
_REHEARSAL = 0
"""The generation of the calls that are made once at the start; repairs count from 1."""


class Board:
    """One client's view of the store; a call that waits keeps every other call of it waiting.

    Every method raises `torch.distributed.DistError` if the store is gone, and its subclass
    `DistStoreError` if what it waits for does not come.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, deadline: timedelta) -> None:
        """Look at `store`, which nobody else uses; wait `deadline` unless a call says other."""
        self.store = store
        self._rank = rank
        self._world_size = world_size
        self._deadline = deadline
        store.set_timeout(deadline)

    # -- once -------------------------------------------------------------------

    def rehearse(self, groups: Sequence[Sequence[int]], standing: Standing) -> None:
        """Publish this rank's groups of the model, and where it is, by the calls of a repair."""
        self.claim(_REHEARSAL, "rehearsal")
        self.store.set(f"groups/{self._rank}", json.dumps([list(each) for each in groups]))
        self.publish(_REHEARSAL, standing)

    def end_rehearsal(self) -> list[list[int]]:
        """Return the groups of all ranks, which have published them; delete what was written."""
        published = [f"groups/{rank}" for rank in range(self._world_size)]
        groups = [each for value in self.store.multi_get(published) for each in json.loads(value)]
        # Counted, not marked: a rank that marks before the others look would be gone for them.
        if self.store.add(f"over/{_REHEARSAL}", 1) == self._world_size:
            standings = [f"standing/{_REHEARSAL}/{rank}" for rank in range(self._world_size)]
            self._delete(f"claim/{_REHEARSAL}", f"over/{_REHEARSAL}", *published, *standings)
        return groups

    # -- the notice ---------------------------------------------------------------

    def claim(self, generation: int, group: str) -> str:
        """Return the group that has `generation`: this one, if no other had it."""
        return str(self.store.compare_set(f"claim/{generation}", "", group).decode())

    def disclaim(self, generation: int) -> None:
        """Take back a claim to a generation that is over."""
        self._delete(f"claim/{generation}")

    def announce(self, notice: Notice) -> None:
        """Tell all of W in one message."""
        keys = [f"wake/{notice.generation}/{rank}" for rank in range(self._world_size)]
        self.store.multi_set(keys, [notice.encode()] * len(keys))

    def await_notice(self, generation: int) -> Notice | None:
        """Wait for the notice of `generation`, however long; None for this rank's farewell."""
        self.store.set_timeout(_FOREVER)
        try:
            told = self.store.get(f"wake/{generation}/{self._rank}")
        finally:
            self.store.set_timeout(self._deadline)
        return None if told.decode() == _FAREWELL else Notice.decode(told)

    def say_farewell(self, generation: int) -> None:
        """Wake this rank's control thread, should nothing else do so in `generation`."""
        self.store.set(f"wake/{generation}/{self._rank}", _FAREWELL)

    # -- where the ranks are --------------------------------------------------------

    def publish(self, generation: int, standing: Standing) -> None:
        """Say where this rank is."""
        self.store.multi_set([f"standing/{generation}/{self._rank}"], [standing.encode()])

    def standings(
        self, generation: int, ranks: Sequence[int], *, patience: timedelta
    ) -> dict[int, Standing]:
        """Wait until all of `ranks` have published where they are."""
        self.store.set_timeout(patience)
        try:
            values = self.store.multi_get([f"standing/{generation}/{rank}" for rank in ranks])
        finally:
            self.store.set_timeout(self._deadline)
        return dict(zip(ranks, map(Standing.decode, values), strict=True))

    # -- the verdict ------------------------------------------------------------------

    def count_done(self, generation: int) -> int:
        """Report that this member's replacement works; return how many have."""
        return int(self.store.add(f"done/{generation}", 1))

    def give_verdict(self, generation: int, verdict: str) -> str:
        """Return the verdict that stands: this one, if there was none."""
        return str(self.store.compare_set(f"verdict/{generation}", "", verdict).decode())

    def withdraw_verdict(self, generation: int) -> None:
        """Take back a verdict on a generation that was over."""
        self._delete(f"verdict/{generation}")

    def has_verdict(self, generation: int) -> bool:
        """Whether there is a verdict."""
        return bool(self.store.check([f"verdict/{generation}"]))

    def verdict(self, generation: int, *, patience: timedelta | None = None) -> str:
        """Wait for the verdict."""
        self.store.set_timeout(patience or self._deadline)
        try:
            return str(self.store.get(f"verdict/{generation}").decode())
        finally:
            self.store.set_timeout(self._deadline)

    # -- afterwards -------------------------------------------------------------------

    def rendezvous(self, generation: int, group: str) -> Store:
        """Return a store in which the replacement of `group` meets; new for every generation."""
        return dist.PrefixStore(f"rendezvous/{generation}/{group}/", self.store)

    def forget(self, generation: int, *, ended: Collection[int]) -> None:
        """Delete what this rank has in `generation`, and all of it if no other will read any.

        Args:
            generation: that is over.
            ended: ranks that have said farewell.
        """
        self._delete(f"wake/{generation}/{self._rank}", f"standing/{generation}/{self._rank}")
        over = [f"over/{generation}/{rank}" for rank in range(self._world_size)]
        self.store.set(over[self._rank], "")
        if not self.store.check([key for rank, key in enumerate(over) if rank not in ended]):
            return
        self._delete(*(f"{name}/{generation}" for name in ("claim", "done", "verdict")), *over)
        for rank in ended:
            self._delete(f"wake/{generation}/{rank}", f"standing/{generation}/{rank}")
        # Named by the backend, so they are looked up; torch before 2.9 cannot.
        for key in getattr(self.store, "list_keys", list)():
            if key.startswith(f"rendezvous/{generation}/"):
                self._delete(key)

    def _delete(self, *keys: str) -> None:
        for key in keys:
            self.store.delete_key(key)
