"Programs of fastMONAI: its data blocks, transforms, losses, metrics, callbacks and patches, with networks of MONAI"
import importlib,types
from functools import partial
import numpy as np,pandas as pd
from benchmarks.compatibility.library_programs.common import Learner,fitted,last

def fastmonai():
    vision,nets,losses = map(importlib.import_module, ('fastMONAI.vision_all','monai.networks.nets','monai.losses'))
    return types.SimpleNamespace(**{**vars(vision), **vars(nets), **vars(losses)})

def volumes(size=16, n=12):
    "Volumes of noise with a bright cube and masks of the cubes, as files, and a class that depends on the cube's size"
    import nibabel
    rng,table = np.random.default_rng(0),[]
    for i in range(n):
        x,y = rng.random((size,)*3, 'float32'),np.zeros((size,)*3, 'float32')
        a,b,c = rng.integers(0, size//2, 3)
        edge = size//4+i%2*size//4
        y[a:a+edge,b:b+edge,c:c+edge] = 1
        for name,o in (('x',x+y),('y',y)): nibabel.save(nibabel.Nifti1Image(o, np.eye(4)), f'{name}{i}.nii.gz')
        table.append(dict(x=f'x{i}.nii.gz', y=f'y{i}.nii.gz', kind='ab'[i%2], volume=edge/size, is_valid=i>=n-4))
    return pd.DataFrame(table)

def normal(m): return [m.ZNormalization()]
def altered(m): return [m.PadOrCrop(16), m.RandomAffine(scales=0.1), m.RandomGamma(), m.ZNormalization()]
def masks(m, tfms=normal):
    block = m.MedDataBlock(blocks=(m.ImageBlock(cls=m.MedImage), m.MedMaskBlock()), splitter=m.ColSplitter(), get_x=m.ColReader('x'),
                           get_y=m.ColReader('y'), item_tfms=tfms(m))
    return block.dataloaders(volumes(), bs=4, num_workers=0)

def unet(m): return m.UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(4,8,16), strides=(2,2), num_res_units=1)
def attention(m): return m.AttentionUnet(spatial_dims=3, in_channels=1, out_channels=1, channels=(4,8), strides=(2,))
def segresnet(m): return m.SegResNet(spatial_dims=3, init_filters=8, blocks_down=(1,1), blocks_up=(1,), in_channels=1, out_channels=1)
def deep(m):
    net = m.DynUNet(3, 1, 1, [3,3,3], [1,2,2], [2,2], filters=[4,8,16], deep_supervision=True, deep_supr_num=1)
    return m.DynUNetDSAdapter(net)
def dice(m): return m.DiceLoss(sigmoid=True)

def segment(to, m, model=unet, loss=dice, tfms=normal, cbs=lambda m: None, more=lambda m,learn: None):
    learn = Learner(masks(m, tfms), model(m), m.CustomLoss(loss(m)), metrics=[m.binary_dice_score,m.AccumulatedDice(2)])
    return fitted(to(learn), 2, cbs(m), more=partial(more, m))

def classify(to, m, column='kind', tfms=normal):
    "Classes of volumes, or a number"
    block,loss,n = (None,None,2) if column=='kind' else (m.RegressionBlock,m.MSELossFlat(),1)
    dls = m.MedImageDataLoaders.from_df(volumes(), fn_col='x', label_col=column, valid_col='is_valid', y_block=block, item_tfms=tfms(m),
                                        bs=4, num_workers=0)
    net = m.Regressor if n==1 else m.Classifier
    return fitted(to(Learner(dls, net((1,16,16,16), *([1] if n==1 else [2]), channels=(4,8), strides=(2,2)), loss)))

def patches(to, m):
    "Patches of volumes, from queues of torchio"
    config = m.PatchConfig(patch_size=[8,8,8], samples_per_volume=2, sampler_type='uniform', queue_length=8, queue_num_workers=0)
    dls = m.MedPatchDataLoaders.from_df(volumes(), img_col='x', mask_col='y', valid_col='is_valid', patch_config=config, bs=4,
                                        pre_patch_tfms=normal(m))
    learn = to(Learner(dls, unet(m), m.CustomLoss(dice(m)), metrics=m.AccumulatedDice(2)))
    learn.fit_one_cycle(2, 1e-3)
    return dict(steps=learn.steps.n, losses=[*map(float, learn.recorder.losses)], preds=learn.recorder.values[-1][1:2]) # has no `get_preds`

def exported(m, learn):
    learn.export('all.pkl')
    return m.load_learner('all.pkl').get_preds(dl=learn.dls.valid)[0]
def loaded(m, learn): return last(learn.load('best_model'), learn.get_preds()[0])
of_fastmonai = {
    'UNet, export, load_learner': partial(segment, more=exported), 'transforms': partial(segment, tfms=altered),
    'AttentionUnet': partial(segment, model=attention), 'SegResNet': partial(segment, model=segresnet),
    'DynUNet with deep supervision': partial(segment, model=deep, loss=lambda m: m.DeepSupervisionLoss(dice(m))),
    'TverskyFocalLoss': partial(segment, loss=lambda m: m.TverskyFocalLoss(sigmoid=True)),
    'EMACheckpoint': partial(segment, cbs=lambda m: m.EMACheckpoint(), more=loaded),
    'classes': classify, 'a number': partial(classify, column='volume'), 'patches': patches}
