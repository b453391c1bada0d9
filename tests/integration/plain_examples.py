"""The examples of frameworks with their changed lines taken back: scripts that know nothing of fabric."""

from job import EXAMPLES

# Example -> the changed lines, and what stood there before.
CHANGED = {
    "transformers_trainer": {
        "from fabric.integrations.transformers import FabricTrainer as Trainer\n": (
            "from transformers import Trainer\n"
        ),
    },
    "accelerate_loop": {
        "from fabric.integrations.accelerate import FabricAccelerator as Accelerator\n": (
            "from accelerate import Accelerator\n"
        ),
    },
    "lightning_trainer": {
        "from fabric.integrations.lightning import FabricStrategy\n": "",
        "        strategy=FabricStrategy(),\n": "",
    },
}


def plain(name: str) -> str:
    """Return the example with the framework alone."""
    text = (EXAMPLES / f"{name}.py").read_text()
    for with_fabric, without in CHANGED[name].items():
        assert text.count(with_fabric) == 1
        text = text.replace(with_fabric, without)
    return text
