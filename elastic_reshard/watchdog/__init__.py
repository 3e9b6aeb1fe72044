"""The host's guard: one process per host and job that holds descriptors and speaks to the supervisor; and its members' side."""
