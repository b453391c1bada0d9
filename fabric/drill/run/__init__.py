"""A drill from its start to its records: the job, the faults of the schedule, the drill's observations."""
