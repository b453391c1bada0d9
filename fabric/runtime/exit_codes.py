"""Exit codes of a trainer: they tell its launcher what to do."""

FINISHED = 0
FAILED = 1  # a person must mend something: a restart does not help
RESTART = 75
DEVICE_FAILED = 76  # as RESTART; the device of this rank has failed
LAYOUT_REFUSED = 78  # the script cannot build the layout that it was given
END_BY_SIGNAL = 128  # plus the signal's number
