"Whole trainings on real data end where fp32 ends"
import pytest,torch
import torch.nn.functional as F
from fastai.basics import Learner,accuracy,nn,set_seed
from fastai.tabular.all import Categorify,CategoryBlock,FillMissing,Normalize,RandomSplitter,TabularPandas,range_of,tabular_learner
from sklearn.datasets import load_breast_cancer
from fastai_amp16.all import AdamW16,GradientNormClip
from fastai_amp16.demo import digits_dls
from common import slow

pytestmark = pytest.mark.usefixtures('as_in_programs') # fastai splits data by arrays

class Block(nn.Module):
    def __init__(self, ni, nf, stride=1):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(ni, nf, 3, stride, 1, bias=False), nn.BatchNorm2d(nf), nn.ReLU(),
                                   nn.Conv2d(nf, nf, 3, 1, 1, bias=False), nn.BatchNorm2d(nf))
        self.short = nn.Identity() if ni==nf and stride==1 else nn.Sequential(nn.Conv2d(ni, nf, 1, stride, bias=False), nn.BatchNorm2d(nf))
    def forward(self, x): return F.relu(self.convs(x)+self.short(x))

class Encoder(nn.Module):
    "The eight rows of a digit are its tokens"
    def __init__(self, d=32):
        super().__init__()
        self.inp,self.pos = nn.Linear(8, d),nn.Parameter(torch.randn(8, d)*0.02)
        layer = nn.TransformerEncoderLayer(d, 4, 2*d, dropout=0., batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 10))
    def forward(self, x): return self.head(self.enc(self.inp(x[:,0])+self.pos).mean(1))

def digits(model): return lambda seed: Learner(digits_dls(seed=seed), model(), opt_func=AdamW16, metrics=accuracy, cbs=GradientNormClip(1.))

def resnet(): return nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Block(8, 16, 2),
                                   Block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

def tabular(seed):
    df = load_breast_cancer(as_frame=True).frame
    df['size'] = (df['mean radius']//5).astype(str)
    cont = [o for o in df.columns if o not in ('target','size')]
    splits = RandomSplitter(seed=seed)(range_of(df))
    to = TabularPandas(df, [Categorify, FillMissing, Normalize], ['size'], cont, 'target', CategoryBlock(), splits)
    return tabular_learner(to.dataloaders(bs=64), layers=[64,32], opt_func=AdamW16, metrics=accuracy, cbs=GradientNormClip(1.))

def fit(make, epochs, lr, to, seed):
    set_seed(seed, reproducible=True)
    learn = to(make(seed))
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(epochs, lr)
    return torch.tensor(learn.recorder.values[-1][1:])

@pytest.mark.parametrize('make,epochs,lr', [
    pytest.param(digits(resnet), 2, 1e-2, id='resnet', marks=slow), pytest.param(digits(Encoder), 5, 1e-2, id='transformer', marks=slow),
    pytest.param(tabular, 5, 1e-2, id='tabular')])
def test_ends_within_noise_of_fp32(make, epochs, lr):
    "Of three seeds: valid loss and accuracy no further from fp32's than fp32's own seeds are from each other"
    fp32,fp16 = [torch.stack([fit(make, epochs, lr, to, seed) for seed in range(3)]) for to in (Learner.to_fp32, Learner.to_fp16_dynamic)]
    noise = fp32.std(0)
    assert fp32[:,1].min()>0.9 # it learned
    assert ((fp16.mean(0)-fp32.mean(0)).abs()<=noise).all()
