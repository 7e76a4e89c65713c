"""What follows when a rank has ended: whoever needs it ends too, and nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpact._errors import Reason
from accelpact._heartbeat import Heartbeat
from accelpact._progress import Progress

if TYPE_CHECKING:
    from torch.distributed import Store

    from accelpact._control import ControlPlane


class Vigil:
    """This rank's heartbeat, and what it makes of the others'."""

    def __init__(self, plane: ControlPlane, store: Store, *, silence: float) -> None:
        """Give the first beat, on the thread that trains.

        Args:
            plane: the control plane that this belongs to.
            store: a client that no call of others blocks for long.
            silence: seconds after which a rank without a heartbeat counts as silent.
        """
        self._plane = plane
        self._silence = silence
        self._progress = Progress(plane.boundary)
        self._heartbeat = Heartbeat(
            store,
            rank=plane.rank,
            world_size=plane.world_size,
            silence=silence,
            on_beat=self._consider,
        )

    def start(self) -> None:
        """Go on beating and watching, once every rank has beaten."""
        self._heartbeat.start()

    @property
    def ended(self) -> set[int]:
        """Ranks that have said farewell: their threads have ended, and read nothing more."""
        return {rank for rank, how in self._heartbeat.ended.items() if how == "gone"}

    def close(self, patience: float) -> None:
        """Say farewell; wait `patience` seconds at most for the thread."""
        self._heartbeat.close(patience)

    def _consider(self) -> None:
        """Fail the repair under way if it needs a rank that ended; or what hangs on a silent one.

        A rank that ended and is not needed ends nobody.
        """
        plane, ended = self._plane, self._heartbeat.ended
        # Looked at every time, so that it knows since when.
        hanging = self._progress.hanging()
        notice = plane.under_way
        if notice is not None:
            for rank in plane.closure(notice.ranks):
                if rank in ended:
                    plane.abort(notice.generation, self._why(rank, ended[rank]))
                    return
        elif hanging >= self._silence:
            for rank in plane.closure([plane.rank]):
                if ended.get(rank) == "silent":
                    self._end_chain(rank, hanging)
                    return

    def _end_chain(self, rank: int, hanging: float) -> None:
        plane = self._plane
        reason = (
            f"{self._why(rank, 'silent')}, and rank {plane.rank} has hung for {hanging:.1f} s "
            f"after update {plane.boundary.frontier}"
        )
        # Tried again at the next beat, if it cannot be done now.
        plane.try_to_refuse(f"rank {rank}", [rank], reason, trigger="heartbeat")

    def _why(self, rank: int, how: str) -> str:
        if how == "gone":
            return f"{Reason.RANK_GONE.value}: rank {rank} is needed and has said farewell"
        reason = Reason.RANK_SILENT.value
        return f"{reason}: rank {rank} has given no heartbeat for {self._silence:g} s"
