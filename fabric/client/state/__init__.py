"""The replica's state: when it is snapshotted, where it is loaded from, whether it was altered."""
