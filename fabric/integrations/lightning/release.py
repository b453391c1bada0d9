"""The installed Lightning, which is published under two names whose classes differ."""

import importlib.util
import sys

LEAST, TESTED = "2.5.0", "2.6.6"
_has_both_names = "pytorch_lightning" not in sys.modules and importlib.util.find_spec("lightning") is not None
ROOT = "lightning.pytorch" if _has_both_names else "pytorch_lightning"
