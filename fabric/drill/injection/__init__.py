"""The actions of faults on processes and links, and the undoing of faults if the drill dies."""
