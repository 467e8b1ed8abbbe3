"What fp16 cannot hold is found out, and the training ends where fp32 ends"
import math
import pytest,torch
from fastai.basics import Learner
from hostile import bad_samples,fit,hopeless,plain_fp16,zoo

floor = 0.01 # of figures that are 1 at best: two or three of 256 samples, which rounding alone moves where all seeds of fp32 agree

@pytest.mark.parametrize('name', zoo)
def test_plain_fp16_fails(name):
    "With a dynamic loss scale or with a static one, where fp32 passes 0.9 by far"
    s = zoo[name]
    assert not all(plain_fp16(s.make(0), s.epochs, s.lr, scale)[1]>0.8 for scale in ('dynamic',512))

@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('name', zoo)
def test_reaches_fp32(name):
    "Of three seeds, the mean is no further from fp32's than fp32's own seeds are from each other"
    s = zoo[name]
    def figures(to): return torch.tensor([fit(to(s.make(seed)), s.epochs, s.lr) for seed in range(3)])
    fp32,fp16 = figures(Learner.to_fp32),figures(Learner.to_fp16_dynamic)
    assert fp32.min()>0.9 # it learned
    assert (fp16.mean()-fp32.mean()).abs()<=fp32.std()+floor, (fp16, fp32)

@pytest.mark.parametrize('name', hopeless)
def test_fp32_fails_too(name):
    s = hopeless[name]
    assert math.isnan(fit(s.make(0), s.epochs, s.lr))

def test_bad_samples():
    x,_ = zip(*hopeless['nan_samples'].make(0).dls.train_ds)
    assert torch.stack(x).isnan().any(1).nonzero().flatten().tolist()==list(bad_samples)
