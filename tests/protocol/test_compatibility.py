"""Two replicas that cannot be members of one job: the sentence says which of their settings differs."""

from msgspec.structs import replace

from fabric.protocol.messages.network import OpenSession
from fabric.protocol.rules.compatibility import incompatibility

ONE = OpenSession("r0", 1, 0, 0, "", 0, "h:1", "http://h:2", 6, layout="a", tensors=("w float32[3]",))


def test_equal_parameters_in_another_layout_are_not_called_other_parameters():
    """Members of two releases, or with other shards, describe the same parameters."""
    said = incompatibility(ONE, replace(ONE, replica="r1", layout="b"))
    assert said.startswith("r0 has other layout of gradients than r1 (equal parameters: the sharding or the")
    said = incompatibility(ONE, replace(ONE, replica="r1", layout="b", tensors=("w float32[4]",)))
    assert "other parameters" in said and "w float32[3] here, and w float32[4] there" in said
    assert not incompatibility(ONE, replace(ONE, replica="r1"))
