"""Which trainings and events `to_fp16_dynamic` and fastai's `to_fp16` and `to_non_native_fp16` survive

On a CPU, autocast follows CUDA's rules, which are those of whoever uses `to_fp16`."""
import math,tempfile,warnings
from functools import partial
import fastai,torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.callback.all import GradientClip,SaveModelCallback
    from fastai.basics import SGD,Callback,DataLoader,DataLoaders,Learner,default_device,nn,set_seed
    import fastai_amp16.all # noqa: F401 (it adds methods to `Learner`)
from benchmarks.accuracy.cuda_habits import follow_cuda
from benchmarks.shared import markdown
from benchmarks.shared.fastais import fastais
from benchmarks.shared.hostile import fit,zoo
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store

contenders = ('to_fp16_dynamic','to_fp16','to_non_native_fp16')

# %% trainings of hostile.py
trainings = {'RegNetY with Squeeze-and-Excitation on raw counts': 'regnety', 'residual network without norms': 'norm_free',
             'attention mask: `+(1-m)*-1e9`': 'masked_add', 'attention mask: `masked_fill(m, -1e9)`': 'masked_fill',
             'attention with scores above 65504': 'large_logits', 'RMS norm as a module of its own': 'rms',
             'RMS norm in the code of another module': 'rms_inline', 'sum over 70,000 elements': 'sum_pool',
             'Poisson regression by `exp`': 'poisson', '`x/(x.norm()+1e-8)` of a sample of zeros': 'cosine',
             'sigmoid and `BCELoss`': 'sigmoid_bce', 'targets in dollars, summed squares': 'large_units', 'loss of 1e-7': 'tiny_loss',
             'one image in a hundred with a broken pixel': 'broken_pixels', 'absolute values of small complex numbers': 'backward_only'}

def figure(name, to):
    "The final accuracy or R², or NaN if the training raises an error"
    s = zoo[name]
    try:
        with fastais(): return fit(getattr(s.make(0), to)(), s.epochs, s.lr)
    except Exception: return math.nan

# %% events in a small, healthy training
class Spoil(Callback):
    "Spoils some training batches, counted from 1: by infinite inputs, or by gradients a million times as large, which fp32 can hold"
    order,run_valid = 5,False
    def __init__(self, batches, backward=False): self.batches,self.backward,self.i = batches,backward,0
    def before_batch(self):
        self.i += 1
        if self.i in self.batches and not self.backward: self.learn.xb = tuple(x*math.inf for x in self.xb)
    def before_backward(self):
        if self.i in self.batches and self.backward: self.learn.loss_grad = self.loss_grad*1e6

def learner(to, lr=1e-2, **kwargs):
    set_seed(0, reproducible=True)
    x = torch.randn(128, 8)
    data = list(zip(x, x[:,:1]*x[:,1:2]+0.1))
    dls = DataLoaders(DataLoader(data, bs=16, shuffle=True), DataLoader(data, bs=64), device=default_device())
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    return getattr(Learner(dls, model, nn.MSELoss(), lr=lr, **kwargs), to)()

def quiet(learn, n=2, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, **kwargs)
    return learn

def loss(learn):
    x,y = learn.dls.valid.one_batch()
    return nn.functional.mse_loss(learn.model.eval()(x).float(), y).item()
def weights(learn): return [p.detach().clone() for p in learn.model.parameters()]
def same(a, b): return all(torch.equal(x, y) for x,y in zip(a, b))
def learns(learn, n=6):
    "Whether another fit lowers the loss, and leaves finite fp32 weights"
    before = loss(learn)
    quiet(learn, n)
    return loss(learn)<0.9*before and all(p.isfinite().all() and p.dtype==torch.float32 for p in learn.model.parameters())

class Do(Callback):
    "Calls `f(learn)` in `event` of the third training batch"
    run_valid = False
    def __init__(self, event, f, order=0): self.i,self.f,self.order = 0,f,order; setattr(self, event, self.call)
    def call(self):
        self.i += 1
        if self.i==3: self.f(self.learn)

def _raise(learn): raise KeyboardInterrupt
def ctrl_c(to):
    learn = learner(to, cbs=Do('after_pred', _raise))
    try: quiet(learn)
    except KeyboardInterrupt: pass
    return not torch.is_autocast_enabled(default_device().type) and learns(learn)

def persistent(to):
    "`to_fp16_dynamic` would end the fit at the third such batch, unless `patience` is larger"
    learn = learner(to, cbs=Spoil(range(1, 201)))
    if to=='to_fp16_dynamic': learn.mixed_precision.patience = 1000
    return learns(quiet(learn, 25))

def one_inf(to):
    learn = quiet(learner(to, cbs=Spoil([3])))
    return math.isfinite(learn.recorder.values[-1][0])

def statistics(to):
    learn = quiet(learner(to, cbs=Spoil([3])))
    return all(b.isfinite().all() for b in learn.model.buffers()) and learns(learn)

def lr_find(to):
    with tempfile.TemporaryDirectory() as d:
        learn = learner(to, path=d)
        before = weights(learn)
        with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=20, show_plot=False)
    return same(before, weights(learn))

def edit(to):
    def fill(learn):
        for p in learn.model.parameters(): p.data.fill_(0.5)
    learn = quiet(learner(to, cbs=Do('after_step', fill), lr=0.))
    return all((p==0.5).all() for p in learn.model.parameters())

