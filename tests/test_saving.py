"Checkpoints and exported learners, resumed and read elsewhere"
import pickle,warnings
import pytest,torch
from fastai.basics import (Adam,Callback,DataLoader,DataLoaders,Learner,OptimWrapper,
                           load_learner,nn,partial,set_seed)
from fastai.callback.all import GradientAccumulation,MixedPrecision
from fastai_amp16.all import (AdamW16,DynamicMixedPrecision)
from common import *

def test_edits_and_loads_in_the_middle_of_a_fit_reach_the_next_forward(tmp_path):
    class Edit(Callback):
        def after_batch(self):
            if self.training and self.train_iter==2: self.model[0].weight.data.fill_(3.)
            if self.training and self.train_iter==3: self.learn.load('start')
    def run(to):
        learn = to(learner(plain_mlp, path=tmp_path))
        learn.create_opt()
        learn.save('start')
        return fit(learn, 1, cbs=[Edit(), (seen:=Seen())]),seen
    class Seen(Callback):
        order = 1
        def before_fit(self): self.preds = []
        def after_pred(self): self.preds.append(self.learn.pred.detach().float())
    (_,sa),(_,sb) = run(Learner.to_fp16_dynamic),run(Learner.to_fp32)
    for p,q in zip(sa.preds, sb.preds): torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)

def test_scale_and_counts_survive_from_fit_to_fit():
    learn = learner(cbs=Poison({0,1,5}, 'backward')).to_fp16_dynamic()
    fit(learn, 1)
    assert learn.mixed_precision.scaler.get_scale()==2**14
    fit(learn, 1)
    with learn.no_bar(), learn.no_logging(): learn.validate()
    assert learn.mixed_precision.scaler.get_scale()==2**13 and learn.mixed_precision.skipped==3
    assert learn.mixed_precision.history.step.tolist()==list(range(8))

@pytest.mark.parametrize('opt_func', [AdamW16, Adam, partial(OptimWrapper, opt=torch.optim.AdamW)], ids=['AdamW16','Adam','OptimWrapper'])
def test_checkpoints(tmp_path, opt_func):
    def new(): return learner(path=tmp_path, opt_func=opt_func, cbs=Poison({0,1,2}, 'backward'))
    a = fit(new().to_fp16_dynamic(), 2)
    a.save('a')
    assert a.mixed_precision.scaler.get_scale()==2**13
    saved = torch.load(tmp_path/'models/a.pth', weights_only=False)
    assert set(saved)=={'model','opt'} and all(v.dtype in (torch.float32,torch.int64) for v in saved['model'].values())
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='Could not load') # fastai's way to say that an optimizer's state was not loaded
        plain = new().load('a') # fastai alone, `weights_only=True`
        plain.save('plain')
        b,c = new().to_fp16_dynamic().load('a'),new().to_fp16_dynamic().load('plain')
    assert b.mixed_precision.scaler.state_dict()==a.mixed_precision.scaler.state_dict() and c.mixed_precision.scaler.get_scale()==2**16
    for o in (plain,b,c): assert equal(state(a), state(o))
    c.mixed_precision.scaler.load_state_dict(a.mixed_precision.scaler.state_dict())
    for o in (a,b,c): fit(set_poison_off(o), 1)
    assert not hasattr(a.opt, 'scaler')

def set_poison_off(learn):
    set_seed(1, reproducible=True)
    return learn.remove_cb(Poison)

def test_resumed_is_uninterrupted(tmp_path):
    def new(): return learner(path=tmp_path, shuffle=False).to_fp16_dynamic(growth_interval=3)
    a = fit(new(), 2)
    a.save('a')
    b = new().load('a')
    fit(a, 2), fit(b, 2)
    assert equal(state(a), state(b)) and a.mixed_precision.scaler.state_dict()==b.mixed_precision.scaler.state_dict()

def test_export(tmp_path):
    learn = fit(learner(path=tmp_path).to_fp16_dynamic(), 1)
    learn.export()
    clean(learn)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fp32,fp16 = load_learner(tmp_path/'export.pkl'),load_learner(tmp_path/'export.pkl', cpu=False)
    assert not fp32._grab_cbs(MixedPrecision) and len(fp16._grab_cbs(DynamicMixedPrecision))==1
    assert equal(weights(learn), weights(fp32)) and fp16.mixed_precision.scaler.state_dict()==learn.mixed_precision.scaler.state_dict()
    pickle.loads(pickle.dumps(learn.model))
    fit(learn, 1)

def test_gradients_of_before_a_load_do_not_enter_the_next_step(tmp_path):
    "Half of an accumulated step was made at the scale of before"
    class GoBack(Callback):
        def after_batch(self):
            if self.training and self.train_iter==1: self.learn.load('one')
    learn = learner(bs=8, path=tmp_path, cbs=GradientAccumulation(16), shuffle=False).to_fp16_dynamic(init_scale=1.)
    learn.create_opt()
    learn.save('one')
    learn.to_fp16_dynamic()
    fit(learn, 1, cbs=GoBack())
    assert learn.mixed_precision.history.grad_norm.max()<10

def test_text_learner_loads_its_scale(tmp_path):
    from fastai.callback.rnn import RNNCallback,RNNRegularizer
    from fastai.text.learner import TextLearner
    ds = Items([(torch.randint(0, 9, (5,)),torch.tensor(1)) for _ in range(16)])
    class Model(nn.Sequential):
        def reset(self): pass
    def new():
        model = Model(nn.Embedding(9,4), nn.Flatten(), nn.Linear(20,2))
        return TextLearner(DataLoaders(DataLoader(ds, bs=8), DataLoader(ds, bs=8)), model, loss_func=nn.CrossEntropyLoss(), path=tmp_path, splitter=lambda m: [list(m.parameters())]).remove_cbs([RNNCallback, RNNRegularizer])
    a = fit(new().to_fp16_dynamic(init_scale=8.), 1)
    a.save('t')
    assert new().to_fp16_dynamic().load('t').mixed_precision.scaler.get_scale()==8
