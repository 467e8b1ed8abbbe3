"""Programs end bit for bit as without us where everything is kept in fp32, and take fp32's way where batches run again in half precision

Two things are ours on purpose and in no program: what a batch has changed is undone, gradients included, if an error or Ctrl-C interrupts
it; and a fit with a `start_epoch` goes on with the random numbers that the checkpoint holds, which a checkpoint of fp32 does not have."""
import itertools,random
from collections import Counter,defaultdict
import fastai.basics,numpy as np,pytest,torch
import torch.nn.functional as F
from fastai.basics import *
from fastai.callback.all import *
from fastai.callback.core import _events
from fastai_amp16.all import AdamW16,GradientNormClip
from common import Items,slow

for k in [k for k in globals() if k.startswith('test')]: del globals()[k] # fastcore's, which pytest would run

pytestmark = [pytest.mark.filterwarnings('ignore::UserWarning','ignore::FutureWarning','ignore::DeprecationWarning'),
              pytest.mark.cpu_only('bit for bit')]

# --- what is compared

class Sees(Callback):
    "Every event, with what there is in it and how many random numbers were drawn"
    order = 97
    def __init__(self): self.events,self.n,self.by = [],Counter(),{'train':{'loss':[],'rows':defaultdict(list)}, 'valid':{'loss':[]}}
    def see(self, event):
        at = 'train' if self.training else 'valid'
        loss = getattr(self, 'loss', None)
        if event=='after_loss': self.by[at]['loss'].append(loss.item())
        if event in ('after_backward','after_step','after_batch'): self.by['train']['rows'][event].append((self.iter,self.pct_train))
        self.n[at,event] += 1
        draws = event in ('after_pred','after_batch')
        drawn = draws and (torch.get_rng_state()[8:24].tolist(),random.getstate()[1][-1],np.random.get_state()[2])
        self.events.append((event,at,getattr(self, 'epoch', None),getattr(self, 'iter', None),loss if loss is None else loss.item(),drawn))
for e in _events: setattr(Sees, e, lambda self, e=e: self.see(e))

def plain(o):
    "Tensors as lists, and containers as they are: to compare by `==`"
    if isinstance(o, Tensor): return str(o.dtype),list(o.shape),(o.to_dense() if o.layout!=torch.strided else o).tolist()
    if isinstance(o, dict): return {k: plain(v) for k,v in o.items()}
    return [plain(v) for v in o] if isinstance(o, (list,tuple,L)) else o

def way(learn):
    "What half precision may not change"
    r,opt = learn.recorder,learn.opt
    state = opt.state_dict()['state'] if opt else []
    steps = [o.get('step') for o in (state.values() if isinstance(state, dict) else state)]
    draws = random.getstate(),torch.get_rng_state().tolist(),np.random.get_state()[1].tolist(),np.random.get_state()[2:]
    return dict(events=[(*o[:4],o[-1]) for o in learn.sees.events], counts=dict(learn.sees.n), rows=dict(learn.sees.by['train']['rows']),
        lengths=[len(learn.sees.by[o]['loss']) for o in ('train','valid')], lrs=getattr(r, 'lrs', 0), iters=getattr(r, 'iters', 0),
        hypers=plain(list(opt.hypers)) if opt else 0, epochs=len(r.values), steps=plain(steps), draws=draws, more=getattr(learn, 'more', 0))

def end(learn):
    "All that a program leaves"
    opt,r = learn.opt,learn.recorder
    models = [learn.model, *getattr(learn, 'nets', ())]
    grads = [p.grad for m in models for p in m.parameters()]
    return dict(weights=plain([{**m.state_dict()} for m in models]), grads=plain(grads), opt=plain(opt.state_dict()) if opt else 0,
        losses=plain(getattr(r, 'losses', 0)), values=repr(plain(list(r.values))), seen=repr(learn.sees.events), by=repr(learn.sees.by),
        **way(learn))

# --- programs: functions of `small`, which makes a learner as `to_fp32`, `to_fp16_dynamic` and so on make it

programs = {}
def program(f):
    programs[f.__name__] = f
    return f

