"`GradientNormClip` in fp32, with fastai's `to_fp16` and with ours"
import math
import pytest,torch
from fastai.basics import Callback,DataLoader,DataLoaders,Learner,SGD,nn,set_seed,store_attr,trainable_params
from fastai_amp16.all import GradientNormClip
from common import Poison
from benchmarks.shared.fastais import fastais

class Watch(Callback):
    "The gradients that the optimizer sees"
    order = 90
    def before_fit(self): self.seen = []
    def before_step(self): self.seen.append(torch.cat([p.grad.detach().flatten().clone() for p in self.model.parameters()]))

def learner(cbs, splitter=trainable_params, scale=1.):
    set_seed(0)
    x,y = torch.randn(64,8),torch.randn(64,1)*scale
    dls = DataLoaders(*[DataLoader(list(zip(x, y)), bs=16)]*2)
    return Learner(dls, nn.Sequential(nn.Linear(8,32), nn.ReLU(), nn.Linear(32,1)), nn.MSELoss(), SGD, lr=1e-3, splitter=splitter, cbs=cbs)

def fit(learn, n=2):
    with fastais(), learn.no_bar(), learn.no_logging(): learn.fit(n)
    return learn

def two_groups(m): return [list(m[0].parameters()),list(m[2].parameters())]

class TorchClip(Callback):
    "The reference"
    order = GradientNormClip.order
    def __init__(self, max_norm, norm_type=2.): store_attr()
    def before_fit(self): self.norms = []
    def before_step(self): self.norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm, self.norm_type).item())

@pytest.mark.parametrize('to', ['to_fp32','to_fp16','to_fp16_dynamic','to_bf16_dynamic'])
@pytest.mark.parametrize('norm_type,max_norm,splitter', [(2.,1.2,trainable_params), (2.,1.2,two_groups), (1.,11.,two_groups),
                                                         (math.inf,0.5,trainable_params)])
def test_is_torchs_clipping_of_the_true_gradients(to, norm_type, max_norm, splitter):
    fastais_scale = dict(init_scale=2.**10) if to=='to_fp16' else {} # at its own first one, fastai may skip steps
    def run(cb): return fit(getattr(learner([cb, Watch()], splitter), to)(**fastais_scale))
    ours,ref = run(GradientNormClip(max_norm, norm_type)),run(TorchClip(max_norm, norm_type))
    norms = ours.gradient_norm_clip.norms
    assert norms==pytest.approx(ref.torch_clip.norms, rel=1e-5) and len(norms)==8
    assert min(norms)<max_norm<max(norms) # both sides of the line
    for a,b in zip(ours.watch.seen, ref.watch.seen): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    for g,n in zip(ours.watch.seen, norms): assert g.norm(p=norm_type).item()==pytest.approx(min(n, max_norm), rel=1e-4)

def test_norms_agree_across_precisions():
    "True gradients: whatever the loss scale; fastai skips steps at its own first one, or not, as the data have it"
    norms = [fit(to(learner(GradientNormClip(1.)))).gradient_norm_clip.norms for to in (Learner.to_fp32, Learner.to_fp16_dynamic,
             lambda l: l.to_fp16_dynamic(init_scale=8.), lambda l: l.to_fp16(init_scale=2.**10))]
    for n in norms[1:]: assert n==pytest.approx(norms[0], rel=2e-2)

def test_gradients_changed_in_between_are_the_ones_to_clip():
    class Amplify(Callback):
        order = 10.5
        def before_step(self):
            for p in self.model.parameters(): p.grad *= 10
    fp32,fp16 = [fit(to(learner([Amplify(), GradientNormClip(1.), Watch()]))) for to in (Learner.to_fp32, Learner.to_fp16_dynamic)]
    assert fp16.gradient_norm_clip.norms==pytest.approx(fp32.gradient_norm_clip.norms, rel=2e-2) and min(fp32.gradient_norm_clip.norms)>5
    assert all(g.norm()<1.01 for g in fp16.watch.seen)

def test_sparse_gradients():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb,self.lin = nn.Embedding(10,8, sparse=True),nn.Linear(8,1)
        def forward(self, x): return self.lin(self.emb((x.abs()*3).long().clamp(max=9)).mean(1))
    def run(to, max_norm):
        learn = learner([GradientNormClip(max_norm)])
        learn.model = Bag()
        fit(to(learn), 1)
        return learn
    set_seed(0)
    assert max(run(Learner.to_fp32, 10.).gradient_norm_clip.norms)>0.5
    class Seen(Callback):
        order = 90
        def before_step(self): self.learn.norm = math.hypot(*[p.grad.to_dense().norm().item() for p in self.model.parameters()])
    for to in (Learner.to_fp32, Learner.to_fp16_dynamic):
        learn = learner([GradientNormClip(1e-3), Seen()])
        learn.model = Bag()
        assert fit(to(learn), 1).norm==pytest.approx(1e-3, rel=1e-2)

@pytest.mark.warns('other code made `loss_grad` infinite') # 1e30 times the loss is too much for fp32
def test_a_step_has_one_norm_however_often_it_ran_and_a_skipped_one_has_none():
    def run(to): return fit(to(learner([GradientNormClip(1.), Poison({6}, 'backward')], scale=1e5)))
    learn,fp32 = run(Learner.to_fp16_dynamic),run(Learner.to_fp32)
    mp,norms = learn.mixed_precision,learn.gradient_norm_clip.norms
    assert mp.n_rerun>0 and mp.history.skipped.tolist()==[i==6 for i in range(8)]
    assert norms==mp.history.grad_norm[~mp.history.skipped].tolist()
    assert norms[:6]==pytest.approx(fp32.gradient_norm_clip.norms[:6], rel=2e-2)

def test_norms_go_on_in_the_next_fit_and_after_a_change_of_precision():
    learn = fit(learner(GradientNormClip(1.)))
    fit(learn.to_fp16_dynamic(), 1)
    fit(learn.to_fp32(), 1)
    norms = learn.gradient_norm_clip.norms
    assert len(norms)==16 and all(isinstance(o, float) for o in norms)

def test_plot():
    import matplotlib.pyplot as plt
    learn = fit(learner(GradientNormClip(3.)))
    _,ax = plt.subplots()
    learn.gradient_norm_clip.plot(ax)
    assert ax.lines[0].get_ydata().tolist()==learn.gradient_norm_clip.norms and set(ax.lines[1].get_ydata())=={3.}

@pytest.mark.parametrize('max_norm', [0, -1., 'a', None, math.nan])
def test_bad_input(max_norm):
    with pytest.raises(ValueError, match='max_norm='): GradientNormClip(max_norm)
    with pytest.raises(ValueError, match='norm_type='): GradientNormClip(1., max_norm)

def test_a_second_one_is_refused_when_the_fit_starts():
    "fastai keeps both, and finds the second one by name"
    learn = learner([GradientNormClip(1.), GradientNormClip(2.)])
    says = 'takes one GradientNormClip, and this one has 2, with the limits 1, 2: call learn.remove_cbs'
    with pytest.raises(ValueError, match=says): fit(learn)
    learn.remove_cbs(GradientNormClip).add_cb(GradientNormClip(3.))
    fit(learn, 1)
    with pytest.raises(ValueError, match='limits 3, 4'): learn.fit(1, cbs=GradientNormClip(4.))
    fit(learn, 1)
