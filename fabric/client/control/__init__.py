"""The control thread: links to peers and lighthouse, the member core, the ranks of one replica."""
