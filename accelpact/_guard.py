"""Phase 2: is this rank at a committed boundary?

Asked of the host alone. The device is waited for when the communicator is stopped, since before
that a collective that failed may occupy it for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelpact._boundary import Boundary
    from accelpact._frameworks import Watch

_SHOWN = 3


def structure(watches: Sequence[Watch]) -> list[str]:
    """Return what in the frameworks' own state contradicts a boundary: the part per update."""
    return [sign for watch in watches for sign in watch.structure()]


def check_boundary(watches: Sequence[Watch], boundary: Boundary) -> None:
    """Look for every sign of an update under way.

    Args:
        watches: what each framework looks at, made once from the model.
        boundary: what this rank has begun since its last commit.

    Raises:
        Rejected: `reject_uncommitted_boundary`, with the first few signs.
    """
    found = []
    if boundary.stepping:
        found.append("the optimizer has stepped and the update was not committed")
    if boundary.entered:
        found.append(f"a forward pass has begun after update {boundary.frontier} was committed")
    found += structure(watches)
    for watch in watches:
        found += [
            f"{path}: has a gradient that no optimizer step has consumed"
            for path in boundary.outstanding(watch.gradients())
        ]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise Rejected(
            Reason.UNCOMMITTED_BOUNDARY,
            f"expected every module idle and no gradient; found {'; '.join(found[:_SHOWN])}{more}",
        )
