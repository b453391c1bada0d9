"""``fabric run --adopt``: a plain PyTorch script trains as one replica of a job, without a changed line."""
