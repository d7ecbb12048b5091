"""What torch shows of a step as it runs: the log recorder, and what the planner and runtime share."""

from gradkeep.remat.tracing._log_recorder import Recorder, record

__all__ = ["Recorder", "record"]