def net(): return nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8,3))
def parts(m): return [params(m[:2]),params(m[2:])]
def loaders(items, **kwargs):
    "Four batches, and one for validation"
    return DataLoaders(*[DataLoader(items[:n], bs=8, shuffle=n>8, **kwargs) for n in (32,8)])
def data(*shape):
    x = torch.randn(32, *shape)
    return loaders(Items(zip(x, (x.view(32, -1)[:,:2]>0).sum(1))))

def making(to):
    def small(model=net, dls=None, loss_func=None, opt_func=Adam, cls=Learner, cbs=(), **kwargs):
        set_seed(3, reproducible=True)
        dls,model = dls or data(6),model() if not isinstance(model, nn.Module) else model
        return to(cls(dls, model, loss_func or CrossEntropyLossFlat(), opt_func, cbs=[Sees(), *L(cbs)], lr=0.05, **kwargs))
    return small

def fit(learn, n=1, how='fit', *args, raises=(), **kwargs):
    with learn.no_bar(), learn.no_logging():
        try: getattr(learn, how)(n, *args, **kwargs)
        except raises: learn.more = 'raised'
    return learn

# optimizers
momentum = partial(SGD, mom=0.9, wd=0.1)
def torchs(opt, **kwargs): return partial(OptimWrapper, opt=opt, **kwargs)
optimizers = dict(momentum=momentum, adam=Adam, adam_l2=partial(Adam, decouple_wd=False), rmsprop=RMSProp, radam=RAdam, qhadam=QHAdam,
    larc=Larc, lamb=Lamb, ranger=ranger, adamw16=AdamW16, torchs_adamw=torchs(torch.optim.AdamW),
    torchs_sgd=torchs(torch.optim.SGD, momentum=0.9, weight_decay=0.1))
for name,opt in optimizers.items(): programs[f'optimizer {name}'] = lambda small, opt=opt: fit(fit(small(opt_func=opt), 1), 1)

# schedules
@program
def one_cycle(small): return fit(small(), 2, 'fit_one_cycle', 0.05)
@program
def flat_cos(small): return fit(small(opt_func=ranger), 2, 'fit_flat_cos', 0.05)
@program
def sgdr(small): return fit(small(), 1, 'fit_sgdr', 1, 0.05)
@program
def fine_tune(small): return fit(small(splitter=parts), 1, 'fine_tune', 0.05)
@program
def other_rates(small):
    cb = ParamScheduler({'lr':SchedLin(0.1, 0.01), 'mom':SchedCos(0.9, 0.5)})
    return fit(small(opt_func=momentum, cbs=cb, splitter=parts), 2, lr=slice(0.01, 0.1), wd=0.2)
@program
def lr_find(small):
    learn = small()
    with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=8, show_plot=False)
    return fit(learn)
@program
def early_stopping(small): return fit(small(cbs=EarlyStoppingCallback(min_delta=9., patience=1)), 4)
@program
def plateau(small): return fit(small(cbs=ReduceLROnPlateau(min_delta=9., patience=1)), 3)

# freezing
def freezing(opt, *freezes):
    def run(small):
        learn = small(opt_func=opt, splitter=parts)
        for o in freezes: fit(getattr(learn, o)() or learn)
        return learn
    return run
for name in ('momentum','adam','torchs_sgd'):
    for order in (('freeze','unfreeze'), ('unfreeze','freeze'), ('unfreeze','freeze','unfreeze')):
        programs[f"{name} {' '.join(order)}"] = freezing(optimizers[name], *order)
@program
def unfreezing_amid_a_fit(small):
    class Thaw(Callback):
        def before_epoch(self): (self.learn.freeze if self.epoch!=1 else self.learn.unfreeze)()
    return fit(small(opt_func=momentum, splitter=parts, cbs=Thaw()), 3)
@program
def frozen_batch_norms(small): return fit(small(cbs=BnFreeze(), train_bn=False), 2)

# accumulation: 4 batches an epoch
for name,n_acc in dict(two=16, three=24, more=99).items():
    programs[f'accumulated {name}'] = lambda small, n=n_acc: fit(fit(small(cbs=GradientAccumulation(n)), 2), 1)
