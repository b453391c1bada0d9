"""Exit codes of a trainer: they tell its launcher what to do."""

FINISHED = 0
FAILED = 1  # a restart does not help: a person must mend something
RESTART = 75
DEVICE_FAILED = 76  # as after RESTART; the device of this rank has failed
LAYOUT_REFUSED = 78  # the script cannot build the layout that the launcher gave it
END_BY_SIGNAL = 128  # an end by a signal has this code plus the signal's number

# Exit codes after which no restart helps: a user's mistake, a wrong command line, a program that cannot run
# or is missing.
FINAL_CODES = (FAILED, 2, 126, 127)
