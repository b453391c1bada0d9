"""Train a small byte-level GPT with fabric: the script that `fabric demo` runs on every replica.

Alone, without any service:   FABRIC_DISABLE=1 python examples/train_gpt.py --steps 50
As one replica of a job:      see the environment variables that `docs/` lists, or run `fabric demo`.

The training loop to copy from is `train` in `fabric/cli/demo/trainer.py`. It stands there so that the
installed package can run it.
"""

from fabric.cli.demo.trainer import main

if __name__ == "__main__":
    main()
