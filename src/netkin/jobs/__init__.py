"""Jobs: long work in parts, each saved to disk as soon as it is finished, that can be monitored, cancelled and resumed.

A terminal, a notebook and a server read the same state, without torch.
"""

from netkin.jobs.job import Cancelled, Job, Part
from netkin.jobs.state import State, beside, cancel, list_jobs, read, refuse_other

__all__ = ["Cancelled", "Job", "Part", "State", "beside", "cancel", "list_jobs", "read", "refuse_other"]
