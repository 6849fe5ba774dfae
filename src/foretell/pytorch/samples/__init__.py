"""Well-known models, written out with their published shapes, as steps to capture.

    foretell capture foretell.pytorch.samples:resnet50 --batch 64 -o step.graph

Each takes a batch size and answers what `foretell.capture` takes: a function that makes the model,
one that makes the batch, the loss and the optimizer.
"""

from foretell.pytorch.samples.language import bert, gpt2, llama
from foretell.pytorch.samples.mobilenet import mobilenet_v3_large
from foretell.pytorch.samples.sample import Sample
from foretell.pytorch.samples.swin import swin_t
from foretell.pytorch.samples.vision import resnet50, vgg16

__all__ = [
    "Sample",
    "bert",
    "gpt2",
    "llama",
    "mobilenet_v3_large",
    "resnet50",
    "swin_t",
    "vgg16",
]
