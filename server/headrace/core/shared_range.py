"""The one check of a range of shared memory, whatever kind of memory it is."""

from __future__ import annotations

from headrace.core.errors import BadRequest


def check_range(offset: int, size_bytes: int, region_bytes: int) -> None:
    """Hold a range against its region.

    Raises:
        BadRequest: it does not lie in the region.
    """
    if offset < 0 or size_bytes < 0 or offset + size_bytes > region_bytes:
        raise BadRequest(
            f"shared memory offset {offset} and size {size_bytes} do not lie in the region of {region_bytes} bytes"
        )
