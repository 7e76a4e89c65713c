"""Phase 2: is this rank at a committed boundary, with nothing in flight on the device?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelpact._frameworks import Framework

_SHOWN = 3


def check_boundary(
    model: torch.nn.Module, frameworks: Sequence[Framework], *, declared: bool
) -> None:
    """Synchronize the device and ask every framework for signs of an update under way.

    Args:
        model: the wrapped model.
        frameworks: what knows the model's private state.
        declared: whether the caller has committed since the optimizer last stepped.

    Raises:
        Rejected: `reject_uncommitted_boundary`, with the first few signs.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    found = [sign for framework in frameworks for sign in framework.violations(model)]
    if not declared:
        found.insert(0, "the optimizer has stepped and the update was not committed")
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise Rejected(
            Reason.UNCOMMITTED_BOUNDARY,
            f"expected every module idle and no gradient; found {'; '.join(found[:_SHOWN])}{more}",
        )
