"""Functions that inspect a call without running it: ``check`` and ``picture``."""