@program
def accumulated_and_clipped(small): return fit(fit(small(opt_func=momentum, cbs=[GradientAccumulation(24), GradientClip(0.1)])))
@program
def accumulated_and_cancelled(small):
    return fit(fit(small(cbs=[GradientAccumulation(24), Cancels('before_backward', CancelBatchException, (2,4))]), 2))
@program
def accumulated_and_loaded(small):
    learn = fit(small(cbs=GradientAccumulation(24), path=Path(small.path)))
    learn.save('a')
    return fit(fit(learn).load('a'))
@program
def zeroed_by_hand(small):
    learn = fit(small(cbs=GradientAccumulation(24)))
    learn.opt.zero_grad()
    return fit(learn)
@program
def gradients_that_others_left(small):
    learn = small(opt_func=momentum)
    learn.create_opt()
    for p in learn.model.parameters(): p.grad = torch.full_like(p, 0.1)
    return fit(learn)

# mixed samples, and other callbacks of fastai
for cb in (MixUp,CutMix): programs[cb.__name__] = lambda small, cb=cb: fit(
    small(lambda: nn.Sequential(nn.Conv2d(1,3,3), nn.Flatten(), nn.Linear(12,3)), data(1,4,4), cbs=cb(0.5)), 2)
@program
def mixed_and_accumulated(small): return fit(small(cbs=[MixUp(0.4), GradientAccumulation(16)]), 2)
@program
def predictions_and_activations(small): return fit(small(cbs=[FetchPredsCallback(), ActivationStats(with_hist=True)]), 2)
@program
def nested_validation(small):
    class Asks(Callback):
        def after_train(self): self.learn.more = [float(o) for o in self.learn.validate()], len(self.learn.get_preds()[0])
    learn = fit(small(cbs=Asks()), 2)
    learn.more = learn.more[1]
    return learn
@program
def channels_last(small):
    def model(): return nn.Sequential(nn.Conv2d(3,4,3), nn.GroupNorm(2,4), nn.Flatten(), nn.Linear(16,3))
    return fit(small(model, data(3,4,4), cbs=ChannelsLast()))
@program
def clipped(small): return fit(small(cbs=GradientNormClip(0.1)), 2)

# saving and resuming
@program
def saved_and_resumed(small):
    learn = fit(small(path=Path(small.path)), 2)
    learn.save('b')
    learn = small(path=Path(small.path))
    return fit(learn.load('b'), 2)
@program
def best_model(small): return fit(small(opt_func=momentum, path=Path(small.path), cbs=SaveModelCallback(min_delta=-9., with_opt=True)), 2)
@program
def exported(small):
    learn = fit(small(path=Path(small.path)))
    learn.more = type(pickle.loads(pickle.dumps(learn.model))).__name__
    return fit(deepcopy(learn))

# adversaries: two networks whose turns a callback switches, with one optimizer for both
class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g,self.turn = nn.Linear(6,6),'c'
        self.c = nn.Sequential(nn.Linear(6,8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8,1))
    def forward(self, x): return self.c(self.g(x)) if self.turn=='g' else self.c(torch.cat([x, self.g(torch.randn_like(x)).detach()]))
class Switches(Callback):
    def __init__(self): self.turns = []
    def before_batch(self):
        m = self.model
        m.turn = 'gc'[self.iter%2]
        self.turns.append(m.turn)
        for n in 'gc': getattr(m, n).requires_grad_(n==m.turn)
@program
def gan(small):
    def loss(p, y): return F.softplus(-p if len(p)==len(y) else torch.cat([-p[:len(y)], p[len(y):]])).mean()
    def parts(m): return [params(m.g),params(m.c)]
    return fit(fit(small(Gan, loss_func=loss, splitter=parts, opt_func=partial(Adam, mom=0.5), cbs=Switches()), 2))
class TwoOpts(Learner):
    "Steps of its own for a second network, as in adversarial training"
    def _do_one_batch(self):
        if self.training:
            self.critic_opt.zero_grad()
            F.softplus(self.critic(self.model(*self.xb).detach())).mean().backward()
            self.critic_opt.step()
        super()._do_one_batch()
