"""Train a small byte-level GPT with fabric: the script that `fabric demo` runs on every replica.

Alone, without any service:   FABRIC_DISABLE=1 python examples/train_gpt.py --steps 50
As one replica of a job:      see the environment variables that `docs/` lists, or run `fabric demo`.

The training loop is `train` in `fabric/cli/demo/trainer.py`; it is kept there so that the installed
package can run it, and it is the one to copy from.
"""

from fabric.cli.demo.trainer import main

if __name__ == "__main__":
    main()
