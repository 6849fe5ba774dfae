"""Well-known models, written out with their published shapes, as steps to capture.

    foretell capture foretell_lab.samples:resnet50 --batch 64 -o step.graph

Each takes a batch size and answers what `foretell.capture` takes: a function that makes the model,
one that makes the batch, the loss and the optimizer.
"""

from foretell_lab.samples.classic import alexnet, densenet121, inception_v3
from foretell_lab.samples.dlrm import dlrm
from foretell_lab.samples.experts import mixtral
from foretell_lab.samples.language import bert, gpt2, llama
from foretell_lab.samples.mobile import efficientnet_b0, mobilenet_v2
from foretell_lab.samples.mobilenet import mobilenet_v3_large
from foretell_lab.samples.recurrent import rnnlm
from foretell_lab.samples.sample import Sample
from foretell_lab.samples.swin import swin_t
from foretell_lab.samples.t5 import t5_small
from foretell_lab.samples.translate import transformer
from foretell_lab.samples.vision import resnet50, vgg16
from foretell_lab.samples.vit import vit_b_16
from foretell_lab.samples.volumes import cosmoflow, unet3d

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
