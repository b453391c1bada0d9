"""Authenticated links between peers: who dials whom, who may, and ordered messages afterwards.

``greeting`` is what both sides prove before a byte of the job passes, ``tcp`` opens the sockets,
``link`` carries messages on the control ones; the data ones are handed on as raw sockets.
"""
