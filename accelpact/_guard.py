"""Phase 2: is this rank at a committed boundary, with nothing in flight on the device?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelpact._frameworks import Watch

_SHOWN = 3


def check_boundary(watches: Sequence[Watch], *, declared: bool) -> None:
    """Synchronize the device and ask every framework for signs of an update under way.

    Args:
        watches: what each framework looks at, made once from the model.
        declared: whether the caller has committed since the optimizer last stepped.

    Raises:
        Rejected: `reject_uncommitted_boundary`, with the first few signs.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    found = [sign for watch in watches for sign in watch()]
    if not declared:
        found.insert(0, "the optimizer has stepped and the update was not committed")
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise Rejected(
            Reason.UNCOMMITTED_BOUNDARY,
            f"expected every module idle and no gradient; found {'; '.join(found[:_SHOWN])}{more}",
        )
