"""Pure: the table of faults, and the schedules that say which fault comes when."""