@program
def two_optimizers(small):
    learn = small(cls=TwoOpts)
    learn.critic = nn.Linear(3,1)
    learn.critic_opt,learn.nets = torch.optim.Adam(learn.critic.parameters()),[learn.critic]
    return fit(learn, 2)

# text and tables
class Bag(nn.Module):
    "Sparse gradients, some of them summed from many"
    def __init__(self):
        super().__init__()
        self.e,self.out = nn.EmbeddingBag(9, 6, sparse=True, mode='sum'),nn.Linear(6,3)
    def forward(self, x): return self.out(self.e(x))
def tokens():
    x = torch.randint(0, 4, (32,12))
    return loaders(Items(zip(x, x[:,0]%3)))
for name,opt in dict(sgd=SGD, torchs=torchs(torch.optim.SGD)).items():
    for n in (8,24):
        programs[f'sparse {name} {n}'] = lambda small, opt=opt, n=n: fit(small(Bag, tokens(), opt_func=opt, cbs=GradientAccumulation(n)), 2)
class Encoder(nn.Module):
    def __init__(self, nested=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, 0.1, batch_first=True)
        self.e,self.enc,self.out = nn.Embedding(9,6),nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested),nn.Linear(6,3)
    def forward(self, x): return self.out(self.enc(self.e(x), src_key_padding_mask=x==3).mean(1))
@program
def transformer(small): return fit(small(Encoder, tokens()), 2)
@program
def language_model(small):
    from fastai.callback.rnn import rnn_cbs
    from fastai.text.models.awdlstm import AWD_LSTM
    from fastai.text.models.core import LinearDecoder,SequentialRNN
    def model(): return SequentialRNN(AWD_LSTM(9, 4, 5, 2), LinearDecoder(9, 4, 0.1))
    x = torch.randint(0, 9, (24,7))
    dls = DataLoaders(*[DataLoader(Items(zip(x[:,:6], x[:,1:])), bs=8, drop_last=True) for _ in range(2)])
    return fit(small(model, dls, cbs=rnn_cbs(1., 1.)), 2)
@program
def table(small):
    from fastai.tabular.model import TabularModel
    def model(): return TabularModel([(4,2),(3,2)], 3, 3, [8], embed_p=0.1)
    items = Items((torch.tensor([i%4,i%3]), torch.randn(3), torch.tensor(i%3)) for i in range(32))
    return fit(small(model, loaders(items, n_inp=2)), 2)
@program
def lazy(small): return fit(small(lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))), 2)

# learners with code of their own
class Penalised(Learner):
    def _backward(self): (self.loss_grad+.1*self.pred.square().mean()).backward()
class TwoLosses(Learner):
    def _backward(self):
        self.loss_grad.backward(retain_graph=True)
        torch.autograd.backward([.1*self.pred.square().mean(), .1*self.pred.mean()])
class Own(Learner):
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        self.loss_grad = self.loss_func(self.pred, *self.yb)+self.loss_func(self.model(self.xb[0]*0.9), *self.yb)
        self.loss = self.loss_grad.clone()
        self('after_loss')
        if self.training: self._do_grad_opt()
class Weighted(Learner):
    def _backward(self):
        g, = torch.autograd.grad(self.loss_grad, self.model[-1].weight, retain_graph=True)
        self.norms.append(g.norm().item())
        (self.loss_grad/(1+g.norm())).backward()
for cls in (Penalised,TwoLosses,Own,Weighted):
    def own(small, cls=cls):
        learn = small(cls=cls)
        learn.norms = []
        return fit(learn, 2)
    programs[cls.__name__] = own

# callbacks that remember
class Holds(Callback):
    "Containers and iterators, in events that a batch may repeat; an iterator that draws draws for itself only"
    order = 20
    def __init__(self):
        self.count,self.cycle,self.noise = itertools.count(),itertools.cycle('abc'),self.draws()
        self.seen,self.stats,self.rows = [],{'train':{'loss':[], 'deep':[[]]}},{i: [] for i in range(192)}
    def draws(self):
        while True: yield random.random(),torch.rand(()).item(),np.random.rand()
    def after_pred(self): self.seen.append((next(self.count), next(self.cycle), next(self.noise)))
    def after_loss(self):
        self.stats['train']['loss'].append(self.iter)
        self.stats['train']['deep'][0].append(next(self.count))
        for o in self.rows.values(): o.append(self.iter)
    def after_fit(self):
        self.learn.more = [self.seen, self.stats, self.rows, [type(o).__name__ for o in (self.count, self.cycle, self.noise)]]
