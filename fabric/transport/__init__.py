"""Authenticated links between peers.

``tcp`` opens the sockets. ``greeting`` is the proof that both sides give before any byte of the job passes.
``link`` carries ordered messages on control sockets; the caller gets data sockets as raw sockets.
"""
