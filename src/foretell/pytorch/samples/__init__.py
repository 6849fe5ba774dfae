"""Well-known models, written out with their published shapes, as steps to capture.

    foretell capture foretell.pytorch.samples:resnet50 --batch 64 -o step.graph

Each takes a batch size and answers what `foretell.capture` takes: a function that makes the model,
one that makes the batch, the loss and the optimizer.
"""

from foretell.pytorch.samples.classic import alexnet, densenet121, inception_v3
from foretell.pytorch.samples.dlrm import dlrm
from foretell.pytorch.samples.experts import mixtral
from foretell.pytorch.samples.language import bert, gpt2, llama
from foretell.pytorch.samples.mobile import efficientnet_b0, mobilenet_v2
from foretell.pytorch.samples.mobilenet import mobilenet_v3_large
from foretell.pytorch.samples.recurrent import rnnlm
from foretell.pytorch.samples.sample import Sample
from foretell.pytorch.samples.swin import swin_t
from foretell.pytorch.samples.t5 import t5_small
from foretell.pytorch.samples.translate import transformer
from foretell.pytorch.samples.vision import resnet50, vgg16
from foretell.pytorch.samples.vit import vit_b_16
from foretell.pytorch.samples.volumes import cosmoflow, unet3d

__all__ = [
    "Sample",
    "alexnet",
    "bert",
    "cosmoflow",
    "densenet121",
    "dlrm",
    "efficientnet_b0",
    "gpt2",
    "inception_v3",
    "llama",
    "mixtral",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "resnet50",
    "rnnlm",
    "swin_t",
    "t5_small",
    "transformer",
    "unet3d",
    "vgg16",
    "vit_b_16",
]
