"""Query-aware selection of pages by statistics of their keys (LServe §3.5)."""

from pallas_kernels.page_selection.api import (
    KeyRuns,
    key_runs,
    plan_selection,
    select_pages,
    write_key_statistics,
)

__all__ = ["KeyRuns", "key_runs", "plan_selection", "select_pages", "write_key_statistics"]