@program
def callback_that_holds(small): return fit(fit(small(cbs=Holds()), 2))
@program
def callback_that_holds_and_accumulates(small): return fit(fit(small(cbs=[Holds(), GradientAccumulation(16)]), 2))
@program
def hooks_on_modules_and_weights(small):
    learn = small(opt_func=momentum)
    learn.model[0].weight.register_hook(lambda g: g.clamp(-.01, .01))
    learn.model[-1].register_full_backward_hook(lambda m, gi, go: (gi[0].clamp(-.01, .01),))
    return fit(learn, 2)

# Cancel exceptions in every event
class Cancels(Callback):
    def __init__(self, event, ex, at=(2,), order=20):
        self.at,self.times,self.ex,self.order = at,0,ex,order
        setattr(self, event, self.cancel)
    def cancel(self):
        if not self.training: return
        self.times += 1
        if self.times in self.at: raise self.ex()
cancels = [getattr(fastai.basics, f'Cancel{o}Exception') for o in ('Batch','Train','Epoch','Step','Backward','Fit')]
in_a_batch = ('before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_cancel_step',
              'after_batch')
for ex in cancels:
    def cancelled(small, ex=ex):
        return [fit(fit(small(opt_func=momentum, cbs=Cancels(e, ex)), raises=ex)) for e in in_a_batch]
    programs[f"{ex.__name__} in every event"] = cancelled

# --- the tests

def run(name, to, tmp_path):
    small = making(to)
    small.path = tmp_path
    set_seed(3, reproducible=True)
    return programs[name](small)

@pytest.fixture(scope='module')
def in_fp32(tmp_path_factory):
    return functools.cache(lambda name: run(name, Learner.to_fp32, tmp_path_factory.mktemp('fp32')))

def differences(what, a, b): return [k for o,p in zip(L(a), L(b)) for v,w in [(what(o), what(p))] for k in v if v[k]!=w[k]]

def marks(name): return [slow]*name.startswith('Cancel') # which test_faults.py has as well

kept = [pytest.param(o, Learner.to_fp16_dynamic, id=o, marks=marks(o)) for o in programs]
kept += [pytest.param(o, Learner.to_bf16_dynamic, id=f'{o}, bf16')
        for o in ('one_cycle','momentum freeze unfreeze','accumulated three','gan','transformer','Penalised','callback_that_holds')]
@pytest.mark.parametrize('name,to', kept)
def test_with_everything_in_fp32_a_program_ends_as_without_us(name, to, in_fp32, tmp_path):
    "Weights, buffers, gradients, optimizer, recorder, events with losses, random numbers, what callbacks hold: bit for bit"
    a,b = in_fp32(name),run(name, partial(to, keep_fp32=['*','.']), tmp_path)
    assert not differences(end, a, b)

# the first never takes a step; a batch in which the second's other optimizer has written to weights cannot run again, as documented; and
# test_faults.py has the Cancel exceptions; optimizers differ in no other way
# and the pass that makes a lazy module is not put back
again = [o for o in programs if o not in ('accumulated more','two_optimizers','lazy') and not o.startswith(('Cancel','optimizer'))]

@pytest.mark.parametrize('name', again)
def test_where_batches_run_again_a_program_takes_fp32s_way(name, in_fp32, tmp_path):
    """Step counts, learning rates, events, random numbers and what callbacks hold, in half precision

    The first loss scale is too high, and it grows after each second step, so that many batches run again."""
    a,b = in_fp32(name),run(name, partial(Learner.to_fp16_dynamic, init_scale=2.**24, growth_interval=2), tmp_path)
    assert not differences(way, a, b)
    for o in L(b): assert o.mixed_precision.n_rerun and not o.mixed_precision.n_skipped
