"""``fabric launch``: one replica's ranks on this host, started again where that helps."""