def load(to):
    with tempfile.TemporaryDirectory() as d:
        other = learner('to_fp32', path=d)
        for p in other.model.parameters(): p.data.fill_(0.3)
        other.save('other', with_opt=False)
        learn = quiet(learner(to, cbs=Do('after_step', lambda learn: learn.load('other', with_opt=False)), lr=0., path=d))
    return all((p==torch.tensor(0.3)).all() for p in learn.model.parameters())

def clip(to):
    "With SGD and a learning rate of 1, a step is as long as the gradient, which is clipped to 1e-3"
    learn = learner(to, cbs=GradientClip(1e-3), opt_func=partial(SGD, wd=0.))
    before = weights(learn)
    quiet(learn, 1, lr=1.)
    moved = sum((a-b).square().sum() for a,b in zip(before, weights(learn))).sqrt().item()
    return moved<=1.01e-3*len(learn.dls.train)

def twice(to): return learns(getattr(learner(to), to)())

def validate(to):
    def check(learn):
        with learn.no_bar(), learn.no_logging(): Learner.validate(learn)
    return learns(quiet(learner(to, cbs=Do('after_batch', check))))

def mid_fit_checkpoint(to):
    "A checkpoint in the middle of a fit holds fp32 weights"
    found = []
    def is_fp32(t): return t.dtype==torch.float32 and not torch.equal(t, t.half().float())
    def look(learn): found.append(all(is_fp32(v) for k,v in learn.model.state_dict().items() if k.endswith('weight') and v.ndim>1))
    quiet(learner(to, cbs=Do('after_batch', look)))
    return found==[True]

def resume(to):
    "A resumed fit ends bit for bit like an uninterrupted one, after overflows that lower the loss scale"
    with tempfile.TemporaryDirectory() as d:
        def make(): return learner(to, cbs=Spoil([6,12], backward=True), path=d)
        whole = quiet(make(), 4, cbs=SaveModelCallback(every_epoch=True, fname='epoch', with_opt=True))
        again = make()
        again.spoil.i = 16
        again.load('epoch_1')
        return same(weights(whole), weights(quiet(again, 4, start_epoch=2)))

events = {
    'after Ctrl-C in the middle of a batch, another fit learns': ctrl_c,
    'after 200 infinite batches in a row, the fit learns again (`patience=1000`)': persistent,
    'one infinite loss: the recorded loss stays finite': one_inf,
    'one infinite batch: norm statistics stay finite': statistics,
    '`lr_find` leaves the weights as they were': lr_find,
    'weights that a callback edits in a fit stay edited': edit,
    'weights that `learn.load` loads in a fit stay loaded': load,
    "fastai's `GradientClip` clips": clip,
    'after the method is called twice, a fit learns': twice,
    'after a callback calls `learn.validate()`, the fit learns': validate,
    'a checkpoint made in a fit holds fp32 weights': mid_fit_checkpoint,
    'a fit resumed in a new learner ends bit for bit the same': resume}

def passes(event, to):
    try:
        with fastais(): return bool(event(to))
    except Exception: return False

# %% the table
everything = {**trainings, **events}

def row(what, key):
    "Which of `contenders` survive the training or the event `key`"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        if callable(key): return dict(what=what, kind='event', **{to: passes(key, to) for to in contenders})
        fp32,*others = [figure(key, to) for to in ('to_fp32',*contenders)]
        return dict(what=what, kind='training', **{to: f>fp32-0.05 for to,f in zip(contenders, others)})

def lists(rows):
    "Markdown: what survives with which of the first two of `contenders`, unless it does with both"
    found = {}
    for r in rows:
        if all(r[o] for o in contenders[:2]): continue
        who = [f'`{o}`' for o in contenders[:2] if r[o]]
        found.setdefault((' and '.join(who) or 'neither')+' only'*(len(who)==1), []).append(f"- {r['what']}")
    return '\n\n'.join(f'With {who}:\n\n'+'\n'.join(what) for who,what in found.items())

def section(res):
    kinds = [[r for r in res['rows'] if r['kind']==kind] for kind in ('training','event')]
    def kept(rows, to): return sum(r[to] for r in rows)
    (hard,events),ours = kinds,'to_fp16_dynamic'
    of_events = 'The events that do not leave a fit intact with both (fp32 itself fails those with infinite numbers, and the resumed fit)'
    return f"""### What survives

Of {len(hard)} trainings that are hard for fp16, {kept(hard, ours)} survive with `to_fp16_dynamic`, and {kept(hard, 'to_fp16')} with
`to_fp16`. Of {len(events)} events in a fit, such as Ctrl-C or an infinite batch, {kept(events, ours)} leave a fit
intact with `to_fp16_dynamic`, and {kept(events, 'to_fp16')} with `to_fp16`.

We chose these cases ourselves. In everyday training, `to_fp16` usually works, and [random programs](#finite-but-wrong) are the better
evidence.

A training survives if it ends within 0.05 of fp32's accuracy or R² (one seed). The CPU follows CUDA's autocast lists here: it computes
sums, `exp` and norm layers in fp32, and refuses `BCELoss`. {markdown.ran(res)}

{markdown.folded('The trainings that do not survive with both', lists(hard))}

{markdown.folded(of_events, lists(events))}"""

def main(args=None):
    p = parser(__file__, __doc__, only=(everything,'rows of the table'))
    a = p.parse_args(args)
    follow_cuda()
    rows = [row(o, everything[o]) for o in a.only]
    for r in rows: print(*(f"{'yes' if r[to] else 'no':>4}" for to in contenders), r['what'], flush=True)
    res = dict(machine=machine(), fastai=fastai.__version__, rows=rows)
    store(res, a.out)

if __name__=='__main__': main()
