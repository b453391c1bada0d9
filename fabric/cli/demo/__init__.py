"""The demo: a language model trained by replicas that survive ``kill -9``, and the proof of it.

``supervise`` starts the processes and kills one of them, ``journal`` reads what every replica logged,
``audit`` and ``summary`` recompute from those logs alone what happened, ``report`` and ``tables`` show
it. ``trainer``, ``gpt`` and ``corpus`` are what the replicas run; nothing else here imports torch.
"""
