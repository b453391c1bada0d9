"""``fabric launch``: starts one replica's ranks on this host, and starts them again where that helps."""
