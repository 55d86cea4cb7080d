"""Reports of an optimizer about itself, and tools that observe an optimizer."""

from secondorder.diagnostics.analysis import Analysis
from secondorder.diagnostics.flat import flat
from secondorder.diagnostics.jsonl import read_events
from secondorder.diagnostics.preconditioning import quantify_preconditioning
from secondorder.diagnostics.timing import StageClock

__all__ = ["Analysis", "StageClock", "flat", "quantify_preconditioning", "read_events"]
