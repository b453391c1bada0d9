"""restore_values: evaluate a snapshot on a server, in a pulled file or in storage, without a job."""

import sys

import torch
from toy import Samples, make_model

import fabric.client


def main() -> None:
    restored = fabric.client.restore_values(sys.argv[1])  # a URL, a file or a folder
    model = make_model()
    model.load_state_dict(restored.values["model"])
    samples = Samples()
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(samples.x), samples.y)
    print(f"step {restored.step}: loss {loss.item():.4f} over {len(samples)} samples")


if __name__ == "__main__":
    main()
