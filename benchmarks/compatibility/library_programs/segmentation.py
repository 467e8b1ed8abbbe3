"Programs of segmentation_models_pytorch: its architectures, encoders and losses"
import importlib
from functools import partial
import numpy as np,torch
from benchmarks.compatibility.library_programs.common import Learner,fitted,split

def smp(): return importlib.import_module('segmentation_models_pytorch')

def masked(n=16, size=32):
    "Images of noise with a bright square, and the mask of the square"
    rng = np.random.default_rng(0)
    x,y = rng.random((n,3,size,size), 'float32'),np.zeros((n,1,size,size), 'float32')
    for i,(a,b) in enumerate(rng.integers(0, size//2, (n,2))): y[i,0,a:a+size//2,b:b+size//2] = 1
    return split([*zip(torch.tensor(x+y), torch.tensor(y))], 4, 8)

def segment(to, smp, arch='Unet', encoder='resnet18', loss=lambda smp: smp.losses.DiceLoss('binary'), **kwargs):
    model = getattr(smp, arch)(encoder, encoder_weights=None, **kwargs)
    return fitted(to(Learner(masked(), model, loss(smp))))

small = dict(encoder_depth=3, decoder_channels=(32,16,8))
def loss(name, *args): return lambda smp: getattr(smp.losses, name)(*args)
wide = dict(encoder='mobilenet_v2') # all five stages: those of a ResNet are slow in fp16 on a CPU
of_smp = {
    **{a: partial(segment, arch=a, **kw) for a,kw in dict(Unet=small, UnetPlusPlus=small, MAnet=small, Linknet=dict(encoder_depth=3),
        PSPNet=dict(encoder_depth=3, psp_out_channels=32), DeepLabV3Plus=dict(wide, decoder_channels=16),
        FPN=dict(wide, decoder_pyramid_channels=32, decoder_segmentation_channels=32), UPerNet=dict(wide, decoder_channels=16),
        Segformer=dict(wide, decoder_segmentation_channels=16)).items()},
    **{f'Unet on {e}': partial(segment, encoder=e, **small) for e in ('mobilenet_v2','efficientnet-b0','mit_b0')},
    'Unet with scse': partial(segment, decoder_attention_type='scse', **dict(small, decoder_channels=(32,32,16))),
    **{n: partial(segment, loss=loss(n, *a), **small) for n,*a in
       (('FocalLoss','binary'), ('JaccardLoss','binary'), ('TverskyLoss','binary'), ('LovaszLoss','binary'), ('SoftBCEWithLogitsLoss',))}}
